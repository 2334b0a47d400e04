"""Measures what a loss divides by, where it clips, and its KL, by calling it with cases of our own. The
results are entries like those of mistakes.py, with numbers."""

import itertools
import math

import numpy as np
import torch

from rl_loss_vectors.mistakes import CLIPPED, k3, pieces, setting, together
from rl_loss_vectors.reference import average, evaluate, with_results
from rl_loss_vectors.vectors import expected

GRID = np.geomspace(1e-5, 30, 80)  # of log-ratios
RATIOS = [1, 0.5, 0.9, 0.999, 1.001, 1.1, 1.5, 5]
NEAR = 1e-3
CLAMP = "variant: right, but no gradient where "


@np.errstate(all="ignore")
def entries(subject, plain):
    """[(name, change)]: where the divisor, the clip and the KL differ from the paper's."""
    found = []
    for measure in (divisor, clip, kl):
        try:
            names, change = measure(subject, plain, found)
        except Exception:  # of a function that does not take such cases
            continue
        if names:
            found.append((" and ".join(names), change))
    return found


def of_policy(subject, case):
    """Your gradient of J, minus its value at A = 0, such as that of a KL or an entropy bonus."""
    zeros = np.zeros(np.shape(case["inputs"]["advantages"])).tolist()
    idle = case | {"inputs": case["inputs"] | {"advantages": zeros}}
    return np.nan_to_num(subject.answer(idle).gradient) - subject.answer(case).gradient


# -------------------------------------------------------------------------------------- the divisor

DIVISORS = {  # B rows, o tokens in each, N in all, the padded width T
    "N": ("token-mean [verl: default]", lambda B, o, N, T: N),
    "B |o|": ("sequence-mean: divided by each |o|", lambda B, o, N, T: B * o),
    "B": ("sums of completions, not divided by a length", lambda B, o, N, T: B),
    "1": ("a sum, not divided", lambda B, o, N, T: 1),
    "B T": ("a mean over the padded width", lambda B, o, N, T: B * T),
    "B T / |o|": ("each completion times its |o|", lambda B, o, N, T: B * T / o),
    "B N / |o|": ("each completion times its |o|", lambda B, o, N, T: B * N / o),
}


def divided_by(formula, k=1):
    def other_average(b, terms, divisors):
        B, T = b.mask.shape
        o = b.mask.sum(1, keepdim=True)
        # A completion's single term counts as one equal term for each of its tokens.
        num_equal = o if terms.shape[1] < T else 1
        return average(b, terms * num_equal, k * formula(B, o, o.sum(), T))

    return pieces(average=other_average)


def divisor_of(subject, plain):
    """(words, k): your divisor is k times this one, on policy, in all cases; ("", 1) if it is the
    paper's."""
    options = []
    on_policy = [x["inputs"] | {"old_logprobs": x["inputs"]["logprobs"]} for x in plain]
    cases = [case | {"inputs": inputs} for case, inputs in zip(plain, on_policy, strict=True)]
    yours = np.concatenate([of_policy(subject, case).ravel() for case in cases])
    assert yours.any(), "no gradient"
    formulas = {"": None} | {words: divided_by(formula) for words, (_, formula) in DIVISORS.items()}
    for words, change in formulas.items():
        gradients = [evaluate(subject.section, case, change)[1].ravel() for case in cases]
        ours = -np.concatenate(gradients)
        k = (ours @ ours) / (ours @ yours)
        if np.allclose(ours, k * yours, rtol=NEAR, atol=NEAR * abs(ours).max()):
            options.append((words, k))
    # A factor of 1 is the likeliest, then the fewest words.
    return min(options, key=lambda pair: (abs(abs(pair[1]) - 1) > NEAR) * len(pair[0] or "paper"))


def divisor(subject, plain, found):
    words, k = divisor_of(subject, plain)
    names = ["mistake: wrong sign"] if k < 0 else []
    if abs(abs(k) - 1) > NEAR:
        names.append(f"mistake: divided by {abs(k):.4g} times {words or 'what the paper divides by'}")
    elif words:
        names.append(f"mistake: {DIVISORS[words][0]}")
    if not words:
        return names, lambda J, b: J(b) / k
    return names, divided_by(DIVISORS[words][1], k)


GSPO = {"clip_eps_low": 3e-4, "clip_eps_high": 4e-4}  # the paper's range; the vectors have our own


def own_constants(subject, plain):
    """{our keyword: the value that a function without this keyword uses}, if it is as good as ours: any
    length in Dr. GRPO, the range in GSPO's paper."""
    try:
        if subject.section == "dr_grpo" and not subject.takes("max_new_tokens"):
            words, k = divisor_of(subject, plain)
            is_length = words == "B" and k > 1 + NEAR
            return {"max_new_tokens": float(f"{k:.6g}") if is_length else 8}
        if subject.section == "gspo" and not subject.takes("clip_eps_low"):
            edges, _ = edges_of(subject)
            return GSPO if (edges[-1, -1], edges[1, 1]) == range_of("gspo", GSPO) else {}
    except Exception:  # of a function that does not take such cases
        pass
    return {}


