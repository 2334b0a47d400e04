"""Measures a loss with batches of our own: what it divides by, the weight of a token by its ratio, and
what is left where A is 0. Each difference from the paper is a Finding, with the change that it makes."""

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from rl_loss_vectors import reference
from rl_loss_vectors.mistakes import by_weights, divided_by, pieces, setting, unchanged, with_terms
from rl_loss_vectors.vectors import ours

FAR = math.log(9.99)  # a clip beyond this ratio is there for safety
CLIPPED = ["ppo", "grpo", "dr_grpo", "dapo", "gspo", "vapo", "deepseek_v32"]
LOG_RATIO = 16  # our own scripts clamp at 20


class Finding(NamedTuple):
    """One difference between a function and its paper, as measured."""

    kind: str  # "mistake", "variant", "clamp", or "constant" where only a number differs
    words: str
    change: Callable = unchanged

    def __str__(self):
        return f"{self.kind}: {self.words}"


def same_number(x, y):
    return math.isclose(x, y, rel_tol=1e-4)


def short(x):
    """A measured number, as its author would have written it."""
    return float(f"{x:.5g}")


def two(x):
    """Rows of two equal tokens."""
    return np.stack([x, x], 1)


# -------------------------------------------------------------------------------------- the divisor

DIVISORS = {  # B rows, o tokens in each, N in all, the padded width T
    "N": ("token-mean", lambda B, o, N, T: N),
    "B |o|": ("sequence-mean: divided by each |o|", lambda B, o, N, T: B * o),
    "B": ("sums of completions, not divided by a length", lambda B, o, N, T: B),
    "1": ("a sum, not divided", lambda B, o, N, T: 1),
    "B T": ("a mean over the padded width", lambda B, o, N, T: B * T),
    "B T / |o|": ("each completion times its |o|", lambda B, o, N, T: B * T / o),
    "B N / |o|": ("each completion times its |o|", lambda B, o, N, T: B * N / o),
    "B max|o|": ("divided by the longest completion", lambda B, o, N, T: B * o.max()),
}
PAPER_DIVISORS = dict.fromkeys(["ppo", "dapo", "vapo", "cispo"], "N")
PAPER_DIVISORS |= dict.fromkeys(["dr_grpo", "reinforce", "rloo"], "B")
LENGTHS = [((6, 3, 1, 4), 6), ((2, 5, 5), 7), ((3, 3), 3)]


def batches(subject):
    """Masks: rows of different length, and one batch that is wider than its longest row."""
    for lengths, T in LENGTHS:
        mask = np.arange(T) < np.array(lengths)[:, None]
        yield np.ones_like(mask) if subject.lacks_mask else mask


def per_token(subject, A, shift=None):
    """[(mask, gradient)] at ratios of 1; shift: log(ref / pi), if there is a reference."""
    found = []
    for mask in batches(subject):
        new = -0.4 - 0.3 * np.arange(mask.size).reshape(mask.shape) % 2.1
        more = {} if shift is None else {"ref_logprobs": new + shift}
        gradient = subject.probe(new, new, np.full((len(mask), 1), A), mask, **more).gradient
        found.append((mask, gradient))
    return found


def fit_divisor(measured, paper, tolerance=1e-3):
    """(words of DIVISORS, k): the gradient is 1 / (k times what the words say); None if none fits."""
    options = []
    for words, (_, formula) in DIVISORS.items():
        quotients = []
        for mask, gradient in measured:
            o = mask.sum(1, keepdims=True)
            expected = 1 / (np.zeros(mask.shape) + formula(len(mask), o, o.sum(), mask.shape[1]))
            quotients.append(gradient[mask] / expected[mask])
        quotients = np.concatenate(quotients)
        if np.allclose(quotients, quotients[0], rtol=tolerance) and quotients[0] != 0:
            k = short(1 / quotients[0])
            options.append((not same_number(abs(k), 1), words != paper, len(words), words, k))
    if not options:
        return None
    return min(options)[3:]


