"""Which answer a text gives, and whether two answers are the same.

Answers are compared as numbers where both are numbers, in whatever notation, and as text otherwise. No
algebra is done. It has to be right about what it accepts: a wrong answer that is rewarded is learned.
"""

import re
from fractions import Fraction

MAX_ANSWER = 1000  # characters; what is longer is no answer
NAME = r"^[\s$]*(?:[a-zA-Z]|\\(?:alpha|beta|theta|lambda|phi|omega)) ?= ?"  # the x= of x=5
# What an answer may be written with, and how to write it plainly, in this order.
NOTATION = [
    (r"\*\*|\\[()]", " "),
    (r"(?<!\\)\${1,2}((?:[^$\\]|\\.)+)\${1,2}", r" \1 "),  # $...$ around a formula
    (r"−", "-"),
    (r"\\!", ""),
    (r"\{,\}|(?<=[0-9])\\,(?=[0-9]{3})", ","),
    (r"~(?=[a-zA-Z])|(?<!\\)\\[,;: ]|\\(?:left|right|displaystyle)(?![a-zA-Z])", " "),
    (r"\\(?:text|textbf|mathrm|mathbf|mbox) ?\{([^{}]*)\}", r" \1 "),
    (r"\\[dt]frac", r"\\frac"),
    (r"\\(frac|sqrt) ?([0-9])", r"\\\1{\2}"),  # \frac12 is \frac{1}2, ...
    (r"(\\frac\{[^{}]*\}) ?([0-9])", r"\1{\2}"),  # ... and that \frac{1}{2}
    (r"\\frac ?\{(-?[^{}+ -]*(?:\{[^{}]*\})?)\} ?\{([0-9]+)\}", r" \1/\2"),  # a/b
    (r" ?([\^_]) ?\{([^{}])\}", r"\1\2"),  # x^{2} is x^2
    (r"\s+", " "),
    (r"^ | ?\.? ?$", ""),
    (r"^(?i:(?:the )?(?:final )?answer(?: is:?|:) )", ""),
    (r"^\(([A-Z])\)$", r"\1"),  # the choice (A)
    (r"^([+-]?) ?\\?\$ ?([+-]?[0-9.,]+)(?i: dollars?| usd)?", r"\1\2 dollars"),
    (r"([0-9]) ?\\?%$", r"\1 percent"),
    (r" ?(?:\^ ?\{?\\circ\}?|°)", " degrees"),
    (r"(?<=[0-9])(?=[a-zA-Z]{2})", " "),  # 5cm is 5 cm
    (r"(?<= )([mck]?m|in|inches|ft|feet|miles) ?\^2", r"square \1"),
    (r"(?<= )([mck]?m|in|inches|ft|feet|miles) ?\^3", r"cubic \1"),
]
# What may stand behind a number, and be left out: nothing that multiplies it, as "million" does.
UNITS = "|".join(
    """
    dollar usd cent percent degree mm cm km mile foot feet ft inch inche in yard meter centimeter
    kilometer gram kg kilogram pound lb ounce oz ton liter ml gallon cup second minute hour hr day week
    month year mph unit point time person people child children student man men woman women boy girl
    friend apple ball book box boxe card coin cookie egg game item marble page piece step ticket toy way
    """.split()
)
UNIT = rf"(?:(?i:{UNITS})s?|[mghsL])"  # one letter counts as it is written: 5 M is no length
MEASURED = rf"(.*[0-9])((?: (?:square |cubic )?{UNIT})?(?:(?: per |/){UNIT})?)"


def final_answer(text):
    r"""What the last '\boxed' holds, or what follows the last '####' on its line if that is later or
    the box holds nothing; None if there is neither."""
    marker = text.rfind("####")
    box = text.rfind("\\boxed")
    found = ""
    if box > marker:
        start = box + len("\\boxed")
        found = boxed(text[start : start + MAX_ANSWER])
    if not found and marker >= 0:
        start = marker + len("####")
        found = text[start : start + MAX_ANSWER].split("\n")[0]
    if len(found) == MAX_ANSWER:  # there may be more of it
        return None
    return found.strip() or None


def gold_answer(value):
    """The gold answer in a cell of the answer column; None if it cannot be read exactly."""
    if isinstance(value, str) and ("####" in value or "\\boxed{" in value):
        return final_answer(value)
    text = str(value).strip()
    if isinstance(value, float) and len(text) > 16:  # rounded: 0.1 as float32 is 0.10000000149011612
        return None
    # Of what is not text, only plain numbers: no None, date, list, NaN or 1e+30.
    if isinstance(value, str) or re.fullmatch(r"-?[0-9]+(\.[0-9]+)?", text):
        return text
    return None


def boxed(text):
    r"""What the braces hold that `text` begins with, "" if they stay open; of '\boxed 12' the 12."""
    if not text.lstrip(" ").startswith("{"):
        return re.match(r"[^\n$]*", text)[0]
    depth = 0
    for brace in re.finditer(r"(?<!\\)[{}]", text):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[text.index("{") + 1 : brace.start()]
    return ""


def number(text):
    """'-1,000.50', '1/2', '2 1/2' -> Fraction; None for text, and for 36/2, which is not worked out."""
    integer = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+)"  # \d would match digits of any alphabet
    if re.fullmatch(rf"[+-]? ?(?=\.?[0-9]){integer}?(?:\.[0-9]+)?", text):
        return Fraction(re.sub("[, ]", "", text))
    quotient = re.fullmatch(r"([+-]?) ?(?:([0-9]+) )?([0-9]+) ?/ ?([0-9]+)", text)
    if quotient is None:
        return None
    whole, above, below = (int(part) for part in quotient.groups("0")[1:])
    if below == 0 or above % below == 0 or (whole > 0 and above > below):
        return None
    value = whole + Fraction(above, below)
    return -value if quotient[1] == "-" else value


def canonical(answer):
    """An answer as it is written -> (value, unit): a Fraction and the unit behind it, if any, or the
    plain text of what is no number."""
    if len(answer) > MAX_ANSWER:
        return answer, ""
    text = answer.strip()
    if number(text) is not None:
        return number(text), ""
    for pattern, plain in NOTATION:
        text = re.sub(pattern, plain, text)
    measured = re.fullmatch(MEASURED, text.strip())
    if measured and number(measured[1]) is not None:
        unit = re.sub(r"(?<=\w\w)s\b", "", measured[2].lower())
        return number(measured[1]), unit
    # In text a blank counts only between words and numbers.
    return re.sub(r" ?([^\w ]) ?", r"\1", text.strip().casefold()), ""


def is_same(found, gold):
    """Whether two answers are the same number or else the same text, however written. A unit counts if
    both have one, and so does a name, as in x=5."""
    if ("=" in found) != ("=" in gold):
        found = re.sub(NAME, "", found)
        gold = re.sub(NAME, "", gold)
    found_value, found_unit = canonical(found)
    gold_value, gold_unit = canonical(gold)
    if found_unit and gold_unit and found_unit != gold_unit:
        return False
    return found_value == gold_value
