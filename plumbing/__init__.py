"""Flags, data, models, rewards, and a run's bookkeeping. Scripts import only from common."""