def divisor(subject):
    """(findings, (words, k)), k being positive."""
    paper = PAPER_DIVISORS.get(subject.section, "B |o|")
    pairs = zip(per_token(subject, 1.0), per_token(subject, 0.0), strict=True)
    measured = [(mask, idle - gradient) for (mask, gradient), (_, idle) in pairs]
    if not any(gradient.any() for _, gradient in measured):
        return [
            Finding("mistake", "no gradient of the policy term reaches the log-probs", detached)
        ], None
    found = (paper, 1.0) if subject.returns_terms else fit_divisor(measured, paper)
    if found is None:
        mask, gradient = measured[0]
        if fit_divisor(measured, paper, 2e-2):
            most = max(np.abs(x[kept] / x[kept].mean() - 1).max() for kept, x in [(mask, gradient)])
            words = f"less precise than float32: the weights of equal tokens scatter by {most:.1%}"
            return [Finding("mistake", words, rounded)], None
        words = "at r = 1 and A = 1, the weights of the tokens of four completions are "
        rows = [
            " ".join(f"{x:.3g}" for x in row[kept]) for row, kept in zip(gradient, mask, strict=True)
        ]
        return [Finding("mistake", words + "; ".join(rows))], None
    words, k = found
    findings = []
    if k < 0:
        findings.append(Finding("mistake", "wrong sign", lambda J, b: -J(b)))
        k = -k
    name, formula = DIVISORS[words]
    if subject.section == "dr_grpo" and words == "B" and not same_number(k, 1):
        if not same_number(k, ours("dr_grpo")["max_new_tokens"]):
            about = f"L_max is {k:.5g} (the paper: any; here: {ours('dr_grpo')['max_new_tokens']})"
            findings.append(Finding("constant", about, setting(max_new_tokens=k)))
        return findings, found
    divide = divided_by(lambda *sizes: formula(*sizes) * k)
    if not same_number(k, 1):
        by = "what the paper divides by" if words == paper else words
        findings.append(Finding("mistake", f"divided by {k:.4g} times {by}", divide))
    elif words != paper:
        findings.append(Finding("mistake", name, divide))
    return findings, (words, k)


def detached(J, b):
    return J(b).detach()


def rounded(J, b):
    return J(b)


# ------------------------------------------------------------------------------ weights by the ratio


class Segment(NamedTuple):
    """Where the weight of a token, by its log-ratio, is of one kind."""

    low: float
    high: float
    kind: str  # "r": it is r; "0": there is no gradient; "c": it is the level
    level: float

    def fits(self, l, w, tolerance):
        expected = {"r": math.exp(l), "0": 0, "c": self.level}[self.kind]
        return abs(w - expected) <= tolerance * max(1, abs(expected))


