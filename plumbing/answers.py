"""Finds the answer in a text, and compares two answers.

Answers are compared as numbers if both are numbers, in any notation, and as text otherwise, without
algebra. A wrong answer must not be accepted: a policy learns whatever is rewarded.
"""

import re
from fractions import Fraction

MAX_ANSWER = 1000  # characters; a longer text is not an answer
# Notation and its plain form, replaced in this order. A replacement must not join its neighbours:
# \frac{7}{7}1 is not 7/71.
SYMBOL = r"(?:[mck]m|m[lLg]|kg|(?:ft|in|lb|oz|hr|USD)s?)(?![a-zA-Z])"
GROUP = r"\{((?:[^{}]|\{[^{}]*\})*)\}"  # braces with no more than one level inside
NOTATION = [
    (r"−", "-"),
    (r"^(['\"“‘]|``)([^'\"”’]*)(?:['\"”’]|'')$", r"\2"),  # quotes
    (r"(?<=[0-9])(?:\{,\}|\\,|,\\!)(?=[0-9]{3}(?![0-9]))", "{,}"),  # thousands
    (r"\\[dtc]frac", r"\\frac"),
    (r"\{([^{}]+)\\over(?![a-zA-Z])([^{}]+)\}", r"\\frac{\1}{\2}"),
    (r"\\([gln]e)q(?![a-zA-Z])", r"\\\1"),
    (r"\\(frac|sqrt) ?([0-9])", r"\\\1{\2}"),  # \frac12 is \frac{1}2, ...
    (r"(\\frac ?\{[^{}]*\}) ?([0-9])", r"\1{\2}"),  # ... and that \frac{1}{2}
    (r"(?<!\S)\*\*(?=\S)([^*]+)(?<=\S)\*\*(?!\w)", r" \1 "),  # bold; 2**3 is a power
    (r"^\*\*|(?<=:)\*\*|\*\*(?=\.?$)", " "),
    # Invisible markup becomes \! first, and then a blank, but not between digits: 3$6$5 is 365.
    (r"(?<!\\)\${1,2}((?:[^$\\]|\\.)+)\${1,2}", r"\\!\1\\!"),
    (r"(?<!\\)\\[()]|\\(?:left|right)(?:\.|(?![a-zA-Z]))|\\displaystyle(?![a-zA-Z])", r"\\!"),
    (rf"\\(?:text|(?:text|math)(?:rm|bf|it|sf|tt)|mbox|boldsymbol) ?{GROUP}", r"\\!\1\\!"),
    (r"(?<=[0-9])(?:\\!)+(?=\.?[0-9])", "{}"),
    (r"\\!|~(?=[a-zA-Z\\])|(?<!\\)\\[,;: ]", " "),
    (r"(?<=[0-9]:[0-9]{2}) *(?i:a\.?m\b\.?)", " am"),  # in a time of day case does not matter
    (r"(?<=[0-9]:[0-9]{2}) *(?i:p\.?m\b\.?)", " pm"),
    (r" ?(?:\^ ?(?:\\circ(?![a-zA-Z])|\{ ?\\circ ?\})|°)", " degrees "),
    (r"\s+", " "),
    (r"(?<=[0-9])(?<!\b0),(?=[0-9]{3}(?![0-9]))(?!.*(?:[)\]]|\\\}))", "{,}"),  # not in (100,200)
    (r" (?=[{}])|(?<=\{) ", ""),
    (rf"^{GROUP}$", r"\1"),
    (r" ?([\^_]) ?\{([0-9](?!\}[\d.])|[a-zA-Z](?!\}\w))\}", r"\1\2"),  # x^{2} is x^2
    (r"^ | ?\.? ?$", ""),
    (r"^(?i:(?:the )?(?:final )?answer(?: is:?|:) )", ""),
    (r"^= ?", ""),
    (r"^\(([A-Z])\)$", r"\1"),  # the choice (A)
]
# The x= of x=5, but not of x=x^2; in a word a letter is no name.
NAME = r"^([a-zA-Z]|\\(?:alpha|beta|theta|lambda|phi|omega)) ?= ?(?!.*(?<![a-z]{2})\1(?![a-z]{2}))"
MEASURES = [
    (r"^([+-]?) ?\\?\$ ?([+-]?[0-9.,{}]+)(?i: dollars?| usd)?(?![\w.,{}])", r"\1\2 dollars"),
    (r" ?(?:\\?%|(?i:per ?cent)\b)", "%"),
    (r"^([+-]? ?[0-9.,{}]+)%$", r"\1 %"),  # a unit, but not behind a fraction: 1/2% is not 1/2
    (rf"(?<=[0-9}}])(?={SYMBOL})", " "),  # 5cm is 5 cm
    (r"(?<= )([mck]?m|in|inches|ft|feet|miles) ?\^2(?![\w.])", r"square \1"),
    (r"(?<= )([mck]?m|in|inches|ft|feet|miles) ?\^3(?![\w.])", r"cubic \1"),
    (r"(?<= )mph\b", "miles per hour"),
]
# A unit is a symbol, in which case matters (5 M is no length), or up to three words that do not change
# the number. What may be a product of variables, as in 2 xyz, is not a word.
CHANGES = """
    zero one two three four five six seven eight nine ten eleven twelve hundred thousand third quarter
    (?:four|fif|six|seven|eigh|nin|ten|eleven|twelf|hundred|thousand)th half
    [a-z]+(?:teen|t[iy]|illion)[eth]* halve dozen score gross pair couple grand double triple twice
    square squared cubic cubed root time plus minus less more over under below above and but not than
    per percent mod factorial sin cos tan log alpha beta gamma theta lambda sigma omega
    """
