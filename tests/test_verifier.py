"""What counts as the final answer, which answers are equal, and why a completion is refused."""

import random
import re
import time
from fractions import Fraction

import pytest

from common import verify
from plumbing.answers import canonical, final_answer

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
    (r"\boxed 365", "365"),
    (r"\boxed{\text{365}}", "365"),
    (r"\boxed{x=365}", "365"),
    ("#### = 365", "365"),
    ("#### $x = 365$", "365"),
    (r"\fbox{365}", "365"),
    (r"\boxed{364} or \fbox{365}", "365"),
    ("\\boxed\n{365}", "365"),
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


PAIRS = [  # realistic answers to MATH and GSM8K: gold answer, completion, label
    # What is optional takes algebra.
    ("18", "so 9+9=18\n#### 18", "right"),
    ("18", "so 9+9=18\n#### 18.", "right"),
    ("18", "so 9+9=18\n#### $18.00", "right"),
    ("18", "so 9+9=18\n#### 18 dollars", "right"),
    ("18", "so 9+9=18\n#### \\$18", "right"),
    ("18", "so 9+9=18\n#### $18 per day", "right"),
    ("18", "so 9+9=18\n#### Answer: 18", "right"),
    ("1234", "so 9+9=18\n#### 1,234", "right"),
    ("1234", "so 9+9=18\n#### 1234.0", "right"),
    ("70000", "so 9+9=18\n#### 70k", "optional"),
    ("0.5", "so 9+9=18\n#### 1/2", "right"),
    ("50", "so 9+9=18\n#### 50%", "right"),
    ("25", "so 9+9=18\n#### 0.25", "wrong"),
    ("-5", "so 9+9=18\n#### -5", "right"),
    ("-5", "so 9+9=18\n#### - 5", "right"),
    ("-5", "so 9+9=18\n#### $-5", "right"),
    ("5", "so 9+9=18\n#### +5", "right"),
    ("18", "so 9+9=18\n#### 19", "wrong"),
    ("18", "so 9+9=18\n#### 36/2", "wrong"),
    ("18", "so 9+9=18\n#### 1.8e1", "optional"),
    ("3", "so 9+9=18\n#### 3 hours and 20 minutes", "wrong"),
    ("18", "**#### 18**", "right"),
    ("18", r"so the answer is $\boxed{18}$.", "right"),
    ("18", r"so the answer is $\boxed{\$18}$.", "right"),
    ("18", r"so the answer is $\boxed{18.}$.", "right"),
    (r"\frac{1}{2}", r"so the answer is $\boxed{\frac12}$.", "right"),
    (r"\frac{1}{2}", r"so the answer is $\boxed{1/2}$.", "right"),
    (r"\frac{1}{2}", r"so the answer is $\boxed{\frac{2}{4}}$.", "right"),
    (r"-\frac{1}{2}", r"so the answer is $\boxed{\frac{-1}{2}}$.", "right"),
    (r"\frac{1}{2}", r"so the answer is $\boxed{\frac 12}$.", "right"),
    (r"2\sqrt{3}", r"so the answer is $\boxed{2\sqrt3}$.", "right"),
    (r"2\sqrt{3}", r"so the answer is $\boxed{2 \sqrt{3}}$.", "right"),
    (r"\sqrt{2}", r"so the answer is $\boxed{1.414}$.", "wrong"),
    (r"\pi", r"so the answer is $\boxed{3.14}$.", "wrong"),
    ("(1,2)", r"so the answer is $\boxed{(1,2)}$.", "right"),
    ("(1,2)", r"so the answer is $\boxed{(2,1)}$.", "wrong"),
    (r"\left(3,\frac{\pi}{2}\right)", r"so the answer is $\boxed{(3, \frac{\pi}{2})}$.", "right"),
    ("[0,1)", r"so the answer is $\boxed{(0,1]}$.", "wrong"),
    ("1,2,3", r"so the answer is $\boxed{1, 2, 3}$.", "right"),
    ("1,2", r"so the answer is $\boxed{\{1,2\}}$.", "optional"),
    (r"\text{(A)}", r"so the answer is $\boxed{(A)}$.", "right"),
    (r"\text{Evelyn}", r"so the answer is $\boxed{Evelyn}$.", "right"),
    (r"\text{even}", r"so the answer is $\boxed{odd}$.", "wrong"),
    ("10", r"so the answer is $\boxed{10\%}$.", "right"),
    (r"\$32{,}348", r"so the answer is $\boxed{32348}$.", "right"),
    (r"58,\!500", r"so the answer is $\boxed{58,500}$.", "right"),
    (r"90^\circ", r"so the answer is $\boxed{90^{\circ}}$.", "right"),
    (r"5\text{ cm}", r"so the answer is $\boxed{5}$.", "right"),
    ("5", r"so the answer is $\boxed{5 \text{ cm}^2}$.", "right"),
    ("5", r"so the answer is $\boxed{x=5}$.", "right"),
    ("x^2+2x+1", r"so the answer is $\boxed{x^2 + 2x + 1}$.", "right"),
    ("2x+3", r"so the answer is $\boxed{3+2x}$.", "optional"),
    ("1024", r"so the answer is $\boxed{2^{10}}$.", "optional"),
    (r"\frac{3}{4}", r"so the answer is $\boxed{0.75}$.", "right"),
    ("11011_2", r"so the answer is $\boxed{11011_2}$.", "right"),
    ("3+4i", r"so the answer is $\boxed{3+4i}$.", "right"),
    (
        r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}",
        r"so the answer is $\boxed{\begin{pmatrix}1\\2\end{pmatrix}}$.",
        "right",
    ),
    ("12", r"so the answer is $\boxed{10 + 2}$.", "wrong"),
    ("12", r"so the answer is $\boxed{12}$. Wait, no: $\boxed{13}$", "wrong"),
    ("12", r"\boxed{12 \text{ or } 13}", "wrong"),
    ("12", r"\boxed 12", "right"),
    ("12", r"\boxed {12}", "right"),
    ("3:2", r"so the answer is $\boxed{3:2}$.", "right"),
    (r"\text{6:00 p.m.}", r"so the answer is $\boxed{6:00 p.m.}$.", "right"),
]


