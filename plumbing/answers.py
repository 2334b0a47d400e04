"""The verifier: finds the final answer in a text, and compares it with the gold answer."""

import re
from fractions import Fraction

MAX_ANSWER = 1000  # characters; anything longer is not an answer
MARKERS = ("####", "Answer:", "<answer>", "\\boxed", "\\fbox")
ARGUMENT = r"\s*(?:\{([^{}]*)\}|([0-9]))"  # of \frac: {12}, or a single digit
# A number with commas, at the beginning of an answer or after x=, a sign or $. Anywhere else a comma
# may separate coordinates: (1,000).
THOUSANDS = r"^((?:[a-zA-Z] ?= ?)?[-+$ ]*)([1-9][0-9]{0,2}(?:(?:,|,\\!|\{,\}|\\,)[0-9]{3})+)(?![0-9,])"
# In this order: x=, sign, $, number (with the sign of $-5), %.
NUMBER_AND_UNIT = r"([a-zA-Z]=)?([+-]?)(\$?)([^ %]+)(%?)"
DECIMAL = r"(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?"
FRACTION = r"[0-9]+/0*[1-9][0-9]*"


def final_answer(text):
    """The answer at the last marker in `text`: what is in the braces of a box, what is between
    `<answer>` and `</answer>`, or else the rest of the line. None if that is empty or not found."""
    marker = max(MARKERS, key=text.rfind)
    start = text.rfind(marker)
    if start < 0:
        return None
    rest = text[start + len(marker) :][: MAX_ANSWER + 1]
    if marker in ("\\boxed", "\\fbox"):
        answer = in_braces(rest.lstrip())
    elif marker == "<answer>":
        answer, end, _ = rest.partition("</answer>")
        if not end:
            return None
    else:
        answer = re.split("\n|</answer>", rest)[0]
    if len(answer) > MAX_ANSWER:
        return None
    answer = answer.strip().removeprefix("**").removesuffix("**").strip()  # bold
    return answer or None


def in_braces(text):
    """'{a{b}}c' -> 'a{b}'. '' if `text` does not begin with a brace, or if that is never closed."""
    if not text.startswith("{"):
        return ""
    depth = 0
    for brace in re.finditer(r"(?<!\\)[{}]", text):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[1 : brace.start()]
    return ""


def without_markup(answer):
    r"""'$\dfrac12$.' -> '\frac{1}{2}', 'x^{ 2 }' -> 'x^{2}', '-\$1{,}000' -> '-$1000'."""
    answer = re.sub(r"^\\text\{([^{}]*)\}$", r"\1", answer)
    answer = re.sub(r"\\text\{([^{}0-9]*)\}", r" \1 ", answer)  # but 3\text{6}5 is not 365
    answer = answer.strip().removesuffix(".")
    answer = re.sub(r"^\$+([^$]+)\$+$|^\\\((.+)\\\)$", r"\1\2", answer)  # $5$ or \(5\), but not $5
    answer = answer.replace("\\$", "$").replace("\\%", "%").replace("\u2212", "-")
    answer = re.sub(r"\\(?:left|right)(?=\\?[()\[\]{}|])", "", answer)
    answer = re.sub(r"\\[dt]frac", r"\\frac", answer)
    answer = re.sub(rf"\\frac{ARGUMENT}{ARGUMENT}", r"\\frac{\1\2}{\3\4}", answer)  # \frac12
    answer = re.sub(THOUSANDS, lambda match: match[1] + re.sub("[^0-9]", "", match[2]), answer)
    answer = re.sub(r"(?<!\\)\\[,;: ]", " ", answer)  # but \\ is a line break
    answer = " ".join(answer.split())
    return re.sub(r"(?<=\{) | (?=\})", "", answer)


def value_of(number):
    r"""The exact value of '-0.5', '1/2', '\frac{1}{2}', '4.5e33', '4.5\times10^{33}' or '10^6'. None
    for other text, and for 36/2: accepting it would teach a policy to skip the last step."""
    number = re.sub(r"^([+-]?)\\frac\{(-?[0-9]+)\}\{([0-9]+)\}$", r"\1\2/\3", number)  # 1/2
    number = re.sub(r"\^\{([+-]?[0-9]+)\}$", r"^\1", number)  # 10^{6} -> 10^6
    number = re.sub(r"(?:\\times|\\cdot|[*×])10\^", "e", number)  # 4.5*10^6 -> 4.5e6
    number = re.sub(r"^([+-]?)10\^", r"\g<1>1e", number)  # 10^6 -> 1e6
    if not re.fullmatch(f"[+-]?(?:{DECIMAL}|{FRACTION})", number):
        return None
    value = Fraction(number)
    is_unfinished = "/" in number and value.denominator == 1
    return None if is_unfinished else value


def symbols(answer):
    r"""Text without spaces: 'a+12 \pi' -> ['a', '+', '12', '\pi']. A number or a command is one symbol,
    since 1 2 is not 12, and \cos h is not \cosh."""
    answer = re.sub(r"^\( ?([a-zA-Z]) ?\)$", r"\1", answer)  # (B) is B
    # x^{2}y is x^2y, but x^{2}1 is not x^21, and x^{a}b is not x^ab.
    answer = re.sub(r"\{([0-9]|[a-zA-Z](?!\}[a-zA-Z0-9]))\}", r" \1 ", answer)
    return re.findall(r"\\[a-zA-Z]+|[0-9.]+|\S", answer)


def value_and_unit(answer):
    r"""'-$0.5' -> (Fraction(-1, 2), '$'). Units are the x= of x=5, $ and %; with words, such as 5 cups,
    an answer is text, since they may change the number: 5 dozen. Text -> (its symbols, '')."""
    answer = without_markup(answer)
    tight = re.sub(r" ?([-+*/^=$×%]|\\times|\\cdot) ?", r"\1", answer)  # no spaces around operators
    match = re.fullmatch(NUMBER_AND_UNIT, tight)
    if match:
        name, sign, dollar, number, percent = match.groups("")
        value = value_of(sign + number)
        if value is not None:
            return value, name + dollar + percent
    return symbols(answer), ""


def is_same(found, gold):
    """Whether two answers are the same number, or the same text. One side may omit a number's unit."""
    if max(len(found), len(gold)) > MAX_ANSWER:
        return found == gold
    found_value, found_unit = value_and_unit(found)
    gold_value, gold_unit = value_and_unit(gold)
    is_one_unit = found_unit == gold_unit or not found_unit or not gold_unit
    return found_value == gold_value and is_one_unit


def verify(text, answer, truncated=False):
    """(reward, verdict): 1.0 and 'correct', else 0.0 and 'wrong', 'no_answer' or 'truncated'."""
    if truncated:
        return 0.0, "truncated"
    found = final_answer(text)
    if found is None:
        return 0.0, "no_answer"
    if is_same(found, answer):
        return 1.0, "correct"
    return 0.0, "wrong"