class Weights:
    """The weights of a token: the derivative of J with respect to its log-prob, divided by A, relative
    to its value at r = 1 for the same sign of A."""

    def __init__(self, subject, level=-1.3):
        """level: the larger of the two log-probs, pi's and pi_old's."""
        self.subject, self.level = subject, level
        # A function that computes in float32, whatever it is given, does not feel a step of 1e-9.
        near_1 = self.probe(1e-4 + 1e-9 * np.arange(8), np.ones(8))
        is_exact = subject.dtype is torch.float64 and len({*near_1}) > 5
        self.tolerance = 1e-6 if is_exact else 1e-3
        self.start = 1e-5 if is_exact else 3e-3

    def probe(self, l, A):
        new = self.level + np.minimum(l, 0)
        new, old = two(new), two(new - l)
        if self.subject.section == "deepseek_v32":  # the second token keeps the mask off
            new[:, 1], old[:, 1] = old[:, 0], new[:, 0]
        idle = self.subject.probe(new, old, np.zeros((len(l), 1))).gradient
        return (idle - self.subject.probe(new, old, np.reshape(A, (-1, 1))).gradient)[:, 0] / A

    def at(self, l, A):
        A = np.broadcast_to(A, np.shape(l)).astype(float)
        return self.probe(l, A) / self.probe(0 * l, np.sign(A))

    def share(self):
        """How much A < 0 counts, relative to A > 0."""
        return float((self.probe(np.zeros(1), -np.ones(1)) / self.probe(np.zeros(1), np.ones(1)))[0])

    def side(self, sign, way):
        """[Segment] from r = 1 outwards; None if the curve is smooth. way: -1 down, 1 up."""
        grid = np.geomspace(self.start, LOG_RATIO, 100)
        weights = self.at(way * grid, sign)
        segments = []
        begin, left = 0, None
        for n, (l, w) in enumerate(zip(way * grid, weights, strict=True)):
            left = left or [Segment(0, 0, kind, weights[n]) for kind in "r0c"]
            fitting = [x for x in left if x.fits(l, w, self.tolerance)]
            if not fitting:
                edge = self.edge(left[0], sign, way * grid[n - 1], l)
                segments.append(left[0]._replace(low=begin, high=edge))
                begin, left = edge, [Segment(0, 0, kind, w) for kind in "r0c"]
                fitting = [x for x in left if x.fits(l, w, self.tolerance)]
            left = fitting
            if len(segments) > 3:
                return None
        return [*segments, left[0]._replace(low=begin, high=way * math.inf)]

    def edge(self, segment, sign, inside, outside):
        """The log-ratio between the two beyond which the weight is of another kind."""
        for _ in range(4):
            l = np.linspace(inside, outside, 40)
            fits = [
                segment.fits(*pair, self.tolerance) for pair in zip(l, self.at(l, sign), strict=True)
            ]
            n = max(1, fits.index(False) if False in fits else 39)
            inside, outside = l[n - 1], l[n]
        return (inside + outside) / 2

    def curve(self, sign):
        """[Segment] from r = 0 to infinity; None if it is smooth."""
        if abs(self.probe(np.zeros(1), np.array([sign]))[0]) < 1e-12:
            return [Segment(-math.inf, math.inf, "0", 0)]
        down, up = self.side(sign, -1), self.side(sign, 1)
        if down is None or up is None:
            return None
        down = [x._replace(low=x.high, high=x.low) for x in reversed(down)]
        if (
            down[-1].kind == up[0].kind
            and same_number(down[-1].level, up[0].level)
            or (down[-1].kind == up[0].kind != "c")
        ):
            return [*down[:-1], up[0]._replace(low=down[-1].low), *up[1:]]
        return [*down, *up]


def near(segments):
    """Without the clips that are there for safety."""
    kept = list(segments)
    while len(kept) > 1 and kept[-1].low >= FAR and kept[-1].kind == "0":
        kept[-2:] = [kept[-2]._replace(high=math.inf)]
    while len(kept) > 1 and kept[0].high <= -FAR and kept[0].kind == "0":
        kept[:2] = [kept[1]._replace(low=-math.inf)]
    return kept


def letters(segments):
    return "".join(x.kind for x in segments)


def edges(segments):
    return [math.exp(x.low) for x in segments[1:]]


def said(segments):
    """r up to 1.2, then 0"""
    words = []
    for x in segments:
        kind = f"{x.level:.4g}" if x.kind == "c" else x.kind
        words.append(kind if x.high == math.inf else f"{kind} up to {math.exp(x.high):.5g}")
    return ", then ".join(words)


def term_of(curves, share=1):
    """f(r, a): the objective whose weights are these curves, clipped where they are 0. share: of A < 0."""

    def f(r, a, *bounds):
        l = r.detach().log()
        sign = 1 if a > 0 else -1
        a = a if a > 0 else a * share
        x = next(x for x in curves[sign] if x.low <= l <= x.high)
        if x.kind == "r":
            return r * a
        if x.kind == "0":
            return a * (math.exp(x.low if x.low >= 0 else x.high) if len(curves[1]) > 1 else 0) + 0 * r
        return a * x.level * (1 + r.log() - l)

    return f


