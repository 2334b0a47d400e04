"""Measures a loss with batches of our own: what it divides by, the weight of a token by its ratio, and
what is left where A is 0."""

import functools
import itertools
import math
from typing import NamedTuple

import numpy as np
import torch

from rl_loss_vectors.reference import k3
from rl_loss_vectors.vectors import BY_TOKENS, ours

FAR = math.log(9.99)  # a clip of r beyond this is there for safety


class Finding(NamedTuple):
    """One difference between a function and its paper, as measured."""

    kind: str  # "mistake", "variant", "clamp", or "constant" where only a number differs
    words: str
    settings: "dict | None" = None  # of a constant: {our keyword: the author's value}
    reach: float = math.inf  # of a clamp: the |log r| where it begins

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
    return " ".join(f"{x + 0:.4g}" for x in row)  # no -0


# -------------------------------------------------------------------------------------- the divisor

DIVISORS = {  # B rows, o tokens in each, N in all, the padded width T
    "N": ("token-mean", lambda B, o, N, T: N),
    "B |o|": ("sequence-mean: divided by each |o|", lambda B, o, N, T: B * o),
    "B": ("sums of completions, not divided by a length", lambda B, o, N, T: B),
    "1": ("a sum, not divided", lambda B, o, N, T: 1),
    "B T": ("a mean over the padded width", lambda B, o, N, T: B * T),
    "B T / |o|": ("each completion times its |o|", lambda B, o, N, T: B * T / o),
}
PAPER_DIVISORS = dict.fromkeys(BY_TOKENS, "N") | dict.fromkeys(["dr_grpo", "reinforce", "rloo"], "B")
MASKS = ["111111 111000 100000 111100", "1100000 1111100 1111100", "111 111", "01101 11110"]


def masks_for(subject):
    masks = [np.array([[x == "1" for x in row] for row in rows.split()]) for rows in MASKS]
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


def factor(measured, name):
    """k, if the gradient of every token is 1 / (k times what the name says), or None"""
    products = []
    for mask, gradient in measured:
        o = mask.sum(1, keepdims=True)
        sizes = DIVISORS[name][1](len(mask), o, o.sum(), mask.shape[1])
        products.append((gradient * sizes)[mask])
    products = np.concatenate(products)
    is_constant = products[0] != 0 and np.allclose(products, products[0], rtol=1e-3)
    return short(1 / products[0]) if is_constant else None


def fitted_divisor(measured, paper):
    """(name in DIVISORS, k), or None; if there is a choice, without a k, or else the paper's"""
    factors = {name: factor(measured, name) for name in DIVISORS}
    known = [name for name, k in factors.items() if k is not None]
    if not known:
        return None
    name = min(known, key=lambda x: (not same_number(abs(factors[x]), 1), x != paper, len(x)))
    return name, factors[name]


def in_masked_places(measured):
    """[Finding] if there is a gradient."""
    if any(gradient[~mask].any() for mask, gradient in measured):
        return [Finding("mistake", "masked places have a gradient")]
    return []


