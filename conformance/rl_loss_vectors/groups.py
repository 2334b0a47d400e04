"""Measures advantages of groups, whitening, GAE's constants and a value loss, with our own batches."""

import numpy as np

from rl_loss_vectors import reference
from rl_loss_vectors.measure import Finding, boundary, columns, divisor, fitted_divisor
from rl_loss_vectors.measure import in_masked_places, masks_for, short, two
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
    "highest reward": lambda R: R.max(1),
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
    "std of all differences": for_all(lambda R: (R - R.mean(1, keepdims=True)).std(ddof=1)),
    "std of all differences (of the population)": for_all(lambda R: (R.T - R.mean(1)).std()),
    "mean": lambda R: R.mean(1),
}


def scale_of(scale, tolerance):
    """(name of SCALES, eps, whether eps is inside the root) of the groups' divisors, or None"""
    for is_inside in (False, True):
        for name, formula in SCALES.items():
            std = formula(R)[MIXED]
            eps = scale**2 - std**2 if is_inside else scale - std
            most = tolerance if name == "no std" else 0.01
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
        return clipped(subject, R, *PAPER[subject.section]) or [
            Finding("mistake", f"rewards {columns(R[0])} give {columns(sign * A[0])}")
        ]
    name, eps, is_inside = divided
    paper_base, paper_scale, paper_eps = PAPER[subject.section]
    population = "variant" if (name, paper_scale) == ("std of the population", "std") else "mistake"
    found = []
    if sign < 0:
        found.append(Finding("mistake", "wrong sign"))
    if back:
        found.append(Finding("mistake", "the mean comes back"))
    if baseline != paper_base:
        found.append(Finding("mistake", f"the baseline is: {baseline} (the paper: {paper_base})"))
    if name != paper_scale:
        found.append(Finding(population, name if name == "no std" else f"divided by the {name}"))
    if is_inside:
        found.append(Finding("variant", f"divided by sqrt(var + {eps:.3g})"))
    has_eps = "std" in name and name != "no std" and not is_inside
    if has_eps and abs(eps - paper_eps) > tolerance:
        words = f"eps is {eps:.3g} (the paper: unspecified; here: {paper_eps:.3g})"
        found.append(Finding("constant", words, {"eps": eps}))
    return found + clipped(subject, OUTLIER, baseline, *divided)


def clipped(subject, rewards, baseline, name, eps, is_inside=False):
    """[Finding] if advantages are what these say, but for a limit. The rest is as scale_of gives it."""
    center = BASELINES.get(baseline, BASELINES["mean"])(rewards)[:, None]
    std = SCALES[name](rewards)[:, None]
    expected = (rewards - center) / (np.sqrt(std**2 + eps) if is_inside else std + max(eps, 1e-9))
    found = subject.probe(rewards=rewards).value
    limit = np.abs(found).max()
    is_clip = np.allclose(found, expected.clip(-limit, limit), atol=1e-3)
    is_clip = is_clip and 0 < limit < 0.999 * np.abs(expected).max()
    return [Finding("mistake", f"clipped at {short(limit):.4g}")] if is_clip else []


def whiten_findings(subject):
    """[Finding] of a whitening: what it subtracts, and what it divides by."""
    x = np.array([[5.0, 0.3, -1.2, 2.0], [0.7, -3.0, 0.1, 1.4]])
    mask = np.array([[0, 1, 1, 1], [1, 0, 1, 1]], bool) | subject.lacks_mask
    found = subject.probe(advantages=x, mask=mask).value
    if np.allclose((found * mask).sum(1), 0, atol=1e-4):
        return [Finding("mistake", "each row is whitened by itself")]
    tokens, result = x[mask], found[mask]
    scale = (tokens[1] - tokens[0]) / (result[1] - result[0])
    base = tokens[0] - result[0] * scale
    centers = {
        "": tokens.mean(),
        "mistake: masked places count in the mean": x.mean(),
        "mistake: masked places are added to the mean": x.sum() / mask.sum(),
        "mistake: the mean is not subtracted": 0.0,
        "variant: the mean comes back [TRL, verl: on request]": tokens.mean() * (1 - scale),
    }
    stds = {
        "": tokens.std(),
        "variant: the unbiased std [TRL, verl]": tokens.std(ddof=1),
        "mistake: masked places count in the std": x.std(),
        "mistake: masked places count in the std, which is the unbiased one": x.std(ddof=1),
        "mistake: no std": 1.0,
    }
    center = [words for words, c in centers.items() if abs(c - base) < 1e-4]
    std = [words for words, c in stds.items() if abs(c - scale) < 1e-4]
    is_line = np.allclose((tokens - base) / scale, result, atol=1e-4)
    names = [*std[:1], *center[:1]] if is_line else []
    found = [Finding(*words.split(": ", 1)) for words in names if words]
    if len(names) < 2:
        found.append(Finding("mistake", f"{columns(tokens)} become {columns(result)}"))
    return found


