"""Is a function the one in the paper? Runs it on its section of the vectors, and says what is wrong:
an entry of mistakes.py (with torch), or where and by how much it differs (explain.py)."""

import itertools

import numpy as np

from rl_loss_vectors import explain
from rl_loss_vectors.vectors import Subject, same

SHAPES = ["as in the file", "BT", "B1", "B"]  # of advantages
SPREADS = "variant: NaN in masked places spreads: the mask is a factor, no torch.where [TRL, verl]"


class Raised(str):
    """What a function raises in a case that it should be able to answer."""


def examine_shapes(function, section, shapes=SHAPES, **how):
    """[(subject, its results)] for each shape of advantages that the function takes, the one for which
    most cases agree first. A function that takes no bool mask gets one of 0 and 1."""
    errors = []
    for mask in ("bool", "float"):
        found = []
        for shape in shapes:
            subject = Subject(function, section, advantages=shape, mask=mask, **how)
            try:
                found.append((subject, examine(subject)))
            except (Exception, SystemExit) as error:
                errors.append(error)
        if found:
            return sorted(found, key=lambda pair: failures(*pair))
    raise errors[0]


def failures(subject, results):
    """To sort by: most cases agree, then fewest raise."""
    _, num_agree, _ = report(subject, results)
    return -num_agree, sum(isinstance(found, Raised) for _, found in results)


def examine(subject):
    """[(case, its answer, or in words why there is none)]. A function that computes in float32 may
    return float64: if all answers are right within the tolerance of float32, that is what they have."""
    results = []
    errors = []
    cases = subject.about["cases"]
    for case in cases:
        found = subject.why_not(case)
        if found is None:
            try:
                found = subject.answer(case)
            except Exception as error:
                errors.append(error)
                found = Raised(f"it raises {type(error).__name__} {error}")
                if are_lists(case) != are_lists(cases[0]):
                    found = f"it takes one number for the batch: {type(error).__name__}"
        results.append((case, found))
    rough = [(case, found._replace(is_float32=True)) for case, found in answered(results)]
    if errors and not rough:
        raise errors[0]
    if all(is_right(subject, case, found) for case, found in rough):
        answers = dict(zip([case["id"] for case, _ in rough], rough, strict=True))
        return [answers.get(case["id"], (case, found)) for case, found in results]
    return results


def answered(results):
    return [(case, found) for case, found in results if not isinstance(found, str)]


def are_lists(case):
    return [isinstance(x, list) for x in case["inputs"].values()]


def total(subject, case, answer):
    """Terms summed up, so that they can be compared with an objective's value."""
    return answer._replace(value=np.asarray((answer.value * subject.weights(case)).sum()))


def entries_of(section):
    """[(kind, name, change)], or None without torch."""
    try:
        from rl_loss_vectors import mistakes
    except ImportError:
        return None
    kinds = (("mistake", mistakes.MISTAKES), ("variant", mistakes.VARIANTS))
    return [
        (kind, name, change)
        for kind, rows in kinds
        for name, where, change in rows
        if section in where.split()
    ]


def gives(section, case, change, answer):
    """Whether an entry gives the answer. Some cannot be evaluated in some cases: no."""
    from rl_loss_vectors import reference

    try:
        value, gradient = reference.evaluate(section, case, change)
    except (ArithmeticError, IndexError, RuntimeError, TypeError, ValueError):
        return False
    gradient = None if gradient is None else gradient.numpy()
    return same(answer, value.detach().numpy(), gradient, case["tolerance"])


def named(section, tested, counts=(1, 2)):
    """The entries of mistakes.py that give the answers in all cases, or else combinations of two."""
    from rl_loss_vectors import mistakes

    # The cases that tell most apart come first, since most entries fail on them.
    tested = sorted(tested, key=lambda pair: -len(set(pair[0]["tags"]) & {"different_lengths", "kl"}))
    for count in counts:
        found = []
        for chosen in itertools.combinations(entries_of(section), count):
            change = mistakes.together(*(change for *_, change in chosen))
            if all(gives(section, case, change, answer) for case, answer in tested):
                found.append(" and ".join(f"{kind}: {name}" for kind, name, _ in chosen))
        if found:
            return found
    return []


def is_right(subject, case, answer):
    return same(answer, *subject.expected(case), case["tolerance"])


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
    """To sort by: a known mistake, an explanation, little, nothing (as many cases agree, of fewer)."""
    text = " ".join(diagnosis)
    return text == "", text.startswith("unknown"), "your gradient" not in text


def diagnosis(subject, results):
    """Lines; none if the function is healthy in all cases that were tested."""
    tested = answered(results)
    spoilt = [
        case
        for case, answer in tested
        if "masked_places" in case["tags"] and not explain.is_finite(answer)
    ]
    tested = [(case, answer) for case, answer in tested if case not in spoilt]
    lines = [SPREADS] if spoilt else []
    if all(is_right(subject, case, answer) for case, answer in tested):
        return lines
    found = []
    unknown = "no known mistake gives these numbers"
    if entries_of(subject.section) is None:
        unknown = "install torch to compare with the known mistakes"
    elif subject.way == "loss":
        found = named(subject.section, tested)
        others = [pair for pair in tested if "micro_batches" not in pair[0]["tags"]]
        if not found and not all(is_right(subject, case, answer) for case, answer in others):
            found = [f"{line}, but not in micro-batches" for line in named(subject.section, others)]
    elif subject.way == "terms":
        found = named(
            subject.section, [(case, total(subject, case, answer)) for case, answer in tested]
        )
    if not found:
        found = [f"unknown: {unknown}", *(f"  {line}" for line in explain.explanation(subject, tested))]
    return found + lines


def difference(case, answer, value, gradient):
    """A line: by how much an answer is off."""
    line = f"{case['id']} {case['name']}: "
    if value.size > 1:
        return line + f"off by {np.abs(answer.value - value).max():.2g}"
    found, expected = (f"{x.item():.9g}" for x in (answer.value, value))
    line += "value agrees" if found == expected else f"{found}, not {expected}"
    if answer.gradient is not None:
        line += f"; gradient off by {np.abs(answer.gradient - gradient).max():.2g}"
    return line


def report(subject, results):
    """(lines, how many cases agree, how many were tested)"""
    lines = []
    num_agree = 0
    num_tested = 0
    for case, answer in results:
        about = f"{case['id']} {case['name']}"
        if isinstance(answer, str):
            label = "RAISES " if isinstance(answer, Raised) else "n/a    "
            num_tested += isinstance(answer, Raised)
            lines.append(f"  {label}  {about}: {' '.join(answer.split())}")
            continue
        num_tested += 1
        value, gradient = subject.expected(case)
        if is_right(subject, case, answer):
            num_agree += 1
            by_value = " (by value only)" if gradient is not None and answer.gradient is None else ""
            lines.append(f"  agrees   {about}{by_value}")
        else:
            lines.append(f"  DIFFERS  {difference(case, answer, value, gradient)}")
    return lines, num_agree, num_tested
