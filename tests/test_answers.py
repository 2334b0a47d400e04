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
from fractions import Fraction
from pathlib import Path

import pytest

from common import verify
from plumbing.answers import NAME, final_answer, gold_answer, is_same, value_and_unit, without_markup

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
PIECES += '(B) cm m L USD k #### \\boxed{ <answer> [" teen'.split()
PIECES += [f" {word} " for word in "dollars people per square million dozen and".split()]
STARTS = ["", "#### ", "\\boxed{", "#### (B) ", "#### 5 ", "#### $5 ", "\nAnswer: x=", "<answer>"]
LIMIT = 0.01  # seconds


def seconds(text, gold):
    """CPU time to read and compare an answer, the best of three: the machine may be busy."""
    times = []
    for _ in range(3):
        start = time.thread_time()
        verify(text, gold)
        times.append(time.thread_time() - start)
    return min(times)


@pytest.mark.parametrize("piece", PIECES)
def test_hostile_text_costs_nothing(piece):
    for start in STARTS:
        for length in (900, 10**6):
            for end in ("", "s}</answer>"):
                assert seconds(start + piece * (length // len(piece)) + end, "365") < LIMIT


@pytest.mark.parametrize("seed", range(5))
def test_a_mixture_costs_nothing(seed):
    rng = random.Random(seed)
    for _ in range(40):
        text = "".join(rng.choices(rng.sample(PIECES, 4), k=1000))
        assert seconds(rng.choice(STARTS) + text[:900], text[:990]) < LIMIT


def test_a_great_exponent_costs_nothing():
    for text in (
        "1e999999999",
        "10^999999999",
        "10^{999999999}",
        "9 \\times 10^{999999999}",
        "-1e-99999",
    ):
        assert seconds("#### " + text, text + "9") < LIMIT and not is_same(text, text + "9")


def bare(answer):
    """Markup, name and unit taken off, in a different way than the verifier does it."""
    answer = re.sub(r"\\(?:left|right)\.?|\\!|\\[a-z]+\{|\\[,;()$]|[*$~{}]", " ", answer)
    answer = re.sub(r"^(?:\s*(?:Answer:|[a-zA-Z]\s*=|=|USD|\+))*", "", answer)
    unit = r"cm|km|m|L|USD|\\?%|\^\s*\\circ|°|\^2|per|[a-zA-Z]{3,}"
    return re.sub(rf"(?:\s*(?:{unit}))*\s*\.?\s*$", "", answer).strip()


@pytest.mark.parametrize("seed", range(20))
def test_what_is_called_right_is_365_and_no_more(seed):
    """And no text is an error, not as a gold answer either."""
    rng = random.Random(seed)
    number_right = 0
    for _ in range(1000):
        before = "".join(rng.choices(PIECES, k=rng.randint(0, 3)))
        after = "".join(rng.choices(PIECES, k=rng.randint(0, 4)))
        text = rng.choice(["#### {}", "\\boxed{{{}}}", "Answer: {}"]).format(before + "365" + after)
        found = final_answer(text)
        reward, verdict = verify(text, "365")
        assert reward == (verdict == "correct") and (found is None) == (verdict == "no_answer")
        if reward:
            number_right += 1
            assert re.fullmatch(r"0*365(?:\.0+)?", bare(found)), text
        assert verify("#### " + after, before)[1] in ("correct", "wrong", "no_answer")
    assert number_right > 20


# ----------------------------------------------------- answers of different value are never the same

NUMBERS = ["1", "7", "71"]
UNITS = {unit: [f" {unit}", rf"\text{{ {unit} }}"] for unit in "mm ml Mm MM ML Ml kg g apples".split()}
UNITS |= {"%": ["%", r"\%", " percent"], "°": [r"^\circ", r"^{\circ}", "°"]}


def one_thing(rng):
    """(what is printed, how it is written)."""
    a, b = rng.choices(NUMBERS, k=2)
    letter = rng.choice("xn")
    of_a, of_b = (rng.choice([f"{{{n}}}", f"{{ {n} }}"] + [n] * (len(n) == 1)) for n in (a, b))
    base = rng.choice([letter, a])
    exponent = rng.choice([of_b, b])
    fraction = rng.choice([r"\frac", r"\dfrac", r"\tfrac "])
    return rng.choice(
        [
            (a, rng.choice([a, a, f"${a}$", rf"\text{{{a}}}", rf"\!{a}\!"])),
            (a, a),
            (a + "171", a + rng.choice([r"\,", r"{,}", r",\!", ",", "'"]) + "171"),
            (letter, rng.choice([letter, f"{{{letter}}}", rf"\mathrm{{{letter}}}"])),
            (("root", a), r"\sqrt" + of_a),
            (("fraction", a, b), fraction + of_a + of_b),
            (("power", base, b), f"{base}^{exponent}"),
            (("index", base, b), f"{base}_{exponent}"),
        ]
    )


def is_natural(thing):
    return isinstance(thing, str) and thing.isdigit()


def value_of(things):
    """Things that are printed side by side -> a Fraction where they are a number, else a tuple."""
    sign = -1 if things[0] == "-" else 1
    *whole, last = things[1:] if things[0] == "-" else things
    if whole[-1:] == ["/"] and len(whole) > 1:
        *whole, above, _ = whole
        last = ("fraction", above, last)
    if not whole and is_natural(last):
        return Fraction(sign * int(last))
    if last[0] == "fraction" and is_natural(last[1]) and is_natural(last[2]):
        fraction = Fraction(int(last[1]), int(last[2]))
        if not whole and fraction.denominator > 1:
            return sign * fraction
        if len(whole) == 1 and is_natural(whole[0]) and fraction < 1:
            return sign * (int(whole[0]) + fraction)
    return tuple(things)


def an_answer(rng):
    """((value, unit or None, name or None), how it is written)."""
    text = rng.choice(["", "", "-"])
    things = list(text)
    for at in range(rng.choice([1, 1, 2, 2, 3])):
        thing, written = one_thing(rng)
        operator = rng.choice(["", "", "", " ", "-", "+", "/", ", ", "**"]) if at else ""
        is_apart = written.startswith("\\frac") or (text.endswith("}") and "\\text" not in text)
        if not is_apart and re.search(r"\w\W*$", text) and re.match(r"\W*\w", written):
            operator = operator or " "
        if at and not operator and is_natural(things[-1]) and is_natural(thing):
            things[-1] += thing  # nothing is printed between them, so they are one
        else:
            things += [operator.strip(), thing] if operator.strip() else [thing]
        text += operator + written
    unit = rng.choice([None] * 6 + list(UNITS))
    if unit:
        text += rng.choice(UNITS[unit])
    name = rng.choice([None] * 6 + ["x", "a"])
    text = rng.choice([f"{name} = ", f"{name}="] if name else ["", "", "= "]) + text
    if not re.search(r"\*\*|\$", text):
        text = rng.choice(["{}", "{}", "**{}**", "${}$", r"\({}\)", "{}."]).format(text)
    return (value_of(things), unit, name), text


def may_be_the_same(one, other):
    """Who says nothing of a unit or a name leaves it open."""
    value, *left_open = zip(one, other, strict=True)
    return value[0] == value[1] and all(a == b or None in (a, b) for a, b in left_open)


def test_no_two_answers_of_different_value_are_the_same():
    """20,000 pairs: of what the verifier reads alike, and of the same letters and digits."""
    rng = random.Random(2)
    read_alike = {}
    spelt_alike = {}
    num_pairs = 0
    num_same = 0
    while num_pairs < 20_000:
        meaning, text = an_answer(rng)
        value, _ = value_and_unit(re.sub(NAME, "", without_markup(text)))
        spelling = re.sub(r"\\[a-zA-Z]+|[^0-9a-z]", "", text.lower())
        for other_meaning, other in read_alike.get(value, [])[-1:] + spelt_alike.get(spelling, [])[-3:]:
            num_pairs += 1
            if is_same(text, other):
                num_same += text != other
                assert may_be_the_same(meaning, other_meaning), (text, other)
        read_alike.setdefault(value, []).append((meaning, text))
        spelt_alike.setdefault(spelling, []).append((meaning, text))
    assert num_same > 1000