def divisor(section, found, measured):
    """Yields a Finding about what the loss divides by. found: as fitted_divisor gives it"""
    if found is None:
        paper = PAPER_DIVISORS.get(section, "B |o|")
        departing = [x for x in measured if not same_number(factor([x], paper) or 0, 1)]
        mask, gradient = departing[0]
        rows = "; ".join(columns(row[kept]) for kept, row in zip(mask, gradient, strict=True))
        where = "where every error is 0.5" if section == "value_loss" else "at r = 1 and A = 1"
        masks = " ".join("".join(str(int(x)) for x in row) for row in mask)
        words = f"{where}, with the mask {masks}, the weights of the tokens are {rows}"
        yield Finding("mistake", words)
        return
    name, k = found
    if k < 0:
        yield Finding("mistake", "wrong sign")
    k = abs(k)
    is_papers = name == PAPER_DIVISORS.get(section, "B |o|")
    here = ours(section).get("max_new_tokens")
    if here and is_papers:
        if not same_number(k, here):
            words = f"L_max is {k:.5g} (the paper: any; here: {here})"
            yield Finding("constant", words, {"max_new_tokens": k})
    elif not same_number(k, 1):
        words = "the paper's mean" if is_papers else DIVISORS[name][0]
        yield Finding("mistake", f"{words}, times {1 / k:.4g}")
    elif not is_papers:
        yield Finding("mistake", DIVISORS[name][0])


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
        at_0 = subject.probe(**inputs, advantages=0.0 * A[rows, None]).gradient
        found.append(at_0 - subject.probe(**inputs, advantages=A[rows, None]).gradient)
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
            is_bad = A < 0
            new[is_bad, 1], old[is_bad, 1] = old[is_bad, 0], new[is_bad, 0]
        return policy_gradient(self.subject, new, old, A)[:, 0] / A

    def at(self, log_r, A):
        A = np.broadcast_to(float(A), log_r.shape) if np.isscalar(A) else A
        return self.probe(log_r, A) / self.probe(0 * log_r, np.sign(A))

    def fits(self, kind, log_r, w):
        """kind: "r" if the weight is r, or the constant that it is"""
        expected = math.exp(log_r) if kind == "r" else kind
        return abs(w - expected) <= self.tolerance * max(1, abs(expected))

    def side(self, sign, way):
        """The curve from r = 1 outwards, down if way is -1: (what it is near 1, "r" or 1; the log r at
        which that ends; the constant that it is from there on), or None if it is smooth."""

        def are(kind, grid):
            return [self.fits(kind, *pair) for pair in zip(grid, self.at(grid, sign), strict=True)]

        grid = way * np.geomspace(self.start, 16, 100)  # our own scripts clamp at 20
        kind = "r" if are("r", grid[:1])[0] else 1.0
        is_kind = are(kind, grid)
        if all(is_kind):
            return kind, way * math.inf, None
        n = is_kind.index(False)
        beyond = 0.0 if are(0.0, grid[n : n + 1])[0] else self.at(grid[-1:], sign)[0]
        if n == 0 or not all(are(beyond, grid[n:])):
            return None
        return kind, boundary(functools.partial(are, kind), grid[n - 1], grid[n]), beyond

    def curve(self, sign):
        """(kinds, edges as log r) from r = 0 to infinity; None if the curve is smooth. PPO, A > 0: side
        gives ("r", -inf, None) down and ("r", 0.182, 0.0) up, so the curve is [None, "r", 0.0], [-inf,
        0.182]."""
        down, up = self.side(sign, -1), self.side(sign, 1)
        if down is None or up is None:
            return None
        kinds = [down[2], down[0], up[0], up[2]]
        edges = [down[1], 0.0, up[1]]
        if down[0] == up[0]:
            kinds, edges = [*kinds[:2], kinds[3]], edges[::2]
        return kinds, edges


def near(kinds, edges):
    """A curve without the clips that are there for safety, and without ends at infinity."""
    is_left_out = [kinds[k] in (None, 0.0) and abs(edges[k]) > FAR for k in (0, -1)]
    last = len(kinds) - is_left_out[1]
    return kinds[is_left_out[0] : last], edges[is_left_out[0] : last - 1]


def letters(kinds):
    return "".join("r" if kind == "r" else "0" if kind == 0 else "c" for kind in kinds)


def said(kinds, edges):
    """r up to 1.2, then 0"""
    words = ["r" if kind == "r" else f"{kind:.4g}" for kind in kinds]
    limits = [f" up to {math.exp(edge):.5g}" for edge in edges]
    return ", then ".join(word + limit for word, limit in zip(words, [*limits, ""], strict=True))


PATTERNS = {  # the kinds of weights by r, for A > 0 and A < 0
    ("r", "r"): "no clip, no cap: the weight is r",
    ("r0", "0r0"): "a dual clip: no gradient where A < 0 and r > {:.4g}",
    ("0r", "r0"): "max instead of min",
    ("0r0", "0r0"): "a clip on both sides, without the min",
    ("r0", "r0"): "min(r, clip(r)) times A: where A < 0 it is clipped above",
    ("c", "c"): "the ratio does not count: the weight is the same at any r",
}
CLIPPED = "ppo grpo dr_grpo dapo gspo vapo deepseek_v32 gmpo rspo".split()
PAPER_PATTERNS = dict.fromkeys(CLIPPED, [("r0", "0r")])
PAPER_PATTERNS |= {"cispo": [("rc", "rc"), ("crc", "crc")], "sapo": []}  # sapo's curve is smooth
PAPER_PATTERNS |= dict.fromkeys(["reinforce", "rloo"], [("c", "c")])
PAPER_RANGES = {"gspo": "[0.9997, 1.0004]"}
PAPER_RANGES |= dict.fromkeys(["grpo", "dr_grpo", "cispo", "deepseek_v32"], "unspecified")


