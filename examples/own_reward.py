r"""Your own reward: math-verify compares answers algebraically, which common.verify does not.

    pip install -r examples/requirements.txt
    python grpo.py --reward examples/own_reward.py:reward

Expect: the same results as without the flag, since sums need no algebra. With a dataset of mathematics
it matters: x(x+1) and x^2+x are equal for math-verify, but different texts for common.verify. To try it
on one answer: python examples/own_reward.py '#### \frac{2}{4}' '0.5'

A reward function gets the text of a completion, the gold answer, and whether the completion was
truncated; it returns a number and a verdict: 'correct', 'wrong', 'no_answer' or 'truncated'.
"""

import sys
from pathlib import Path

from math_verify import parse, verify

sys.path.insert(0, str(Path(__file__).parent.parent))
from plumbing.answers import final_answer


def reward(text, answer, truncated):
    if truncated:
        return 0.0, "truncated"
    found = final_answer(text)  # after the last ####, or inside the last \boxed
    if found is None:
        return 0.0, "no_answer"
    # Formulas are found between dollars. The gold answer comes first: the comparison is not symmetric.
    if verify(parse(f"${answer}$"), parse(f"${found}$")):
        return 1.0, "correct"
    return 0.0, "wrong"


if __name__ == "__main__":
    print(reward(sys.argv[1], sys.argv[2], truncated=False))
