r"""What counts as the final answer, and which answers are equal.

answers.jsonl has realistic, wrong and hostile completions, and the verdict expected of each: correct,
wrong, no_answer; refused (wrong or no_answer); or another: two answers that must not be taken for the
same, since something is glued to a fraction, a power, an index or a unit.
"""

import functools
import json
import random
import re
import time
from fractions import Fraction
from pathlib import Path

import pytest

from common import verify
from plumbing import answers
from plumbing.answers import canonical, final_answer, is_same

CASES = [json.loads(line) for line in (Path(__file__).parent / "answers.jsonl").open()]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["text"][:40])
def test_answer(case):
    gold, text, expected = case["gold"], case["text"], case["expected"]
    reward, verdict = verify(text, gold)
    assert reward == (expected == "correct") and reward == (verdict == "correct")
    if expected in ("wrong", "no_answer"):
        assert verdict == expected
    found = final_answer(text)
    assert (found is None) == (verdict == "no_answer")
    if expected in ("correct", "another"):  # each is right for itself, in both directions
        assert verify("#### " + gold, gold) == verify("#### " + found, found) == (1.0, "correct")
        assert is_same(gold, found) == is_same(found, gold) == (expected == "correct")
    assert verify(text, gold, truncated=True) == (0.0, "truncated")  # it may go on: 36 of 365


def test_an_answer_that_is_too_long_is_no_answer():
    assert verify("#### " + "0" * 900 + "365", "365") == (1.0, "correct")
    assert verify("#### " + "0" * 1000 + "365", "365") == (0.0, "no_answer")
    assert verify("\\boxed{" + "0" * 1000 + "365}", "365") == (0.0, "no_answer")
    assert verify("\\boxed " + "0" * 1000 + "365", "365") == (0.0, "no_answer")
    assert verify("#### " + "9" * 900, "9" * 10**6) == (0.0, "wrong")


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


PIECES = [" ", " ", "\n", ".."]
PIECES += "365 36 5 0 1 , . / - + $ $$ \\$ % \\% \\! \\, \\; ~ ** { } {,} ^ ^2 _2 ( ) \\( \\) =".split()
PIECES += r"x= Answer: \text{ \mathrm{ \left \right \frac \frac{ \sqrt \pi \cdot ^\circ °".split()
PIECES += "cm m L USD /day k".split()
PIECES += [f" {word} " for word in "dollars people per square million dozen and".split()]


@pytest.mark.parametrize("seed", range(5))
def test_an_answer_of_the_greatest_length_takes_little_longer_than_half_of_it(seed):
    rng = random.Random(seed)
    for _ in range(40):
        some = rng.sample(PIECES, 4)
        text = "".join(rng.choices(some, k=1000))
        assert seconds("#### " + text[:990]) < 8 * seconds("#### " + text[:495]) + SLACK