def range_finding(section, low, high):
    """[Finding] if the range of ratios is not the one here."""
    here = ours(section)
    if section == "cispo":
        bounds = here["is_weight_floor"], here["is_weight_cap"]
        settings = {"is_weight_floor": low, "is_weight_cap": high}
    elif "log_ratio_clip" in here:
        bounds = [math.exp(x * here["log_ratio_clip"]) for x in (-1, 1)]
        settings = {"log_ratio_clip": math.log(high)}
    else:
        bounds = 1 - here["clip_eps_low"], 1 + here["clip_eps_high"]
        settings = {"clip_eps_low": 1 - low, "clip_eps_high": high - 1}
    if np.allclose((low, high), bounds, rtol=1e-5, atol=1e-5):
        return []
    text = "[{:.5g}, {:.5g}]".format(*bounds)
    paper = PAPER_RANGES.get(section)
    source = f"the paper: {paper}; here: {text}" if paper else f"the paper: {text}"
    is_constant = "log_ratio_clip" not in settings or same_number(low * high, 1)
    words = f"the range is [{low:.5g}, {high:.5g}] ({source})"
    return [Finding("constant", words, settings) if is_constant else Finding("mistake", words)]


def clip(weights):
    """[Finding] about the weights by the ratio."""
    section = weights.subject.section
    one = np.ones(1)
    share = float((weights.probe(0 * one, -one) / weights.probe(0 * one, one))[0])
    findings = []
    if abs(share - 1) > 1e-3:
        words = f"A < 0 counts {share:.4g} times as much as A > 0" if share else "A < 0 does not count"
        findings.append(Finding("mistake", words))
    nothing = [None, 0.0, None], [-math.inf, math.inf]
    curves = [weights.curve(1), weights.curve(-1) if share else nothing]
    if None in curves:
        return [*findings, *gates(weights)]
    up, down = [near(*curve) for curve in curves]  # for A > 0 and A < 0
    pattern = letters(up[0]), letters(down[0])
    bounds = sorted(math.exp(x) for x in up[1] + down[1])
    if pattern not in PAPER_PATTERNS[section]:
        shown = f"by r, the weight is {said(*up)} where A > 0; {said(*down)} where A < 0"
        words = PATTERNS.get(pattern, shown) if section in CLIPPED or not bounds else shown
        kind = "variant" if "dual" in words else "mistake"
        findings.append(Finding(kind, words.format(bounds.pop()) if "{" in words else words))
    elif section == "cispo":
        floor = 0.0 if up[0][0] == "r" else up[0][0]
        findings += range_finding(section, floor, up[0][-1])
    if section in CLIPPED and bounds and bounds[0] <= 1 <= bounds[-1]:
        findings += range_finding(section, bounds[0], bounds[-1])
    far = [x for _, edges in curves for x in edges if FAR < abs(x) < math.inf]
    if far and section in CLIPPED:
        where = {f"r {'>' if edge > 0 else '<'} {math.exp(edge):.4g}" for edge in far}
        words = f"no gradient where {' or '.join(sorted(where))}, which is rare"
        findings.append(Finding("clamp", words, reach=min(map(abs, far))))
    return findings


def gates(weights):
    """[Finding] about a smooth curve: SAPO's tau, or a table."""
    r = np.array([0.25, 0.5, 0.8, 1.25, 2, 4])
    rows = {sign: weights.at(np.log(r), sign) for sign in (1, -1)}
    # w = r sech^2(tau (r - 1) / 2)
    taus = [2 * np.arccosh(np.sqrt(np.maximum(r / w, 1))) / abs(r - 1) for w in rows.values()]
    is_gate = all(np.allclose(tau, tau[0], rtol=1e-3) for tau in taus)
    if weights.subject.section != "sapo" or not is_gate:
        words = f"by r = {columns(r)}, the weight is {columns(rows[1])} where A > 0, "
        return [Finding("mistake", words + f"{columns(rows[-1])} where A < 0")]
    yours, here = [short(tau[0]) for tau in taus], list(ours("sapo").values())
    if yours == here:
        return []
    words = "tau is {:.4g} and {:.4g} (the paper: {:.4g} and {:.4g})".format(*yours, *here)
    if yours == here[::-1]:
        return [Finding("mistake", words)]
    return [Finding("constant", words, {"tau_pos": yours[0], "tau_neg": yours[1]})]


