"""Measures advantages of groups, GAE's constants, and a value loss, with batches of our own."""

import math
from types import SimpleNamespace

import numpy as np
import torch

from rl_loss_vectors import reference
from rl_loss_vectors.measure import Finding, boundary, columns, divisor, masks_for, short, two
from rl_loss_vectors.mistakes import pieces, setting
from rl_loss_vectors.vectors import ours

PAPER = {  # section: (baseline, scale, eps)
    "group_advantages": ("mean", "std", 1e-6),
    "group_differences": ("mean", "no std", 0.0),
    "leave_one_out": ("mean of the others", "no std", 0.0),
}
R = np.array([[1, 0, 0.2, 0.5], [2, 2.5, -1, 0.3], [0.5, 0.5, 0.5, 0.5], [0.1, 0.4, 0.2, 0.9]])
OUTLIER = np.array([[1.0] + [0.0] * 15, [0.0] * 8 + [1.0] * 8])  # its A is 3.75 with a std


def informative(R):
    return R[(R != R[:, :1]).any(1)]


def is_uniform(case):
    """Which groups of a case have equal rewards, (P,)"""
    rewards = np.array(case["inputs"]["rewards"])
    return (rewards == rewards[:, :1]).all(1)


def for_all(f):
    """f of all rewards, for each group"""
    return lambda R: f(R) + 0 * R[:, 0]


BASELINES = {  # each a number for each group
    "mean": lambda R: R.mean(1),
    "mean of the batch": for_all(np.mean),
    "mean of informative completions": for_all(lambda R: informative(R).mean()),
    "median": lambda R: np.median(R, 1),
    "highest reward": lambda R: R.max(1),
    "lowest reward": lambda R: R.min(1),
    "no baseline": for_all(lambda R: 0),
}
SCALES = {
    "no std": for_all(lambda R: 1),
    "std": lambda R: R.std(1, ddof=1),
    "std of the population": lambda R: R.std(1),
    "std of the batch": for_all(lambda R: R.std(ddof=1)),
    "std of the batch (of the population)": for_all(np.std),
    "std of informative completions": for_all(lambda R: informative(R).std(ddof=1)),
    "std of informative completions (of the population)": for_all(lambda R: informative(R).std()),
    "range": lambda R: R.max(1) - R.min(1),
}


def scale_of(scale, tolerance):
    """(name of SCALES, eps, whether eps is inside the root) of the groups' divisors, or None"""
    for is_inside in (False, True):
        for name, formula in SCALES.items():
            std = formula(R)[[0, 1, 3]]
            eps = scale**2 - std**2 if is_inside else scale - std
            most = tolerance if name == "no std" else 0.05
            if np.allclose(eps, eps[0], rtol=1e-3, atol=tolerance) and -tolerance < eps[0] < most:
                return name, float(f"{eps[0]:.3g}") if eps[0] > tolerance else 0.0, is_inside
    return None


def with_formula(baseline, name, eps, is_inside, limit=math.inf, back=0, sign=1):
    """What was measured, as a change of the paper's."""

    def change(J, b):
        rewards = b.rewards.numpy()
        std = SCALES[name](rewards)
        scale = np.sqrt(std**2 + eps) if is_inside else std + eps
        if baseline == "mean of the others":
            scale = scale * (1 - 1 / rewards.shape[1])
        center = BASELINES.get(baseline, BASELINES["mean"])(rewards)[:, None]
        A = (rewards - center) / scale[:, None] + back * center
        is_uniform = [[reference.is_uniform(row)] for row in rewards]
        return torch.from_numpy(sign * np.where(is_uniform, 0, A).clip(-limit, limit))

    return change


