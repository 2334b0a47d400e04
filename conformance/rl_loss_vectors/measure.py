"""Measures a loss with batches of our own: what it divides by, the weight of a token by its ratio, and
what is left where A is 0. Each difference from the paper is a Finding with the change that it makes."""

import functools
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from rl_loss_vectors import mistakes
from rl_loss_vectors.mistakes import by_weights, divided_by, pieces, setting, unchanged, with_term
from rl_loss_vectors.reference import k3
from rl_loss_vectors.vectors import ours

FAR = math.log(9.99)  # a clip of r beyond this is there for safety
CLIPPED = [*mistakes.CLIPPED, "gmpo", "rspo"]


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


def columns(row):
    return " ".join(f"{x:.4g}" for x in row)


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
PAPER_DIVISORS = dict.fromkeys(["ppo", "dapo", "vapo", "cispo", "value_loss"], "N")
PAPER_DIVISORS |= dict.fromkeys(["dr_grpo", "reinforce", "rloo"], "B")
LENGTHS = [((6, 3, 1, 4), 6), ((2, 5, 5), 7), ((3, 3), 3)]  # of completions, and the padded width


def masks_for(subject):
    masks = [np.arange(T) < np.array(lengths)[:, None] for lengths, T in LENGTHS]
    return [np.ones_like(mask) if subject.lacks_mask else mask for mask in masks]


def per_token(subject, A, shift=0.0):
    """[(mask, gradient)] where every ratio is 1; shift: log(pi_ref / pi)"""
    found = []
    for mask in masks_for(subject):
        new = -0.4 - 0.3 * np.arange(mask.size).reshape(mask.shape) % 2.1
        A_B1 = np.full((len(mask), 1), A)
        inputs = {"logprobs": new, "old_logprobs": new, "advantages": A_B1, "mask": mask}
        found.append((mask, subject.probe(**inputs, ref_logprobs=new + shift).gradient))
    return found


def fit_divisor(measured, paper):
    """(words of DIVISORS, k) where the gradient is 1 / (k times what the words say), or None"""
    options = []
    for words, (_, formula) in DIVISORS.items():
        products = []
        for mask, gradient in measured:
            o = mask.sum(1, keepdims=True)
            sizes = np.zeros(mask.shape) + formula(len(mask), o, o.sum(), mask.shape[1])
            products.append((gradient * sizes)[mask])
        products = np.concatenate(products)
        if products[0] != 0 and np.allclose(products, products[0], rtol=1e-3):
            k = short(1 / products[0])
            options.append((not same_number(abs(k), 1), words != paper, len(words), words, k))
    return min(options)[3:] if options else None


def divisor(subject, measured):
    """([Finding], what the loss divides by, a function as in DIVISORS; None if that is unknown)"""
    section = subject.section
    paper = PAPER_DIVISORS.get(section, "B |o|")
    found = (paper, 1.0) if subject.returns_terms else fit_divisor(measured, paper)
    if found is None:
        rows = "; ".join(columns(row[kept]) for kept, row in zip(*measured[0], strict=True))
        words = (
            f"at r = 1 and A = 1, the weights of the tokens of {len(measured[0][0])} rows are {rows}"
        )
        return [Finding("mistake", words)], None
    words, k = found
    name, formula = DIVISORS[words]
    findings = [Finding("mistake", "wrong sign", lambda J, b: -J(b))] if k < 0 else []
    k = abs(k)
    here = ours(section).get("max_new_tokens")
    if here and words == paper and not same_number(k, 1):
        if not same_number(k, here):
            about = f"L_max is {k:.5g} (the paper: any; here: {here})"
            findings.append(Finding("constant", about, setting(max_new_tokens=k)))
    elif words != paper or not same_number(k, 1):
        factor = f"divided by {k:.4g} times "
        about = factor + ("what the paper divides by" if words == paper else words)
        about = name if same_number(k, 1) else about
        findings.append(Finding("mistake", about, divided_by(lambda *sizes: formula(*sizes) * k)))
    return findings, lambda *sizes: formula(*sizes) * k


