"""Measures advantages of groups, GAE's constants, and a value loss, with batches of our own."""

import math
from types import SimpleNamespace

import numpy as np
import torch

from rl_loss_vectors import reference
from rl_loss_vectors.measure import DIVISORS, Finding, columns, fit_divisor, same_number, short, two
from rl_loss_vectors.mistakes import divided_by, pieces, setting
from rl_loss_vectors.vectors import ours

PAPER = {  # section: (baseline, scale, eps)
    "group_advantages": ("mean", "std", 1e-6),
    "group_differences": ("mean", "no std", 0.0),
    "leave_one_out": ("mean of the others", "no std", 0.0),
}
R = np.array([[1, 0, 0.2, 0.5], [2, 2.5, -1, 0.3], [0.5, 0.5, 0.5, 0.5], [0.1, 0.4, 0.2, 0.9]])
LONG = np.array([[1.0] + [0.0] * 15, [0.0] * 8 + [1.0] * 8])


def informative(R):
    return R[(R != R[:, :1]).any(1)]


BASELINES = {
    "mean": lambda R: R.mean(1),
    "mean of the batch": lambda R: R.mean() + 0 * R[:, 0],
    "mean of informative completions": lambda R: informative(R).mean() + 0 * R[:, 0],
    "median": lambda R: np.sort(R, 1)[:, (R.shape[1] - 1) // 2],
    "highest reward": lambda R: R.max(1),
    "lowest reward": lambda R: R.min(1),
    "no baseline": lambda R: 0 * R[:, 0],
}
SCALES = {
    "no std": lambda R: 1 + 0 * R[:, 0],
    "std": lambda R: R.std(1, ddof=1),
    "std of the population": lambda R: R.std(1),
    "std of the batch": lambda R: R.std(ddof=1) + 0 * R[:, 0],
    "std of the batch, of the population": lambda R: R.std() + 0 * R[:, 0],
    "std of informative completions": lambda R: informative(R).std(ddof=1) + 0 * R[:, 0],
    "std of informative completions, of the population": lambda R: informative(R).std() + 0 * R[:, 0],
    "sum of squares, rooted": lambda R: R.std(1) * R.shape[1] ** 0.5,
    "mean deviation": lambda R: np.abs(R - R.mean(1, keepdims=True)).mean(1),
    "range": lambda R: R.max(1) - R.min(1),
}


def probe(subject, **inputs):
    """The function's answer for arrays of our own."""
    first = next(iter(inputs.values()))
    inputs = {name: np.asarray(x, float).tolist() for name, x in inputs.items()}
    case = {"inputs": inputs, "keywords": {}, "value": 0 * first, "tags": []}
    if subject.section == "value_loss":
        case |= {"value": 0.0, "gradient": 0 * first}
    if subject.section == "gae":
        case["value"] = np.stack([0 * first, 0 * first])
    return subject.answer(case)


def scale_of(scale):
    """(name of SCALES, eps, whether eps is inside the root) of a divisor for each group; None if unknown."""
    kept = (R != R[:, :1]).any(1)
    for is_inside in (False, True):
        for name, formula in SCALES.items():
            std = formula(R)[kept]
            excess = scale**2 - std**2 if is_inside else scale - std
            is_constant = np.allclose(excess, excess[0], rtol=1e-3, atol=1e-10)
            most = 1e-10 if name == "no std" else 0.05
            if is_constant and -1e-10 < excess[0] < most:
                return name, float(f"{max(excess[0], 0):.3g}") if excess[0] > 1e-10 else 0.0, is_inside
    return None


def of_groups(baseline, name, eps, is_inside, limit, back):
    """The advantages that were measured, as a change of the paper's."""

    def change(J, b):
        rewards = b.rewards.numpy()
        std = SCALES[name](rewards)
        scale = np.sqrt(std**2 + eps) if is_inside else std + eps
        if baseline == "mean of the others":
            scale = scale * (1 - 1 / rewards.shape[1])
        center = BASELINES.get(baseline, BASELINES["mean"])(rewards)
        A = (rewards - center[:, None]) / scale[:, None] + back * center[:, None]
        A = np.where([[reference.is_uniform(row)] for row in rewards], 0, A)
        return torch.from_numpy(np.clip(A, -limit, limit))

    return change


def findings(subject):
    """[Finding] of advantages: their baseline, what they are divided by, whether they are clipped."""
    found = probe(subject, rewards=R).value
    kept = (R != R[:, :1]).any(1)
    A, rewards = found[kept], R[kept]
    slopes = (A[:, 1:] - A[:, :1]) / np.where(
        rewards[:, 1:] == rewards[:, :1], np.nan, rewards[:, 1:] - rewards[:, :1]
    )
    slope = np.nanmean(slopes, 1)
    if np.nanmax(np.abs(slopes - slope[:, None])) > 1e-6 or not slope.all():
        return [Finding("mistake", f"no line in R: rewards {columns(R[0])} give {columns(found[0])}")]
    scale = 1 / slope
    base = rewards[:, 0] - A[:, 0] * scale
    names = [
        name for name, formula in BASELINES.items() if np.allclose(formula(R)[kept], base, atol=1e-8)
    ]
    back = np.allclose(rewards.mean(1) * (1 - scale), base, atol=1e-8) and not names
    paper_base, paper_scale, paper_eps = PAPER[subject.section]
    leaves_out = 1 - 1 / R.shape[1]
    divided = scale_of(scale)
    baseline = "mean" if back else (names or [None])[0]
    if divided is None and baseline == "mean" and scale_of(scale / leaves_out):
        baseline, divided = "mean of the others", scale_of(scale / leaves_out)
    if baseline is None or divided is None:
        words = f"rewards {columns(R[0])} give {columns(found[0])}: minus {base[0]:.4g}, divided by {scale[0]:.4g}"
        return [Finding("mistake", words)]
    name, eps, is_inside = divided
    limit = clip_of(subject, baseline, *divided)
    change = of_groups(baseline, name, eps, is_inside, limit, back)
    found = []
    if back:
        found.append(("mistake", "the mean comes back"))
    if baseline != paper_base:
        found.append(("mistake", f"minus {article(baseline)}, not the {paper_base}"))
    if name != paper_scale:
        kind = "variant" if name == "std of the population" and paper_scale == "std" else "mistake"
        found.append((kind, "no std" if name == "no std" else f"divided by the {name}"))
    if is_inside:
        found.append(("variant", f"divided by sqrt(var + {eps:.3g})"))
    elif eps != paper_eps and name != "no std":
        about = f"eps is {eps:.3g} (the paper: unspecified; here: {paper_eps:.3g})"
        found.append(("constant", about))
    if limit < math.inf:
        found.append(("mistake", f"clipped at {limit:.4g}"))
    return [Finding(*pair, change) for pair in found]


def article(baseline):
    return baseline if baseline == "no baseline" else f"the {baseline}"


def clip_of(subject, baseline, name, eps, is_inside):
    """The size at which advantages are clipped, by a reward that is far from its group's mean."""
    found = probe(subject, rewards=LONG).value
    expected = of_groups(baseline, name, eps, is_inside, math.inf, 0)(
        None, SimpleNamespace(rewards=torch.tensor(LONG))
    )
    most = np.abs(found).max()
    is_less = most < np.abs(expected.numpy()).max() - 1e-6
    return short(most) if is_less and np.isclose(np.abs(expected).max(), 3.75, atol=0.3) else math.inf


# --------------------------------------------------------------------------------------- GAE, values


def gae_findings(subject):
    """The constants of a function that takes no gamma or no lambda."""
    if subject.takes("gamma") and subject.takes("lam"):
        return []
    zeros = np.zeros((1, 3))
    last = np.array([[0.0, 0.0, 1.0]])
    more = {"mask": zeros + 1}
    for name, x in {"gamma": 0.5, "lam": 0.25}.items():
        more |= {name: x} if subject.takes(name) and subject.default(name) is None else {}
    both = probe(subject, rewards=last, values=zeros, **more).value[0][0, 1]  # gamma lambda
    gamma = short(probe(subject, rewards=zeros, values=last, **more).value[0][0, 1] + both)
    lam = short(both / gamma)
    found = []
    for name, x in {"gamma": gamma, "lam": lam}.items():
        if not subject.takes(name):
            about = f"{name} is {x:.4g}, which the function does not take"
            found.append(Finding("constant", about, setting(**{name: x})))
    return found


def value_findings(subject):
    """[Finding] of a value loss: its divisor, and where it has no gradient."""
    measured = []
    for lengths, T in [((6, 3, 1, 4), 6), ((2, 5, 5), 7)]:
        mask = np.arange(T) < np.array(lengths)[:, None]
        mask = np.ones_like(mask) if subject.lacks_mask else mask
        zeros = np.zeros(mask.shape)
        answer = probe(subject, values=zeros, old_values=zeros, returns=zeros + 0.5, mask=mask)
        measured.append((mask, -answer.gradient))
    found = []
    fitting = fit_divisor(measured, "N")
    if fitting is None:
        rows = "; ".join(columns(row) for row in measured[0][1])
        return [
            Finding(
                "mistake",
                f"where V is the old value and the return 0.5 above, minus the gradient is {rows}",
            )
        ]
    words, k = fitting
    name, formula = DIVISORS[words]
    scaled = divided_by(lambda *sizes: formula(*sizes) * k)
    if same_number(k, 2):
        found.append(Finding("variant", "half of the squared error", lambda J, b: J(b) / 2))
        k = 1
        scaled = divided_by(formula)
    if k < 0:
        found.append(Finding("mistake", "wrong sign", lambda J, b: -J(b)))
        scaled, k = divided_by(lambda *sizes: formula(*sizes) * -k), -k
    if not same_number(k, 1):
        found.append(Finding("mistake", f"divided by {k:.4g} times {words}", scaled))
    elif words != "N":
        found.append(Finding("mistake", name, scaled))
    return found + value_clip(subject)


def value_clip(subject):
    """Findings about the clip: d is how far V has moved from the old value."""
    edges = {}
    for returns in (100.0, -100.0):
        low, high = 1e-3, 10.0
        for _ in range(4):
            d = np.linspace(low, high, 200)
            moved = probe(
                subject,
                values=two(d),
                old_values=two(0 * d),
                returns=two(0 * d + returns),
                mask=two(0 * d + 1),
            )
            has_none = np.abs(moved.gradient[:, 0]) < 1e-9
            if not has_none.any() or has_none[0]:
                break
            low, high = d[has_none.argmax() - 1], d[has_none.argmax()]
        edges[returns] = short((low + high) / 2) if has_none.any() else None
    here = ours("value_loss")["value_clip"]
    best, worst = edges[100.0], edges[-100.0]  # toward the return, and away from it
    found = []
    if best is None and worst is None:
        return [Finding("variant", "the values are not clipped", setting(value_clip=0))]
    if best is None:
        found.append(Finding("mistake", "min instead of max", pieces(worse=torch.min)))
    elif worst is not None:
        found.append(
            Finding("mistake", "the clipped error alone, without the max", pieces(worse=lambda x, y: y))
        )
    limit = best or worst
    if abs(limit - here) > 1e-4:
        about = f"values are clipped at {limit:.4g} (here: {here})"
        found.append(Finding("constant", about, setting(value_clip=limit)))
    return found
