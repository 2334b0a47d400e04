"""Is a function the one in the paper? Compares it with all cases, says on which kinds it differs, names
a known mistake if that alone gives all of its answers, and shows its numbers beside the paper's."""

import math

import numpy as np
import torch

from rl_loss_vectors import mistakes
from rl_loss_vectors.call import Subject, fitted, plain, said
from rl_loss_vectors.reference import evaluate
from rl_loss_vectors.tables import FAR, tables_of_case, tables_of_loss

DEPARTURES = {  # what --allow accepts, and how it is said
    "nan": "NaN in masked places spreads: only torch.where before exp stops it, a factor does not",
    "rounding": "equal rewards do not always give exactly A = 0",
    "clamp": "it differs only at ratios above 10 or below 1/10",
    "value": "all gradients agree, values do not",
}

# The paper's range is a tenth of our script's, which vectors.json has. An author may mean either.
RANGES = {"gspo": [{}, {"clip_eps_low": 3e-4, "clip_eps_high": 4e-4}]}


def is_right(case, answer, ours=None, parts=(0, 1)):
    """Whether the answer is the expected one, or `ours`, up to float32's rounding error relative to the
    largest number. parts: 0 for the value, 1 for the gradient"""
    ours = ours or (case["value"], case.get("gradient"))
    for k in parts:
        if ours[k] is not None:
            expected = np.array(ours[k], float)
            size = np.abs(expected[np.isfinite(expected)]).max(initial=0)
            tolerance = case["tolerance"]["float32"] * (1 + size)
            if not np.allclose(answer[k], expected, rtol=0, atol=tolerance, equal_nan=True):
                return False
    return True


def departure(case, answer):
    """Why a case is not compared, a key of DEPARTURES, or None."""
    if "equal_rewards" in case["tags"]:
        rewards = np.array(case["inputs"]["rewards"])
        is_uniform = (rewards == rewards[:, :1]).all(1)
        is_exact = (rewards == rewards.round()).all(1)  # the mean of whole numbers is not rounded
        if np.abs(answer[0][is_uniform & ~is_exact]).max(initial=0) > 1e-6:
            return "rounding"
    is_finite = all(np.isfinite(x).all() for x in answer if x is not None)
    return "nan" if "masked_places" in case["tags"] and not is_finite else None


def is_far(case):
    """Whether a token's ratio, to the old policy or the reference, is far from 1."""
    tensors = {name: np.array(x) for name, x in (case["inputs"] | case["keywords"]).items()}
    new = tensors.get("logprobs", np.zeros(1))
    moved = [new - tensors.get(name, new) for name in ("old_logprobs", "ref_logprobs")]
    return any(np.abs(x * tensors.get("mask", 1)).max() > math.log(FAR) for x in moved)


def examined(subject, case):
    """(case, the function's answer, or an error, or why it does not apply)"""
    try:
        reason = subject.why_not(case)
        case = subject.adapted(case)
        return case, reason or subject.answer(case)
    except Exception as error:
        is_rare = "token_advantages" in case["tags"] or isinstance(case["inputs"].get("lam"), list)
        return case, "an error, as it takes one A or lambda for a completion" if is_rare else error