WORD = rf"(?!(?i:{'|'.join(CHANGES.split())})(?:e?s)?\b)(?=\w*[aeiou])[A-Za-z][a-z]{{2,}}\b"
UNIT = rf"(?:(?:square|sq|cubic) )?(?:{SYMBOL}|[mghsL%]|(?!\w[^aeiou]\w\b){WORD}(?: {WORD}){{0,2}})"
MEASURED = rf"(.*[0-9}}])((?: {UNIT}(?:(?: per |/){UNIT})?| per {UNIT})?)"
FULL_NAMES = """
    mm=millimeter cm=centimeter m=meter metre=meter km=kilometer in=inch ft=foot feet=foot sq=square
    g=gram mg=milligram kg=kilogram oz=ounce lb=pound ml=milliliter l=liter litre=liter usd=dollar
    s=second sec=second min=minute h=hour hr=hour
    """
FULL_NAMES = dict(pair.split("=") for pair in FULL_NAMES.split())
# In a text \frac{a}{b} is a/b if nothing next to it could belong to a or to b.
FRACTION = (
    r"((?:^|[(\[{,=<>&]|\\\\|matrix\}|\\pm|\\[lg]eq?|\b(?:or|and)) ?[+-]? ?|(?<=[\w)}\]]) ?[+-] ?)"
    r"\\frac\{(?!\})(-?[0-9]*[a-zA-Z]*(?:\^[0-9]|\\pi|\\sqrt\{[^{}]*\})?)\}\{([0-9]+)\}"
    r"(?= ?(?:$|[)\]},=<>&%+-]|\\[\\}]|\\end)| (?:or|and) )"
)
WORDS = r"(?<![\\\w])[^\W\d_]{3,}|^[A-Z][a-z]\b"  # an initial's case does not matter; the second: No


def final_answer(text):
    r"""The content of the last '\boxed' or '\fbox', or the rest of the line after the last '####',
    whichever is later; None if there is neither, or it is empty."""
    marker = text.rfind("####")
    box = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    found = None
    if box > marker:
        found = boxed(text[box : box + MAX_ANSWER])
    # An unclosed box is plain text on the marker's line; on a later line it invalidates the answer.
    is_on_its_line = "\n" not in text[marker : max(marker, box)]
    if found is None and marker >= 0 and is_on_its_line:
        start = marker + len("####")
        found = text[start : start + MAX_ANSWER].split("\n")[0]
    if found is None or len(found) == MAX_ANSWER:  # it may be longer
        return None
    return found.strip() or None


