r"""What counts as the final answer, and which answers are the same.

answers.jsonl has realistic, wrong and hostile completions with the expected verdict: correct, wrong,
no_answer; refused (wrong or no_answer); or another: two answers that must not be taken for the same,
because something is glued to a fraction, a power, an index or a unit. answer_pairs.tsv has pairs of
answers that are the same or different, with the gold answer first.
"""

import json
import random
import re
import time
from decimal import Decimal
from pathlib import Path

import pytest

from common import verify
from plumbing.answers import final_answer, gold_answer, is_same

CASES = [json.loads(line) for line in (Path(__file__).parent / "answers.jsonl").open()]
PAIRS = (Path(__file__).parent / "answer_pairs.tsv").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["text"][:40])
def test_answer(case):
    gold, text, expected = case["gold"], case["text"], case["expected"]
    reward, verdict = verify(text, gold)
    assert reward == (expected == "correct") and reward == (verdict == "correct")
    if expected in ("wrong", "no_answer"):
        assert verdict == expected
    found = final_answer(text)
    assert (found is None) == (verdict == "no_answer")
    if expected == "another":  # in both directions
        assert not is_same(gold, found)
    assert verify(text, gold, truncated=True) == (0.0, "truncated")  # it may go on: 36 of 365


@pytest.mark.parametrize("pair", PAIRS)
def test_pair(pair):
    expected, gold, found = pair.split("\t")
    assert is_same(found, gold) == (expected == "same")
    is_choice = re.fullmatch(r"\(?[A-Z]\)?|\\text\{\([A-Z]\)\}", gold)
    if not is_choice or expected == "different":  # only the gold answer makes it a choice
        assert is_same(gold, found) == (expected == "same")


CELLS = [
    *[(" New York\n", "New York"), (72, "72"), (-0.5, "-0.5"), (1e30, "1e+30")],
    *[(Decimal("1.50"), "1.50"), (True, "true"), ([False], "false"), ([3.0], "3.0"), (["7"], "7")],
    *[('["72"]', "72"), ('[ "x \\\\boxed{\\\\frac12}" ]', "\\frac12"), (["x #### 7"], "7")],
    *[(text, text) for text in ("[72]", "[2,5]", '["2", "5"]', '["\\x"]', "[" * 10**5)],
    *[("so 36+36 #### 72", "72"), ("so \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}")],
    *[(text, None) for text in ("", " ", "proof", "Proof", "notfound", "x ####", "\\boxed{proof}")],
    *[(cell, None) for cell in (None, float("nan"), float("-inf"), b"72", {"a": 1}, [], [1, 2], [[1]])],
]


@pytest.mark.parametrize("cell, gold", CELLS, ids=lambda value: repr(value)[:20])
def test_gold_answer(cell, gold):
    assert gold_answer(cell) == gold


def test_an_answer_that_is_too_long_is_no_answer():
    assert verify("#### " + "0" * 900 + "365", "365") == (1.0, "correct")
    for start in ("#### ", "\\boxed{", "\nAnswer: ", "<answer>"):
        for end in ("", "}", "</answer>", "\n"):
            assert verify(start + "0" * 1000 + "365" + end, "365") == (0.0, "no_answer")
    assert verify("#### " + "9" * 900, "9" * 10**6) == (0.0, "wrong")
    assert is_same("9" * 2000, "9" * 2000) and not is_same("9" * 2000, "9" * 2000 + ".")


# ------------------------------------------------------------------------------ hostile and random text

PIECES = [" ", " ", "\n", ".."]
PIECES += (
    "365 36 5 0 1 , . / - + $ $$ \\$ % \\% \\! \\, \\; ~ ** { } {,} ^ ^2 _2 ( ) \\( \\) = A".split()
)
PIECES += (
    r"x= Answer: \text{ \mathrm{ \left \right \frac \frac{ \sqrt \pi \cdot ^\circ ° 10^ e9".split()
)
PIECES += '(B) 1e999999999 10^{999999999} cm m L USD k #### \\boxed{ <answer> [" teen'.split()
PIECES += [f" {word} " for word in "dollars people per square million dozen and".split()]
STARTS = ["", "#### ", "\\boxed{", "#### (B) ", "#### 5 ", "#### $5 ", "\nAnswer: x=", "<answer>"]
LIMIT = 0.01  # seconds


def is_cheap(text, gold):
    """Whether reading and comparing an answer takes less CPU time than LIMIT. The machine may be busy:
    one of three tries is enough."""
    for _ in range(3):
        start = time.thread_time()
        verify(text, gold)
        if time.thread_time() - start < LIMIT:
            return True
    return False


@pytest.mark.parametrize("piece", PIECES)
def test_hostile_text_costs_nothing(piece):
    for start in STARTS:
        for length in (900, 10**6):
            assert is_cheap(start + piece * (length // len(piece)) + "s}</answer>", "365"), start


def test_a_mixture_costs_nothing():
    rng = random.Random(0)
    for _ in range(100):
        text = "".join(rng.choices(rng.sample(PIECES, 4), k=1000))
        assert is_cheap(rng.choice(STARTS) + text[:900], text[:990])
