"""Measures advantages of groups, whitening, GAE's constants and a value loss, with our own batches."""

import numpy as np

from rl_loss_vectors.measure import Finding, boundary, columns, divisor, fitted_divisor, masks_for
from rl_loss_vectors.measure import short, two
from rl_loss_vectors.vectors import ours

PAPER = {  # section: (baseline, divided by, eps)
    "group_advantages": ("mean", "std", 1e-6),
    "group_differences": ("mean", "no std", 0.0),
    "leave_one_out": ("mean of the others", "no std", 0.0),
}
R = np.array([[1, 0, 0.2, 0.5], [2, 2.5, -1, 0.3], [0.5, 0.5, 0.5, 0.5], [0.1, 0.4, 0.2, 0.9]])
MIXED = [0, 1, 3]  # its groups of different rewards
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
            std = formula(R)[MIXED]
            eps = scale**2 - std**2 if is_inside else scale - std
            most = tolerance if name == "no std" else 0.05
            if np.allclose(eps, eps[0], rtol=1e-3, atol=tolerance) and -tolerance < eps[0] < most:
                return name, float(f"{eps[0]:.3g}") if eps[0] > tolerance else 0.0, is_inside
    return None


def findings(subject):
    """[Finding] of advantages: their baseline, what they are divided by, whether they are clipped."""
    A = subject.probe(rewards=R).value[MIXED]
    tolerance = 1e-5 if np.array_equal(A, A.astype(np.float32)) else 1e-10  # it computes in float32
    rewards = R[MIXED]
    slope = (A[:, 1] - A[:, 0]) / (rewards[:, 1] - rewards[:, 0])
    sign = -1 if (slope < 0).all() else 1
    A, scale = sign * A, sign / np.where(slope == 0, np.nan, slope)
    base = rewards[:, 0] - A[:, 0] * scale
    names = [
        name for name, f in BASELINES.items() if np.allclose(f(R)[MIXED], base, atol=10 * tolerance)
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
    paper_base, paper_scale, paper_eps = PAPER[subject.section]
    population = "variant" if (name, paper_scale) == ("std of the population", "std") else "mistake"
    facts = {
        ("mistake", "wrong sign"): sign < 0,
        ("mistake", "the mean comes back"): back,
        ("mistake", f"the baseline is: {baseline} (the paper: {paper_base})"): baseline != paper_base,
        (population, f"divided by the {name}".replace("divided by the no", "no")): name != paper_scale,
        ("variant", f"divided by sqrt(var + {eps:.3g})"): is_inside,
    }
    found = [Finding(*fact) for fact, is_so in facts.items() if is_so]
    has_eps = "std" in name and name != "no std" and not is_inside
    if has_eps and abs(eps - paper_eps) > tolerance:
        words = f"eps is {eps:.3g} (the paper: unspecified; here: {paper_eps:.3g})"
        found.append(Finding("constant", words, {"eps": eps}))
    return found + clipped(subject, baseline, divided)


def divided_by(rewards, name, eps, is_inside):
    """What the groups' differences are divided by, (P, 1). The rest is as scale_of gives it."""
    std = SCALES[name](rewards)[:, None]
    return np.sqrt(std**2 + eps) if is_inside else std + eps


def clipped(subject, baseline, divided):
    """[Finding] if the advantage of a rare reward is smaller than these say."""
    center = BASELINES.get(baseline, BASELINES["mean"])(OUTLIER)[:, None]
    largest = np.abs((OUTLIER - center) / divided_by(OUTLIER, *divided)).max()
    found = np.abs(subject.probe(rewards=OUTLIER).value).max()
    return [Finding("mistake", f"clipped at {short(found):.4g}")] if found < 0.999 * largest else []


def whiten_findings(subject):
    """[Finding] of a whitening: what it subtracts, and what it divides by."""
    x = np.array([[0.3, -1.2, 2.0], [0.7, 0.1, 1.4]])
    found = subject.probe(advantages=x).value
    if np.allclose(found.mean(1), 0, atol=1e-4):
        return [Finding("mistake", "each row is whitened by itself")]
    scale = float((x[0, 1] - x[0, 0]) / (found[0, 1] - found[0, 0]))
    base = float(x[0, 0] - found[0, 0] * scale)
    if not np.allclose((x - base) / scale, found, atol=1e-4):
        return [Finding("mistake", f"{columns(x.ravel())} become {columns(found.ravel())}")]
    facts = {
        ("variant", "the unbiased std [TRL, verl]"): abs(x.std(ddof=1) - scale) < 1e-4,
        ("mistake", "no std"): abs(1 - scale) < 1e-4,
        ("variant", "the mean comes back [TRL, verl: on request]"): (
            abs(x.mean() * (1 - scale) - base) < 1e-4 < abs(x.mean() - base)
        ),
        ("mistake", "the mean is not subtracted"): abs(base) < 1e-4,
    }
    return [Finding(*fact) for fact, is_so in facts.items() if is_so]


def gae_findings(subject):
    """The gamma and lambda of a function that does not take them, or has them as defaults."""
    zeros, last = np.zeros((1, 3)), np.array([[0.0, 0.0, 1.0]])
    own = {name: subject.default(name) for name in ("gamma", "lam")}
    more = {name: 0.5 if x is None else x for name, x in own.items()}
    both = subject.probe(rewards=last, values=zeros, **more).value[0][0, 1]
    gamma = subject.probe(rewards=zeros, values=last, **more).value[0][0, 1] + both
    measured = {"gamma": short(gamma), "lam": short(both / gamma)}  # both is gamma lambda
    return [
        Finding("constant", f"{name} is {x:.4g}, the function's own", {name: x})
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
    measured = []
    for mask in masks_for(subject):
        zeros = np.zeros(mask.shape)
        measured.append(
            (mask, -error_gradient(subject, zeros, zeros + 0.5, mask))
        )  # 2 (V - return) / N
    found = fitted_divisor(measured, "N")
    if found == ("N", 2.0):
        return [Finding("variant", "half of the squared error"), *value_clip(subject)]
    return [*divisor("value_loss", found, measured), *value_clip(subject)]


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
        return [Finding("variant", "the values are not clipped")]
    found = []
    if abs(limit - here) > 1e-4:
        words = f"values are clipped at {limit:.4g} (the paper: unspecified; here: {here})"
        found.append(Finding("constant", words, {"value_clip": short(limit)}))
    if toward is None:
        found.append(Finding("mistake", "min instead of max"))
    elif away is not None:
        found.append(Finding("mistake", "the clipped error alone, without the max"))
    return found