PATTERNS = {  # the kinds of weight by r, for A > 0 and A < 0
    ("r", "r"): "no clip",
    ("r0", "0r0"): "a dual clip: no gradient where A < 0 and r > {:.4g}",
    ("0r", "r0"): "max instead of min",
    ("0r0", "0r0"): "a clip on both sides, without the min",
    ("r0", "r0"): "min(r, clip(r)) times A: where A < 0 it is clipped above",
    ("c", "c"): "the ratio does not count: the weight is 1 at any r",
    ("rc", "rc"): "a cap on the weight instead of a clip: every token keeps its gradient",
    ("crc", "crc"): "a weight with two bounds instead of a clip: every token keeps its gradient",
}
PAPER_PATTERNS = {"cispo": ("rc", "rc"), "reinforce": ("c", "c"), "rloo": ("c", "c")}
UNSPECIFIED = ["grpo", "dr_grpo", "cispo", "deepseek_v32"]


def paper_range(section):
    """(the range here, what the paper says)"""
    here = ours(section)
    if section == "cispo":
        return (here["is_weight_floor"], here["is_weight_cap"]), "unspecified"
    if section in ("gmpo", "rspo"):
        return tuple(short(math.exp(x * here["log_ratio_clip"])) for x in (-1, 1)), None
    low, high = short(1 - here["clip_eps_low"]), short(1 + here["clip_eps_high"])
    paper = {"gspo": "[0.9997, 1.0004]"}.get(section)
    return (low, high), "unspecified" if section in UNSPECIFIED else paper


def range_finding(section, low, high):
    here, paper = paper_range(section)
    if all(
        same_number(1 + x, 1 + y) if y == 0 else abs(x - y) < 1e-5 for x, y in zip((low, high), here)
    ):
        return []
    source = f"the paper: {paper}; here: [{here[0]:.6g}, {here[1]:.6g}]"
    if paper is None:
        source = f"the paper: [{here[0]:.6g}, {here[1]:.6g}]"
    return [Finding("constant", f"the range is [{low:.6g}, {high:.6g}] ({source})")]


def clip(weights, section):
    """Findings about the weights by the ratio."""
    findings = []
    share = weights.share()
    if abs(share - 1) > 1e-3:
        findings.append(Finding("mistake", f"A < 0 counts {share:.4g} times as much as A > 0"))
    curves = {sign: weights.curve(sign) for sign in (1, -1)}
    if None in curves.values():
        scaled = lambda b: torch.where(b.advantages < 0, share * b.advantages, b.advantages)  # noqa: E731
        findings = [x._replace(change=setting(advantages=scaled)) for x in findings]
        return findings + gates(weights, section)
    change = pieces(clipped=term_of(curves, share))
    if section not in [*CLIPPED, "gmpo", "rspo"]:
        change = by_weights(term_of(curves, share))
    kept = {sign: near(curve) for sign, curve in curves.items()}
    far = [edge for sign in curves for edge in edges(curves[sign]) if edge not in edges(kept[sign])]
    pattern = letters(kept[1]), letters(kept[-1])
    expected = PAPER_PATTERNS.get(section, ("r0", "0r"))
    bounds = sorted(short(x) for sign in kept for x in edges(kept[sign]))
    if section == "cispo" and pattern in [("rc", "rc"), ("crc", "crc")]:
        limits = [short(x) for x in edges(kept[1])]
        low, high = limits if len(limits) == 2 else (0.0, *limits)
        findings += range_finding(section, low, high)
        change = setting(is_weight_floor=low, is_weight_cap=high)
    elif pattern != expected:
        words = PATTERNS.get(pattern)
        if words is None or section == "cispo" and pattern != ("r", "r"):
            words = f"by r, the weight is {said(kept[1])} where A > 0; {said(kept[-1])} where A < 0"
        if "{" in words:
            words = words.format(bounds.pop())
        findings.append(Finding("variant" if "dual" in words else "mistake", words))
    if section in [*CLIPPED, "gmpo", "rspo"] and bounds and bounds[0] < 1 < bounds[-1]:
        findings += range_finding(section, bounds[0], bounds[-1])
    if far:
        most = max(abs(math.log(edge)) for edge in far)
        words = (
            f"no gradient where |log r| > {most:.4g} (r = {math.exp(most):.4g}), which hardly occurs"
        )
        findings.append(Finding("clamp", words))
    return [x._replace(change=change) for x in findings]


