r"""What counts as the final answer, and which answers are the same.

A row of answers.tsv is an expected verdict, a gold answer, and a completion, or it is `same` or
`different` and two answers, which are compared in both directions.
"""

import re
import time
from fractions import Fraction
from itertools import product
from pathlib import Path

import pytest

from plumbing.answers import is_same, verify

LINES = (Path(__file__).parent / "answers.tsv").read_text(encoding="utf-8").splitlines()
ROWS = [line.split("\t") for line in LINES if "\t" in line]


@pytest.mark.parametrize("expected, gold, text", ROWS)
def test_each_answer_of_the_table_has_its_verdict(expected, gold, text):
    if expected in ("same", "different"):
        assert is_same(text, gold) == (expected == "same")
        assert is_same(gold, text) == (expected == "same")
    else:
        text = text.replace("⏎", "\n")
        assert verify(text, gold) == (float(expected == "correct"), expected)
        assert verify(text, gold, truncated=True) == (0.0, "truncated")  # 36 may become 365


def test_an_answer_of_more_than_1000_characters_is_no_answer():
    assert verify("#### " + "0" * 900 + "365", "365") == (1.0, "correct")
    for start in ("#### ", "\\boxed{", "Answer: ", "<answer>"):
        for end in ("", "}", "</answer>", "\n"):
            assert verify(start + "0" * 1000 + "365" + end, "365") == (0.0, "no_answer")
    assert is_same("9" * 2000, "9" * 2000) and not is_same("9" * 2000, "9" * 2000 + ".")


# -------------------------------------------------------------- different values are never the same


def value_in_python(text):
    """The value that Python computes for an answer without its unit. None if it cannot."""
    text = re.sub(r"[$%,]|^ *x *= *", "", text.strip().removesuffix("."))
    text = re.sub(r"\\frac *\{(.*?)\} *\{(.*?)\}", r"(\1)/(\2)", text)
    text = text.replace(r"\times", "*").replace("^", "**").replace("{", "(").replace("}", ")")
    text = re.sub(r"(?<![.\w])[0-9.]+(?:e[+-]?[0-9]+)?", r"Fraction('\g<0>')", text)
    try:
        return eval(text, {"Fraction": Fraction})
    except (SyntaxError, ValueError, NameError, TypeError, ZeroDivisionError):
        return None


GOLD = r"365; -1,234.5; $0.5; 1/2; \frac{1}{2}; 4.5e3; 10^{6}; 2 \times 10^3; x=5".split("; ")


@pytest.mark.parametrize("gold", GOLD)
def test_a_changed_number_is_the_same_only_if_its_value_is(gold):
    characters = ["", *"0123456789.,-+/*^ex={}()$% "]
    value = value_in_python(gold)
    assert value is not None
    for start, width, character in product(range(len(gold) + 1), (0, 1), characters):
        found = gold[:start] + character + gold[start + width :]
        if is_same(found, gold):
            assert value_in_python(found) == value, found


# ------------------------------------------------------------------------------------ hostile text

PIECES = r"""
    365 0 1, , {,} . / - + * $ \$ % \% \, \! { } { ( \( ^ ^{ _2 = x= **
    \text{ \text{a} \left \left( \frac \frac{ \frac1 \frac{1}{2} \sqrt{2} \times
    \times10^ 10^ 10^{ e9 1e999999999 10^{999999999}
    #### Answer: \boxed{ \fbox{ <answer> </answer>
    """.split()
PIECES += [" ", "\n", "\u00a0", " cups", " dozen", " 1"]
STARTS = ["", "#### ", "#### 5 ", "#### $5", "\\boxed{", "Answer: x=", "<answer>"]


@pytest.mark.parametrize("piece", PIECES)
def test_hostile_text_is_cheap(piece):
    """A search whose time is quadratic would take minutes for the long text."""
    start_time = time.thread_time()
    gold = piece * (990 // len(piece))
    for start in STARTS:
        verify(start + gold + "}</answer>", "365")
        verify(start + gold[: 990 - len(start)] + "s", gold)
        verify(start + piece * (10**5 // len(piece)) + "}</answer>", "365")
    assert time.thread_time() - start_time < 1
