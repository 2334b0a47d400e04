"""Is a function the one in the paper? Runs it on its section of the vectors, and says what is wrong:
what measure.py and groups.py find, or one or two entries of mistakes.py that give all its answers."""

import functools
import itertools
import math

import numpy as np

from rl_loss_vectors import groups, measure, mistakes, reference
from rl_loss_vectors.measure import Finding, columns
from rl_loss_vectors.names import Misfit
from rl_loss_vectors.vectors import Answer, expected, fitted, same

SPREADS = "variant: NaN in masked places spreads: the mask is a factor, no torch.where [TRL, verl]"
AFTER_EXP = "variant: NaN in masked places reaches the gradient: mask the log-ratio before exp"
VALUE = "variant: the gradient is right, the value is not"
NO_RULE = "variant: equal rewards do not always give A = 0 [TRL, verl]"
FLAGS = {SPREADS: "--allow-nan", AFTER_EXP: "--allow-nan", VALUE: "--allow-value"}
FLAGS |= {"clamp": "--allow-clamp", NO_RULE: "--allow-rounding"}
MEASURES = dict.fromkeys(groups.PAPER, groups.findings) | {
    "whiten": groups.whiten_findings,
    "gae": groups.gae_findings,
    "value_loss": groups.value_findings,
}
BOTH, GRADIENT = (0, 1), (1,)
OTHER_LAYOUTS = {
    "GP": "over the wrong axis: it would be right for rewards (G, P)",
    "N": "it would be right for rewards in a row, (P G,)",
    "G": "it would be right if it got one group at a time",
}


def is_right(section, case, answer, change=mistakes.unchanged, parts=BOTH):
    """Whether the answer is the expected one, or what a change of the paper gives."""
    is_paper = change is mistakes.unchanged
    ours = expected(case) if is_paper else Answer(*reference.evaluate(section, case, change))
    return same(answer, ours, case["tolerance"]["float32"], parts)


class Report:
    """What the doctor finds out about a function: `lines`, none if it is right; `constants`, in which
    it may differ from the paper; `results`, [(case, answer or reason or error)]."""

    def __init__(self, subject):
        self.subject = subject
        self.section = subject.section
        self.notes = []
        findings = self.measured()
        self.constants = [x for x in findings if x.kind == "constant"]
        self.results = [self.examined(case) for case in subject.about["cases"]]
        self.lines = self.diagnosis([x for x in findings if x.kind != "constant"])

    def mixing(self):
        """[Finding] if there is no shape of advantages that keeps rows apart."""
        if self.subject.is_separate or math.isnan(self.subject.separation):
            return []
        share = f"{self.subject.separation:.0%} of what one A moves is in its own row"
        return [Finding("mistake", f"one row's A moves the others' gradient: {share}")]

    def measured(self):
        """[Finding]; a note, if the function does not take batches of our own."""
        findings = []
        if math.isnan(self.subject.separation or 0):
            return [Finding("mistake", "two calls with the same arguments differ")]
        try:
            with np.errstate(all="ignore"):
                for finding in MEASURES.get(self.section, measure.findings)(self.subject):
                    findings.append(finding)
        except Exception as error:
            words = " ".join(f"{type(error).__name__}: {error}".split())
            self.notes.append(f"not all was measured, since it fails in a batch of ours ({words})")
        return findings

    def examined(self, case):
        """(the case with the author's constants, the answer, or why there is none, or an error)"""
        settings = {}
        for finding in self.constants:
            settings |= finding.settings
        try:
            reason = self.subject.why_not(case)
            if reason:
                return case, reason
            case = self.subject.adapted(case, settings)
            return case, self.subject.answer(case)
        except Exception as error:
            if "token_advantages" in case["tags"]:
                return case, "it takes one advantage for each completion"
            if isinstance(case["inputs"].get("lam"), list):
                return case, "it takes one lambda for the batch"
            return case, error

    def diagnosis(self, shown):
        answered = [pair for pair in self.results if isinstance(pair[1], Answer)]
        reach = min((x.reach for x in shown), default=math.inf)
        accepted = {}
        tested = []
        for case, answer in answered:
            words = departure(self.section, case, answer)
            if words:
                accepted |= {words: max(accepted.get(words, 0), size_where_equal(case, answer))}
            elif largest_log_ratio(case) < reach:
                tested.append((case, answer))
        lines = [str(x) for x in [*self.mixing(), *self.explanation(shown, tested)]]
        for words, size in accepted.items():
            lines.append(f"{words}: it is up to {size:.2g}" if size else words)
        raising = [case["id"] for case, found in self.results if isinstance(found, Exception)]
        if raising:
            lines.append(f"it raises an error in {', '.join(raising)}")
        if len(answered) < 5:
            lines.append("fewer than five cases apply: too few to tell")
        return lines

    def explanation(self, shown, tested):
        """Entries that give all answers replace what was measured; numbers, if there is neither."""
        if all(is_right(self.section, *pair) for pair in tested):
            return shown
        clamps = [x for x in shown if x.kind == "clamp"]
        is_described = len(clamps) < len(shown)
        has_gradient = all("gradient" in case for case, _ in tested)
        parts = [BOTH, GRADIENT] if has_gradient and not is_described else [BOTH]
        found = entries_that_give(self.section, tested, parts)
        if found is None and (is_described or self.mixing()):
            return shown
        if found is None:
            is_measured = self.section in [*MEASURES, *measure.PAPER_PATTERNS] and not self.notes
            found = numbers_of(self.section, tested, is_measured)
        return [*found, *clamps]


