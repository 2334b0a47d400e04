r"""The verifier: finds the answer in a text and compares it with the gold answer.

The last marker counts: `####` or a line that begins with `Answer:` (the rest of the line is the
answer), `\boxed{}` or `\fbox{}`, or `<answer>...</answer>`. Two answers are the same if they are equal
as written, or equal in one of these ways after invisible markup is removed:

- Numbers, by value: -1,000.5 (or `{,}`, `\,`, `'`, a thin or no-break space), 1/2, 2 1/2, any `\frac`,
  4.5e33, 10^6, 4.5 \times 10^{33}. A fraction that is a whole number (36/2) is not reduced: it is text.
- Numbers with a unit: `%` (not after a fraction), degrees, a currency (also in front), a symbol (cm,
  m^2, km/h; a single letter only after a space), or up to three words, the last one before any `per`
  a plural (red apples, miles per hour) and none that changes the number (dozens, thirds, times).
  `per day` may stand alone. A unit on one side only is ignored; two units must be the same text, except
  for a plural s.
- Choices: for the gold answers B and (B), also B), Option B, and (B) 12 if no other letter follows.
- Text: spaces around operators and brackets don't count, nor does a capital that starts a word (Red).

A leading `=` or `Answer:` is dropped, as is a name (x=5) on one side only. A number never equals text.
Lists, sets, and algebra are left to math-verify: --reward examples/algebra.py:grade.
"""

import json
import re
from contextlib import suppress
from fractions import Fraction
from numbers import Number

MAX_ANSWER = 1000  # characters; anything longer is not an answer
BOXES = ("\\boxed", "\\fbox")
LINES = ("####", "\nAnswer:", "\n**Answer:", "\n**Answer:**", "\n**Answer**:")

# Markup and what it becomes, in this order.
SILENT = r"\\[!()\[\]]|\\(?:left|right)(?![a-zA-Z])\.?"
TEXT = r"\\(?:mbox|(?:text|math)(?:bf|it|rm|sf|tt)?) ?\{"
GLUED = rf"[0-9]\}}?(?:\$|{SILENT}|{TEXT})+[0-9]"  # left as it is: 3$6$5 is not 365
ARGUMENT = r" ?(?:\{ ?([^{}]*?) ?\}|(\w))"
SEPARATOR = r"(?:,|\{,\}|\\,|['~\u00a0\u2009\u202f])"
THOUSANDS = rf"(?<![\w.,^])[1-9][0-9]{{0,2}}(?:{SEPARATOR}[0-9]{{3}})+(?![0-9,])(?!.*(?:[)\]]|\\\}}))"
SPACE = r"(?:\s|~(?= ?[a-zA-Z])|(?<!\\)\\(?:[,;: ]|q?quad(?![a-zA-Z])))+"
DEGREES = r"(?:\^ ?(?:\\circ(?![a-zA-Z])|\{ ?\\circ ?\})|°|\bdegrees?\b)"
MARKUP = [
    (r"\u2212", "-"),
    (r"(?<!\S)\*\*([^*\s](?:[^*]*[^*\s])?)\*\*(?!\w)|^\*\*|\*\*$", r"\1"),  # bold; 2**3 is a power
    (r"(?<!\\)\${1,2}((?:[^$\\]|\\.)+)\${1,2}", r"\1"),  # a pair; a single $ is a dollar
    (rf"(?<!\\)(?:{SILENT})", ""),
    (r"\\[dtc]frac", r"\\frac"),
    (rf"\\frac{ARGUMENT}{ARGUMENT}", r"\\frac{\1\2}{\3\4}"),
    (r"\\sqrt ?(\w)", r"\\sqrt{\1}"),
    (rf"{TEXT}([^{{}}]*)\}}", r" \1"),
    (THOUSANDS, lambda number: re.sub("[^0-9]", "", number[0])),  # but (1,000) may be a pair
    (SPACE, " "),
    (r"(?<![\\\w])[A-Z][a-z]{2,}(?!\w)|^ ?[A-Z][a-z]\b", lambda word: word[0].lower()),
    (rf" ?{DEGREES}", "°"),
    (r" ?(?:\\?%|\bper ?cent\b)", "%"),
    # x^{2}y is x^2y, but x^{2}1 is not x^21. Arguments of commands keep their braces.
    (r"(?<![a-zA-Z0-9}\]])\{([0-9](?!\}[0-9.{])|[a-zA-Z](?!\}[\w{]))\}", r"\1"),
    (r"^ | ?\.? ?$", ""),
    (r"^(?:(?:the )?(?:final )?answer ?(?:is:?|:)|=) ?", ""),
    (r"^\( ?([A-Z]) ?\)$", r"\1"),  # the choice (B)
]
SPACES = [
    (r" ?([^\w .]) ?", r"\1"),  # around operators, commas, and brackets
    (r"(\\[a-zA-Z]+) (?![a-zA-Z])", r"\1"),  # after a command; but \cos h is not \cosh
]
# A name is a letter that the rest doesn't have (no x=2x), or the rest is a number and words.
NAME = r"^([a-zA-Z]) ?= ?(?=[^a-zA-Z]+ [a-z]{3}|(?!.*\1))"
# A choice: B, option B, or with a mark (B), B) or B. and then text without any other letter.
LETTER = r"(?:(?<![a-zA-Z])[A-Z](?![a-zA-Z])|\([a-z]\))"
MARKED = r"(?:\( ?([A-Z]) ?\)|([A-Z])[).:])"
CHOICE = rf"(?:option )?(?:([A-Z])|{MARKED}(?: (?![+*/^=])(?!.*{LETTER}).*)?)"