class Report:
    """How a function differs from the paper's: `lines`, none if it is right."""

    def __init__(self, subject, allowed=(), is_verbose=False):
        self.subject = subject
        self.results = [examined(subject, case) for case in subject.about["cases"]]
        answered = [pair for pair in self.results if isinstance(pair[1], tuple)]
        departures = {departure(*pair) for pair in answered}
        self.tested = [pair for pair in answered if departure(*pair) is None]
        self.wrong = [pair for pair in self.tested if not is_right(*pair)]
        self.errors = [
            f"{case['id']}: {said(x)}" for case, x in self.results if isinstance(x, Exception)
        ]
        self.tables = []
        try:
            tables = tables_of_loss(subject) if subject.is_loss else []
            self.tables = [x for x in tables if len(x.different())]
        except Exception as error:
            self.errors.append(f"a small batch: {said(error)}")
        self.differs = bool(self.wrong or self.tables)  # more than what --allow accepts
        far = [is_far(case) for case, _ in self.wrong] + [table.is_far() for table in self.tables]
        is_value_only = subject.is_loss and all(is_right(*pair, parts=[1]) for pair in self.wrong)
        self.names = []
        self.lines = []
        if self.differs and all(far):
            departures.add("clamp")
        elif self.differs and is_value_only and not self.tables:
            departures.add("value")
        self.differs = self.differs and not {"clamp", "value"} & departures
        if self.differs:
            known = mistakes.known_for(subject.section) if self.wrong else []
            self.names = [name for name, change in known if self.is_given_by(change)]
            self.lines.append(self.summary())
        if len(self.names) == 1:
            self.lines.append(f"it is: {self.names[0]}")
        if self.differs:
            self.lines += self.advice()
        for word, text in DEPARTURES.items():
            if word in departures and word not in allowed:
                self.lines.append(f"{text} (--allow {word})")
        self.lines += [f"it raises an error in {error}" for error in self.errors]
        if len(answered) < 5:
            self.lines.append("fewer than five cases apply: too few to tell")
        if self.lines:
            self.lines += self.shown(is_verbose)

    def is_given_by(self, change):
        """Whether a change of the paper's formula gives all answers."""
        section = self.subject.section
        return all(is_right(*pair, evaluate(section, pair[0], change)) for pair in self.tested)

    def summary(self):
        """3 of 13 cases differ: holes 1/1, different_lengths 2/9, on_policy 0/1"""
        ids = {case["id"] for case, _ in self.wrong}
        by_tag = {}
        for case, _ in self.tested:
            for tag in case["tags"]:
                by_tag.setdefault(tag, []).append(case["id"] in ids)
        counts = [f"{tag} {sum(x)}/{len(x)}" for tag, x in by_tag.items()]
        return f"{len(ids)} of {len(self.tested)} cases differ: {', '.join(counts) or 'no tags'}"

    def advice(self):
        """A line: constants that its author may not mean, with his defaults if they have our names."""
        subject = self.subject
        meant = dict.fromkeys(subject.open, "NUMBER") | subject.defaults
        others = [k for k in meant if k not in subject.settings and meant[k] != subject.constants[k]]
        flags = [f"--set {k}={meant[k]}" for k in others]
        return [f"if you mean other constants: {' '.join(flags)}"] if flags else []

    def shown(self, is_verbose):
        """Lines: the first table of each kind, or all."""
        tables = self.tables
        if self.wrong and (is_verbose or not tables):
            tables = [*tables, *tables_of_case(self.subject, *self.wrong[0])]
        seen = set()
        for table in tables:
            if len(table.different()) and (is_verbose or table.kind not in seen):
                yield from table.lines(99 if is_verbose else 8)
                seen.add(table.kind)

    def notes(self):
        """Lines: how it was called, and what was not tested."""
        subject = self.subject
        given = (subject.bound | subject.settings).items()
        shown = [f"{name}={x}" for name, x in given if plain(name) != x]
        if subject.kind[0] is not torch.float64:
            shown.append("numpy arrays" if subject.kind[0] is np.float64 else str(subject.kind[0]))
        if subject.shape != "B1":
            shown.append(f"advantages ({', '.join(subject.shape)})")
        order = "by order, since no name is known, " if subject.is_by_order else ""
        lines = [f"called {order}with {', '.join(shown)}"] if shown else []
        missing = [x for x in ("mask", "old_logprobs") if x in subject.arguments]
        lines += [f"tested without {x}" for x in missing if not subject.takes(x)]
        reasons = {}
        for case, why in self.results:
            if isinstance(why, str):
                reasons.setdefault(why, []).append(case["id"])
        return lines + [f"not tested: {', '.join(ids)} ({why})" for why, ids in reasons.items()]


def examine(function, section, settings=None, allowed=(), is_verbose=False):
    """The Report on a function. settings: as Subject has them."""
    reports = []
    for paper in RANGES.get(section, [{}]):
        subject = fitted(Subject(function, section, settings or {}, paper))
        reports.append(Report(subject, allowed, is_verbose))
    return min(reports, key=lambda x: (x.differs, len(x.wrong), len(x.tables), len(x.names) != 1))


def diagnose(function, section, allowed=(), **settings):
    """How a function differs from the paper's, in lines; none if it is right. For an assertion."""
    return examine(function, section, settings, allowed).lines
