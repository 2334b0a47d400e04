"""A reward that adds up two rewards: is the answer right, and does the completion show its work?

    python grpo.py --reward examples/format_and_accuracy.py:grade --run_dir runs/format

Expect: greedy held-out accuracy of at least 0.97, as without the flag, and work in almost every answer.
The format has a small weight, so a right answer in the wrong format beats a wrong answer in the right
format. But grpo.py divides by the group's std. If all eight answers are right, and only one shows its
work, its advantage is 2.47, as large as that of one right answer among seven wrong ones. dr_grpo.py has
no std, so there the weight stays small. The verdict is the verifier's, so accuracy in the log counts
right answers only.
"""

import re

from common import verify


def shows_work(text):
    """1.0 if the completion is text with a sum in it, then #### and a number, else 0.0."""
    return float(re.fullmatch(r"\s*\S.*=.*#### ?\d+\s*", text, re.DOTALL) is not None)


def grade(text, answer, truncated):
    """(reward, verdict) for a completion, the gold answer, and whether the completion was truncated."""
    accuracy, verdict = verify(text, answer, truncated)
    return accuracy + 0.2 * shows_work(text), verdict