def gates(weights, section):
    """SAPO's tau, or the table of a smooth curve."""
    r = np.array([0.5, 1.5, 2.0])
    taus = {}
    for sign in (1, -1):
        quotients = np.maximum(r / weights.at(np.log(r), sign), 1)
        found = 2 * np.arccosh(np.sqrt(quotients)) / np.abs(r - 1)
        taus[sign] = short(found[0]) if np.allclose(found, found[0], rtol=1e-3) else None
    here = ours("sapo")["tau_pos"], ours("sapo")["tau_neg"]
    if None not in taus.values() and min(taus.values()) > 0 and section == "sapo":
        if (taus[1], taus[-1]) == here:
            return []
        change = setting(tau_pos=taus[1], tau_neg=taus[-1])
        if (taus[-1], taus[1]) == here:
            return [Finding("mistake", "the two tau swapped", change)]
        words = f"tau is {taus[1]:.4g} and {taus[-1]:.4g} (the paper: {here[0]:.4g} and {here[1]:.4g})"
        return [Finding("constant", words, change)]
    r = np.array([0.25, 0.5, 0.8, 1, 1.25, 2, 4])
    rows = [f"by r = {columns(r)}"]
    for name, sign in (("A > 0", 1), ("A < 0", -1)):
        rows.append(f"where {name} {columns(weights.at(np.log(r), sign))}")
    return [Finding("mistake", "the weight is a smooth curve: " + "; ".join(rows))]


def columns(row):
    return " ".join(f"{x:.4g}" for x in row)


def binary_kl(p, q):
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


DISTANCES = {
    "|pi - pi_old|": lambda p, q: abs(p - q),
    "KL(pi_old || pi) of this token against all others": lambda p, q: binary_kl(q, p),
    "KL(pi || pi_old) of this token against all others": binary_kl,
}


def distance(subject):
    """(name, size) of the distance of pi from pi_old beyond which tokens lose their gradient, or None."""
    edges = []
    for level in (-0.3, -0.6, -0.9):
        for sign in (1, -1):  # up where A > 0, down where A < 0
            segments = Weights(subject, level).side(sign, sign)
            if segments is None or letters(sorted(segments, key=lambda x: abs(x.low))) != "r0":
                return None
            l = segments[0].high
            edges.append((math.exp(level + min(l, 0)), math.exp(level - max(l, 0))))
    for name, of in DISTANCES.items():
        sizes = [of(*pair) for pair in edges]
        if np.allclose(sizes, sizes[0], rtol=1e-3):
            return name, short(sizes[0])
    return None


def beyond_ratio(weights):
    """Findings if a weight depends on more than r: on the probability, or on A's size."""
    findings = []
    l = np.log(np.array([0.7, 0.95, 1.1, 1.5]))
    levels = [Weights(weights.subject, level).at(l, 1) for level in (-0.05, -1.3, -5)]
    if not np.allclose(levels, levels[1], rtol=1e-2, atol=1e-3):
        rows = "; ".join(columns(row) for row in levels)
        words = "the weight depends on pi itself, not on r alone: at r = 0.7 0.95 1.1 1.5 and "
        words = f"{words}log pi about -0.05, -1.3, -5 it is {rows}"
        found = distance(weights.subject)
        if found:
            words = "no gradient where {} > {:.4g}, instead of a clip of r: DPPO's mask".format(*found)
        findings.append(Finding("mistake", words))
    sizes = np.array([0.25, 0.5, 1, 2, 4])
    scaled = sizes * weights.at(np.zeros(5), sizes)
    if np.allclose(scaled, sizes, rtol=1e-2):
        return findings
    words, change = f"at A = {columns(sizes)} the weight is {columns(scaled)}", unchanged
    if np.allclose(scaled, 1, rtol=1e-3):
        words, change = "only the sign of A counts", setting(advantages=lambda b: b.advantages.sign())
    elif np.allclose(scaled, sizes.clip(max=scaled[-1]), rtol=1e-3):
        limit = float(scaled[-1])
        words, change = (
            f"A is clipped at {limit:.4g}",
            setting(advantages=lambda b: b.advantages.clip(-limit, limit)),
        )
    return [*findings, Finding("mistake", words, change)]


