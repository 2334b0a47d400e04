"""Is a function the one in the paper? Runs it on its section of the vectors, and says what is wrong:
what measure.py and groups.py find, an entry of mistakes.py, or both."""

import functools
import itertools
import math

import numpy as np

from rl_loss_vectors import groups, measure, mistakes, reference
from rl_loss_vectors.measure import Finding
from rl_loss_vectors.mistakes import together, unchanged
from rl_loss_vectors.names import Misfit
from rl_loss_vectors.vectors import Answer, expected, fitted, same

SPREADS = "variant: NaN in masked places spreads: the mask is a factor, no torch.where [TRL, verl]"
AFTER_EXP = "variant: NaN in masked places reaches the gradient: mask the log-ratio before exp"
VALUE = "variant: the gradient is right, the value is not"
NO_RULE = "variant: no rule for equal rewards [TRL, verl]"
FLAGS = {SPREADS: "--allow-nan", AFTER_EXP: "--allow-nan", VALUE: "--allow-value"}
FLAGS |= {"clamp": "--allow-clamp", NO_RULE: "--allow-rounding"}
PLAIN = "plain"
SPECIAL = ["masked_places", "large_ratios", "kl", "sampler", "micro_batches", "token_advantages"]
SPECIAL += ["equal_rewards"]
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


def tag_of(case):
    return next((tag for tag in SPECIAL if tag in case["tags"]), PLAIN)


def is_right(section, case, answer, change=None, parts=BOTH):
    """Whether the answer is the expected one, or what a change of the paper gives; no, if that change
    cannot be evaluated in this case."""
    try:
        ours = Answer(*reference.evaluate(section, case, change)) if change else expected(case)
    except Exception:
        return False
    return same(answer, ours, case["tolerance"]["float32"], parts)


class Report:
    """What the doctor finds out about a function: `lines`, none if it is right; `constants`, in which
    it may differ from the paper; `results`, [(case, answer or reason or error)]."""

    def __init__(self, subject):
        self.subject = subject
        self.section = subject.section
        self.notes = []
        self.is_explained = True
        findings = self.measured()
        self.constants = [x for x in findings if x.kind == "constant"]
        self.change = functools.reduce(together, [x.change for x in self.constants], unchanged)
        self.results = [self.examined(case) for case in subject.about["cases"]]
        self.answered = [pair for pair in self.results if isinstance(pair[1], Answer)]
        self.lines = self.diagnosis([x for x in findings if x.kind != "constant"])

    def measured(self):
        """[Finding]; a note, if the function does not take batches of our own."""
        findings = []
        if math.isnan(self.subject.separation or 0):
            return [Finding("mistake", "two calls with the same arguments differ")]
        if not self.subject.is_separate:
            share = f"{self.subject.separation:.0%} of what one A moves is in its own row"
            findings.append(Finding("mistake", f"one row's A moves the others' gradient: {share}"))
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
        reason = self.subject.why_not(case)
        if reason:
            return case, reason
        try:
            case = self.subject.adapted(case, self.change if self.constants else None)
            return case, self.subject.answer(case)
        except Exception as error:
            if "token_advantages" in case["tags"]:
                return case, "it takes one advantage for each completion"
            if isinstance(case["inputs"].get("lam"), list):
                return case, "it takes one lambda for the batch"
            return case, error

    def has_only(self, start):
        return all(line.startswith(start) for line in self.lines)

    def diagnosis(self, shown):
        lines, tested = [], []
        for case, answer in self.answered:
            are_finite = [np.isfinite(x).all() for x in answer if x is not None]
            if "masked_places" in case["tags"] and not all(are_finite):
                is_late = self.section in reference.LOSSES and are_finite[0]
                lines = [AFTER_EXP if is_late or lines == [AFTER_EXP] else SPREADS]
            else:
                tested.append((case, answer))
        raising = [case["id"] for case, found in self.results if isinstance(found, Exception)]
        if raising:
            lines.append(f"it raises an error in {', '.join(raising)}")
        if len(self.answered) < 5:
            lines.append("fewer than five cases apply: too few to tell")
        if tested and (shown or not all(is_right(self.section, *pair) for pair in tested)):
            explanation = Explanation(self.section, tested, self.change, shown)
            lines = explanation.lines() + lines
            self.is_explained = explanation.is_complete
        return lines


def examine(function, section, fixed=None, layout=None):
    """The Report on a function: in the shape of advantages that separates rows or, if there is none, in
    the first that can be explained. fixed: {parameter: value}. layout: of rewards, as in the file."""
    reports = [Report(subject) for subject in fitted(function, section, fixed, layout)]
    report = min(reports, key=lambda report: not report.is_explained)
    if section in groups.PAPER and layout is None and not report.has_only(NO_RULE):
        for other, words in OTHER_LAYOUTS.items():
            if other != report.subject.layout and is_right_in(function, section, fixed, other):
                line = f"mistake: {words}; if that is meant, --layout {other}"
                report.lines = [line, *(report.lines if report.is_explained else [])]
                break
    return report


