"""Measures what a loss divides by, where it clips, and its KL, by calling it with cases of our own. The
results are entries like those of mistakes.py, with numbers."""

import functools
import itertools
import math

import numpy as np
import torch

from rl_loss_vectors.mistakes import CLIPPED, k3, pieces, setting, together, unchanged
from rl_loss_vectors.reference import average, evaluate, with_results
from rl_loss_vectors.vectors import Answer, expected

FAR = 16  # a log-ratio; a clamp beyond it is there for safety, and never acts
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
    """Your J and its gradient, minus what a KL or an entropy bonus adds: their values at A = 0."""
    zeros = np.zeros(np.shape(case["inputs"]["advantages"])).tolist()
    idle = subject.answer(case | {"inputs": case["inputs"] | {"advantages": zeros}})
    yours = subject.answer(case)
    return Answer(idle.value - yours.value, np.nan_to_num(idle.gradient) - yours.gradient)


# -------------------------------------------------------------------------------------- the divisor


def divided_by(formula):
    def other_average(b, terms, divisors):
        B, T = b.mask.shape
        o = b.mask.sum(1, keepdim=True)
        # A completion's single term counts as one equal term for each of its tokens.
        num_equal = o if terms.shape[1] < T else 1
        return average(b, terms * num_equal, formula(B, o, o.sum(), T))

    return pieces(average=other_average)


PAPER = "what the paper divides by"
DIVISORS = {  # B rows, o tokens in each, N in all, the padded width T
    PAPER: ("", unchanged),
    "N": ("token-mean [verl: default]", divided_by(lambda B, o, N, T: N)),
    "B |o|": ("sequence-mean: divided by each |o|", divided_by(lambda B, o, N, T: B * o)),
    "B": ("sums of completions, not divided by a length", divided_by(lambda B, o, N, T: B)),
    "1": ("a sum, not divided", divided_by(lambda B, o, N, T: 1)),
    "B T": ("a mean over the padded width", divided_by(lambda B, o, N, T: B * T)),
    "B T / |o|": ("each completion times its |o|", divided_by(lambda B, o, N, T: B * T / o)),
    "B N / |o|": ("each completion times its |o|", divided_by(lambda B, o, N, T: B * N / o)),
}


def divisor(subject, plain, found):
    """The divisor for which, on policy, k times your gradient is ours, with the same k in all cases."""
    on_policy = [x["inputs"] | {"old_logprobs": x["inputs"]["logprobs"]} for x in plain]
    cases = [case | {"inputs": inputs} for case, inputs in zip(plain, on_policy, strict=True)]
    yours = np.concatenate([of_policy(subject, case).gradient.ravel() for case in cases])
    assert yours.any(), "no gradient"
    options = []
    for words, (name, change) in DIVISORS.items():
        gradients = [evaluate(subject.section, case, change)[1].ravel() for case in cases]
        ours = -np.concatenate(gradients)
        k = (ours @ ours) / (ours @ yours)
        if np.allclose(ours, k * yours, rtol=NEAR, atol=NEAR * abs(ours).max()):
            has_factor = abs(abs(k) - 1) > NEAR
            options.append((has_factor * len(words), words, name, change, k))
    # A factor of 1 is the likeliest, then the fewest words.
    size, words, name, change, k = min(options, key=lambda option: option[0])
    names = ["mistake: wrong sign"] if k < 0 else []
    if size > 0:
        names.append(f"mistake: divided by {abs(k):.4g} times {words}")
    elif name:
        names.append(f"mistake: {name}")
    return names, lambda J, b: change(J, b) / k


def own_constants(subject):
    """Constants to use with a function that takes none: ours, or others that the paper allows (GSPO's
    own range, any length in Dr. GRPO)."""
    if subject.section == "gspo" and not subject.takes("clip_eps_low"):
        return [{}, {"clip_eps_low": 3e-4, "clip_eps_high": 4e-4}]
    if subject.section == "dr_grpo" and not subject.takes("max_new_tokens"):
        case = subject.cases[0]
        ours = case["keywords"]["max_new_tokens"]
        length = round(ours * float(expected(case).value / subject.answer(case).value))
        T = len(case["inputs"]["mask"][0])
        return [{"max_new_tokens": length if length > T else ours}]
    return [{}]


# ------------------------------------------------------------------------------------------ the clip


def two_tokens(subject, log_ratios, advantages, **keywords):
    """A case whose completions have two tokens with the same ratio."""

    def two(x):
        return np.stack([x, x], 1).tolist()

    new = -1.3 + np.minimum(log_ratios, 0)
    inputs = {
        "logprobs": two(new),
        "old_logprobs": two(new - log_ratios),
        "advantages": np.reshape(advantages, (-1, 1)).tolist(),
        "mask": [[1, 1]] * len(new),
    }
    keywords = defaults(subject) | {name: two(x) for name, x in keywords.items()}
    case = {"inputs": inputs, "keywords": keywords, "gradient": None, "denominator": None}
    return with_results(subject.section, subject.adapted(case))


def defaults(subject):
    keywords = subject.about["cases"][0]["keywords"] | subject.about["defaults"] | subject.constants
    return {key: x for key, x in keywords.items() if not isinstance(x, list)}