def findings(subject):
    """[Finding] of advantages: their baseline, what they are divided by, whether they are clipped."""
    A = subject.probe(rewards=R).value[[0, 1, 3]]
    tolerance = 1e-5 if np.array_equal(A, A.astype(np.float32)) else 1e-10  # it computes in float32
    rewards = R[[0, 1, 3]]
    slope = (A[:, 1] - A[:, 0]) / (rewards[:, 1] - rewards[:, 0])
    sign = -1 if (slope < 0).all() else 1
    A, scale = sign * A, sign / np.where(slope == 0, np.nan, slope)
    base = rewards[:, 0] - A[:, 0] * scale
    names = [
        name for name, f in BASELINES.items() if np.allclose(f(R)[[0, 1, 3]], base, atol=10 * tolerance)
    ]
    back = np.allclose(rewards.mean(1) * (1 - scale), base, atol=10 * tolerance) and not names
    baseline = "mean" if back else next(iter(names), None)
    divided = scale_of(scale, tolerance)
    if divided is None and baseline == "mean":  # R - mean of the others is G / (G - 1) (R - mean)
        divided = scale_of(scale * 4 / 3, tolerance)
        baseline = "mean of the others"
    is_line = np.allclose((rewards - base[:, None]) / scale[:, None], A, atol=1e-6 + tolerance)
    if baseline is None or divided is None or not is_line:
        return [Finding("mistake", f"rewards {columns(R[0])} give {columns(sign * A[0])}")]
    name, eps, is_inside = divided
    found = subject.probe(rewards=OUTLIER).value
    unclipped = with_formula(baseline, *divided)(None, SimpleNamespace(rewards=torch.tensor(OUTLIER)))
    is_clipped = not back and np.abs(found).max() < 0.999 * unclipped.abs().max()
    limit = short(np.abs(found).max()) if is_clipped else math.inf
    paper_base, paper_scale, paper_eps = PAPER[subject.section]
    population = "variant" if (name, paper_scale) == ("std of the population", "std") else "mistake"
    has_eps = "std" in name and name != "no std" and not is_inside
    facts = {
        ("mistake", "wrong sign"): sign < 0,
        ("mistake", "the mean comes back"): back,
        ("mistake", f"the baseline is: {baseline} (the paper: {paper_base})"): baseline != paper_base,
        (population, f"divided by the {name}".replace("divided by the no", "no")): name != paper_scale,
        ("variant", f"divided by sqrt(var + {eps:.3g})"): is_inside,
        ("constant", f"eps is {eps:.3g} (the paper: unspecified; here: {paper_eps:.3g})"): (
            has_eps and abs(eps - paper_eps) > tolerance
        ),
        ("mistake", f"clipped at {limit:.4g}"): is_clipped,
    }
    change = with_formula(baseline, *divided, limit, back, sign)
    return [Finding(*fact, change) for fact, is_so in facts.items() if is_so]


def whiten_findings(subject):
    """[Finding] of a whitening: what it subtracts, and what it divides by."""
    x = np.array([[0.3, -1.2, 2.0], [0.7, 0.1, 1.4]])
    found = subject.probe(advantages=x).value
    if np.allclose(found.mean(1), 0, atol=1e-4):
        return [Finding("mistake", "each row is whitened by itself")]
    scale = float((x[0, 1] - x[0, 0]) / (found[0, 1] - found[0, 0]))
    base = float(x[0, 0] - found[0, 0] * scale)
    centers = {"mean": x.mean(), "comes back": x.mean() * (1 - scale), "stays": 0.0}
    stds = {"paper": x.std(), "unbiased": x.std(ddof=1), "none": 1.0}
    center = [name for name, c in centers.items() if abs(c - base) < 1e-4]
    std = [name for name, s in stds.items() if abs(s - scale) < 1e-4]
    if not center or not std or not np.allclose((x - base) / scale, found, atol=1e-4):
        return [Finding("mistake", f"{columns(x.ravel())} become {columns(found.ravel())}")]

    def change(J, b):
        tokens = b.advantages[b.mask]
        mean = tokens.mean()
        stds = {"paper": tokens.std(correction=0) + 1e-8, "unbiased": tokens.std(), "none": 1.0}
        back = {"mean": 0, "comes back": mean, "stays": mean / stds[std[0]]}[center[0]]
        return torch.where(b.mask, (b.advantages - mean) / stds[std[0]] + back, 0)

    facts = {
        ("variant", "the unbiased std [TRL, verl]"): std[0] == "unbiased",
        ("mistake", "no std"): std[0] == "none",
        ("variant", "the mean comes back [TRL, verl: on request]"): center[0] == "comes back",
        ("mistake", "the mean is not subtracted"): center[0] == "stays",
    }
    return [Finding(*fact, change) for fact, is_so in facts.items() if is_so]