def beyond_ratio(subject):
    """[Finding] if a weight depends on pi itself, as with DPPO's masks."""
    r = np.array([0.71, 0.96, 1.13, 1.53])  # where no author's bound is
    rows = [Weights(subject, level).at(np.log(r), 1) for level in (-0.05, -1.3, -5)]
    if np.allclose(rows, rows[1], rtol=1e-2, atol=1e-3):
        return []
    words = f"the weight depends on pi, not on r alone: at r = {columns(r)} and log pi about "
    text = f"{words}-0.05, -1.3, -5 it is {'; '.join(map(columns, rows))}"
    return [Finding("mistake", text)]


def coupling(subject):
    """[Finding] if a token's weight depends on the other tokens' ratios as the paper's does not."""
    one = np.ones(1)
    new, old = np.array([[-1.3, -2.3]]), np.full((1, 2), -1.3)  # below 1 no clip acts where A > 0
    both = [policy_gradient(subject, x, old, one)[0, 0] for x in (old, new)]
    weight = both[1] / both[0]
    is_one_ratio = subject.section in ("gspo", "gmpo", "rspo")
    if np.isclose(weight, math.exp(-0.5) if is_one_ratio else 1, rtol=1e-3):
        return []
    known = {
        "a token's weight is its own ratio, not the completion's": 1,
        "a token's weight is the ratio of the completion, as in GSPO": math.exp(-0.5),
        "a token's weight is the product of all ratios": math.exp(-1),
    }
    measured = f"a token's weight is {weight:.4g} times as large if another token's r is 1/e, not 1"
    words = next((name for name, x in known.items() if np.isclose(weight, x, rtol=1e-3)), measured)
    return [Finding("mistake", words)]


def size_of_advantages(weights):
    """[Finding] if a gradient is not proportional to A."""
    sizes = np.array([0.5, 1, 2, 4])
    found = sizes * weights.at(np.zeros(4), sizes)
    if np.allclose(found, sizes, rtol=1e-2):
        return []
    words = f"where A is {columns(sizes)}, the gradient is that of {columns(found)}"
    return [Finding("mistake", words)]


# ---------------------------------------------------------------------------------- where A is 0

ESTIMATORS = {  # of a KL, by log x and r
    "k1": lambda x, r: -x,
    "k2": lambda x, r: x**2 / 2,
    "k3": lambda x, r: k3(x),
    "k3 upside down": lambda x, r: k3(-x),
    "|log x|": lambda x, r: abs(x),
    "k3 clamped at 10": lambda x, r: k3(x).clamp(max=10),
    "k3 times r": lambda x, r: r * k3(x),
}
OTHER_TERMS = {  # by log pi and r
    "log pi": lambda logp, r: logp,
    "pi log pi": lambda logp, r: logp.exp() * logp,
    "r": lambda logp, r: r,
}
NEW = -np.array([1.3, 0.7, 1.1, 1.6, 0.9, 1.2, 2.0, 0.8, 1.4])
OLD = NEW - np.array([0, 0.5, 0.3, 0.1, -0.2, -0.4, 0.6, 0.2, -0.55])
REF = NEW + np.array([0, -2, -1, -0.5, 0.3, 1, 1.5, 3.1, 0.7])


def known_terms(with_ref):
    """{name: (values, gradients)} of ESTIMATORS and OTHER_TERMS. Values are relative to the first."""
    logp = torch.tensor(NEW, requires_grad=True)
    old, ref = torch.tensor(OLD), torch.tensor(REF)
    r = (logp - old).exp()
    terms = {f"{name}, x = pi_old / pi": f(old - logp, r) for name, f in ESTIMATORS.items()}
    if with_ref:
        terms |= {f"{name}, x = pi_ref / pi": f(ref - logp, r) for name, f in ESTIMATORS.items()}
    terms |= {name: f(logp, r) for name, f in OTHER_TERMS.items()}
    known = {}
    for name, values in terms.items():
        (gradient,) = torch.autograd.grad(values.sum(), logp, retain_graph=True)
        known[name] = (values - values[0]).detach().numpy(), gradient.numpy()
    return known


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


