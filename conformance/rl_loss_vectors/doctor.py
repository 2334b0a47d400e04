"""Is a function the one in the paper? Runs it on its section of the vectors, and says what is wrong:
an entry of mistakes.py or measure.py, or else what measure.py finds about its weights."""

import dataclasses
import functools
import itertools

import numpy as np
import torch

from rl_loss_vectors import measure, mistakes, reference
from rl_loss_vectors.names import Misfit
from rl_loss_vectors.vectors import GROUPS, SHAPES, Answer, Subject, expected, same

SPREADS = "variant: NaN in masked places spreads: the mask is a factor, no torch.where [TRL, verl]"
AFTER_EXP = "variant: NaN in masked places reaches the gradient: mask the log-ratio before exp"
UNKNOWN = "unknown: no known mistake gives these numbers"
PLAIN = "plain"
SPECIAL = ["masked_places", "large_ratios", "kl", "micro_batches", "settings", "token_advantages"]
SPECIAL += ["equal_rewards"]


def examine_shapes(function, section, fixed):
    """[(subject, its results)] for each shape that the function takes, beginning with the one in which
    most cases agree. A function that takes no bool mask gets one of 0 and 1; one that takes no float64
    gets float32."""
    errors = []
    shapes = SHAPES if section in reference.LOSSES else SHAPES[:1]
    if section in mistakes.GROUPS:
        shapes = GROUPS
    for dtype, mask in itertools.product((torch.float64, torch.float32), ("bool", "float")):
        found = []
        for shape in shapes:
            try:
                subject = Subject(function, section, shape, mask, dtype, fixed)
                for constants in measure.own_constants(subject):
                    subject = dataclasses.replace(subject, constants=constants)
                    found.append((subject, examine(subject)))
            except (Exception, SystemExit) as error:
                errors.append(error)
        if found:
            return sorted(found, key=lambda pair: failures(*pair))
    raise min(errors, key=lambda error: (not isinstance(error, Misfit), "bool" in str(error)))


def tag_of(case):
    return next((tag for tag in SPECIAL if tag in case["tags"]), PLAIN)


def failures(subject, results):
    """A sort key: first where most plain cases agree, then where the fewest cases raise an error."""
    num_agree = sum(is_right(*pair) for pair in answered(results) if tag_of(pair[0]) == PLAIN)
    return -num_agree, sum(isinstance(found, Exception) for _, found in results)


def examine(subject):
    """[(case, answer)]. Instead of an answer there may be the reason why there is none, or an error."""
    results = []
    for case in subject.cases:
        try:
            found = subject.why_not(case) or subject.answer(case)
        except Exception as error:
            found = error
            if "token_advantages" in case["tags"]:
                found = "it takes one advantage for each completion"
            if isinstance(case["inputs"].get("lam"), list):
                found = "it takes one lambda for the batch"
        results.append((case, found))
    errors = [found for _, found in results if isinstance(found, Exception)]
    if errors and not answered(results):
        raise errors[0]
    return results


def answered(results):
    return [(case, found) for case, found in results if isinstance(found, Answer)]


def is_right(case, answer):
    return same(answer, expected(case), case["tolerance"]["float32"])


def gives(section, case, change, answer):
    """Whether an entry gives the answer. No, if it cannot be evaluated in this case."""
    try:
        changed = Answer(*reference.evaluate(section, case, change))
    except Exception:
        return False
    return same(answer, changed, case["tolerance"]["float32"])


def named(section, tested, measured=()):
    """Lines that name what gives the answers: entries of mistakes.py, and what was measured."""
    # The most telling cases come first, since most entries fail on them.
    tested = sorted(tested, key=lambda pair: -len({*pair[0]["tags"]} & {"different_lengths", "holes"}))
    groups = [(tag, [pair for pair in tested if tag_of(pair[0]) == tag]) for tag in (PLAIN, *SPECIAL)]
    changes = dict(measured)
    if len(measured) > 1:
        words = " and ".join(changes)
        changes[words] = functools.reduce(mistakes.together, changes.values())
    changes |= {name: change for name, (where, change) in mistakes.ENTRIES.items() if section in where}
    return explained(section, groups, mistakes.unchanged, changes)