def boundary(test, inside, outside):
    """The number from which on test(numbers) is false, or None if it is true up to `outside`."""
    for _ in range(4):
        numbers = np.linspace(inside, outside, 64)
        is_true = [bool(x) for x in test(numbers)]
        if False not in is_true:
            return None
        n = max(1, is_true.index(False))
        inside, outside = numbers[n - 1], numbers[n]
    return float(inside + outside) / 2


# ------------------------------------------------------------------------------ weights by the ratio


def policy_gradient(subject, new, old, A):
    """The gradient of J without what is left where A is 0, (B, T). A: (B,)"""
    # A function that mixes rows is asked about one at a time.
    groups = [slice(None)] if subject.is_separate else [slice(k, k + 1) for k in range(len(A))]
    found = []
    for rows in groups:
        inputs = {"logprobs": new[rows], "old_logprobs": old[rows]}
        idle = subject.probe(**inputs, advantages=0.0 * A[rows, None]).gradient
        found.append(idle - subject.probe(**inputs, advantages=A[rows, None]).gradient)
    return np.concatenate(found)


class Weights:
    """The weights of a token: the derivative of J with respect to its log-prob, divided by A, relative
    to its value at r = 1 for the same sign of A."""

    def __init__(self, subject, level=-1.3):
        """level: the larger one of log pi and log pi_old"""
        self.subject, self.level = subject, level
        # A function that computes in float32, whatever it is given, does not feel a step of 1e-9.
        near_1 = self.probe(1e-4 + 1e-9 * np.arange(8), np.ones(8))
        is_exact = subject.dtype is torch.float64 and len({*near_1}) > 5
        self.tolerance, self.start = (1e-6, 1e-5) if is_exact else (3e-5, 1e-4)
        if subject.dtype is np.float64:
            self.tolerance, self.start = 1e-3, 3e-3

    def probe(self, log_r, A):
        new = two(self.level + np.minimum(log_r, 0))
        old = two(self.level - np.maximum(log_r, 0))
        if self.subject.section == "deepseek_v32":  # the second token keeps the mask off
            new[:, 1], old[:, 1] = old[:, 0], new[:, 0]
        return policy_gradient(self.subject, new, old, A)[:, 0] / A

    def at(self, log_r, A):
        A = np.broadcast_to(float(A), log_r.shape) if np.isscalar(A) else A
        return self.probe(log_r, A) / self.probe(0 * log_r, np.sign(A))

    def fits(self, kind, log_r, w):
        """kind: "r" if the weight is r, or the constant that it is"""
        expected = math.exp(log_r) if kind == "r" else kind
        return abs(w - expected) <= self.tolerance * max(1, abs(expected))

    def side(self, sign, way):
        """(kinds, edges, as log r) from r = 1 outwards, down if way is -1; None if it is smooth."""

        def test(kind, grid):
            return [self.fits(kind, *pair) for pair in zip(grid, self.at(grid, sign), strict=True)]

        grid = way * np.geomspace(self.start, 16, 100)  # our own scripts clamp at 20
        weights = self.at(grid, sign)
        kinds, edges = [], []
        options = ["r", 0.0, weights[0]]
        for n, (log_r, w) in enumerate(zip(grid, weights, strict=True)):
            fitting = [kind for kind in options if self.fits(kind, log_r, w)]
            if not fitting:
                kinds.append(options[0])
                is_kind = functools.partial(test, options[0])
                edges.append(boundary(is_kind, grid[n - 1], log_r))
                fitting = [kind for kind in ("r", 0.0, w) if self.fits(kind, log_r, w)]
            if len(edges) > 3:
                return None
            options = fitting
        return [*kinds, options[0]], edges

    def curve(self, sign):
        """(kinds, edges) from r = 0 to infinity; None if the curve is smooth."""
        down, up = self.side(sign, -1), self.side(sign, 1)
        if down is None or up is None:
            return None
        kinds, edges = down[0][::-1], down[1][::-1]
        if (kinds[-1] == "r") == (up[0][0] == "r"):
            kinds = kinds[:-1]  # the same below 1 and above
        else:
            edges = [*edges, 0.0]
        return [*kinds, *up[0]], [*edges, *up[1]]


def without_far(kinds, edges):
    """A curve without the clips that are there for safety."""
    first = 1 if edges and edges[0] < -FAR and kinds[0] == 0 else 0
    last = -1 if edges and edges[-1] > FAR and kinds[-1] == 0 else None
    return kinds[first:last], edges[first:last]


