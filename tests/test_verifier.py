"""What counts as the final answer, which answers are equal, and why a completion is refused."""

import time

import pytest

from common import final_answer, verify

RIGHT = [
    ("#### 365", "365"),
    ("7+8=15 #### 365", "365"),
    ("####365", "365"),
    ("#### 1 #### 365", "365"),
    ("#### 365\nand so on", "365"),
    ("#### 365.", "365"),
    ("#### 365.0", "365"),
    ("#### $1,000", "1000"),
    ("#### 1,234,567", "1234567"),
    ("#### 50%", "50"),
    ("#### -3", "-3"),
    ("#### +3", "3"),
    ("#### 0.50", "0.5"),
    ("#### .5", "0.5"),
    ("#### 1/2", "0.5"),
    ("#### 2/4", "1/2"),
    ("#### 007", "7"),
    ("#### Paris", "paris"),
    ("#### New   York", "new york"),
    (r"so \boxed{42}", "42"),
    (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
    (r"\boxed{1} then \boxed{2}", "2"),
    (r"#### 1 \boxed{2}", "2"),
    (r"\boxed{1} #### 2", "2"),
    (r"\boxed{ 3 }", "3"),
    (r"#### 5 \boxed{6", r"5 \boxed{6"),
    ("  #### 365  ", "365"),
    ("##### 365", "365"),
    ("#### 10000000000000000000000001", "10000000000000000000000001"),
]
WRONG = [
    ("#### 366", "365"),
    ("#### 36 5", "365"),
    ("#### 365 366", "365"),
    ("#### 365#", "365"),
    ("#### 3,65", "365"),
    ("#### 9**9**9", "9"),
    ("#### __import__('os')", "1"),
    ("#### 1e2", "100"),
    ("#### 1/0", "1"),
    ("#### nan", "0"),
    ("#### inf", "0"),
    ("#### 3$6$5", "365"),
    ("#### ٣٦٥", "365"),
    ("#### ３６５", "365"),
    ("#### 3.6.5", "365"),
    ("#### 10000000000000000000000001", "10000000000000000000000000"),
    ("#### 0.1", "0.10000000000000001"),
    ("#### -", "0"),
    ("#### $", "0"),
    ("#### .", "0"),
    ("#### 1_000", "1000"),
    ("#### 0x10", "16"),
]
NO_ANSWER = [
    "",
    "365",
    "### 365",
    "####",
    "####\n365",
    "#### \n",
    "\\boxed{}",
    "\\boxed{365",
    "boxed{365}",
    "57+308=365",
]


@pytest.mark.parametrize("text, gold", RIGHT)
def test_right(text, gold):
    assert verify(text, gold) == (1.0, "correct")


@pytest.mark.parametrize("text, gold", WRONG)
def test_wrong(text, gold):
    assert verify(text, gold) == (0.0, "wrong")


@pytest.mark.parametrize("text", NO_ANSWER)
def test_no_answer(text):
    assert final_answer(text) is None and verify(text, "365") == (0.0, "no_answer")


def test_what_is_cut_off_is_never_right():
    """'#### 36' may be the beginning of 365, so a completion without its EOS gets nothing."""
    assert verify("#### 36", "36", truncated=True) == (0.0, "truncated")
    assert verify("", "36", truncated=True) == (0.0, "truncated")


@pytest.mark.parametrize(
    "piece", ["{", "}", "{}", "\\boxed{", "#### ", "9", "9,", "9/", "a\n", "\\boxed{{", "-", "\u0663"]
)
def test_a_megabyte_takes_no_time(piece):
    text = "\\boxed{" + piece * (10**6 // len(piece))
    start = time.perf_counter()
    for candidate in (text, "#### " + text, text + "#### 1"):
        verify(candidate, "1")
    assert time.perf_counter() - start < 2
