"""The infrastructure behind a run. You can ignore it when you study an algorithm or copy a loss.

README.md beside this file says what each file does. The names imported here are those that scripts use.
"""

from plumbing import ranks
from plumbing.args import RunArgs, UserError, flag, launch
from plumbing.correction import rollout_correction
from plumbing.memory import plan_memory
from plumbing.metrics import Meter, critic_stats, iteration_metrics
from plumbing.packing import forward_packed
from plumbing.policy import TrainedModel
from plumbing.run import Run
