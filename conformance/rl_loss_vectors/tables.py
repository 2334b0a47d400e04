"""What a function and the paper's formula give in small batches that isolate one thing each. Nothing is
inferred: a table has your numbers and the paper's, where they differ."""

import math
from typing import NamedTuple

import numpy as np

RATIOS = "1e-5 0.04 0.26 0.51 0.76 0.91 0.99 0.999 0.9998 1.0002 1.001 1.01 1.09 1.16 1.24 1.41 2.1 4.1"
RATIOS = [
    float(x) for x in f"{RATIOS} 6.1 25 1e5".split()
]  # not round: those may be an author's bounds
FAR = 10.0  # a clip of a ratio beyond this is there for safety
MASK = np.array([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0], [0, 1, 1, 0, 1, 0]])


class Table(NamedTuple):
    kind: str
    title: str
    head: str  # what the labels are
    labels: list
    yours: np.ndarray
    paper: np.ndarray
    tolerance: float = 1e-3

    def different(self):
        """The columns that differ."""
        with np.errstate(invalid="ignore"):
            same = np.isclose(self.yours, self.paper, rtol=self.tolerance, atol=1e-5, equal_nan=True)
        return np.flatnonzero(~same)

    def is_far(self):
        """Whether it differs only where ratios are far from 1."""
        labels = [self.labels[k] for k in self.different()]
        return self.head.startswith(("r", "pi")) and all(x > FAR or x < 1 / FAR for x in labels)

    def lines(self, most):
        columns = self.different()
        texts = [[self.head, "yours", "paper"]]
        for k in columns[:most]:
            label = self.labels[k]
            numbers = [f"{x[k] + 0:.4g}" for x in (self.yours, self.paper)]  # no -0
            texts.append([label if isinstance(label, str) else f"{label:.7g}", *numbers])
        widths = [max(map(len, column)) for column in texts]
        rows = ["  ".join(map(str.rjust, row, widths)) for row in zip(*texts, strict=True)]
        if len(columns) > most:
            rows[0] += f"  and {len(columns) - most} more"
        return [self.title, *(f"  {row}" for row in rows)]


def case_of(subject, new, **inputs):
    """A case of our own with the paper's results. If not given, the mask, A and gamma are 1, and the
    other policies are the policy."""
    ones = np.ones(new.shape)
    given = dict.fromkeys(["logprobs", "old_logprobs", "ref_logprobs", "sampler_logprobs"], new)
    given |= {"router_shift": ones, "mask": ones, "advantages": ones[:, :1]} | inputs
    given = {name: np.asarray(x).tolist() for name, x in given.items()}
    template = subject.about["cases"][0]
    keywords = template["keywords"] | {name: x for name, x in given.items() if subject.takes(name)}
    case = {"inputs": {name: given[name] for name in subject.arguments}}
    case["keywords"] = {name: x for name, x in keywords.items() if name not in subject.arguments}
    case |= {"denominator": [], "gradient": []}  # to be computed
    if "old_logprobs" in inputs and "sampler_logprobs" in case["keywords"]:
        case["keywords"]["sampler_logprobs"] = given["old_logprobs"]
    return subject.adapted(case)


def gradients(subject, new, **inputs):
    """(yours, the paper's) of the objective with respect to the log-probs, (2, B, T)"""
    case = case_of(subject, new, **inputs)
    _, yours = subject.answer(case)
    return -np.array([yours, case["gradient"]])


def of_policy(subject, new, advantages, **inputs):
    """gradients of the policy's term: without what is left where A = 0"""
    A = np.array(advantages, float)
    with_A = gradients(subject, new, advantages=A, **inputs)
    without = gradients(subject, new, advantages=0 * A, **inputs)
    return with_A - without


def is_separate(subject):
    """Whether one row's advantage moves the gradient of that row alone."""
    new = np.array([[-1.3, -0.4, -2.1, -0.7], [-0.2, -1.1, -0.6, -3.0], [-0.9, -0.3, -1.7, -0.5]])
    first, second = (gradients(subject, new, advantages=[[1], [A], [2]])[0] for A in (-0.5, -0.8))
    moved = np.abs(second - first).sum(1)
    return moved[1] > 0.999 * moved.sum()


def relative(found, unit):
    """[(yours, the paper's)] as two rows, each divided by its unit"""
    return np.array(found).T / np.where(unit == 0, 1, unit)[:, None]