# ---------------------------------------------------------------------------------- where A is 0


def k3(x):
    return torch.expm1(x) - x


def estimators(name, log_x, r):
    """{name: its formula}, log x being log_x(logp, old, ref)"""
    of = {
        "k1": lambda x: -x,
        "k2": lambda x: x**2 / 2,
        "k3": k3,
        "k3 upside down": lambda x: k3(-x),
        "|log x|": torch.abs,
        "k3 clamped at 10": lambda x: k3(x).clamp(max=10),
    }
    found = {}
    for words, formula in of.items():
        found[f"{words}, x = {name}"] = lambda *b, f=formula: f(log_x(*b))
    found[f"k3 times r, x = {name}"] = lambda *b: r(*b) * k3(log_x(*b))
    found[f"k3 times r without its gradient, x = {name}"] = lambda *b: r(*b).detach() * k3(log_x(*b))
    return found


def ratio(logp, old, ref):
    return torch.exp(logp - old)


TERMS = estimators("pi_ref / pi", lambda logp, old, ref: ref - logp, ratio)
TERMS |= estimators("pi_old / pi", lambda logp, old, ref: old - logp, ratio)
TERMS |= {
    "log pi": lambda logp, old, ref: logp,
    "pi log pi": lambda logp, old, ref: logp.exp() * logp,
    "pi": lambda logp, old, ref: logp.exp(),
    "r": ratio,
}
X = np.array([0, -2, -1, -0.5, 0.3, 1, 1.5, 3.1, 0.7])  # log(pi_ref / pi)
Y = np.array([0, 0.5, 0.3, 0.1, -0.2, -0.4, 0.6, 0.2, -0.55])  # log r
NEW = -np.array([1.3, 0.7, 1.1, 1.6, 0.9, 1.2, 2.0, 0.8, 1.4])


def idle(subject, with_ref):
    """(values, gradients) of the loss's term for one token, where A is 0, in units of the weight of a
    token at r = 1 and A = 1. Values are relative to the first."""
    ref = {"ref_logprobs": two(NEW + X)} if with_ref else {}
    n = len(X)
    zeros = np.zeros((n, 1))
    unit = Weights(subject).probe(np.zeros(n), np.ones(n))
    gradients = subject.probe(two(NEW), two(NEW - Y), zeros, **ref).gradient[:, 0] / unit
    unit = Weights(subject).probe(np.zeros(1), np.ones(1))[0]
    values = []
    for k in range(n):
        one = [two(x[k : k + 1]) for x in (NEW, NEW - Y)]
        more = {name: x[k : k + 1] for name, x in ref.items()}
        values.append(float(subject.probe(*one, zeros[:1], **more).value) / (2 * unit))
    return np.array(values) - values[0], gradients


def formulas(with_ref):
    """{name: (values, gradients)} of TERMS in the batch of `idle`."""
    found = {}
    for name, term in TERMS.items():
        logp = torch.tensor(NEW, requires_grad=True)
        if with_ref or "ref" not in name:
            values = term(logp, torch.tensor(NEW - Y), torch.tensor(NEW + X))
            (gradient,) = torch.autograd.grad(values.sum(), logp)
            found[name] = (values - values[0]).detach().numpy(), gradient.numpy()
    return found