def sums_that_fit(measured, known, tolerance):
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
    """(terms that have the gradient, terms that have the value), [(coefficient, name)] or None, of what
    is left where A is 0; and its gradients"""
    values, gradients = idle(subject, with_ref)
    known = known_terms(with_ref)
    tolerance = 1e-5 if subject.dtype is torch.float64 else 1e-3
    by_value = sums_that_fit(values, {name: x for name, (x, _) in known.items()}, tolerance)
    by_gradient = sums_that_fit(gradients, {name: x for name, (_, x) in known.items()}, tolerance)
    both = [x for x in by_gradient if x in by_value]
    best = [(both or found or [None])[0] for found in (by_gradient, by_value)]
    return *best, gradients


def listed(terms):
    words = [f"{name}, coefficient {abs(c):.4g}{', rewarded' * (c < 0)}" for c, name in terms]
    return " and ".join(words)


def said_terms(with_ref, by_gradient, by_value, gradients):
    if by_gradient is None:
        points = [f"log r = {columns(NEW - OLD)}", f"log(pi_ref / pi) = {columns(REF - NEW)}"]
        where = " and ".join(points[: 1 + with_ref])
        return f"a term whose gradient, at {where}, is {columns(gradients)}"
    if by_gradient == by_value:
        return listed(by_gradient)
    value = "something else" if by_value is None else listed(by_value) or "nothing"
    if not by_gradient:
        return f"{value}, without a gradient"
    return f"the gradient of {listed(by_gradient)}, the value of {value}"


PAPER_TERMS = {"grpo": "k3, x = pi_ref / pi", "deepseek_v32": "k3 times r, x = pi_ref / pi"}
VARIANTS = [f"{name}, x = pi_ref / pi" for name in ("k2", "k3", "k3 clamped at 10", "k3 times r")]


def kl(subject):
    """[Finding] about what is left where A is 0, without a reference and with one"""
    section = subject.section
    paper, here = PAPER_TERMS.get(section), ours(section).get("kl_coef")
    states = [] if subject.needs("ref_logprobs") else [False]
    if subject.takes("ref_logprobs"):
        states.append(True)
    findings = []
    for with_ref in states:
        by_gradient, by_value, gradients = left(subject, with_ref)
        is_one = by_gradient == by_value and len(by_gradient or []) == 1 and by_gradient[0][0] > 0
        c, name = by_gradient[0] if is_one else (0.0, None)
        if (by_gradient, by_value) == ([], []):
            if with_ref and paper:
                findings.append(no_kl(subject, here))
        elif with_ref and paper and name == paper:
            if not same_number(c, here):
                words = f"the KL's coefficient is {c:.4g} (the paper: {here})"
                findings.append(Finding("constant", words, {"kl_coef": c}))
        elif with_ref and paper:
            kind = "variant" if name in VARIANTS else "mistake"
            about = said_terms(with_ref, by_gradient, by_value, gradients)
            findings = [Finding(kind, f"the KL is {about}")]
        else:
            about = said_terms(with_ref, by_gradient, by_value, gradients)
            where = "" if with_ref or len(states) == 1 else "without a reference, "
            what = "a KL" if "x = " in about else "a term"
            findings = [Finding("mistake", f"{where}{what} that the paper lacks: {about}")]
    return findings or constant(subject)


def no_kl(subject, here):
    """The Finding, if nothing is left where A is 0."""
    if subject.is_off("kl_coef"):
        return Finding("constant", f"the KL's coefficient is 0 (the paper: {here})", {"kl_coef": 0.0})
    same, moved = per_token(subject, 1.0), per_token(subject, 1.0, 1.0)
    if all(np.allclose(x, y) for (_, x), (_, y) in zip(same, moved, strict=True)):
        return Finding("mistake", "there is no KL: the reference is not used")
    return Finding("mistake", "the KL depends on A: where A is 0 there is none")


def own_mean(subject, divisor_name):
    """[Finding] if what is left where A is 0 has another divisor than the policy's term."""
    if subject.returns_terms:
        return []
    measured = per_token(subject, 0.0, 1.0)
    found = fitted_divisor(measured, divisor_name)
    if found is None or factor(measured, divisor_name) is not None:
        return []
    words = f"what is left where A is 0 has a mean of its own: {DIVISORS[found[0]][0]}"
    return [Finding("mistake", words)]


