r"""A reward of your own: math-verify, which compares answers by algebra, where common.verify does none.

    pip install -r examples/requirements.txt
    python grpo.py --reward examples/own_reward.py:reward

Expect: the default job as without the flag, since sums need no algebra. With a dataset of mathematics
it matters: x(x+1) and x^2+x are the same for math-verify, and different texts for common.verify. To
see what it makes of an answer: python examples/own_reward.py '#### \frac{2}{4}' '0.5'

A reward gets the text of a completion, the gold answer, and whether the completion ran into the cap;
it returns a number, and one of 'correct', 'wrong', 'no_answer' and 'truncated'.
"""

import sys
from pathlib import Path

from math_verify import parse, verify

sys.path.insert(0, str(Path(__file__).parent.parent))
from plumbing.answers import final_answer


def reward(text, answer, truncated):
    if truncated:
        return 0.0, "truncated"
    found = final_answer(text)  # what follows the last #### or fills the last \boxed
    if found is None:
        return 0.0, "no_answer"
    # Formulas are found between dollars. The gold answer comes first: the comparison is not symmetric.
    if verify(parse(f"${answer}$"), parse(f"${found}$")):
        return 1.0, "correct"
    return 0.0, "wrong"


if __name__ == "__main__":
    print(reward(sys.argv[1], sys.argv[2], truncated=False))