def gae_findings(subject):
    """The gamma and lambda of a function that does not take them, or has them as defaults."""
    zeros, last = np.zeros((1, 3)), np.array([[0.0, 0.0, 1.0]])
    own = {name: subject.default(name) for name in ("gamma", "lam")}
    more = {name: 0.5 if x is None else x for name, x in own.items()}
    both = subject.probe(rewards=last, values=zeros, **more).value[0][0, 1]
    gamma = subject.probe(rewards=zeros, values=last, **more).value[0][0, 1] + both
    measured = {"gamma": short(gamma), "lam": short(both / gamma)}  # both is gamma lambda
    return [
        Finding("constant", f"{name} is {x:.4g}, the function's own", setting(**{name: x}))
        for name, x in measured.items()
        if own[name] is not None or not subject.takes(name)
    ]


def error_gradient(subject, values, returns, mask=None):
    """The gradient of a value loss whose old values are 0, (B, T)."""
    inputs = {"values": values, "old_values": 0 * values, "returns": returns}
    return subject.probe(**inputs, mask=0 * values + 1 if mask is None else mask).gradient


def value_findings(subject):
    """[Finding] of a value loss: its divisor, and where it has no gradient."""
    errors = np.array([0.5, 1, 2, 4])
    gradient = -error_gradient(subject, two(0 * errors), two(errors))[:, 0]
    if not np.allclose(gradient / gradient[0], errors / errors[0], rtol=1e-3):
        words = f"no squared error: at errors {columns(errors)} its gradient is {columns(gradient)}"
        return [Finding("mistake", words)]
    zeros = [np.zeros(mask.shape) for mask in masks_for(subject)]
    measured = []
    for x, mask in zip(zeros, masks_for(subject), strict=True):
        measured.append((mask, -error_gradient(subject, x, x + 0.5, mask)))  # 2 (V - return) / N
    found, _ = divisor(subject, measured)
    half = "divided by 2 times what the paper divides by"
    named = {half: ("variant", "half of the squared error")}
    return [Finding(*named.get(x.words, x[:2]), x.change) for x in found] + value_clip(subject)


def value_clip(subject):
    """[Finding] about the clip: V moves from an old value of 0, toward a return and away from it."""

    def edge(returns):
        def has_gradient(moved):
            gradient = error_gradient(subject, two(moved), two(0 * moved + returns))
            return np.abs(gradient[:, 0]) > 1e-9

        return boundary(has_gradient, 0.0, 10.0)

    toward, away = edge(100.0), edge(-100.0)
    limit = toward or away
    here = ours("value_loss")["value_clip"]
    if limit is None:
        return [Finding("variant", "the values are not clipped", setting(value_clip=0))]
    found = []
    if abs(limit - here) > 1e-4:
        about = f"values are clipped at {limit:.4g} (the paper: unspecified; here: {here})"
        found.append(Finding("constant", about, setting(value_clip=short(limit))))
    if toward is None:
        found.append(Finding("mistake", "min instead of max", pieces(worse=torch.min)))
    elif away is not None:
        alone = pieces(worse=lambda plain, near: near)
        found.append(Finding("mistake", "the clipped error alone, without the max", alone))
    return found