def letters(kinds):
    return "".join("r" if kind == "r" else "0" if kind == 0 else "c" for kind in kinds)


def said(kinds, edges):
    """r up to 1.2, then 0"""
    words = ["r" if kind == "r" else f"{kind:.4g}" for kind in kinds]
    limits = [f" up to {math.exp(edge):.5g}" for edge in edges]
    return ", then ".join(word + limit for word, limit in zip(words, [*limits, ""], strict=True))


def term_of(curves, share):
    """f(r, a): a term whose weights are these curves, clipped where they are 0. share: of A < 0"""

    def f(r, a, *bounds):
        kinds, edges = curves[1 if a > 0 else -1]
        a = a if a > 0 else a * share
        log_r = r.detach().log()
        n = sum(bool(log_r > edge) for edge in edges)
        if kinds[n] == "r":
            return r * a
        if kinds[n] == 0:
            nearest = min([*edges[max(n - 1, 0) : n + 1]], key=abs, default=-math.inf)
            return a * math.exp(nearest) + 0 * r
        return a * kinds[n] * (1 + r.log() - log_r)

    return f


PATTERNS = {  # the kinds of weights by r, for A > 0 and A < 0
    ("r", "r"): "no clip",
    ("r0", "0r0"): "a dual clip: no gradient where A < 0 and r > {:.4g}",
    ("0r", "r0"): "max instead of min",
    ("0r0", "0r0"): "a clip on both sides, without the min",
    ("r0", "r0"): "min(r, clip(r)) times A: where A < 0 it is clipped above",
    ("c", "c"): "the ratio does not count: the weight is the same at any r",
}
PAPER_PATTERNS = dict.fromkeys(CLIPPED, ("r0", "0r")) | {"cispo": ("rc", "rc")}
PAPER_PATTERNS |= dict.fromkeys(["reinforce", "rloo"], ("c", "c")) | {"sapo": None}  # a smooth curve
PAPER_RANGES = {"gspo": "[0.9997, 1.0004]"}
PAPER_RANGES |= dict.fromkeys(["grpo", "dr_grpo", "cispo", "deepseek_v32"], "unspecified")


def range_finding(section, low, high):
    """[Finding] if the range of ratios is not the one here."""
    here = ours(section)
    if section == "cispo":
        bounds = here["is_weight_floor"], here["is_weight_cap"]
    elif "log_ratio_clip" in here:
        bounds = [math.exp(x * here["log_ratio_clip"]) for x in (-1, 1)]
    else:
        bounds = 1 - here["clip_eps_low"], 1 + here["clip_eps_high"]
    if np.allclose((low, high), bounds, rtol=1e-5, atol=1e-5):
        return []
    text = "[{:.5g}, {:.5g}]".format(*bounds)
    paper = PAPER_RANGES.get(section)
    source = f"the paper: {paper}; here: {text}" if paper else f"the paper: {text}"
    change = setting(is_weight_floor=low, is_weight_cap=high)
    if section != "cispo":
        curves = {1: (["r", 0.0], [math.log(high)]), -1: ([0.0, "r"], [math.log(low)])}
        change = pieces(clipped=term_of(curves, 1))
    return [Finding("constant", f"the range is [{low:.5g}, {high:.5g}] ({source})", change)]