def ratios_for(subject):
    """RATIOS, and some on both sides of the paper's bounds"""
    c = subject.constants
    bounds = [1 - c.get("clip_eps_low", 0), 1 + c.get("clip_eps_high", 0), c.get("is_weight_cap", 1)]
    bounds += [math.exp(x * c.get("log_ratio_clip", 0)) for x in (-1, 1)]
    near = [x**y for x in bounds if x > 0 and x != 1 for y in (0.998, 1.002)]
    return sorted([*RATIOS, *near])


def by_ratio(measure, subject, A, of_first, of_second, of_reference=0):
    """[(yours, the paper's)] for the first of two tokens, by a ratio of its own or of the second."""
    found = []
    for r in ratios_for(subject):
        moved = np.log(r) * np.array([[of_first, of_second]])
        new = -0.1 + np.minimum(moved, 0)
        inputs = {"old_logprobs": new - moved, "ref_logprobs": new + of_reference * np.log(r)}
        found.append(measure(subject, new, advantages=[[A]], **inputs)[:, 0, 0])
    return found


def share_table(title, both):
    """Of a batch with the masks of MASK. Tokens of a completion that share both numbers share a column,
    whose label has x at their places."""
    labels = []
    columns = []
    for row, pairs in zip(MASK, both.transpose(1, 2, 0), strict=True):
        groups = {}
        for t, pair in enumerate(pairs):
            if row[t] or not np.allclose(*pair, atol=1e-9):
                groups.setdefault(tuple(pair.round(9)), []).append(t)
        for pair, places in groups.items():
            labels.append("".join("x" if t in places else str(kept) for t, kept in enumerate(row)))
            columns.append(pair)
    return Table(title, title, "token", labels, *np.array(columns).T)


def tables_of_loss(subject):
    """Yields a Table for each thing that a loss may do in its own way."""
    new = -0.4 - 0.3 * np.arange(MASK.size).reshape(MASK.shape) % 2.1
    ratios = ratios_for(subject)

    def first_token(*A):
        return of_policy(subject, new[: len(A), :2], [[x] for x in A])[:, 0, 0]

    both = of_policy(subject, new, np.ones((4, 1)), mask=MASK)
    yield share_table("share of a token (x), by its completion's mask, where r = 1 and A = 1", both)
    sizes = [-2, -1, -0.5, 0.5, 2]
    unit = first_token(1)
    both = relative([first_token(A) for A in sizes], unit)
    yield Table("A", "gradient of a token by A, 1 at A = 1", "A", sizes, *both)
    both = relative([first_token(1, A) for A in sizes], first_token(1, 1))
    title = "gradient of a token by the A of another completion, 1 at A = 1"
    yield Table("rows", title, "A", sizes, *both)
    for sign, where in ((1, "A > 0"), (-1, "A < 0")):
        for kind, head, of_first in ((f"weight {where}", "r", 1), ("others", "r of another token", 0)):
            both = relative(by_ratio(of_policy, subject, sign, of_first, 1), first_token(sign))
            title = f"weight of a token by {head}, 1 at r = 1, where {where}"
            yield Table(kind, title, head, ratios, *both)
    title = "what is left where A = 0, in units of the weight where A = 1"
    both = relative(by_ratio(gradients, subject, 0, 1, 1), unit)
    yield Table("old", title, "pi/pi_old", ratios, *both)
    if subject.takes("ref_logprobs"):
        both = relative(by_ratio(gradients, subject, 0, 0, 0, 1), unit)
        yield Table("ref", title, "pi_ref/pi", ratios, *both)
        both = gradients(subject, new, advantages=np.zeros((4, 1)), ref_logprobs=new - 1, mask=MASK)
        title = "share of a token (x) in the KL, by its completion's mask, where pi_ref/pi = 1/e"
        yield share_table(title, both)


def tables_of_case(subject, case, answer):
    """Yields a Table for each row of a case, labeled by the first argument."""
    name = subject.arguments[0]
    labels = np.array(case["inputs"][name])
    for kind, yours in zip(("value", "gradient"), answer, strict=True):
        if yours is None:
            continue
        paper = np.asarray(case[kind])
        if paper.ndim == 0:
            yield Table("value", f"{case['id']} {case['name']}", "", ["value"], [yours], [paper], 1e-5)
            continue
        rows = np.broadcast_to(labels, paper.shape).reshape(-1, labels.shape[-1])
        pairs = zip(rows, yours.reshape(rows.shape), paper.reshape(rows.shape), strict=True)
        for n, row in enumerate(pairs):
            title = f"{case['id']} {case['name']}: {kind}, row {n + 1}"
            yield Table(kind, title, name, *row, 1e-5)