def gold_answer(value):
    """The gold answer in a cell of the answer column; None if it cannot be read exactly."""
    if isinstance(value, str) and re.search(r"####|\\(?:boxed|fbox)\{", value):
        return final_answer(value)
    text = str(value).strip()
    if isinstance(value, float) and len(text) > 16:  # rounded: 0.1 as float32 is 0.10000000149011612
        return None
    # Values that are not text must be plain numbers: no None, date, list, NaN or 1e+30.
    if isinstance(value, str) or re.fullmatch(r"-?[0-9]+(\.[0-9]+)?", text):
        return text
    return None


def boxed(text):
    r"""The content of the braces after the '\boxed' or '\fbox' with which `text` begins, None if they
    are not closed; 12 for '\boxed 12'."""
    box = re.match(r"\\(?:boxed|fbox)(?:\s*(?=\{)|([^\n$]*))", text)
    if box[1] is not None:
        return box[1] if len(box[0]) < MAX_ANSWER else None  # it may be longer
    depth = 0
    for brace in re.finditer(r"(?<!\\)[{}]", text[box.end() :]):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[box.end() + 1 : box.end() + brace.start()]
    return None


def number(text):
    """'-1,000.50', '1/2', '2 1/2' -> Fraction; None for text, and for 36/2, which is unfinished."""
    # \d would match digits of any alphabet.
    integer = r"(?:[1-9][0-9]{0,2}(?:(?:,|\{,\})[0-9]{3})+|[0-9]+)"
    if re.fullmatch(rf"[+-]? ?(?=\.?[0-9]){integer}?(?:\.[0-9]+)?", text):
        return Fraction(re.sub("[{, }]", "", text))
    text = re.sub(r"^\\frac\{-", r"-\\frac{", text)
    text = re.sub(r" ?\\frac\{([0-9]+)\}\{([0-9]+)\}$", r" \1/\2", text)
    quotient = re.fullmatch(r"([+-]?) ?(?:([0-9]+) )?([0-9]+) ?/ ?([0-9]+)", text)
    if quotient is None:
        return None
    whole, above, below = (int(part) for part in quotient.groups("0")[1:])
    if below == 0 or above % below == 0 or (whole > 0 and above > below):
        return None
    value = whole + Fraction(above, below)
    return -value if quotient[1] == "-" else value


def canonical(answer, is_named=False):
    """An answer as written -> (value, unit): a Fraction and the unit after it, if any; or, for an
    answer that is not a number, its plain text. With `is_named`, x=5 is 5."""
    if len(answer) > MAX_ANSWER:
        return answer, ""
    text = answer.strip()
    notation = [*NOTATION, (NAME, ""), *MEASURES] if is_named else NOTATION + MEASURES
    for pattern, plain in notation:
        text = re.sub(pattern, plain, text)
    text = text.strip()
    measured = re.fullmatch(MEASURED, text)
    if measured and number(measured[1]) is not None:
        unit = measured[2].strip().lower().replace("/", " per ")
        unit = re.sub(r"(?<=ch|sh|ss)es\b|(?<=x)es\b|(?<=\w[a-rt-z])s\b", "", unit)
        unit = re.sub(r"\w+", lambda word: FULL_NAMES.get(word[0], word[0]), unit)
        return number(measured[1]), unit
    # In text blanks matter only between words and numbers, and case only where it may be a unit.
    text = re.sub(FRACTION, r"\1\2/\3", text)
    text = re.sub(r" ?([^\w .]) ?", r"\1", text)
    text = re.sub(r"(\\[a-zA-Z]+) (?=[0-9])", r"\1", text)
    return re.sub(WORDS, lambda word: word[0].lower() if word[0].istitle() else word[0], text), ""


def is_same(found, gold):
    """Whether two answers are the same number or the same text, however written. Units are compared if
    both have one, and so are names, as in x=5."""
    is_named = ("=" in found.lstrip("$= ")) != ("=" in gold.lstrip("$= "))
    found_value, found_unit = canonical(found, is_named)
    gold_value, gold_unit = canonical(gold, is_named)
    if found_unit and gold_unit and found_unit != gold_unit:
        return False
    return found_value == gold_value