def explained(section, groups, change, changes):
    """The fewest lines that explain the answers in groups of cases, one group after the other: by at
    most two changes in the plain cases, and by one more for each tag of the special ones."""
    if not groups:
        return []
    (tag, tested), *rest = groups
    for size in range(3 if tag == PLAIN else 2):
        found = []
        for names in itertools.combinations(changes, size):
            all_changes = functools.reduce(mistakes.together, [changes[x] for x in names], change)
            if all(gives(section, case, all_changes, answer) for case, answer in tested):
                line = [" and ".join(names)] if names else []
                found.append(line + explained(section, rest, all_changes, changes))
        if found:
            return min(found, key=len)
    wrong = [case["id"] for case, answer in tested if not gives(section, case, change, answer)]
    ids = ", ".join(sorted(wrong))
    if tag == PLAIN:
        return [f"{UNKNOWN}: {ids}"]
    line = f"unknown with {tag.replace('_', ' ')}: {ids}"
    return [line, *explained(section, rest, change, changes)]


def examined(function, section, fixed):
    """(subject, its results, the diagnosis) for the shape in which most cases agree; at a tie, for one
    in which the mistake is known."""
    found = examine_shapes(function, section, fixed)
    best = [pair for pair in found if failures(*pair) == failures(*found[0])]
    options = [(*pair, diagnosis(*pair)) for pair in best]
    return min(options, key=lambda option: " ".join(option[2]).count("unknown"))


def diagnose(function, section, **fixed):
    """What is wrong with a function, in lines; none if it is right. For the assertion in a test.
    fixed: other parameters of the function."""
    return examined(function, section, fixed)[2]


def diagnosis(subject, results):
    """Lines; none if the function is right in all cases that were tested, and these are enough."""
    tested = []
    lines = []
    for case, answer in answered(results):
        are_finite = [np.isfinite(x).all() for x in answer if x is not None]
        if "masked_places" in case["tags"] and not all(are_finite):
            is_late = subject.section in reference.LOSSES and are_finite[0]
            lines = [AFTER_EXP if is_late or lines == [AFTER_EXP] else SPREADS]
        else:
            tested.append((case, answer))
    raising = [case["id"] for case, found in results if isinstance(found, Exception)]
    if raising:
        lines.append(f"it raises an error in {', '.join(raising)}")
    wrong = [pair for pair in tested if not is_right(*pair)]
    if not wrong:
        too_few = ["fewer than five cases apply: too few to tell"]
        return lines + (too_few if len(answered(results)) < 5 else [])
    plain = [pair for pair in tested if tag_of(pair[0]) == PLAIN]
    measured = measure.entries(subject, [case for case, _ in plain])
    found = named(subject.section, tested, measured)
    is_near = all(same(answer, expected(case), 2e-2) for case, answer in plain)
    if found[0].startswith(UNKNOWN) and is_near:
        found.append("  all are within 2%: computed in bfloat16, or a small term is added")
    if "unknown" in " ".join(found) and subject.section in reference.LOSSES:
        found += [f"  {line}" for line in measure.explanation(subject, wrong, measured)]
    return found + lines


def needed_flag(line):
    """The flag that accepts a complaint, or None."""
    if line in (SPREADS, AFTER_EXP):
        return "--allow-nan"
    return "--allow-clamp" if line.startswith(measure.CLAMP) and " and " not in line else None


def report(case, answer):
    """A line about a case."""
    about = f"{case['id']} {case['name']}"
    if isinstance(answer, str):
        return f"  n/a      {about}: {answer}"
    if isinstance(answer, Exception):
        return f"  RAISES   {about}: {type(answer).__name__} {' '.join(str(answer).split())}"
    if is_right(case, answer):
        return f"  agrees   {about}"
    pairs = zip(answer, expected(case), strict=True)
    off = [f"{np.abs(x - y).max():.2g}" for x, y in pairs if y is not None]
    return f"  DIFFERS  {about}: off by {', the gradient by '.join(off)}"