# ------------------------------------------------------------------------------------------ the clip


def asked(subject, log_ratios, advantages, ref_logprobs=None):
    """(your answer, the case) for completions of two tokens with the same ratio."""

    def two(x):
        return np.stack([x, x], 1).tolist()

    new = -1.3 + np.minimum(log_ratios, 0)
    keywords = defaults(subject)
    if subject.has_ref:
        keywords["ref_logprobs"] = two(new if ref_logprobs is None else ref_logprobs)
    inputs = {
        "logprobs": two(new),
        "old_logprobs": two(new - log_ratios),
        "advantages": np.reshape(advantages, (-1, 1)).tolist(),
        "mask": [[1, 1]] * len(new),
    }
    case = {"inputs": inputs, "keywords": keywords, "value": 0, "gradient": np.zeros((len(new), 2))}
    if subject.returns_terms:
        case = with_results(subject.section, case | {"denominator": None})
    return subject.answer(case), case


def defaults(subject):
    keywords = subject.about["cases"][0]["keywords"] | subject.about["defaults"] | subject.constants
    return {key: x for key, x in keywords.items() if not isinstance(x, list)}


def weights(subject, log_ratios, signs=(1, -1)):
    """Your dJ / dlogprob over A for A = 1 and A = -1, at a ratio of 1 and then at other ratios, divided
    by the first one; and the cases."""
    x = np.concatenate([[0], log_ratios])
    cases = {A: asked(subject, x, np.full(len(x), A))[1] for A in signs}
    table = np.array([of_policy(subject, case).sum(1) / A for A, case in cases.items()])
    return table / abs(table[0, 0]), cases


def edge(subject, A, direction):
    """(ratio, kind): beyond this ratio the weight is not r, but 0 ("clip") or constant ("cap");
    (None, "") if there is no such ratio."""
    grid = GRID
    for _ in range(4):
        w = weights(subject, direction * grid, [A])[0][0]
        w = w[1:] / w[0]
        r = np.exp(direction * grid)
        is_r = np.abs(w / r - 1) < NEAR
        if is_r.all():
            return None, ""
        n = int(np.argmin(is_r))
        if (np.abs(w[n:]) > 1e-9).any():
            assert np.ptp(w[n:]) < NEAR * w[-1] and abs(w[-1] / r[n] - 1) < 0.5, "neither r nor a cap"
            return rounded(w[-1]), "cap"
        grid = np.linspace(grid[n - 1] if n else 0, grid[n], 80)
    return rounded(r[n]), "clip"


def rounded(r):
    return float(f"{r:.6g}")


def edges_of(subject):
    """{(sign of A, direction): ratio or None}, and the kinds"""
    found = {(A, way): edge(subject, A, way) for A in (1, -1) for way in (-1, 1)}
    return {key: r for key, (r, _) in found.items()}, {kind for _, kind in found.values()} - {""}


def range_of(section, keywords):
    if section == "gmpo":
        return tuple(rounded(math.exp(x * keywords["log_ratio_clip"])) for x in (-1, 1))
    return rounded(1 - keywords["clip_eps_low"]), rounded(1 + keywords["clip_eps_high"])


def clip(subject, plain, found):
    edges, kinds = edges_of(subject)
    keywords = defaults(subject)
    limits = {A: (edges[A, -1] or 0, edges[A, 1] or math.inf) for A in (1, -1)}
    if subject.section == "cispo" and kinds == {"cap"}:
        floor, cap = limits[1]
        ours = [keywords["is_weight_floor"], keywords["is_weight_cap"]]
        if [floor, cap] == ours:
            return [], None
        names = [f"variant: the weights are in {[floor, cap]}, not {ours}"]
        return names, setting(is_weight_floor=floor, is_weight_cap=cap)
    if subject.section not in [*CLIPPED, "gmpo"] or "cap" in kinds:
        return [], None

    ours = range_of(subject.section, keywords)

    def clipped(r, a, low, high):
        bounds = {ours[0]: low, ours[1]: high}  # if your bound equals ours, use the case's
        least, most = limits[1 if a > 0 else -1]
        return torch.clamp(r, bounds.get(least, least), bounds.get(most, most)) * a

    return clip_names(edges, ours), pieces(clipped=clipped)


DUAL = "variant: dual clip: A < 0 and r > {:.4g} [verl]"
PLACES = {  # (sign of A, direction) where there is no gradient: what this is
    (): "mistake: no clip",
    ((-1, -1), (1, 1)): None,  # the paper's
    ((-1, -1), (-1, 1), (1, 1)): DUAL,
    ((-1, 1), (1, -1)): "mistake: max instead of min",
    ((-1, -1), (-1, 1), (1, -1), (1, 1)): "mistake: a clip on both sides, without the min",
    ((-1, 1), (1, 1)): "mistake: min(r, clip(r)) times A: where A < 0 it is clipped above",
}