LONG = [
    "#### 9" + "9" * 5000,
    "#### 365" + "0" * 5000,
    "#### 365." + "0" * 5000 + "1",
    "#### 1/" + "3" * 5000,
    "}" * 100 + "{" * 100,
    "#### 866\n\\boxed{" + "9" * 1000 + "}",
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


def test_long_texts_are_refused_without_an_error():
    for text in LONG:
        assert verify(text, "365")[0] == verify(text, "866")[0] == 0.0, text[:60]
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


def without_notation(answer):
    """Notation and units taken off, in another way than the verifier does it."""
    answer = re.sub(r"\\(?:left|right)\.", "", answer)
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


# -------------------------------------------------- answers of different value are never the same

NUMBERS = ["1", "7", "71"]
ONE_UNIT = {"mm": "mm", "ml": "ml", "mL": "ml", "Mm": None, "MM": None, "ML": None, "Ml": None}
NEVER = "(?!)"


def braced(text):
    """{71}; of one digit also 7, as TeX takes it."""
    bare = [text, " " + text] if re.fullmatch("[0-9]", text) else []
    return [f"{{{text}}}", f"{{ {text} }}", *bare]


def one_thing(rng):
    """(what is printed, how it is written, a pattern of what would belong to it if it came next)."""
    a, b, c = rng.choices(NUMBERS, k=3)
    letter = rng.choice(["x", "x", r"\pi"])
    kind = rng.choice("number number thousands letter root fraction fraction power index".split())
    if kind == "number":
        written = rng.choice([a, a, a, f"${a}$", rf"\text{{{a}}}", rf"\!{a}\!", f"{b}.{a}", f".{a}"])
        return re.sub("[^0-9.]", "", written), written, "[0-9.]"
    if kind == "thousands":
        return a + "171", a + rng.choice([r"\,", r"{,}", r",\!"]) + "171", "[0-9.]"
    if kind == "letter":
        return letter, letter, "[a-zA-Z]"
    if kind == "root":
        return ("root", a), r"\sqrt" + rng.choice(braced(a)), NEVER
    if kind == "fraction":
        root = (("root", a), rf"\sqrt{{{a}}}")
        above, written = rng.choice([(a, a), (a, a), ("-" + a, "-" + a), (letter, letter), root])
        command = rng.choice([r"\frac", r"\dfrac", r"\tfrac"])
        return (
            ("fraction", above, b),
            command + rng.choice(braced(written)) + rng.choice(braced(b)),
            NEVER,
        )
    mark = {"power": "^", "index": "_"}[kind]
    base = rng.choice([letter, a])
    fraction = rf"\frac{{{b}}}{{{c}}}"
    raised, written, next_part = rng.choice(
        [
            (b, f"{{{b}}}", NEVER),
            (b, f" {{ {b} }}", NEVER),
            (b, b, r"[\w.]"),
            ("x", "{x}", NEVER),
            ("x", "x", r"[\w.]"),
            (("fraction", b, c), rng.choice([f"{{{fraction}}}", fraction, f"{{{b}/{c}}}"]), NEVER),
        ]
    )
    return (kind, base, raised), base + mark + written, next_part


def is_natural(thing):
    return isinstance(thing, str) and re.fullmatch("[0-9]+", thing) is not None


def value_of(things):
    """Things that are printed side by side -> a Fraction where they are a number, else a tuple."""
    things = list(things)
    for at in range(len(things) - 2, 0, -1):  # a/b where nothing else belongs to a or to b
        before = things[at - 2] if at >= 2 else "+"
        after = things[at + 2] if at + 2 < len(things) else "+"
        is_apart = before in ("+", "-", ",") or is_natural(before)
        if things[at] == "/" and is_apart and after in ("+", "-", ",", "%"):
            things[at - 1 : at + 2] = [("fraction", things[at - 1], things[at + 1])]
    if things[0][0] == "fraction" and things[0][1][0] == "-":
        things[:1] = ["-", ("fraction", things[0][1][1:], things[0][2])]
    sign = -1 if things[0] == "-" else 1
    *whole, last = things[1:] if things[0] == "-" else things
    if not whole and isinstance(last, str) and re.fullmatch("[0-9.]+", last):
        return sign * Fraction(last)
    if last[0] == "fraction" and is_natural(last[1]) and is_natural(last[2]):
        fraction = Fraction(int(last[1]), int(last[2]))
        if not whole:
            return sign * fraction
        if len(whole) == 1 and is_natural(whole[0]) and fraction < 1:
            return sign * (int(whole[0]) + fraction)
    return tuple(things)


def side_by_side(rng):
    """(things, how they are written)."""
    thing, text, next_part = one_thing(rng)
    things = [thing]
    for _ in range(rng.choice([0, 0, 1, 1, 1, 2])):
        neighbours = [one_thing(rng), ("1", "1", "[0-9.]"), ("x", "x", "[a-zA-Z]")]
        thing, right, next_of_right = rng.choice(neighbours)
        operator = rng.choice(["", "", "", "", "", "-", "+", "/", "/", ", ", "**"])
        would_belong = re.match(next_part, re.sub(r"^(?:\$|\\!|\\text\{)+", "", right))
        two_numbers = things[-1] in NUMBERS and thing in NUMBERS
        next_part = next_of_right
        if operator:
            text += rng.choice([operator, f" {operator} "]) + right
            things += [operator.strip(), thing]
        elif would_belong and two_numbers and rng.random() < 0.7:
            text += (r"\!" if right in NUMBERS else "") + right
            things[-1] += thing  # nothing is printed between them, so they are one
        else:
            text += rng.choice([" "] if would_belong else ["", "", " ", r"\!", r"\;"]) + right
            things.append(thing)
    if rng.random() < 0.1:
        return ["-", *things], "-" + text
    return things, text


def an_answer(rng):
    """((value, unit or None, name or None), how it is written)."""
    things, text = side_by_side(rng)
    unit = None
    end = rng.choice([""] * 10 + ["unit", "degree", "degree C", "%", "!"])
    if end == "unit":
        written, unit = rng.choice(list(ONE_UNIT.items()))
        text += rng.choice([" {}", r"\text{{ {} }}", r"\,\mathrm{{{}}}"]).format(written)
        things += [] if unit else [written]
    elif end == "degree":
        text += rng.choice([r"^\circ", r"^{\circ}", "°"])
        unit = "degree"
    elif end == "degree C":
        text += rng.choice([r"^\circ C", r"^{\circ}C", r"°\text{C}"])
        things += ["degree", "C"]
    elif end == "%" and "frac" not in text and "/" not in text:
        text += rng.choice(["%", r"\%", " percent"])
        unit = "%"
    elif end:
        text += end
        things.append(end)
    name = rng.choice([None] * 6 + ["x", "a"])
    text = rng.choice([f"{name} = ", f"{name}="] if name else ["", "", "= "]) + text
    if not re.search(r"\*\*|\$", text):
        text = rng.choice(["{}", "{}", "**{}**", "${}$", r"\({}\)", "{}."]).format(text)
    return (value_of(things), unit, name), text


def may_be_the_same(one, other):
    """Who says nothing of a unit or a name leaves it open."""
    value, *left_open = zip(one, other, strict=True)
    return value[0] == value[1] and all(a == b or None in (a, b) for a, b in left_open)


def test_no_two_answers_of_different_value_are_the_same(monkeypatch):
    """20,000 pairs: of what the verifier reads alike, and of the same letters and digits."""
    monkeypatch.setattr(answers, "canonical", functools.cache(canonical))  # each is in many pairs
    rng = random.Random(2)
    read_alike = {}
    spelt_alike = {}
    num_pairs = 0
    num_same = 0
    while num_pairs < 20_000:
        meaning, text = an_answer(rng)
        value, _ = answers.canonical(text, is_named=True)
        spelling = re.sub(r"\\(?!pi)[a-zA-Z]+|[^0-9a-z]", "", text.lower())
        for other_meaning, other in read_alike.get(value, [])[-1:] + spelt_alike.get(spelling, [])[-3:]:
            num_pairs += 1
            if is_same(text, other):
                num_same += text != other
                assert may_be_the_same(meaning, other_meaning), (text, other)
        read_alike.setdefault(value, []).append((meaning, text))
        spelt_alike.setdefault(spelling, []).append((meaning, text))
    assert num_same > 1000