@pytest.mark.parametrize("gold, text, label", PAIRS)
def test_realistic_pairs(gold, text, label):
    reward, _ = verify(text, gold)
    if label == "right":
        assert reward == 1.0
    if label == "wrong":
        assert reward == 0.0


RIGHT_PAIRS = [  # gold answer, completion
    # Numbers
    ("5", "#### $5.00."),
    ("18.9", r"\boxed{\$18.90}"),
    ("1000000", "#### 1,000,000"),
    ("1000", r"\boxed{1\,000}"),
    ("1000", r"\boxed{1{,}000}"),
    ("12", r"\boxed{12.0}"),
    ("-3", "#### −3"),
    ("1234.5", "#### $1,234.50"),
    ("-5", "#### -$5"),
    ("0.25", "#### .25"),
    ("18", r"#### \(18\)"),
    ("18", "#### $18$."),
    ("18", "#### $$18$$"),
    ("18", "#### **$18$**"),
    ("18", "#### The answer is 18."),
    ("18", "#### **Final answer:** 18"),
    ("18", r"\[ \boxed{\mathbf{18}} \]"),
    ("18", r"\boxed{\displaystyle 18}"),
    ("18", "#### $18$ dollars"),
    ("12", r"we get $\boxed 12$."),
    ("12", "\\boxed 12.\nDone"),
    ("18", "$18 = 2 \\cdot 9$\n#### 18\nI hope it is correct."),
    # Fractions and mixed numbers
    (r"\frac{3}{4}", "#### 3/4"),
    (r"\frac{3}{4}", r"\boxed{\dfrac{3}{4}}"),
    (r"\frac{3}{4}", r"\boxed{\tfrac34}"),
    (r"\frac{3}{4}", r"\boxed{\frac{6}{8}}"),
    (r"\frac{3}{4}", r"\boxed{\frac {3} {4}}"),
    (r"\frac{17}{50}", "#### 0.34"),
    ("0.75", r"\boxed{\frac 3 4}"),
    (r"\frac{5}{2}", "#### 2 1/2"),
    (r"\frac{5}{2}", r"\boxed{2\frac{1}{2}}"),
    ("2.5", r"\boxed{2\tfrac12}"),
    (r"-\frac{5}{2}", r"\boxed{-2 \frac12}"),
    ("2 1/2", r"\boxed{\frac{5}{2}}"),
    (r"\frac{a}{b}", r"\boxed{\dfrac{a}{b}}"),
    (r"\frac{\sqrt{3}}{2}", r"\boxed{\sqrt{3}/2}"),
    (r"\frac{3\pi}{4}", r"#### 3\pi/4"),
    (r"\left(3,\frac{\pi}{2}\right)", r"\boxed{(3, \pi/2)}"),
    (r"y=x^2/4+1/2", r"\boxed{y = \frac{x^2}{4} + \frac12}"),
    ("x=1/2 or x=3", r"\boxed{x = \frac{1}{2} \text{ or } x = 3}"),
    (
        r"\begin{pmatrix} 1/5 \\ -8/5 \end{pmatrix}",
        r"\boxed{\begin{pmatrix}\frac15\\\frac{-8}5\end{pmatrix}}",
    ),
    (r"10,\!000\pi", r"\boxed{10,000\pi}"),
    # Units and names
    (r"5\text{ cm}", "#### 5 cm"),
    ("5 ml", r"\boxed{5\text{ mL}}"),
    (r"5\text{ cm}", r"\boxed{5\mathrm{~cm}}"),
    ("5", r"\boxed{5\,\text{cm}^{2}}"),
    ("18", "#### 18 apples"),
    ("18", "#### 18 miles per hour"),
    ("18", "#### $18 USD"),
    ("18", "#### 18 Dollars"),
    ("18", "#### $18/day"),
    ("18", "#### 18 per day"),
    ("6.5", r"\boxed{6\frac{1}{2} \text{ hours}}"),
    ("0.5", "#### 1/2 cup"),
    ("10", r"\boxed{10\%}"),
    (r"10\%", "#### 10"),
    (r"10\%", "#### 10 percent"),
    ("45", "#### 45°"),
    (r"45^\circ", "#### 45 degrees"),
    ("x=5", r"\boxed{5}"),
    ("30", r"\boxed{\theta = 30^\circ}"),
    ("y=2x+3", r"\boxed{y = 2x + 3}"),
    ("2x+3", r"\boxed{y = 2x + 3}"),
    # Text
    (r"(-\infty, 3]", r"\boxed{\left( -\infty,3 \right]}"),
    (r"\{1,2\}", r"\boxed{\left\{1, 2\right\}}"),
    ("(100,200)", r"\boxed{(100, 200)}"),
    (r"\text{Tuesday}", "#### Tuesday."),
    (r"\text{No}", "#### no"),
    (r"\text{Tuesday}", r"\boxed{\textbf{tuesday}}"),
    (r"\text{(A)}", r"\boxed{A}"),
    ("6:00 p.m.", r"\boxed{6:00\text{ p.m.}}"),
    ("11011_2", r"\boxed{11011_{2}}"),
    ("3:2", "#### 3 : 2"),
    ("3+4i", r"\boxed{3 + 4i}"),
    (r"\sqrt{2}", r"\boxed{\sqrt 2}"),
    ("x^{10}+x^2", r"\boxed{x^{10} + x^{2}}"),
    (
        r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}",
        r"\boxed{\begin{pmatrix}1&2\\3&4\end{pmatrix}}",
    ),
    (r"12\text{ and }13", r"\boxed{12 and 13}"),
    ("36/2", "#### 36/2"),
]
WRONG_PAIRS = [  # gold answer, completion
    # Other numbers
    ("3", "#### -3"),
    ("3", r"\boxed{\pm 3}"),
    ("1/3", "#### 0.333"),
    ("0.1", r"\boxed{10\%}"),
    (r"50\%", "#### 0.5"),
    ("1234", "#### 1, 234"),
    ("365", "#### 3$65"),
    ("365", r"\boxed{3\,65}"),
    ("365", r"\boxed{3\text{6}5}"),
    ("365", r"\boxed{3\left65}"),
    ("365", "#### 0,365"),
    ("5", "#### 5,000"),
    ("5", "#### 5 000"),
    ("5", "#### ~5"),
    ("5", "#### about 5"),
    ("5", r"\boxed{\approx 5}"),
    ("5", "#### > 5"),
    ("5", "#### 5!"),
    ("5", "#### $5^2"),
    ("5", r"\boxed{5^\circ^2}"),
    ("5", "#### 5/%"),
    ("5", r"\boxed{5\%^2}"),
    ("5", "#### 5-6"),
    ("5", "#### 5 to 6"),
    ("5", "#### 5 or 6 apples"),
    ("5", "#### 1 in 5"),
    ("5", r"\boxed 5 or 6"),
    ("12", r"\boxed{12, 13}"),
    ("18", "#### 18 (eighteen or so)"),
    ("18", "#### 18;"),
    ("0", "#### $."),
    ("2", "#### 4 2/2"),
    # Work left to do
    ("18", r"\boxed{\frac{36}{2}}"),
    ("18", "#### 18/1"),
    ("18", r"\boxed{2\cdot 9}"),
    ("6", r"\boxed{2\times3}"),
    ("3", "#### 2 2/2"),
    ("12", r"\boxed{\sqrt{144}}"),
    ("5", "#### 5 + 0"),
    ("1", "#### 50/50"),
    ("0", "#### 0/7"),
    ("4", "#### 4 0/9"),
    ("5", "#### 5 1/2"),
    ("21/2", r"\boxed{2\frac12}"),
    ("1", r"\boxed{2\frac12}"),
    ("1.5", "#### 2 - 1/2 = 1.5"),
    ("7/2", r"\boxed{2\frac{3}{2}}"),
    ("x^{1/2}", r"\boxed{x^1/2}"),
    ("1/2", "#### 1/2/1"),
    ("1/2", r"\boxed{\frac{1}{2}x}"),
    # Units and names
    ("18", "#### 18 million"),
    ("18", "#### $18 million"),
    ("18", "#### 18 thousand people"),
    ("18", "#### 18 dozen eggs"),
    ("18", "#### 18 hundred"),
    ("18", "#### 18 pairs"),
    ("18", "#### 18k"),
    ("5", "#### 5 M"),
    ("5", "#### 5 ms"),
    ("1980", "#### 1980s"),
    ("5", "#### 5th"),
    ("5", "#### 2m"),
    ("2m", r"\boxed{2}"),
    ("2x+3", r"\boxed{2x+3 h}"),
    ("18", "#### 18 dollars and 50 cents"),
    ("3", "#### 3 hours 20 minutes"),
    ("5", "#### 5 ft 3 in"),
    (r"5\text{ cm}", "#### 5 m"),
    (r"5\text{ cm}^2", "#### 5 cm"),
    (r"5\text{ cm}", r"\boxed{5\text{ cm}^2}"),
    ("$18", "#### 18 cents"),
    (r"10\%", r"\boxed{10^\circ}"),
    (r"30\text{ mph}", "#### 30 km per hour"),
    ("18", "#### 18 per"),
    ("18", "#### $18 per 100"),
    ("x=5", r"\boxed{y=5}"),
    ("5", r"\boxed{x=5 \text{ or } x=6}"),
    ("5", r"\boxed{a=b=5}"),
    ("5", r"\boxed{xy=5}"),
    ("5", r"\boxed{x \ne 5}"),
    ("5", r"\boxed{5x}"),
    ("5", r"\boxed{5\pi}"),
    ("90", r"\boxed{\angle 90}"),
    # Text
    ("(0,1)", r"\boxed{[0,1)}"),
    ("(1,2)", r"\boxed{1,2}"),
    ("(1,2)", r"\boxed{(12)}"),
    ("11011", r"\boxed{11011_2}"),
    ("3/2", "#### 3:2"),
    ("(A)", r"\boxed{(B)}"),
    ("A", "#### A or B"),
    ("ab", r"\boxed{ba}"),
    (r"\pi r", r"\boxed{\pir}"),
    ("New York", "#### NewYork"),
    ("y=2x+3", r"\boxed{y=2x-3}"),
]