def clip_names(edges, ours):
    """What the edges amount to. Edges at a factor of 10 or more are there for safety."""
    near = {key: r for key, r in sorted(edges.items()) if r and 0.1 < r < 9.99}
    far = max([abs(math.log(r)) for key, r in edges.items() if r and key not in near], default=0)
    names = []
    if 0 < far < 16:
        names.append(f"{CLAMP}|log r| > {far:.4g} (r = {math.exp(far):.4g}): a clamp")
    name = PLACES.get(tuple(near), f"mistake: the clip acts in these places alone: {near}")
    if name == DUAL:
        name = DUAL.format(near.pop((-1, 1)))
    if name:
        names.append(name)
    low, high = min(near.values(), default=1), max(near.values(), default=1)
    if low < 1 < high and (low, high) != ours:
        engines = " [TRL, verl: default]" if (low, high) == (ours[0], rounded(2 - low)) else ""
        ranges = [f"[{x:.6g}, {y:.6g}]" for x, y in ((low, high), ours)]
        names.append(f"variant: the range is {ranges[0]}, not {ranges[1]}{engines}")
    return names


# -------------------------------------------------------------------------------------------- the KL

KLS = {  # of log x, x = pi_ref / pi
    "k1": lambda x: -x,
    "k2": lambda x: x**2 / 2,
    "k3": k3,
    "k3 upside down": lambda x: k3(-x),
    "|log x|": torch.abs,
    "k3 without gradient": lambda x: k3(x).detach(),
    "k3 with its score term": lambda x: k3(x) + k3(x).detach() * (x.detach() - x),
}


def kl(subject, plain, found):
    """What remains where A is 0, as c times an estimator."""
    assert "grpo" in subject.section and subject.has_ref
    x = np.array([-2, -1, -0.5, 0.3, 1, 1.5])
    answer, case = asked(subject, x[::-1] / 3, 0 * x, x - 2)
    kl_coef = defaults(subject)["kl_coef"]
    for name, of in itertools.product(KLS, ("ref", "old")):
        change = estimator(KLS[name], of)
        for _, other in found:
            change = together(change, other)
        value, gradient = evaluate("grpo", case, change)
        c = answer.value / value
        if np.allclose(answer.gradient, c * gradient, rtol=NEAR, atol=NEAR / 100):
            break
    else:
        return [], None
    coefficient = float(f"{c * kl_coef:.3g}")
    if (name, of, coefficient) == ("k3", "ref", kl_coef):
        return [], None
    kind = "variant" if (name, of) == ("k3", "ref") and c > 0 else "mistake"
    if coefficient == 0:
        return ["mistake: there is no KL: the reference is not used"], estimator(KLS[name], of, 0)
    size = f"{abs(coefficient):.3g}{', rewarded' if c < 0 else ''}"
    line = f"{kind}: the KL is {name}, x = pi_{of} / pi, coefficient {size}"
    return [line], estimator(KLS[name], of, coefficient / kl_coef)


def estimator(k, of, c=1):
    change = pieces(k3=lambda log_x: c * k(log_x))
    return together(change, setting(ref_logprobs=lambda b: b.old_logprobs)) if of == "old" else change


# ------------------------------------------------------------------------- where all this is not enough


@np.errstate(all="ignore")
def explanation(subject, wrong, measured):
    """Lines: what was measured, how advantages act on policy, and the weights of tokens by ratio."""
    lines = [f"what was measured: {name}" for name, _ in measured]
    if any(answer.gradient[np.array(case["inputs"]["mask"]) == 0].any() for case, answer in wrong):
        lines.append("there is a gradient in masked places")
    for case, answer in wrong:
        if "on_policy" in case["tags"]:
            A = np.array(case["inputs"]["advantages"])[:, 0]
            ours = expected(case).gradient
            quotients = np.where(ours, answer.gradient / ours, np.nan)
            lines.append(f"on policy, advantages of {in_columns(A)}")
            lines.append(f"                 act like {in_columns(A * np.nanmax(quotients, 1))}")
    try:
        size = np.abs(asked(subject, np.zeros(2), [0, 0])[0].gradient).max()
        yours, cases = weights(subject, np.log(RATIOS[1:]))
        ours = [-evaluate(subject.section, x)[1].sum(1) / A for A, x in cases.items()]
    except Exception:  # of a function that does not take such cases
        return lines
    if size > 1e-9:
        lines.append(f"a term has no advantage: where every A is 0 your gradient is up to {size:.2g}")
    ours = np.array(ours) / abs(ours[0][0])
    for A, your, our in zip(("A > 0", "A < 0"), yours, ours, strict=True):
        if not np.allclose(your, our, rtol=NEAR):
            lines.append(f"where {A}, by r:   {in_columns(RATIOS)}")
            lines.append(f"  your weight     {in_columns(your)}")
            lines.append(f"  our weight      {in_columns(our)}")
    return lines


def in_columns(row):
    return " ".join(f"{x:9.4g}" for x in row)