def clip(weights):
    """[Finding] about the weights by the ratio."""
    section = weights.subject.section
    one = np.ones(1)
    share = float((weights.probe(0 * one, -one) / weights.probe(0 * one, one))[0])
    findings = []
    if abs(share - 1) > 1e-3:
        words = f"A < 0 counts {share:.4g} times as much as A > 0" if share else "A < 0 does not count"
        findings.append(Finding("mistake", words))
    curves = {1: weights.curve(1), -1: ([0.0], []) if share == 0 else weights.curve(-1)}
    if None in curves.values():
        return gates(weights, share, findings)
    near = {sign: without_far(*curve) for sign, curve in curves.items()}
    pattern = letters(near[1][0]), letters(near[-1][0])
    bounds = sorted(math.exp(x) for _, edges in near.values() for x in edges)
    change = pieces(clipped=term_of(curves, share))
    if section not in CLIPPED:
        change = by_weights(term_of(curves, share))
    if section == "cispo" and pattern in [("rc", "rc"), ("crc", "crc")]:
        kinds, _ = near[1]
        low, high = 0.0 if kinds[0] == "r" else kinds[0], kinds[-1]
        findings += range_finding(section, low, high)
    elif section == "cispo" and pattern == ("r", "r"):
        findings.append(Finding("mistake", "no cap"))
        change = setting(is_weight_cap=math.inf)
    elif pattern != PAPER_PATTERNS.get(section):
        shown = f"by r, the weight is {said(*near[1])} where A > 0; {said(*near[-1])} where A < 0"
        words = PATTERNS.get(pattern, shown) if section in CLIPPED or not bounds else shown
        kind = "variant" if "dual" in words else "mistake"
        findings.append(Finding(kind, words.format(bounds.pop()) if "{" in words else words))
    if section in CLIPPED and bounds and bounds[0] < 1 < bounds[-1]:
        findings += range_finding(section, bounds[0], bounds[-1])
    far = [edge for _, edges in curves.values() for edge in edges if abs(edge) > FAR]
    where = {f"r {'>' if edge > 0 else '<'} {math.exp(edge):.4g}" for edge in far}
    if far and section in CLIPPED:
        words = f"no gradient where {' or '.join(sorted(where))}, which is rare"
        findings.append(Finding("clamp", words))
    return [x if x.kind == "constant" else x._replace(change=change) for x in findings]


def gates(weights, share, findings):
    """SAPO's tau, or the table of a smooth curve."""
    section = weights.subject.section
    r = np.array([0.25, 0.5, 0.8, 1.25, 2, 4])
    rows = {sign: weights.at(np.log(r), sign) for sign in (1, -1)}
    # w = r sech^2(tau (r - 1) / 2)
    taus = [2 * np.arccosh(np.sqrt(np.maximum(r / w, 1))) / abs(r - 1) for w in rows.values()]
    if section == "sapo" and all(np.allclose(tau, tau[0], rtol=1e-3) for tau in taus):
        yours, here = [short(tau[0]) for tau in taus], list(ours("sapo").values())
        change = setting(tau_pos=yours[0], tau_neg=yours[1])
        words = "tau is {:.4g} and {:.4g} (the paper: {:.4g} and {:.4g})".format(*yours, *here)
        if yours != here:
            kind = "mistake" if yours == here[::-1] else "constant"
            findings.append(Finding(kind, words, change))
    else:
        words = f"by r = {columns(r)}, the weight is {columns(rows[1])} where A > 0, "
        findings.append(Finding("mistake", words + f"{columns(rows[-1])} where A < 0"))
    scaled = setting(advantages=lambda b: torch.where(b.advantages < 0, share, 1) * b.advantages)
    return [x._replace(change=scaled) if "counts" in x.words else x for x in findings]


def binary_kl(p, q):
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


DISTANCES = {
    "|pi - pi_old|": lambda p, q: abs(p - q),
    "KL(pi_old || pi) of this token against all others": lambda p, q: binary_kl(q, p),
    "KL(pi || pi_old) of this token against all others": binary_kl,
}


def beyond_ratio(subject):
    """[Finding] if a weight depends on pi itself, as with DPPO's masks."""
    log_r = np.log(np.array([0.7, 0.95, 1.1, 1.5]))
    rows = [Weights(subject, level).at(log_r, 1) for level in (-0.05, -1.3, -5)]
    if np.allclose(rows, rows[1], rtol=1e-2, atol=1e-3):
        return []
    edges = []
    for level, sign in itertools.product((-0.3, -0.6, -0.9), (1, -1)):
        found = Weights(subject, level).side(sign, sign)  # up where A > 0, down where A < 0
        if found and letters(found[0])[-1] == "0":
            log_r = found[1][-1]
            edges.append((math.exp(level + min(log_r, 0)), math.exp(level - max(log_r, 0))))
    for name, of in DISTANCES.items():
        sizes = [of(*pair) for pair in edges]
        if len(edges) == 6 and np.allclose(sizes, sizes[0], rtol=1e-3):
            words = f"no gradient where {name} > {short(sizes[0]):.4g}: DPPO's mask instead of a clip"
            return [Finding("mistake", words)]
    words = "the weight depends on pi, not on r alone: at r = 0.7 0.95 1.1 1.5 and log pi about "
    text = f"{words}-0.05, -1.3, -5 it is {'; '.join(map(columns, rows))}"
    return [Finding("mistake", text)]