def fits(measured, known, tolerance):
    """Yields [(coefficient, name)], one or two, whose sum is what was measured."""
    for size in (1, 2):
        for names in itertools.combinations(known, size):
            columns = np.stack([known[name] for name in names], 1)
            coefficients, _, rank, _ = np.linalg.lstsq(columns, measured, rcond=1e-9)
            error = np.abs(columns @ coefficients - measured).max()
            is_needed = rank == size and np.abs(coefficients).min() > 1e-6
            if is_needed and error < tolerance * (1 + np.abs(measured).max()):
                yield [(short(c), name) for c, name in zip(coefficients, names, strict=True)]


def of_values(subject, with_ref):
    """(the terms by their gradients, the terms by their values), [(coefficient, name)]; None if unknown."""
    values, gradients = idle(subject, with_ref)
    known = formulas(with_ref)
    tolerance = 1e-6 if subject.dtype is torch.float64 else 1e-3
    found = []
    for measured, k in ((gradients, 1), (values, 0)):
        candidates = list(fits(measured, {name: x[k] for name, x in known.items()}, tolerance))
        found.append(candidates if np.abs(measured).max() > tolerance else [[]])
    both = [x for x in found[0] if x in found[1]]
    if both:
        return both[0], both[0]
    return tuple(x[0] if x else None for x in found)


def listed_terms(found):
    return " and ".join(
        f"{name}, coefficient {abs(c):.4g}{', rewarded' if c < 0 else ''}" for c, name in found
    )


def said_terms(by_gradient, by_value):
    if by_gradient is None:
        return "a term whose gradient no known estimator has"
    if by_value == by_gradient:
        return listed_terms(by_gradient)
    value = "a value of another kind" if by_value is None else listed_terms(by_value) or "no value"
    if not by_gradient:
        return f"{value}, without a gradient"
    return f"the gradient of {listed_terms(by_gradient)}, the value of {value}"


PAPER_TERMS = {"grpo": "k3, x = pi_ref / pi", "deepseek_v32": "k3 times r, x = pi_ref / pi"}


def kl_divisor(subject, formula):
    """(findings, what a term where A is 0 is divided by), if the terms have a gradient that shows it."""
    measured = per_token(subject, 0.0, 1.0 if subject.takes("ref_logprobs") else None)
    found = fit_divisor(measured, "") if any(gradient.any() for _, gradient in measured) else None
    if found is None or subject.returns_terms:
        return [], formula
    name, own = DIVISORS[found[0]]
    if all(
        np.allclose(own(*sizes), formula(*sizes) * own(2, 2, 4, 2) / formula(2, 2, 4, 2))
        for sizes in SIZES
    ):
        return [], formula
    scale = formula(9, 2, 18, 2) / own(9, np.array(2), 18, 2)
    return [Finding("mistake", f"what is left where A is 0 has a mean of its own: {name}")], (
        lambda *sizes: own(*sizes) * scale
    )


SIZES = [(3, np.array([2, 5, 4]), 11, 6), (2, np.array([2, 2]), 4, 7)]


def kl(subject, found_divisor):
    """Findings about what is left where A is 0, without a reference and with one."""
    findings = []
    section = subject.section
    words, k = found_divisor or (PAPER_DIVISORS.get(section, "B |o|"), 1.0)
    paper, here = PAPER_TERMS.get(section), ours(section).get("kl_coef")
    states = [False, True][: 1 + subject.takes("ref_logprobs")]
    for with_ref in states[subject.needs("ref_logprobs") :]:
        by_gradient, by_value = of_values(subject, with_ref)
        if (by_gradient, by_value) == ([], []):
            findings += [no_kl(subject)] if with_ref and paper else []
            continue
        more, divide = [], lambda *sizes: DIVISORS[words][1](*sizes) * abs(k)
        if by_gradient:
            more, divide = kl_divisor(subject, divide)
        is_known = None not in (by_gradient, by_value)
        change = with_terms(term_of_both(by_gradient, by_value), divide) if is_known else unchanged
        more = [x._replace(change=change) for x in more]
        about = said_terms(by_gradient, by_value)
        is_own = with_ref and is_known and by_gradient == by_value and by_gradient[0][0] > 0
        if is_own and [name for _, name in by_gradient] == [paper]:
            c = by_gradient[0][0]
            if not same_number(c, here):
                about = f"the KL's coefficient is {c:.4g} (the paper: {here})"
                findings.append(Finding("constant", about, setting(kl_coef=c)))
            findings += more
            continue
        if with_ref and paper:
            is_variant = is_own and len(by_gradient) == 1 and by_gradient[0][1] in VARIANT_TERMS
            kind = "variant" if is_variant else "mistake"
            about = f"the KL is {about}"
        else:
            where = "without a reference, " if not with_ref and len(states) > 1 else ""
            name = "a KL" if "x = " in about else "a term"
            kind, about = "mistake", f"{where}{name} that the paper lacks: {about}"
        findings = [Finding(kind, about, change), *more]
    return findings + constant(subject)


