"""Is a function the one in the paper? Runs it on its section of the vectors, and says what is wrong:
an entry of mistakes.py or measure.py, or where and by how much it differs (explain.py)."""

import dataclasses
import itertools

import numpy as np
import torch

from rl_loss_vectors import explain, measure, mistakes, reference
from rl_loss_vectors.vectors import Misfit, Subject, same

SHAPES = ["as in the file", "BT", "B1", "B"]  # of advantages
GROUPS = ["PG", "N", "GP", "G"]  # of rewards
SPREADS = "variant: NaN in masked places spreads: the mask is a factor, no torch.where [TRL, verl]"
AFTER_EXP = "variant: NaN in masked places reaches the gradient: mask the log-ratio before exp"
SPECIAL = ["masked_places", "large_ratios", "kl", "micro_batches", "settings", "token_advantages"]
SPECIAL += ["equal_rewards"]
PAPER = {"gspo": {"clip_eps_low": 3e-4, "clip_eps_high": 4e-4}}  # where the vectors have our own


class Raised(str):
    """What a function raises in a case that it should be able to answer."""


def examine_shapes(function, section, fixed=None):
    """[(subject, its results)] for each shape of advantages that the function takes, the one for which
    most cases agree first. A function that takes no bool mask gets one of 0 and 1, one that takes no
    float64 gets float32."""
    errors = []
    has_groups = section in ("group_advantages", "group_differences", "leave_one_out")
    shapes = [{"rewards": x} for x in GROUPS] if has_groups else [{"advantages": x} for x in SHAPES]
    for dtype, mask in itertools.product((torch.float64, torch.float32), ("bool", "float")):
        found = []
        for shape in shapes:
            try:
                subject = Subject(function, section, mask=mask, dtype=dtype, fixed=fixed or {}, **shape)
                subject = dataclasses.replace(subject, constants=own_constants(subject))
                found.append((subject, examine(subject)))
            except (Exception, SystemExit) as error:
                errors.append(error)
        if has_groups and found:  # (P, G), unless that raises, or another arrangement is right
            right = [pair for pair in found if agrees_with_the_paper(*pair)]
            found = right or [min(found, key=lambda pair: failures(*pair)[1])]
        found.sort(key=lambda pair: failures(*pair))
        if found:
            return [pair for pair in found if rows_are_apart(pair[0])] or found
    misfits = [error for error in errors if isinstance(error, Misfit)]
    raise (misfits or sorted(errors, key=lambda error: "bool" in str(error)))[0]


def plain_cases(section_cases):
    return [case for case in section_cases if not {*SPECIAL} & {*case["tags"]}]


def own_constants(subject):
    """{our keyword: the value that a function without this keyword uses}, if it is as good as ours: a
    length of Dr. GRPO, or the paper's range."""
    constants = PAPER.get(subject.section, {})
    cases = subject.about["cases"]
    try:
        if subject.section == "dr_grpo" and not subject.takes("max_new_tokens"):
            length = measure.constant_length(subject, plain_cases(cases))
            return {"max_new_tokens": length or cases[0]["keywords"]["max_new_tokens"]}
        if constants and not any(subject.takes(key) for key in constants):
            edges, _ = measure.edges_of(subject)
            if (edges[-1, -1], edges[1, 1]) == measure.range_of(subject.section, constants):
                return constants
    except Exception:  # of a function that does not take such cases
        pass
    return {}


def rows_are_apart(subject):
    """Whether a row's advantage moves the gradient of this row alone; not if (B,) stands for (T,)."""
    try:
        before, after = (measure.asked(subject, np.zeros(3), A)[0] for A in ([1, 1, -1], [3, 1, -1]))
        return np.allclose(before.gradient[1:], after.gradient[1:])
    except Exception:
        return False


def agrees_with_the_paper(subject, results):
    rows = [pair for pair in results if pair[0]["kind"] == "paper"]
    return all(not isinstance(found, str) and is_right(subject, case, found) for case, found in rows)


def failures(subject, results):
    """To sort by: most cases agree, then fewest raise."""
    num_agree = sum(is_right(subject, *pair) for pair in answered(results))
    return -num_agree, sum(isinstance(found, Raised) for _, found in results)


def examine(subject):
    """[(case, its answer, or in words why there is none)]"""
    results = []
    errors = []
    for case in subject.about["cases"]:
        try:
            found = subject.why_not(case) or subject.answer(case)
        except Exception as error:
            if subject.insists():
                return examine(subject)
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