# Ways to write a number -> the form that NUMBER matches: 4.5e33, -2 1/2, 5 \$.
CURRENCY = r"(?:\\\$|[€£¥₹]|(?:USD|EUR|GBP|JPY|CNY|INR)(?![a-zA-Z]))"
EXPONENT = r"[+-]?[0-9]{1,3}"
NUMERALS = [
    (r"^([+-]?) ?10 ?\^", r"\1 1*10^"),
    (rf" ?(?:\\times|\\cdot|[*×·]) ?10 ?\^ ?(?:\{{({EXPONENT})\}}|({EXPONENT}))(?![0-9.])", r"e\1\2"),
    (r"^\\frac\{-", r"-\\frac{"),
    (r"^([+-]?) ?([0-9]*) ?\\frac\{([0-9]+)\}\{([0-9]+)\}(?![0-9])", r"\1\2 \3/\4"),
    (r"^([+-]? ?)\$", r"\1\\$"),
    (rf"^([+-]?) ?({CURRENCY}) ?([+-]?[0-9.][0-9.e/+-]*)", r"\1\3 \2"),
]
FRACTION = r"[0-9]+ ?/ ?0*[1-9][0-9]*"
DECIMAL = rf"(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:[eE]{EXPONENT})?"
NUMBER = rf"([+-]?) ?(?:([0-9]+) (?={FRACTION}))?({FRACTION}|{DECIMAL})(.*)"  # sign, whole, rest, unit

# Words that change the number, also with s, th, or ths at the end.
CHANGES = """
    zero one two three four five fif six sixe seven eight eigh nine nin ten eleven twelve twelf
    [a-z]+teen (?:twen|thir|for|fif|six|seven|eigh|nine)(?:ty|tie) hundred thousand [a-z]*illion
    lakh crore myriad dozen score gross grosse pair couple half halve third quarter time fold double
    triple repeat(?:ing)? recur(?:ring)? and not plus minus negative per cos
    """
WORD = rf"(?!(?:{'|'.join(CHANGES.split())})(?:s|ths?)?\b)[a-z]{{3,}}"
PLURAL = rf"(?=(?:[a-z]+[^\Wisu]s|feet|people)\b){WORD}"
SYMBOL = "mm|cm|km|in|ft|yd|mg|kg|oz|lb|ml|mL|min|hr|m/s|km/h|mph|Hz|kHz|MHz|GHz"
SYMBOLS = rf"(?: ?(?:{SYMBOL})| [mgshL])(?:\^[23])?"
UNIT = rf"(?: ?[%°]| ?{CURRENCY}|{SYMBOLS}|(?: {WORD}){{0,2}} {PLURAL})?(?: per {WORD}(?: {WORD})?)?"