def size_of_advantages(weights):
    """[Finding] if a gradient is not proportional to A."""
    sizes = np.array([0.5, 1, 2, 4])
    found = sizes * weights.at(np.zeros(4), sizes)
    limit = short(found[-1])
    if np.allclose(found, sizes, rtol=1e-2):
        return []
    if np.allclose(found, 1, rtol=1e-3):
        words = "only the sign of A counts"
        return [Finding("mistake", words, setting(advantages=lambda b: b.advantages.sign()))]
    if np.allclose(found, sizes.clip(max=limit), rtol=1e-3):
        clipped = setting(advantages=lambda b: b.advantages.clip(-limit, limit))
        return [Finding("mistake", f"A is clipped at {limit:.4g}", clipped)]
    return [
        Finding("mistake", f"where A is {columns(sizes)}, the gradient is that of {columns(found)}")
    ]


# ---------------------------------------------------------------------------------- where A is 0


def terms_of(name, log_x):
    """{name of a term: its formula}, log x being log_x(logp, old, ref)"""
    of = {
        "k1": lambda x, r: -x,
        "k2": lambda x, r: x**2 / 2,
        "k3": lambda x, r: k3(x),
        "k3 upside down": lambda x, r: k3(-x),
        "|log x|": lambda x, r: abs(x),
        "k3 clamped at 10": lambda x, r: k3(x).clamp(max=10),
        "k3 times r": lambda x, r: r * k3(x),
        "k3 times r without its gradient": lambda x, r: r.detach() * k3(x),
        "k3 times min(r, 1)": lambda x, r: r.clamp(max=1) * k3(x),
    }
    return {
        f"{words}, x = {name}": lambda logp, old, ref, f=f: f(log_x(logp, old, ref), (logp - old).exp())
        for words, f in of.items()
    }


TERMS = terms_of("pi_ref / pi", lambda logp, old, ref: ref - logp)
TERMS |= terms_of("pi_old / pi", lambda logp, old, ref: old - logp)
TERMS |= {
    "log pi": lambda logp, old, ref: logp,
    "pi log pi": lambda logp, old, ref: logp.exp() * logp,
    "r": lambda logp, old, ref: (logp - old).exp(),
}
NEW = -np.array([1.3, 0.7, 1.1, 1.6, 0.9, 1.2, 2.0, 0.8, 1.4])
OLD = NEW - np.array([0, 0.5, 0.3, 0.1, -0.2, -0.4, 0.6, 0.2, -0.55])
REF = NEW + np.array([0, -2, -1, -0.5, 0.3, 1, 1.5, 3.1, 0.7])


def idle(subject, with_ref):
    """(values, gradients) of what is left for one token where A is 0, in units of the weight of a token
    at r = 1 and A = 1. Values are relative to the first."""
    values, gradients = [], []
    for k in range(len(NEW)):
        new, old, ref = (two(x[k : k + 1]) for x in (NEW, OLD, REF))
        inputs = {"logprobs": new, "old_logprobs": old, "advantages": np.zeros((1, 1))}
        answer = subject.probe(**inputs, ref_logprobs=ref if with_ref else None)
        unit = policy_gradient(subject, new, new, np.ones(1))[0, 0]
        values.append(float(answer.value) / (2 * unit))
        gradients.append(answer.gradient[0, 0] / unit)
    return np.array(values) - values[0], np.array(gradients)


def fits(measured, known, tolerance):
    """[[(coefficient, name)]]: every one or two terms whose sum is what was measured"""
    if np.abs(measured).max() < tolerance:
        return [[]]
    found = []
    for names in [*itertools.combinations(known, 1), *itertools.combinations(known, 2)]:
        matrix = np.stack([known[name] for name in names], 1)
        coefficients, _, rank, _ = np.linalg.lstsq(matrix, measured, rcond=1e-9)
        error = np.abs(matrix @ coefficients - measured).max()
        is_needed = rank == len(names) and np.abs(coefficients).min() > 1e-6
        if is_needed and error < tolerance * (1 + np.abs(measured).max()):
            found.append([(short(c), name) for c, name in zip(coefficients, names, strict=True)])
    return found