@pytest.mark.parametrize("gold, text", RIGHT_PAIRS)
def test_right_pairs(gold, text):
    assert verify(text, gold) == (1.0, "correct")


@pytest.mark.parametrize("gold, text", WRONG_PAIRS)
def test_wrong_pairs(gold, text):
    assert verify(text, gold)[0] == 0.0


@pytest.mark.parametrize("gold, text", RIGHT_PAIRS)
def test_an_answer_is_right_for_itself(gold, text):
    for answer in (gold, final_answer(text)):
        assert verify("#### " + answer, answer) == (1.0, "correct")


def test_an_answer_that_is_too_long_is_no_answer():
    assert verify("#### " + "0" * 900 + "365", "365") == (1.0, "correct")
    assert verify("#### " + "0" * 1000 + "365", "365") == (0.0, "no_answer")
    assert verify("\\boxed{" + "0" * 1000 + "365}", "365") == (0.0, "no_answer")
    assert verify("\\boxed " + "0" * 1000 + "365", "365") == (0.0, "no_answer")
    assert verify("#### " + "9" * 900, "9" * 10**6) == (0.0, "wrong")


LATER_BOXES = ["", " ", "\x00", "\x1c", "\n", "\u200b", "{}", "867", "867{", "9" * 1000]


@pytest.mark.parametrize("box", LATER_BOXES)
def test_a_line_before_a_later_box_is_no_answer(box):
    for text in (r"\boxed{%s}", r"\fbox{%s}", r"\boxed" + "\n{%s}", r"\boxed$%s$"):
        assert verify("#### 866\n" + text % box, "866")[0] == 0.0


