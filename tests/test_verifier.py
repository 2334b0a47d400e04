"""What counts as the final answer, which answers are equal, and why a completion is refused."""

import random
import re
import time
from fractions import Fraction

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
    (r"\boxed{\boxed{365}}", "365"),
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


MEGABYTE = 10**6
HOSTILE = [  # none of these is a right answer to the question 57+308=, whose answer is 365
    "57+308=",
    "57+308=57+308=57+308=",
    "#### 57+308",
    "#### 57+308=365",
    "#### 365 or 366",
    "#### 364, 365, 366",
    "#### 365 #### 366",
    "#### 365\n#### 366",
    "#### 366\n365",
    "####\n\n365",
    "####\r365 366",
    "#### 365\r366",
    "#### 365\u2028 366",
    "#### 3 6 5",
    "#### 3\u00a065",
    "#### 36\u200b5",
    "#### 365\u0000",
    "####\u0000365",
    "#### \uff13\uff16\uff15",
    "#### \u0663\u0666\u0665",
    "#### \u00b3\u2076\u2075",
    "#### \U0001d7d1\U0001d7d4\U0001d7d3",
    "#### CCCLXV",
    "#### three hundred and sixty-five",
    "#### 0x16d",
    "#### 0b101101101",
    "#### 0o555",
    "#### 3.65e2",
    "#### 365e0",
    "#### 365j",
    "#### 3_6_5",
    "#### 365L",
    "#### 365;",
    "#### 365 365",
    "#### 36,5",
    "#### 3,6,5",
    "#### ,365",
    "#### 365,",
    "#### --365",
    "#### -365",
    "#### 365.5",
    "#### 365..",
    "#### 365%%",
    "#### $$365",
    "#### 365$",
    "#### 730/2/1",
    "#### 365/0",
    "#### 0/0",
    "#### 365/",
    "#### /365",
    "#### NaN",
    "#### Infinity",
    "#### -inf",
    "#### None",
    "#### True",
    "#### int('365')",
    "#### eval('57+308')",
    "#### __import__('os').system('true')",
    "#### {365}",
    "#### [365]",
    "#### (365)",
    "#### '365'",
    "#### <365>",
    "#### 365</s>",
    "#### ${365}",
    "#### %d",
    "#### {answer}",
    "#### 9**9**9",
    "#### 9" + "9" * 99,
    "#### 9" + "9" * 5000,
    "#### 365" + "0" * 5000,
    "#### 365." + "0" * 5000 + "1",
    "#### 1/" + "3" * 5000,
    "### 365",
    "# # # # 365",
    "＃＃＃＃ 365",
    "\\boxed{366}",
    "\\boxed{365",
    "\\boxed 365",
    "\\boxed{{365}",
    "\\boxed{\\boxed{366}}",
    "\\boxed{}365",
    "\\boxed{365}\\boxed{}",
    "\\boxed{365} #### 366",
    "#### 365 \\boxed{366}",
    "\\boxed{36}5",
    "\\boxed{3}{6}{5}",
    "\\fbox{365}",
    "boxed{365}",
    "\\Boxed{365}",
    "\\boxed{\\text{365}}",
    "\\boxed{x=365}",
    "\\boxed{365}{" * 3 + "\\boxed{",
    "}" * 100 + "{" * 100,
    "\\boxed{" * MEGABYTE,
    "\\boxed{" + "{" * MEGABYTE,
    "\\boxed{" + "{}" * (MEGABYTE // 2) + "}",
    "####" * (MEGABYTE // 4),
    "#" * MEGABYTE + "x",
    "#### " + "9" * MEGABYTE,
    "#### " + "9," * (MEGABYTE // 2),
    "#### " + "-" * MEGABYTE,
    "#### " + " " * MEGABYTE + "366",
    "#### " + "1/" * (MEGABYTE // 2),
    "\n" * MEGABYTE,
    "a" * MEGABYTE,
    "\u0663" * MEGABYTE,
]


def test_hostile_completions():
    """More than a hundred: none is right, none raises, all together take no time."""
    assert len(HOSTILE) >= 100
    start = time.perf_counter()
    for text in HOSTILE:
        for truncated in (False, True):
            reward, why = verify(text, "365", truncated)
            assert reward == 0.0 and why in ("wrong", "no_answer", "truncated"), text[:60]
    assert time.perf_counter() - start < 5


def test_the_final_line_may_be_long_but_the_answer_is_still_found():
    assert verify("x" * MEGABYTE + "#### 365" + "\n" + "y" * MEGABYTE, "365") == (1.0, "correct")


@pytest.mark.parametrize("seed", range(20))
def test_random_text_is_never_an_error(seed):
    """Strings made of the verifier's own syntax: what it calls right equals the gold answer."""
    rng = random.Random(seed)
    pieces = [
        "####",
        "\\boxed{",
        "{",
        "}",
        "365",
        "36",
        "5",
        ".",
        ",",
        "/",
        "$",
        "%",
        "-",
        "+",
        " ",
        "\n",
        "0",
    ]
    for _ in range(500):
        text = "".join(rng.choices(pieces, k=rng.randint(0, 12)))
        reward, why = verify(text, "365")
        assert reward == (why == "correct")
        assert (final_answer(text) is None) == (why == "no_answer")
        if reward:
            assert Fraction(re.sub(r"[$%,]", "", final_answer(text)).rstrip(".")) == 365