def left(subject, with_ref):
    """(terms that have the gradient, terms that have the value), [(coefficient, name)] or None"""
    known = {}
    for name, term in TERMS.items():
        logp = torch.tensor(NEW, requires_grad=True)
        values = term(logp, torch.tensor(OLD), torch.tensor(REF))
        if with_ref or "ref" not in name:
            (gradient,) = torch.autograd.grad(values.sum(), logp)
            known[name] = (values - values[0]).detach().numpy(), gradient.numpy()
    tolerance = 1e-5 if subject.dtype is torch.float64 else 1e-3
    by_value, by_gradient = (
        fits(measured, {name: x[k] for name, x in known.items()}, tolerance)
        for k, measured in enumerate(idle(subject, with_ref))
    )
    both = [x for x in by_gradient if x in by_value]
    return tuple((both or found or [None])[0] for found in (by_gradient, by_value))


def said_terms(subject, with_ref, by_gradient, by_value):
    def listed(found):
        words = [f"{name}, coefficient {abs(c):.4g}{', rewarded' * (c < 0)}" for c, name in found]
        return " and ".join(words)

    if by_gradient is None:
        points = [f"log r = {columns(NEW - OLD)}", f"log(pi_ref / pi) = {columns(REF - NEW)}"]
        where = " and ".join(points[: 1 + with_ref])
        return f"a term whose gradient, at {where}, is {columns(idle(subject, with_ref)[1])}"
    if by_gradient == by_value:
        return listed(by_gradient)
    value = "something else" if by_value is None else listed(by_value) or "nothing"
    if not by_gradient:
        return f"{value}, without a gradient"
    return f"the gradient of {listed(by_gradient)}, the value of {value}"


PAPER_TERMS = {"grpo": "k3, x = pi_ref / pi", "deepseek_v32": "k3 times r, x = pi_ref / pi"}
VARIANTS = ["k2", "k3", "k3 clamped at 10", "k3 times r", "k3 times r without its gradient"]
VARIANTS = [f"{name}, x = pi_ref / pi" for name in [*VARIANTS, "k3 times min(r, 1)"]]


def kl(subject, divide):
    """[Finding] about what is left where A is 0, without a reference and with one. divide: as `divisor`
    gives it"""
    findings = []
    paper, here = PAPER_TERMS.get(subject.section), ours(subject.section).get("kl_coef")
    states = [] if subject.needs("ref_logprobs") else [False]
    if subject.takes("ref_logprobs"):
        states.append(True)
    for with_ref in states:
        by_gradient, by_value = left(subject, with_ref)
        if (by_gradient, by_value) == ([], []):
            if with_ref and paper:
                findings.append(no_kl(subject, here))
            continue
        more, own_divide = mean_of_its_own(subject, divide) if by_gradient else ([], divide)
        change = unchanged
        if None not in (by_gradient, by_value):
            change = with_term(term_with(by_gradient, by_value), own_divide)
        is_one = by_gradient == by_value and len(by_gradient or []) == 1 and by_gradient[0][0] > 0
        name = by_gradient[0][1] if is_one else None
        about = said_terms(subject, with_ref, by_gradient, by_value)
        if with_ref and name == paper and paper:
            c = by_gradient[0][0]
            if not same_number(c, here):
                words = f"the KL's coefficient is {c:.4g} (the paper: {here})"
                findings.append(Finding("constant", words, setting(kl_coef=c)))
        elif with_ref and paper:
            kind = "variant" if name in VARIANTS else "mistake"
            findings = [Finding(kind, f"the KL is {about}", change)]
        else:
            where = "" if with_ref or len(states) == 1 else "without a reference, "
            kind = "a KL" if "x = " in about else "a term"
            findings = [Finding("mistake", f"{where}{kind} that the paper lacks: {about}", change)]
        findings += [x._replace(change=change) for x in more]
    return findings or constant(subject)


def term_with(by_gradient, by_value):
    """A term with these gradients and these values; None without a reference that it needs."""
    needs_ref = any("ref" in name for _, name in [*by_gradient, *by_value])

    def term(logp, old, ref):
        if needs_ref and ref is None:
            return 0 * logp
        g, v = (
            sum([c * TERMS[name](logp, old, ref) for c, name in found], 0 * logp)
            for found in (by_gradient, by_value)
        )
        return g - g.detach() + v.detach()

    return term