def is_right_in(function, section, fixed, layout):
    try:
        return Report(fitted(function, section, fixed, layout)[0]).has_only(NO_RULE)
    except Misfit:
        return False


def diagnose(function, section, **fixed):
    """What is wrong with a function, in lines; none if it is right. For the assertion in a test.
    fixed: other parameters of the function."""
    return examine(function, section, fixed).lines


class Explanation:
    """What gives a function's answers, in as few lines as possible."""

    def __init__(self, section, tested, change, shown):
        """change: the author's constants. shown: what else was measured."""
        self.section, self.change, self.shown = section, change, shown
        self.is_complete = False
        # The most telling cases come first, since most entries fail on them.
        telling = {"different_lengths", "holes"}
        tested = sorted(tested, key=lambda pair: -len(telling & {*pair[0]["tags"]}))
        self.tested = {tag: [x for x in tested if tag_of(x[0]) == tag] for tag in (PLAIN, *SPECIAL)}
        named = {name: x for name, (where, x) in mistakes.ENTRIES.items() if section in where}
        self.entries = [Finding(*name.split(": ", 1), x) for name, x in named.items()]

    def gives(self, tag, findings, parts=BOTH):
        # The innermost of several changes of the same piece counts, so the constants come last.
        change = functools.reduce(together, [*(x.change for x in findings), self.change])
        return all(is_right(self.section, *pair, change, parts) for pair in self.tested[tag])

    def of_plain(self):
        """(what gives the answers in the plain cases, or None; whether it gives the values, too)"""
        facts = [x for x in self.shown if x.change is unchanged]
        has_gradient = all("gradient" in case for case, _ in self.tested[PLAIN])
        for parts, size in itertools.product([BOTH, GRADIENT][: 1 + has_gradient], range(3)):
            for entries in itertools.combinations(self.entries, size):
                for findings in ([*self.shown, *entries], [*entries, *facts]):
                    if self.gives(PLAIN, findings, parts) and (size or findings == self.shown):
                        return findings, parts == BOTH
        return None, False

    def lines(self):
        found, has_value = self.of_plain()
        if found is None:
            as_paper = "  in the batches that measure it, it does what the paper does"
            facts = [str(x) for x in self.shown] or [as_paper]
            return [self.not_explained(PLAIN), *facts, *self.first_case()]
        self.is_complete = True
        lines = [str(x) for x in sorted(found, key=lambda x: x.change is unchanged)]
        if not has_value and any(answer.gradient.any() for _, answer in self.tested[PLAIN]):
            size_of_error = lambda pair: abs(pair[1].value - expected(pair[0]).value)  # noqa: E731
            case, answer = max(self.tested[PLAIN], key=size_of_error)
            example = f"{answer.value:.4g} instead of {expected(case).value:.4g} in {case['id']}"
            words = VALUE.replace("the", "with that, the", 1) if found else VALUE
            lines.append(f"{words}, for example {example}")
        for tag in SPECIAL:
            options = [[], *([x] for x in self.entries if x not in found)]
            parts = BOTH if has_value else GRADIENT
            more = next((x for x in options if self.gives(tag, [*found, *x], parts)), None)
            if more is None and self.wrong_ids(tag):
                lines.append(self.not_explained(tag))
            lines += [str(x) for x in more or []]
            found = [*found, *(more or [])]
        return lines

    def not_explained(self, tag):
        if tag == "equal_rewards":
            sizes = [np.abs(x.value[groups.is_uniform(case)]).max() for case, x in self.tested[tag]]
            if max(sizes) > 1e-6:
                return f"{NO_RULE}: there, A is up to {max(sizes):.2g} instead of 0"
        ids = ", ".join(sorted(self.wrong_ids(tag)))
        return f"mistake: {ids} differ, which what was measured does not fully explain"

    def wrong_ids(self, tag):
        return [
            case["id"] for case, answer in self.tested[tag] if not is_right(self.section, case, answer)
        ]

    def first_case(self):
        """Lines: up to two rows of the first case that differs."""
        wrong = [x for x in self.tested[PLAIN] if not is_right(self.section, *x)]
        case, answer = (wrong or self.tested[PLAIN])[0]
        ours = expected(case)
        what, k = ("result", 0) if ours.gradient is None else ("gradient", 1)
        lines = []
        if k:
            lines = [f"  {case['id']}: the value is {answer.value:.4g} instead of {ours.value:.4g}"]
        width = ours[k].shape[-1]
        for your, our in zip(answer[k].reshape(-1, width), ours[k].reshape(-1, width), strict=True):
            if len(lines) < 5 and not np.allclose(your, our, rtol=1e-4):
                lines.append(f"  {case['id']}: your {what}  {in_columns(your)}")
                lines.append(f"  {' ' * len(case['id'])}  ours {' ' * len(what)}  {in_columns(our)}")
        return lines


def in_columns(row):
    return " ".join(f"{x:8.4g}" for x in row)


def needed_flag(line):
    """The flag that accepts a complaint, or None."""
    return next((flag for start, flag in FLAGS.items() if line.startswith(start)), None)


def report(case, answer):
    """A line about a case."""
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
