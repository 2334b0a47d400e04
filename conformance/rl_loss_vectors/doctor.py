"""Is a function the one in the paper? Runs it on its section of the vectors, and says what is wrong:
an entry of mistakes.py or measure.py, or where and by how much it differs (explain.py)."""

import dataclasses
import itertools
from typing import NamedTuple

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
    """[(subject, its results)] for each shape that the function takes, the one for which most cases
    agree first. A function that takes no bool mask gets one of 0 and 1, one that takes no float64 gets
    float32."""
    errors = []
    shapes = [{"advantages": x} for x in SHAPES]
    if section in mistakes.GROUPS:
        shapes = [{"rewards": x} for x in GROUPS]
    for dtype, mask in itertools.product((torch.float64, torch.float32), ("bool", "float")):
        found = []
        for shape in shapes:
            try:
                subject = Subject(function, section, mask=mask, dtype=dtype, fixed=fixed or {}, **shape)
                subject = dataclasses.replace(subject, constants=own_constants(subject))
                found.append((subject, examine(subject)))
            except (Exception, SystemExit) as error:
                errors.append(error)
        if section in mistakes.GROUPS and found:  # another arrangement only if it is right
            right = [pair for pair in found if agrees_with_the_paper(*pair)]
            found = right or [min(found, key=lambda pair: failures(*pair)[1])]
        if found:
            return sorted(found, key=lambda pair: failures(*pair))
    misfits = [error for error in errors if isinstance(error, Misfit)]
    raise (misfits or sorted(errors, key=lambda error: "bool" in str(error)))[0]


def is_plain(case):
    return not {*SPECIAL} & {*case["tags"]}


def own_constants(subject):
    """{our keyword: the value that a function without this keyword uses}, if it is as good as ours: a
    length of Dr. GRPO, or the paper's range."""
    constants = PAPER.get(subject.section, {})
    cases = subject.about["cases"]
    try:
        if subject.section == "dr_grpo" and not subject.takes("max_new_tokens"):
            length = measure.own_length(subject, [case for case in cases if is_plain(case)])
            return {"max_new_tokens": length or cases[0]["keywords"]["max_new_tokens"]}
        if constants and not any(subject.takes(key) for key in constants):
            edges, _ = measure.edges_of(subject)
            if (edges[-1, -1], edges[1, 1]) == measure.range_of(subject.section, constants):
                return constants
    except Exception:  # of a function that does not take such cases
        pass
    return {}


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


def named(section, tested, measured=()):
    """Lines: the entries that give the answers in the plain cases, alone or in twos, and then, for each
    tag of a special case in which they do not, what else does."""
    # The cases that tell most apart come first, since most entries fail on them.
    tested = sorted(tested, key=lambda pair: -len({*pair[0]["tags"]} & {"different_lengths", "holes"}))
    plain = [pair for pair in tested if is_plain(pair[0])] or tested
    known = {f"{kind}: {name}": x for kind, name, where, x in mistakes.ENTRIES if section in where}
    unchanged = lambda J, b: J(b)  # noqa: E731
    whole = unchanged
    for _, change in measured:
        whole = mistakes.together(whole, change)
    words = " and ".join(name for name, _ in measured)
    with_one = {f"{words} and {x}": mistakes.together(whole, known[x]) for x in known if words}
    twos = {}
    for x, y in itertools.combinations(known, 2):
        twos[f"{x} and {y}"] = mistakes.together(known[x], known[y])
    for options in ({"": unchanged}, dict(measured), {words: whole} | known, with_one, twos):
        found = []
        for name, change in options.items():
            if all(gives(section, case, change, answer) for case, answer in plain):
                found.append(special_lines(section, tested, name, change, dict(measured) | known))
        if found:
            return min(found, key=len)
    return []


def special_lines(section, tested, words, change, known):
    """[words, a line for each tag whose cases need more than this change]"""
    lines = [words] if words else []
    wrong = [pair for pair in tested if not gives(section, pair[0], change, pair[1])]
    for tag in SPECIAL:
        these = [pair for pair in wrong if tag in pair[0]["tags"]]
        ids = ", ".join(case["id"] for case, _ in these)
        fits = []
        for name, other in known.items():
            both = mistakes.together(change, other)
            if these and all(gives(section, case, both, answer) for case, answer in these):
                left = [pair for pair in wrong if not gives(section, pair[0], both, pair[1])]
                fits.append((left, f"{name} (in {ids})" if words else name))
        if these:
            left = [pair for pair in wrong if tag not in pair[0]["tags"]]
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
    wrong = [pair for pair in tested if not is_right(subject, *pair)]
    if not wrong:
        return lines
    measured = measure.entries(subject, [case for case, _ in tested if is_plain(case)])
    found = named(subject.section, tested, measured)
    if not found:
        found = ["unknown: no known mistake gives these numbers"]
        if all(
            same(answer, *subject.expected(case), 2e-2) for case, answer in tested if is_plain(case)
        ):
            found.append("  all are within 2%: computed in bfloat16, or a small term is added")
    if "unknown" in " ".join(found):
        found += [f"  {line}" for line in explain.explanation(subject, wrong, measured)]
    return found + lines


def needed_flag(line):
    """The flag that accepts a complaint, or None."""
    if line in (SPREADS, AFTER_EXP):
        return "--allow-nan"
    return "--allow-clamp" if line.startswith(measure.CLAMP) and " and " not in line else None


def report(subject, results):
    """A line about each case: the first word says how it went."""
    lines = []
    for case, answer in results:
        about = f"{case['id']} {case['name']}"
        if isinstance(answer, str):
            label = "RAISES " if isinstance(answer, Raised) else "n/a    "
            lines.append(f"  {label}  {about}: {' '.join(answer.split())}")
        elif is_right(subject, case, answer):
            lines.append(f"  agrees   {about}")
        else:
            pairs = zip(answer, subject.expected(case), strict=True)
            off = [f"{np.abs(x - y).max():.2g}" for x, y in pairs if y is not None]
            lines.append(f"  DIFFERS  {about}: off by {', the gradient by '.join(off)}")
    return lines


# ------------------------------------------------------------------------------ for a pytest suite


class Check(NamedTuple):
    """A case and the function that is to pass it: `check()` in the body of a test."""

    subject: Subject
    case: dict

    def check(self):
        """An AssertionError with the diagnosis of all cases, if the function does not agree."""
        answer = self.subject.answer(self.case)
        if not is_right(self.subject, self.case, answer):
            raise AssertionError("\n".join(diagnosis(self.subject, examine(self.subject))))


def cases(section, call, xfails=(), **how):
    """The cases of a section for `pytest.mark.parametrize`, each with its id; `how`: as in Subject.

    Cases that do not apply are skipped. xfails: ids of known differences. They are strict: when one
    starts to pass, its test fails.
    """
    import pytest

    subject = Subject(call, section, **how)
    parameters = []
    for case in subject.about["cases"]:
        why_not = subject.why_not(case)
        marks = []
        if why_not:
            marks = [pytest.mark.skip(reason=why_not)]
        elif case["id"] in xfails:
            marks = [pytest.mark.xfail(strict=True, raises=AssertionError)]
        parameters.append(pytest.param(Check(subject, case), id=case["id"], marks=marks))
    return parameters