def mean_of_its_own(subject, divide):
    """([Finding], what divides it) for what is left where A is 0."""
    found = fit_divisor(per_token(subject, 0.0, 1.0), "")
    if found is None or subject.returns_terms:
        return [], divide
    name, formula = DIVISORS[found[0]]
    batches = [(len(mask), mask.sum(1), mask.sum(), mask.shape[1]) for mask in masks_for(subject)]
    quotients = np.concatenate([np.ravel(divide(*x) / formula(*x) + 0 * x[1]) for x in batches])
    if np.allclose(quotients, quotients[0]):
        return [], divide
    one = (1, np.array(2), 2, 2)  # where its coefficient was measured
    scale = divide(*one) / formula(*one)
    words = f"what is left where A is 0 has a mean of its own: {name}"
    return [Finding("mistake", words)], lambda *sizes: formula(*sizes) * scale


def no_kl(subject, here):
    change = setting(ref_logprobs=None)
    if subject.is_off("kl_coef"):
        return Finding("constant", f"the KL's coefficient is 0 (the paper: {here})", change)
    return Finding("mistake", "there is no KL: the reference is not used", change)


def constant(subject):
    """[Finding] if the loss of one token is not 0 where A is 0 and every log-prob is the same."""
    one = two(np.array([-1e-9]))
    inputs = {"logprobs": one, "old_logprobs": one, "advantages": np.zeros((1, 1))}
    value = float(subject.probe(**inputs).value)
    if abs(value) < 1e-6:
        return []
    words = f"a constant is added: where A is 0 the loss is {value:.4g}"
    return [Finding("variant", words, lambda J, b: J(b) - value)]


# ------------------------------------------------------------------------------------------ all of it


def findings(subject):
    """Yields a Finding for each way in which a loss differs from its paper, as our batches show it."""
    if subject.section not in PAPER_PATTERNS:
        return  # a new section: its cases are all that is compared
    divide = DIVISORS[PAPER_DIVISORS.get(subject.section, "B |o|")][1]
    if subject.is_separate:
        pairs = zip(per_token(subject, 1.0), per_token(subject, 0.0), strict=True)
        measured = [(mask, idle - gradient) for (mask, gradient), (_, idle) in pairs]
        if max(np.abs(gradient).max() for _, gradient in measured) < 1e-12:
            words = "no gradient of the policy term reaches the log-probs"
            yield Finding("mistake", words, lambda J, b: J(b).detach())
            return
        found, divide = divisor(subject, measured)
        yield from found
    weights = Weights(subject)
    unit = weights.probe(np.zeros(1), np.ones(1))[0]
    if divide is None or not np.isfinite(unit) or abs(unit) < 1e-12:
        return  # a single row whose mean is subtracted from A, for example
    if not subject.lacks_old:
        other = beyond_ratio(subject) if subject.is_separate else []
        yield from other or clip(weights)
        if subject.section == "deepseek_v32":
            yield from offpolicy(subject)
    if subject.is_separate:
        yield from size_of_advantages(weights)
    yield from kl(subject, divide)


def offpolicy(subject):
    """[Finding] about DeepSeek-V3.2's mask: below which log r a bad completion has no gradient."""

    def is_kept(moved):
        old = two(-1.3 + 0 * moved)
        new = old - np.stack([0 * moved, 2 * moved], 1)  # the first token is inside every range
        return np.abs(policy_gradient(subject, new, old, 0 * moved - 1)[:, 0]) > 1e-9

    here = ours("deepseek_v32")["offpolicy_mask"]
    delta = boundary(is_kept, 0.0, 0.5)
    if delta is None:
        words = "no off-policy mask: a bad completion keeps its gradient wherever the policy has moved"
        return [Finding("mistake", words, setting(offpolicy_mask=math.inf))]
    about = f"the off-policy mask's delta is {delta:.4g} (the paper: unspecified; here: {here})"
    if abs(delta - here) < 1e-4:
        return []
    return [Finding("constant", about, setting(offpolicy_mask=short(delta)))]
