"""What does not change an algorithm's numbers. Scripts import only from common."""