def term_of_both(by_gradient, by_value):
    """[(1, formula, whether it needs a reference)] with these gradients and these values."""

    def k(*logps):
        g = sum(c * TERMS[name](*logps) for c, name in by_gradient) + 0 * logps[0]
        v = sum(c * TERMS[name](*logps) for c, name in by_value) + 0 * logps[0]
        return g - g.detach() + v.detach()

    return [(1.0, k, any("ref" in name for _, name in [*by_gradient, *by_value]))]


def constant(subject):
    """A finding if the loss of one token is not 0 where A is 0 and every log-prob is the same."""
    one = two(np.array([-1e-9]))
    value = float(subject.probe(one, one, np.zeros((1, 1)), ref_logprobs=one).value)
    if abs(value) < 1e-6:
        return []
    words = f"a constant is added: where A is 0 the loss is {value:.4g}"
    return [Finding("variant", words, lambda J, b: J(b) - value)]


VARIANT_TERMS = [f"{name}, x = pi_ref / pi" for name in ("k2", "k3", "k3 clamped at 10", "k3 times r")]
VARIANT_TERMS.append("k3 times r without its gradient, x = pi_ref / pi")


def no_kl(subject):
    change = setting(ref_logprobs=None)
    if subject.is_off("kl_coef"):
        return Finding(
            "constant", f"the KL's coefficient is 0 (the paper: {ours('grpo')['kl_coef']})", change
        )
    return Finding("mistake", "there is no KL: the reference is not used", change)


# ------------------------------------------------------------------------------------------ all of it


def findings(subject):
    """[Finding] of a loss: how it differs from its paper, as far as our batches show it."""
    if not subject.is_separate:
        return []  # in our batches, all A are equal
    found, found_divisor = divisor(subject)
    if {x.change for x in found} & {detached, rounded}:
        return found
    if subject.lacks_old and subject.section not in ("reinforce", "rloo"):
        return found + kl(subject, found_divisor)
    weights = Weights(subject)
    beyond = beyond_ratio(weights)
    if not any("pi" in x.words for x in beyond):
        found += clip(weights, subject.section)
    if subject.section == "deepseek_v32":
        found += offpolicy(subject)
    return found + beyond + kl(subject, found_divisor)


def offpolicy(subject):
    """DeepSeek-V3.2's mask: below which log r a bad completion has no gradient."""
    l = -np.linspace(0.0, 0.2, 401)[1:]
    zeros = np.zeros((len(l), 1))
    old = two(np.full(len(l), -1.3))
    new = old + two(l)
    left = subject.probe(new, old, zeros - 1).gradient - subject.probe(new, old, zeros).gradient
    dropped = np.abs(left[:, 0]) < 1e-9
    delta = short(-l[dropped.argmax()] - 0.00025) if dropped.any() else math.inf
    here = ours("deepseek_v32")["offpolicy_mask"]
    change = setting(offpolicy_mask=delta)
    if delta == math.inf:
        words = "no off-policy mask: a bad completion keeps its gradient wherever the policy has moved"
        return [Finding("mistake", words, change)]
    if abs(delta - here) < 3e-4:
        return []
    about = f"the off-policy mask's delta is {delta:.3g} (the paper: unspecified; here: {here})"
    return [Finding("constant", about, change)]