def gae_findings(subject):
    """[Finding] of GAE: the function's own gamma and lambda; and, since GAE is linear, how the first
    token's A and return weigh each reward and value."""
    units, zeros = np.eye(4), np.zeros((4, 4))
    inputs = {"rewards": np.vstack([units, zeros]), "values": np.vstack([zeros, units])}
    inputs["mask"] = np.array(8 * [[1, 0, 1, 1]], bool) | subject.lacks_mask
    own = {name: subject.default(name) for name in ("gamma", "lam")}
    constants = {"gamma": 0.5, "lam": 0.25} | {name: x for name, x in own.items() if x is not None}
    found = subject.probe(**inputs, **constants).value[:, :, 0]
    doubled = subject.probe(**inputs | {"rewards": 2 * inputs["rewards"]}, **constants).value[:, :, 0]
    is_linear = np.allclose(doubled[:, :4], 2 * found[:, :4])
    findings = []
    if not is_linear:
        words = "twice the rewards do not give twice the A: it whitens or clips inside"
        findings.append(Finding("mistake", words))
    second = 1 if subject.lacks_mask else 2
    product = found[0, second]  # gamma lambda
    gamma = found[0, 4 + second] + product
    for name, x in {"gamma": gamma, "lam": product / gamma if gamma else 0}.items():
        if not subject.takes(name) and is_linear:
            constants[name] = short(x)
        if not subject.takes(name) or own[name] is not None:
            words = f"{name} is {constants[name]:.4g}, the function's own"
            findings.append(Finding("constant", words, {name: constants[name]}))
    lists = {name: np.asarray(x).tolist() for name, x in (inputs | constants).items()}
    paper = reference.evaluate("gae", {"inputs": lists, "keywords": {}})[0][:, :, 0]
    for name, yours, papers in zip(("A", "return"), found, paper, strict=True):
        if is_linear and not np.allclose(yours, papers, atol=1e-6):
            parts = [
                f"the rewards by {columns(x[:4])} and the values by {columns(x[4:])}"
                for x in (yours, papers)
            ]
            where = "" if subject.lacks_mask else ", where the second place is masked"
            words = f"the first token's {name} weighs {parts[0]}{where} (the paper: {parts[1]})"
            findings.append(Finding("mistake", words))
    return findings


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
    values = errors / 50  # inside every clip
    moved = error_gradient(subject, two(values), two(0 * values - 1))[:, 0]
    if not np.allclose(moved / moved[0], (1 + values) / (1 + values[0]), rtol=1e-3):
        words = f"at values of {columns(values)} and returns of -1 its gradient is {columns(moved)}"
        return [Finding("mistake", words)]
    measured = []
    for mask in masks_for(subject):
        zeros = np.zeros(mask.shape)
        measured.append(
            (mask, -error_gradient(subject, zeros, zeros + 0.5, mask))
        )  # 2 (V - return) / N
    findings = [*in_masked_places(measured), *value_clip(subject)]
    found = fitted_divisor(measured, "N")
    if found == ("N", 2.0):
        return [Finding("variant", "half of the squared error"), *findings]
    return [*divisor("value_loss", found, measured), *findings]


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
