"""Is a function the one in the paper? Runs it on its section of the vectors, and says what is wrong:
an entry of mistakes.py, or where and by how much it differs (explain.py)."""

import itertools

import numpy as np

from rl_loss_vectors import explain, mistakes, reference
from rl_loss_vectors.vectors import Subject, same

SHAPES = ["as in the file", "BT", "B1", "B"]  # of advantages
SPREADS = "variant: NaN in masked places spreads: the mask is a factor, no torch.where [TRL, verl]"


class Raised(str):
    """What a function raises in a case that it should be able to answer."""


def examine_shapes(function, section):
    """[(subject, its results)] for each shape of advantages that the function takes, the one for which
    most cases agree first. A function that takes no bool mask gets one of 0 and 1."""
    errors = []
    for mask in ("bool", "float"):
        found = []
        for shape in SHAPES:
            subject = Subject(function, section, advantages=shape, mask=mask)
            try:
                found.append((subject, examine(subject)))
            except (Exception, SystemExit) as error:
                errors.append(error)
        if found:
            return sorted(found, key=lambda pair: failures(*pair))
    raise errors[0]


def failures(subject, results):
    """To sort by: most cases agree, then fewest raise."""
    num_agree = sum(is_right(subject, *pair) for pair in answered(results))
    return -num_agree, sum(isinstance(found, Raised) for _, found in results)


def examine(subject):
    """[(case, its answer, or in words why there is none)]"""
    results = []
    errors = []
    for case in subject.about["cases"]:
        found = subject.why_not(case)
        if found is None:
            try:
                found = subject.answer(case)
            except Exception as error:
                errors.append(error)
                found = Raised(f"it raises {type(error).__name__} {error}")
                if isinstance(case["inputs"].get("lam"), list):
                    found = "it takes one lambda for the batch"
        results.append((case, found))
    if errors and not answered(results):
        raise errors[0]
    return results


def answered(results):
    return [(case, found) for case, found in results if not isinstance(found, str)]


def is_right(subject, case, answer):
    return same(answer, *subject.expected(case), case["tolerance"]["float32"])


def gives(section, case, change, answer):
    """Whether an entry gives the answer. Some cannot be evaluated in some cases: no."""
    try:
        value, gradient = reference.evaluate(section, case, change)
    except Exception:
        return False
    gradient = None if gradient is None else gradient.numpy()
    return same(answer, value.numpy(), gradient, case["tolerance"]["float32"])


def named(section, tested):
    """The entries of mistakes.py that give the answers in all cases, or else combinations of two."""
    # The cases that tell most apart come first, since most entries fail on them.
    tested = sorted(tested, key=lambda pair: -len(set(pair[0]["tags"]) & {"different_lengths", "kl"}))
    changes = {
        f"{kind}: {name}": change
        for kind, name, sections, change in mistakes.ENTRIES
        if section in sections
    }
    pairs = itertools.combinations(changes, 2)
    both = {f"{x} and {y}": mistakes.together(changes[x], changes[y]) for x, y in pairs}
    for options in (changes, both):
        found = [
            words
            for words, change in options.items()
            if all(gives(section, case, change, answer) for case, answer in tested)
        ]
        if found:
            return found
    return []


def diagnosed(found):
    """(subject, its results, the diagnosis) for the shape of advantages that suits a function best:
    where as many cases agree, the one in which its mistake is known or explained."""
    options = {}
    for subject, results in found:
        answers = str(answered(results))
        if failures(subject, results) == failures(*found[0]) and answers not in options:
            options[answers] = (subject, results, diagnosis(subject, results))
    return min(options.values(), key=lambda option: obscurity(option[2]))


def obscurity(diagnosis):
    """To sort by: a known mistake, an explanation, neither."""
    text = " ".join(diagnosis)
    return text.startswith("unknown"), "your gradient" not in text


def diagnosis(subject, results):
    """Lines; none if the function is healthy in all cases that were tested."""
    tested = []
    lines = []
    for case, answer in answered(results):
        if "masked_places" in case["tags"] and not explain.is_finite(answer):
            lines = [SPREADS]
        else:
            tested.append((case, answer))
    if all(is_right(subject, *pair) for pair in tested):
        return lines
    found = named(subject.section, tested)
    if not found:
        found = ["unknown: no known mistake gives these numbers"]
        explained = imprecise(subject, tested) or explain.explanation(subject, tested)
        found += [f"  {line}" for line in explained]
    return found + lines


def imprecise(subject, tested):
    """A line, if nearly all numbers are ours with the rounding errors of bfloat16: small, and of either
    sign, unlike those of a factor that is a little wrong."""
    errors = []
    for case, answer in tested:
        value, gradient = subject.expected(case)
        yours, ours = (answer.value, value) if gradient is None else (answer.gradient, gradient)
        places = np.abs(ours) > 1e-9
        errors += list(yours[places] / ours[places] - 1)
    size = np.median(np.abs(errors))
    is_small = 2e-4 < size < 8e-3 and np.mean(np.abs(errors) < 0.03) > 0.75
    if not is_small or not 0.1 < np.mean(np.array(errors) > 0) < 0.9:
        return []
    return [f"your numbers differ by about {size:.0e} of their size everywhere: computed in bfloat16?"]


def difference(subject, case, answer):
    """A line: by how much an answer is off."""
    value, gradient = subject.expected(case)
    line = f"{case['id']} {case['name']}: off by {np.abs(answer.value - value).max():.2g}"
    if gradient is not None:
        line += f", the gradient by {np.abs(answer.gradient - gradient).max():.2g}"
    return line


def report(subject, results):
    """A line about each case."""
    lines = []
    for case, answer in results:
        about = f"{case['id']} {case['name']}"
        if isinstance(answer, str):
            label = "RAISES " if isinstance(answer, Raised) else "n/a    "
            lines.append(f"  {label}  {about}: {' '.join(answer.split())}")
        elif is_right(subject, case, answer):
            lines.append(f"  agrees   {about}")
        else:
            lines.append(f"  DIFFERS  {difference(subject, case, answer)}")
    return lines