def joined(changes):
    """{words of all: all together}"""
    whole = lambda J, b: J(b)  # noqa: E731
    for change in changes.values():
        whole = mistakes.together(whole, change)
    return {" and ".join(changes): whole}


def combinations(options, number):
    """{words: change} of this many of the options together"""
    result = {}
    for keys in itertools.combinations(options, number):
        result |= joined({key: options[key] for key in keys})
    return result


def named(section, tested, measured=()):
    """Lines: the entries that give the answers in the plain cases, alone or in twos, and then, for each
    tag of a special case in which they do not, what else does."""
    # The cases that tell most apart come first, since most entries fail on them.
    tested = sorted(tested, key=lambda pair: -len({*pair[0]["tags"]} & {"different_lengths", "holes"}))
    plain = [pair for pair in tested if not {*SPECIAL} & {*pair[0]["tags"]}] or tested
    known = {
        f"{kind}: {name}": x for kind, name, sections, x in mistakes.ENTRIES if section in sections
    }
    base = dict(measured)
    whole = joined(base)
    more = {f"{x} and {y}": mistakes.together(whole[x], known[y]) for x in whole for y in known if base}
    for options in (joined({}), base, whole | known, more, combinations(known, 2)):
        found = []
        for words, change in options.items():
            if all(gives(section, case, change, answer) for case, answer in plain):
                found.append(special_lines(section, tested, words, change, base | known))
        if found:
            return min(found, key=len)
    return []


def special_lines(section, tested, words, change, known):
    """[words, a line for each tag whose cases need more than this change]"""
    lines = [words] if words else []
    wrong = [pair for pair in tested if not gives(section, pair[0], change, pair[1])]
    while wrong:
        tag = next(tag for tag in SPECIAL if any(tag in case["tags"] for case, _ in wrong))
        these = [pair for pair in wrong if tag in pair[0]["tags"]]
        ids = ", ".join(case["id"] for case, _ in these)
        fits = []
        for name, other in known.items():
            both = mistakes.together(change, other)
            if all(gives(section, case, both, answer) for case, answer in these):
                left = [pair for pair in wrong if not gives(section, pair[0], both, pair[1])]
                fits.append((left, f"{name} (in {ids})" if words else name))
        left = [pair for pair in wrong if not any(pair is x for x in these)]
        fits.append((left, f"unknown with {tag.replace('_', ' ')}: {ids}"))
        wrong, line = min(fits, key=lambda fit: len(fit[0]))
        lines.append(line)
    return lines


def diagnosed(found):
    """(subject, its results, the diagnosis) for the shape of advantages that suits a function best:
    where as many cases agree, the one in which its mistake is known."""
    options = {}
    for subject, results in found:
        answers = str(answered(results))
        if failures(subject, results) == failures(*found[0]) and answers not in options:
            options[answers] = (subject, results, diagnosis(subject, results))
    return min(options.values(), key=lambda option: "unknown" in " ".join(option[2]))


def diagnosis(subject, results):
    """Lines; none if the function is healthy in all cases that were tested."""
    tested = []
    lines = []
    for case, answer in answered(results):
        if "masked_places" in case["tags"] and not explain.is_finite(answer):
            is_late = subject.section in reference.LOSSES and np.isfinite(answer.value).all()
            lines = [AFTER_EXP if is_late or lines == [AFTER_EXP] else SPREADS]
        else:
            tested.append((subject.case_of(case["id"]), answer))
    if all(is_right(subject, *pair) for pair in tested):
        return lines
    measured = measure.entries(subject, plain_cases([case for case, _ in tested]))
    found = named(subject.section, tested, measured)
    if not found:
        found = ["unknown: no known mistake gives these numbers"]
        plain = [pair for pair in tested if not {*SPECIAL} & {*pair[0]["tags"]}]
        if all(same(answer, *subject.expected(case), 2e-2) for case, answer in plain):
            found.append("  all are within 2%: computed in bfloat16, or a small term is added")
    if "unknown" in " ".join(found):
        found += [f"  {line}" for line in explain.explanation(subject, tested, measured)]
    return found + lines


def needed_flag(line):
    """The flag that accepts a complaint, or None."""
    if line in (SPREADS, AFTER_EXP):
        return "--allow-nan"
    return "--allow-clamp" if line.startswith(measure.CLAMP) and " and " not in line else None


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