def edge(subject, A, direction):
    """The ratio beyond which the weight is not r: it is 0 there, or constant in CISPO. None if there is
    no such ratio."""

    def measured(log_ratio):
        found = of_policy(subject, two_tokens(subject, np.array([log_ratio]), [A]))
        return float(found.value), found.gradient.sum()

    value_at_1, weight_at_1 = measured(0)
    value, weight = measured(direction * FAR)
    weight = weight / weight_at_1
    if abs(weight / math.exp(direction * FAR) - 1) < NEAR:
        return None
    is_capped = abs(weight) > 1e-9
    assert is_capped == (subject.section == "cispo"), "another kind of clip"
    if is_capped:
        return rounded(weight)
    # Where the objective is clipped, it stays what it was at the edge.
    log_edge = math.log(value / value_at_1)
    _, inside = measured(0.99 * log_edge)
    assert abs(inside / weight_at_1 / math.exp(0.99 * log_edge) - 1) < NEAR, "not clipped"
    return rounded(math.exp(log_edge))


def rounded(r):
    return float(f"{r:.6g}")


def range_of(section, keywords):
    if section == "cispo":
        return keywords["is_weight_floor"], keywords["is_weight_cap"]
    if section == "gmpo":
        return tuple(rounded(math.exp(x * keywords["log_ratio_clip"])) for x in (-1, 1))
    return rounded(1 - keywords["clip_eps_low"]), rounded(1 + keywords["clip_eps_high"])


def clip(subject, plain, found):
    assert subject.section in [*CLIPPED, "gmpo", "cispo"]
    edges = {(A, way): edge(subject, A, way) for A in (1, -1) for way in (-1, 1)}
    limits = {A: (edges[A, -1] or 0, edges[A, 1] or math.inf) for A in (1, -1)}
    ours = range_of(subject.section, defaults(subject))
    if subject.section == "cispo":
        floor, cap = limits[1]
        change = setting(is_weight_floor=floor, is_weight_cap=cap)
        return [] if limits[1] == ours else [range_name((floor, cap), ours)], change

    def clipped(r, a, low, high):
        bounds = {ours[0]: low, ours[1]: high}  # if your bound equals ours, use the case's
        least, most = limits[1 if a > 0 else -1]
        return torch.clamp(r, bounds.get(least, least), bounds.get(most, most)) * a

    return clip_names(edges, ours), pieces(clipped=clipped)


def range_name(yours, ours):
    return "variant: the range is [{:.6g}, {:.6g}], not [{:.6g}, {:.6g}]".format(*yours, *ours)


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
    if far > 0:
        names.append(f"{CLAMP}|log r| > {far:.4g} (r = {math.exp(far):.4g}): a clamp")
    name = PLACES.get(tuple(near), f"mistake: the clip acts in these places alone: {near}")
    if name == DUAL:
        name = DUAL.format(near.pop((-1, 1)))
    if name:
        names.append(name)
    low, high = min(near.values(), default=1), max(near.values(), default=1)
    if low < 1 < high and (low, high) != ours:
        names.append(range_name((low, high), ours))
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
    case = two_tokens(subject, x[::-1] / 3, 0 * x, ref_logprobs=x - 2)
    answer = subject.answer(case)
    kl_coef = defaults(subject)["kl_coef"]
    for name, of in itertools.product(KLS, ("ref", "old")):
        others = [change for _, change in found]
        change = functools.reduce(together, others, estimator(KLS[name], of))
        value, gradient = evaluate("grpo", case, change)
        c = answer.value / value
        if np.allclose(answer.gradient, c * gradient, rtol=NEAR, atol=NEAR / 100):
            break
    else:
        return [], None
    coefficient = float(f"{c * kl_coef:.3g}")
    change = estimator(KLS[name], of, coefficient / kl_coef)
    if (name, of, coefficient) == ("k3", "ref", kl_coef):
        return [], change
    if coefficient == 0:
        return ["mistake: there is no KL: the reference is not used"], change
    kind = "variant" if (name, of) == ("k3", "ref") and c > 0 else "mistake"
    size = f"{abs(coefficient):.3g}{', rewarded' if c < 0 else ''}"
    return [f"{kind}: the KL is {name}, x = pi_{of} / pi, coefficient {size}"], change


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
            quotients = (answer.gradient * (ours != 0)).sum(1) / ours.sum(1)
            lines.append(f"on policy, advantages of {in_columns(A)}")
            lines.append(f"                 act like {in_columns(A * quotients)}")
    try:
        idle = subject.answer(two_tokens(subject, np.zeros(2), [0, 0]))
        yours, ours = [], []
        for A in (1, -1):
            case = two_tokens(subject, np.log(RATIOS), np.full(len(RATIOS), A))
            yours.append(of_policy(subject, case).gradient.sum(1) / A)
            ours.append(-evaluate(subject.section, case)[1].sum(1) / A)
    except Exception:  # of a function that does not take such cases
        return lines
    yours = yours / abs(yours[0][0])
    ours = ours / abs(ours[0][0])
    size = np.abs(idle.gradient).max()
    if size > 1e-9:
        lines.append(f"a term has no advantage: where every A is 0 your gradient is up to {size:.2g}")
    for A, your, our in zip(("A > 0", "A < 0"), yours, ours, strict=True):
        if not np.allclose(your, our, rtol=NEAR):
            lines.append(f"where {A}, by r:   {in_columns(RATIOS)}")
            lines.append(f"  your weight     {in_columns(your)}")
            lines.append(f"  our weight      {in_columns(our)}")
    return lines


def in_columns(row):
    return " ".join(f"{x:9.4g}" for x in row)