def constant(subject):
    """[Finding] if the loss of one token is not 0 where A is 0 and every log-prob is the same."""
    one = two(np.array([-1e-9]))
    inputs = {"logprobs": one, "old_logprobs": one, "advantages": np.zeros((1, 1))}
    value = float(subject.probe(**inputs).value)
    if abs(value) < 1e-6:
        return []
    return [Finding("variant", f"a constant is added: where A is 0 the loss is {value:.4g}")]


# ------------------------------------------------------------------------------------------ all of it


def findings(subject):
    """Yields a Finding for each way in which a loss differs from its paper, as our batches show it."""
    section = subject.section
    if section not in PAPER_PATTERNS:
        return  # of such a section, its cases are all that is compared
    paper = PAPER_DIVISORS.get(section, "B |o|")
    fitted = paper, 1.0
    if subject.is_separate:
        pairs = zip(per_token(subject, 1.0), per_token(subject, 0.0), strict=True)
        measured = [(mask, at_0 - gradient) for (mask, gradient), (_, at_0) in pairs]
        if max(np.abs(gradient).max() for _, gradient in measured) < 1e-12:
            yield Finding("mistake", "no gradient of the policy term reaches the log-probs")
            return
        if not subject.returns_terms:
            fitted = fitted_divisor(measured, paper)
            yield from divisor(section, fitted, measured)
        yield from in_masked_places(per_token(subject, 1.0, 1.0))
    weights = Weights(subject)
    unit = weights.probe(np.zeros(1), np.ones(1))[0]
    if fitted is None or not np.isfinite(unit) or abs(unit) < 1e-12:
        return  # a single row whose mean is subtracted from A, for example
    if not subject.lacks_old:
        other = beyond_ratio(subject) if subject.is_separate else []
        coupled = coupling(subject)
        # V3.2's token that keeps the mask off has the inverse ratio, which a product would hide.
        is_hidden = coupled and section == "deepseek_v32"
        yield from coupled
        yield from other if other or is_hidden else clip(weights)
        if section == "deepseek_v32":
            yield from offpolicy(subject)
        elif section == "rspo":
            yield from shift_floor(subject)
    if subject.is_separate:
        yield from size_of_advantages(weights)
        yield from own_mean(subject, fitted[0])
    yield from kl(subject)


def offpolicy(subject):
    """[Finding] about DeepSeek-V3.2's mask: below which log r a bad completion has no gradient."""

    def is_kept(moved):
        old = two(-1.3 + 0 * moved)
        new = old - np.stack([0 * moved, 2 * moved], 1)  # the first token is inside every range
        return np.abs(policy_gradient(subject, new, old, 0 * moved - 1)[:, 0]) > 1e-9

    here = ours("deepseek_v32")["offpolicy_mask"]
    delta = boundary(is_kept, 0.0, 0.5)
    if delta is None:
        words = "no off-policy mask: in a bad completion, tokens inside the range keep their gradient"
        return [Finding("mistake", words)]
    if abs(delta - here) < 1e-4:
        return []
    words = f"the off-policy mask's delta is {delta:.4g} (the paper: unspecified; here: {here})"
    return [Finding("constant", words, {"offpolicy_mask": short(delta)})]


def shift_floor(subject):
    """[Finding] about RSPO's gamma: the weight of a token by it, and its floor."""

    def weight(shift):
        new = two(0 * shift - 1.3)
        inputs = {"logprobs": new, "old_logprobs": new, "advantages": 0 * shift[:, None] + 1}
        return subject.probe(**inputs, router_shift=two(shift)).gradient[:, 0]

    def is_shift(shift):
        return np.isclose(weight(shift) / weight(0 * shift + 1), shift, rtol=1e-3)

    here = ours("rspo")["gamma_min"]
    floor = boundary(is_shift, 1.0, 0.01)
    if floor is None:
        return [Finding("mistake", "gamma has no floor")]
    if floor > 0.99:
        shift = np.array([1, 0.95, 0.9, 0.5, 0.1])
        words = (
            f"by gamma = {columns(shift)}, the weight is {columns(weight(shift) / weight(shift)[0])}"
        )
        return [Finding("mistake", f"{words} where A > 0")]
    if abs(floor - here) < 1e-3:
        return []
    words = f"gamma's floor is {floor:.3g} (the paper: unspecified; here: {here})"
    return [Finding("constant", words, {"gamma_min": float(f"{floor:.3g}")})]
