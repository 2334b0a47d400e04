r"""Two answers of different value are never the same, however they are written and whatever stands
beside a fraction, a power, an index or a unit."""

import functools
import random
import re
from fractions import Fraction

import pytest

from plumbing import answers
from plumbing.answers import canonical, is_same

NOT_THE_SAME = r"""
    \frac{7}{7}1 | 7/71          \frac771 | 7/71              \frac{7}{7}0 | 7/70
    \frac{7}{7}.1 | 7/7.1        \frac{\pi}{7}1 | \pi/71      \frac{x}{7}1 | x/71
    \frac{\sqrt{7}}{7}1 | \sqrt{7}/71                         \frac{7}{7}\!1 | 7/71
    \frac{1}{2}x | 1/2x          \frac{1}{2}^2 | 1/2^2        \frac{1}{2}! | 1/2!
    3/\frac{1}{2} | 3/1/2        x\frac{-1}{2} | x-1/2        x^\frac{1}{2} | x^1/2
    \frac{1\pm\sqrt{5}}{2} | 1\pm\sqrt{5}/2                   \frac{a:b}{2} | a:b/2
    2\frac121 | 2 1/21           \sqrt21 | \sqrt{21}          \sqrt\text{21} | \sqrt21
    x^{7}1 | x^71                10^{7}1 | 10^71              x_{7}1 | x_71
    x^{a}b | x^ab                x^{7}.5 | x^7.5              x^{+}1 | x^+1
    5 cm^{2}1 | 5 cm^21          5^\circ3 | 53                5^\circ C | 5
    7**5/8 | 7 5/8               x ** 2 | x 2                 7** \frac{7}{1} | 7\frac{7}{1}
    7$5$/8 | 7 5/8               7\(5\)/8 | 7 5/8             7\text{5}/8 | 7 5/8
    3$6$5 | 3 6 5                7\left5/8 | 7 5/8            3\!65 | 3 65
    (1\,234) | (1, 234)          1,234x | 1, 234x             2^1\,000 | 2^1000
    \frac{9}{8}% | 9/8           \frac98\% | 9/8              1/2 percent | 1/2
    71 Mm | 71 mm                71 ML | 71 ml                5 MW | 5 mW
    9\Pi | 9\pi                  2X | 2x                      5/m | 5
"""


@pytest.mark.parametrize("pair", re.split(r"\s{3,}", NOT_THE_SAME.strip()))
def test_what_is_glued_to_its_neighbour_is_another_answer(pair):
    one, other = pair.split(" | ")
    assert not is_same(one, other) and not is_same(other, one)
    assert is_same(one, one) and is_same(other, other)


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