def test_what_is_cut_off_is_never_right():
    """'#### 36' may be the beginning of 365, so a completion without its EOS gets nothing."""
    assert verify("#### 36", "36", truncated=True) == (0.0, "truncated")
    assert verify("", "36", truncated=True) == (0.0, "truncated")


MEGABYTE = 10**6
SLACK = 0.005  # seconds, for what is short


def seconds(text):
    """CPU time that the verifier takes, at best of three: the machine may be busy."""
    times = []
    for _ in range(3):
        start = time.thread_time()
        verify(text, "365")
        times.append(time.thread_time() - start)
    return min(times)


REPEATED = ["#### ", "\\boxed ", " ", "\n", "a\n", "1 ", " cm", " per ", "\u0663"]
REPEATED += r"{ } {} # ###x 9 9, 9/ 1/ a - $ \$ \ ** x= \boxed{ \boxed{{".split()
REPEATED += r"\text{ \frac \frac{ \sqrt{".split()


@pytest.mark.parametrize("piece", REPEATED)
def test_two_megabytes_take_twice_as_long_as_one(piece):
    """Four times, as a search within a search would, are too many."""
    text = piece * (MEGABYTE // len(piece))
    for start in ("", "#### ", "\\boxed{", "\\boxed ", "#### 1\n"):
        for end in ("", "}", "#### 1", "\\boxed{1}"):
            assert seconds(start + 2 * text + end) < 3 * seconds(start + text + end) + SLACK


@pytest.mark.parametrize("seed", range(5))
def test_an_answer_of_the_greatest_length_takes_little_longer_than_half_of_it(seed):
    rng = random.Random(seed)
    for _ in range(40):
        some = rng.sample(PIECES, 4)
        text = "".join(rng.choices(some, k=1000))
        assert seconds("#### " + text[:990]) < 8 * seconds("#### " + text[:495]) + SLACK


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
    "\\boxed{{365}",
    "\\boxed{\\boxed{366}}",
    "\\boxed{}365",
    "\\boxed{365}\\boxed{}",
    "\\boxed{365} #### 366",
    "#### 365 \\boxed{366}",
    "\\boxed{36}5",
    "\\boxed{3}{6}{5}",
    "boxed{365}",
    "\\Boxed{365}",
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
    """None is right, none raises."""
    for text in HOSTILE:
        for truncated in (False, True):
            reward, why = verify(text, "365", truncated)
            assert reward == 0.0 and why in ("wrong", "no_answer", "truncated"), text[:60]


def test_the_final_line_may_be_long_but_the_answer_is_still_found():
    assert verify("x" * MEGABYTE + "#### 365" + "\n" + "y" * MEGABYTE, "365") == (1.0, "correct")


@pytest.mark.parametrize("seed", range(20))
def test_random_text_is_never_an_error(seed):
    """Strings made of the verifier's own syntax: what it calls right equals the gold answer."""
    rng = random.Random(seed)
    pieces = [*r"#### \boxed{ { } 365 36 5 . , / $ % - + 0".split(), " ", "\n"]
    for _ in range(500):
        text = "".join(rng.choices(pieces, k=rng.randint(0, 12)))
        reward, why = verify(text, "365")
        assert reward == (why == "correct")
        assert (final_answer(text) is None) == (why == "no_answer")
        if reward:
            assert Fraction(re.sub(r"[$%, ]", "", final_answer(text)).rstrip(".")) == 365


PIECES = [" ", " ", "\n", ".."]
PIECES += "365 36 5 0 1 , . / - + $ $$ \\$ % \\% \\! \\, \\; ~ ** { } {,} ^ ^2 _2 ( ) \\( \\) =".split()
PIECES += r"x= Answer: \text{ \mathrm{ \left \right \frac \frac{ \sqrt \pi \cdot ^\circ °".split()
PIECES += "cm m L dollars USD people per /day square million k dozen and".split()


def without_notation(answer):
    """Notation and units taken off, in another way than the verifier does it."""
    answer = answer.replace("\\!", "").replace("\\circ", "°").replace("{,}", ",")
    answer = re.sub(r"\\(?:text|mathrm|left|right)(?![a-z])|\\[,;()$%]|[*$%{}~\s]", " ", answer)
    answer = re.sub(r" +", " ", answer)
    answer = re.sub(r"^ ?(?:Answer:)? ?(?:= ?)?(?:[a-zA-Z](?:_2)? ?= ?)?", "", answer)
    unit = r"(?:square )?(?:day|cm|km|mm|m|mL|L|dollars|USD|people)(?: ?\^ ?2)?(?![A-Za-z])"
    answer = re.sub(rf"(?: ?(?:square|per)? ?\^? ?°)?(?:(?:per |/) ?{unit}| ?{unit})*", "", answer)
    return answer.strip().removesuffix(".").strip()


@pytest.mark.parametrize("seed", range(20))
def test_random_notation(seed):
    """No answer made of notation is an error, and what is called right is 365 and no more."""
    rng = random.Random(seed)
    number_right = 0
    for _ in range(2000):
        before = "".join(rng.choices(PIECES, k=rng.randint(0, 3)))
        after = "".join(rng.choices(PIECES, k=rng.randint(0, 4)))
        box = rng.choice(["#### {}", "\\boxed{{{}}}", "\\boxed {}"])
        text = box.format(before + "365" + after)
        reward, why = verify(text, "365")
        assert reward == (why == "correct")
        if reward:
            number_right += 1
            left = without_notation(final_answer(text))
            assert re.fullmatch(r"[+]? ?0*365(\.0+)?", left), text
    assert number_right > 100


@pytest.mark.parametrize("seed", range(20))
def test_random_notation_against_random_notation(seed):
    """Neither side of a comparison is ever an error, and every answer is right for itself."""
    rng = random.Random(seed)
    for _ in range(500):
        one, other = ("".join(rng.choices(PIECES, k=rng.randint(1, 12))) for _ in range(2))
        assert verify("#### " + one, other)[1] in ("correct", "wrong", "no_answer")
        found = final_answer("#### " + one)
        if found is not None:
            assert canonical(found) == canonical(final_answer("#### " + found))