def final_answer(text):
    """The answer at the last marker in `text`; None if it is empty, or if there is no marker."""
    text = "\n" + text
    start, marker = max((text.rfind(marker), marker) for marker in (*BOXES, *LINES, "<answer>"))
    if start < 0:
        return None
    start += len(marker)
    rest = text[start : start + MAX_ANSWER]
    if marker in BOXES:
        found = in_braces(rest.lstrip())
    elif marker == "<answer>":
        found = rest.split("</answer>")[0] if "</answer>" in rest else ""
    else:
        found = re.split("\n|</answer>", rest)[0]
    if len(found) == MAX_ANSWER:  # it may be longer
        return None
    return found.strip() or None


def in_braces(text):
    """What is in the braces at the beginning of `text`; '' if there are none, or they never close."""
    depth = 0
    for brace in re.finditer(r"(?<!\\)[{}]", text):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0 and text[0] == "{":
            return text[1 : brace.start()]
    return ""


def gold_answer(cell):
    """The gold answer in a cell of a dataset: text, a number, a boolean, a list of one of these, or
    JSON such as '["72"]' ('[72]' stays text, since it may be an interval). None for anything else."""
    if isinstance(cell, str):
        one_string = re.fullmatch(r'\s*\[\s*(".*")\s*\]\s*', cell)
        with suppress(ValueError):
            cell = json.loads(one_string[1]) if one_string else cell
    elif isinstance(cell, list) and len(cell) == 1:
        cell = cell[0]
    if isinstance(cell, bool):
        cell = str(cell).lower()
    elif isinstance(cell, Number) and abs(cell) < float("inf"):  # not NaN either
        cell = str(cell)
    if not isinstance(cell, str):
        return None
    if re.search(r"####|\\(?:boxed|fbox)\b", cell):
        cell = final_answer(cell) or ""
    return None if cell.strip().lower() in ("", "proof", "notfound") else cell.strip()


def replaced(text, replacements):
    for pattern, replacement in replacements:
        text = re.sub(pattern, replacement, text)
    return text


def without_markup(answer):
    return answer if re.search(GLUED, answer) else replaced(answer, MARKUP)


def value_and_unit(text):
    """'-1/2 cups' -> (Fraction(-1, 2), 'cup'); (text, '') if it is not a number."""
    number = re.fullmatch(NUMBER, replaced(text, NUMERALS))
    if number is None or re.fullmatch(UNIT, number[4]) is None:
        return replaced(text, SPACES), ""
    sign, whole, digits, unit = number.groups("")
    value = Fraction(digits.replace(" ", ""))
    is_unfinished = value.denominator == 1 or (whole and value > 1)
    if "/" in digits and (is_unfinished or "%" in unit):
        return replaced(text, SPACES), ""
    value += int(whole or 0)
    unit = re.sub(r"(?<=[a-z]{2})s\b", "", unit.strip())
    return -value if sign == "-" else value, unit


def is_same(found, gold):
    """Whether two answers are the same by the rules above."""
    if found == gold:
        return True
    if max(len(found), len(gold)) > MAX_ANSWER:
        return False
    found = without_markup(found)
    gold = without_markup(gold)
    choice = re.fullmatch(CHOICE, found)
    if choice is not None and gold in choice.groups():
        return True
    if ("=" in found) != ("=" in gold):
        found = re.sub(NAME, "", found)
        gold = re.sub(NAME, "", gold)
    found_value, found_unit = value_and_unit(found)
    gold_value, gold_unit = value_and_unit(gold)
    if found_unit and gold_unit and found_unit != gold_unit:
        return False
    return found_value == gold_value
