"""A reward that handles algebra: math-verify rechecks the answers that common.verify calls wrong.

    pip install -r examples/requirements.txt
    python grpo.py --reward examples/algebra.py:grade --run_dir runs/algebra

Expect: the same results as without the flag, because the model's sums need no algebra. On a math
dataset it also accepts x^2+x for x(x+1), and lists, sets, and matrices in a different notation. But it
also accepts 36/2 for 18, so a policy may learn to skip its last step. math-verify uses a signal to stop
after five seconds, which works only in the main thread; reward functions are called there.
"""

from math_verify import parse
from math_verify import verify as is_equal

from common import final_answer, verify


def grade(text, answer, truncated):
    """(reward, verdict) for a completion, the gold answer, and whether the completion was truncated."""
    reward, verdict = verify(text, answer, truncated)
    # It looks for formulas between dollar signs. The order matters: the gold answer comes first.
    if verdict == "wrong" and is_equal(parse(f"${answer}$"), parse(f"${final_answer(text)}$")):
        return 1.0, "correct"
    return reward, verdict