def departure(section, case, answer):
    """What a flag accepts, or None; a case with it is not compared."""
    if size_where_equal(case, answer) > 1e-6:
        return NO_RULE
    are_finite = [np.isfinite(x).all() for x in answer if x is not None]
    if "masked_places" not in case["tags"] or all(are_finite):
        return None
    return AFTER_EXP if section in reference.LOSSES and are_finite[0] else SPREADS


def size_where_equal(case, answer):
    """The largest A in groups of equal rewards."""
    if "equal_rewards" not in case["tags"]:
        return 0.0
    return np.abs(answer.value[groups.is_uniform(case)]).max()


def largest_log_ratio(case):
    """Of the tokens in the mask, in a case of a loss; 0 in others."""
    inputs = {name: np.array(x) for name, x in case["inputs"].items()}
    if "old_logprobs" not in inputs:
        return 0.0
    log_ratio = inputs["logprobs"] - inputs["old_logprobs"]
    return np.abs(log_ratio[inputs["mask"].astype(bool)]).max()


def entries_that_give(section, tested, all_parts):
    """Lines: one or two entries that give all answers, or their gradients, or None."""
    named = [(name, x) for name, (sections, x) in mistakes.ENTRIES.items() if section in sections]
    for parts, size in itertools.product(all_parts, range(3)):
        for entries in itertools.permutations(named, size):
            change = functools.reduce(mistakes.together, [x for _, x in entries], mistakes.unchanged)
            if all(is_right(section, *pair, change, parts) for pair in tested):
                lines = [name for name, _ in entries]
                return lines if parts == BOTH else [*lines, value_line(tested)]
    return None


def value_line(tested):
    case, answer = max(tested, key=lambda pair: abs(pair[1].value - expected(pair[0]).value))
    return f"{VALUE}: {answer.value:.4g} instead of {expected(case).value:.4g} in {case['id']}"


def numbers_of(section, tested, is_measured):
    """Lines: which cases differ, and up to two rows of the first one."""
    wrong = [pair for pair in tested if not is_right(section, *pair)]
    ids = ", ".join(case["id"] for case, _ in wrong)
    but = ", but all that could be measured is as in the paper" if is_measured else ""
    lines = [f"mistake: {ids} differ{but}"]
    case, answer = wrong[0]
    ours = expected(case)
    what, k = ("result", 0) if ours.gradient is None else ("gradient", 1)
    if k:
        lines.append(f"  {case['id']}: the value is {answer.value:.4g} instead of {ours.value:.4g}")
    width = ours[k].shape[-1]
    for your, our in zip(answer[k].reshape(-1, width), ours[k].reshape(-1, width), strict=True):
        if len(lines) < 5 and not np.allclose(your, our, rtol=1e-4):
            lines.append(f"  {case['id']}: your {what}  {columns(your)}")
            lines.append(f"  {' ' * len(case['id'])}  ours {' ' * len(what)}  {columns(our)}")
    return lines


def is_accepted(lines):
    return all(line.startswith(NO_RULE) for line in lines)


def examine(function, section, fixed=None, layout=None):
    """The Report on a function. fixed: {parameter: value}. layout: of rewards, as in the file."""
    report = Report(fitted(function, section, fixed, layout))
    if section in groups.PAPER and layout is None and not is_accepted(report.lines):
        for other, words in OTHER_LAYOUTS.items():
            if other != report.subject.layout and is_right_in(function, section, fixed, other):
                report.lines = [f"mistake: {words}; if that is meant, --layout {other}"]
                break
        if any("of the batch" in line for line in report.lines):
            report.notes.append("if it takes one group of rewards at a time, say --layout G")
    return report


def is_right_in(function, section, fixed, layout):
    try:
        return is_accepted(Report(fitted(function, section, fixed, layout)).lines)
    except Misfit:
        return False


def diagnose(function, section, **fixed):
    """What is wrong with a function, in lines; none if it is right. For the assertion in a test.
    fixed: other parameters of the function."""
    return examine(function, section, fixed).lines


def needed_flag(line):
    """The flag that accepts a complaint, or None."""
    return next((flag for start, flag in FLAGS.items() if line.startswith(start)), None)


def line_about(case, answer):
    about = f"{case['id']} {case['name']}"
    if isinstance(answer, str):
        return f"  n/a      {about}: {answer}"
    if isinstance(answer, Exception):
        return f"  RAISES   {about}: {type(answer).__name__} {' '.join(str(answer).split())}"
    ours = expected(case)
    if same(answer, ours, case["tolerance"]["float32"]):
        return f"  agrees   {about}"
    off = [f"{np.abs(x - y).max():.2g}" for x, y in zip(answer, ours, strict=True) if y is not None]
    return f"  DIFFERS  {about}: off by {', the gradient by '.join(off)}"
