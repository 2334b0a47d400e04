"""What a loss divides by, where it clips and its KL, measured by asking it cases of our own: entries like
those of mistakes.py, with numbers."""

import itertools
import math

import numpy as np
import torch

from rl_loss_vectors.mistakes import CLIPPED, GEOMETRIC, k3, pieces, setting, together
from rl_loss_vectors.reference import LOSSES, evaluate, length, with_results

GRID = np.geomspace(1e-5, 30, 80)  # of log-ratios
NEAR = 1e-3
ENGINES = " [TRL, verl: default]"
CLAMP = "variant: right, but no gradient where "


@np.errstate(all="ignore")
def entries(subject, plain):
    """[(name, change)]: what is unlike the paper in the divisor, the clip and the KL."""
    found = []
    for measure in (divisor, clip, kl) if subject.section in LOSSES else ():
        try:
            names, change = measure(subject, plain, found)
        except Exception:  # of a function that does not take such cases
            continue
        if names:
            found.append((" and ".join(names), change))
    return found


def of_policy(subject, case):
    """Your gradient of J, without what it is where A = 0, such as that of a KL or an entropy."""
    idle = case["inputs"] | {"advantages": np.zeros(np.shape(case["inputs"]["advantages"])).tolist()}
    return (
        np.nan_to_num(subject.answer(case | {"inputs": idle}).gradient) - subject.answer(case).gradient
    )


# -------------------------------------------------------------------------------------- the divisor

DIVISORS = {  # of B rows, |o| tokens in one, N in all, the padded width T, the longest M, the constant L
    "N": ("token-mean [verl: default]", lambda B, o, N, T, M, L: N),
    "B |o|": ("sequence-mean: divided by each |o|", lambda B, o, N, T, M, L: B * o),
    "B L_max": ("a constant length", lambda B, o, N, T, M, L: B * L),
    "B": ("sums of completions, not divided by a length", lambda B, o, N, T, M, L: B),
    "1": ("a sum, not divided", lambda B, o, N, T, M, L: 1),
    "B T": ("a mean over the padded width", lambda B, o, N, T, M, L: B * T),
    "B M": ("divided by the longest |o|", lambda B, o, N, T, M, L: B * M),
    "B N": ("a token-mean, divided by B again", lambda B, o, N, T, M, L: B * N),
    "|o|": ("sequence-means, not divided by B", lambda B, o, N, T, M, L: o),
    "N / |o|": ("each completion times its |o|", lambda B, o, N, T, M, L: N / o),
    "B T / |o|": ("each completion times its |o|", lambda B, o, N, T, M, L: B * T / o),
    "B N / |o|": ("each completion times its |o|", lambda B, o, N, T, M, L: B * N / o),
}


def on_policy(section, case):
    """The case with ratios of 1."""
    case = {key: x for key, x in case.items() if key != "id"}
    inputs = case["inputs"] | {"old_logprobs": case["inputs"]["logprobs"]}
    shift = {"router_shift": np.ones(np.shape(case["gradient"])).tolist()} if section == "rspo" else {}
    return with_results(section, case | {"inputs": inputs, "keywords": case["keywords"] | shift})


def divisors_of(subject, plain):
    """(your divisor, ours, sizes) of each completion; sizes as in DIVISORS. None if tokens differ."""
    rows = []
    for case in plain:
        case = on_policy(subject.section, subject.case_of(case["id"]))
        A = np.broadcast_to(case["inputs"]["advantages"], np.shape(case["gradient"]))
        yours, ours = of_policy(subject, case), -np.array(case["gradient"])
        mask = np.array(case["inputs"]["mask"])
        o = mask.sum(1)
        for i in np.flatnonzero(np.abs(ours).max(1)):
            where = ours[i] != 0
            D = (A[i] / yours[i])[where]
            if (
                np.ptp(D) > NEAR * abs(D[0])
                or np.abs(yours[i][~where]).any()
                or not np.isfinite(D).all()
            ):
                return None
            L = case["keywords"].get("max_new_tokens", math.nan)
            sizes = (len(mask), o[i], o.sum(), mask.shape[1], o.max(), L)
            rows.append((D[0], (A[i] / ours[i])[where][0], sizes))
    return zip(*rows, strict=True) if rows else None


def fitted(divisors, sizes):
    """(words, k): these are k times a divisor of the table; a k of 1 or -1, or else the fewest words."""
    found = []
    for words, (_, formula) in DIVISORS.items():
        k = np.array(divisors) / [formula(*each) for each in sizes]
        if np.ptp(k) <= NEAR * abs(k[0]):
            found.append((words, k[0]))
    return min(found, key=lambda pair: (abs(abs(pair[1]) - 1) > NEAR) * len(pair[0]))


def divisor(subject, plain, found):
    yours, ours, sizes = divisors_of(subject, plain)
    words, k = fitted(yours, sizes)
    right, _ = fitted(ours, sizes)
    what, formula = DIVISORS[words]

    def average(b, terms, how):
        o = [length(b, i) for i in range(len(terms))]
        rest = (sum(o), b.mask.shape[1], max(o), getattr(b, "max_new_tokens", math.nan))
        # What there is once for a completion stands on each of its tokens.
        parts = [
            sum(row) * (n // len(row)) / formula(len(o), n, *rest)
            for n, row in zip(o, terms, strict=True)
        ]
        return sum(parts) / k

    names = ["mistake: wrong sign"] if k < 0 else []
    if abs(abs(k) - 1) > NEAR:
        names.append(f"mistake: divided by {abs(k):.4g} {words}, not by {right}".replace(" 1,", ","))
    elif words != right:
        names.append(f"mistake: {what}")
    return names, pieces(average=average)


def constant_length(subject, plain):
    """The L_max of a Dr. GRPO that has no keyword for it, or None."""
    yours, _, sizes = divisors_of(subject, plain)
    words, k = fitted(yours, sizes)
    return float(f"{k:.6g}") if words == "B" and k > 1 + NEAR else None


# ------------------------------------------------------------------------------------------ the clip


def asked(subject, log_ratios, advantages, **more):
    """(your answer, the case) about completions of two tokens with the same ratio."""
    new = -1 + np.minimum(log_ratios, 0)
    more = {"ref_logprobs": new} | more if subject.needs_ref or more else {}
    table = {"logprobs": new, "old_logprobs": new - log_ratios, **more}
    table = {key: np.stack([x, x], 1).tolist() for key, x in table.items()}
    keywords = {key: table.pop(key) for key in more}
    shift = {"router_shift": np.ones((len(new), 2)).tolist()} if subject.section == "rspo" else {}
    inputs = table | {
        "advantages": np.reshape(advantages, (-1, 1)).tolist(),
        "mask": [[1, 1]] * len(new),
    }
    case = {"inputs": inputs, "keywords": defaults(subject) | keywords | shift, "value": 0}
    case["gradient"] = np.zeros((len(new), 2))
    if subject.returns_terms:
        case = with_results(subject.section, case | {"denominator": None})
    return subject.answer(case), case


def defaults(subject):
    keywords = subject.about["cases"][0]["keywords"] | subject.about["defaults"] | subject.constants
    return {key: x for key, x in keywords.items() if not isinstance(x, list)}


def own_term(subject):
    """The largest gradient where every A is 0."""
    return float(np.abs(asked(subject, np.zeros(2), [0, 0])[0].gradient).max())


def weights(subject, log_ratios, signs=(1, -1)):
    """Your dJ / dlogprob over A for A = 1 and A = -1, the first of them that at a ratio of 1, in units
    of the latter for A = 1; and the cases"""
    x = np.concatenate([[0], log_ratios])
    cases = {A: asked(subject, x, np.full(len(x), A))[1] for A in signs}
    table = np.array([of_policy(subject, case).sum(1) / A for A, case in cases.items()])
    return table / abs(table[0, 0]), cases


def edge(subject, A, direction):
    """(ratio, kind): from where on the weight is not r, but 0 ("clip") or constant ("cap"); (None, "")
    if there is no such place."""
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
            assert np.ptp(w[n:]) < NEAR * w[-1] and abs(w[-1] / r[n] - 1) < 0.5, (
                "neither r nor constant"
            )
            return rounded(w[-1]), "cap"
        grid = np.linspace(grid[n - 1] if n else 0, grid[n], 80)
    return rounded(r[n]), "clip"


def rounded(r):
    """A bound as people write it: its distance from 1 has few digits."""
    return round(1 + float(f"{r - 1:.3g}"), 9) if 0.1 < r < 2 else float(f"{r:.8g}")


def edges_of(subject):
    """{(sign of A, direction): ratio or None}, and the kinds"""
    found = {(A, way): edge(subject, A, way) for A in (1, -1) for way in (-1, 1)}
    return {key: r for key, (r, _) in found.items()}, {kind for _, kind in found.values()} - {""}


def range_of(section, keywords):
    if section in GEOMETRIC:
        return tuple(rounded(math.exp(x * keywords["log_ratio_clip"])) for x in (-1, 1))
    return rounded(1 - keywords["clip_eps_low"]), rounded(1 + keywords["clip_eps_high"])


def clip(subject, plain, found):
    edges, kinds = edges_of(subject)
    keywords = defaults(subject)
    limits = {A: (edges[A, -1] or 0, edges[A, 1] or math.inf) for A in (1, -1)}
    if subject.section == "cispo" and kinds == {"cap"} and limits[1] == limits[-1]:
        return cap_names(*limits[1], keywords), setting(
            is_weight_floor=limits[1][0], is_weight_cap=limits[1][1]
        )
    if subject.section not in CLIPPED + GEOMETRIC or "cap" in kinds:
        return [], None

    def clipped(r, a, low, high):
        return torch.clamp(r, *limits[1 if a > 0 else -1]) * a

    return clip_names(edges, range_of(subject.section, keywords), subject.section), pieces(
        clipped=clipped
    )


def cap_names(floor, cap, ours):
    names = (
        [f"variant: weights of at least {floor:.4g} [verl: 0.8]"]
        if floor != ours["is_weight_floor"]
        else []
    )
    engines = {0.2: " [TRL: default]", 1 + ours["is_weight_cap"]: " [verl: 1 + c]"}
    if cap != ours["is_weight_cap"]:
        names.append(
            f"variant: a cap of {cap:.4g}, where ours is {ours['is_weight_cap']:.4g}{engines.get(cap, '')}"
        )
    return names


def clip_names(edges, ours, section):
    """What the edges amount to."""
    logs = {key: math.log(r) if r else 0 for key, r in edges.items()}
    near = {key: None if abs(logs[key]) > 2.3 else r for key, r in edges.items()}
    far = max(abs(x) if 2.3 < abs(x) < 16 else 0 for x in logs.values())  # for safety
    names = []
    if far:
        is_of_r = far < 6
        words = (
            f"r > {math.exp(far):.4g}: a clamp of r"
            if is_of_r
            else f"|log r| > {far:.4g}: a clamp of log r"
        )
        names.append(f"{CLAMP}{words}")
    found = (near[-1, -1], near[1, 1])
    places = {key for key, r in near.items() if r}
    if not places:
        return ["mistake: no clip"]
    if places == {(-1, -1), (1, 1), (-1, 1)}:
        names.append(f"variant: dual clip: A < 0 and r > {near[-1, 1]:.4g} [verl]")
    elif len(places) == 4:
        names.append("mistake: a clip on both sides, without the min")
    elif places == {(1, -1), (-1, 1)}:
        names.append("mistake: max for min")
        found = (near[1, -1], near[-1, 1])
    elif places == {(1, 1), (-1, 1)}:
        names.append("mistake: min(r, clip(r)) times A: where A < 0 it is clipped above")
        found = (ours[0], near[1, 1])
    elif places != {(-1, -1), (1, 1)}:
        words = [
            f"A {'>' if A > 0 else '<'} 0, {'r above' if way > 0 else 'r below'} {near[A, way]:.4g}"
            for A, way in places
        ]
        return [f"mistake: it clips only where {' and where '.join(sorted(words))}"]
    if found != ours:
        is_default = found[1] - 1 == 1 - found[0] and found in (
            (ours[0], rounded(2 - ours[0])),
            (0.8, 1.2),
        )
        found, ours = (f"[{low:.10g}, {high:.10g}]" for low, high in (found, ours))
        names.append(f"variant: the range is {found}, not {ours}{ENGINES if is_default else ''}")
    return names


# -------------------------------------------------------------------------------------------- the KL

KLS = {  # of log x
    "k1": lambda x: -x,
    "k2": lambda x: x**2 / 2,
    "k3": k3,
    "k3 upside down": lambda x: k3(-x),
    "x - 1": torch.expm1,
    "|log x|": torch.abs,
}
GRADIENTS = {  # how much there is of the derivative, and of the score times k
    "": (1, 0),
    ", without gradient": (0, 0),
    ", with its score term": (1, 1),
    ", its score term alone": (0, 1),
}


def kl(subject, plain, found):
    """What is left where A is 0, as c times an estimator."""
    if "grpo" not in subject.section or not subject.takes("ref_logprobs"):
        return [], None
    x = np.array([-2, -1, -0.5, 0.3, 1, 1.5])
    pairs = [asked(subject, size * x[::-1] / 3, 0 * x, ref_logprobs=-2 + size * x) for size in (1, 0.4)]
    for (name, k), (words, parts), of in itertools.product(
        KLS.items(), GRADIENTS.items(), ("ref", "old")
    ):
        change = estimator(k, *parts, of)
        for _, other in found:
            change = together(change, other)
        results = [[y.numpy() for y in evaluate("grpo", case, change)] for _, case in pairs]
        c, other = (
            answer.value / value for (answer, _), (value, _) in zip(pairs, results, strict=True)
        )
        gradients = np.array(
            [[c * y, answer.gradient] for (answer, _), (_, y) in zip(pairs, results, strict=True)]
        )
        if abs(c - other) < NEAR * abs(c) and np.allclose(*gradients.swapaxes(0, 1), NEAR, NEAR / 100):
            break
    else:
        return [], None
    ours = defaults(subject)["kl_coef"]
    c = float(f"{c * ours:.3g}")
    is_right = (name, words, of) == ("k3", "", "ref")
    if is_right and c == ours:
        return [], None
    kind = "variant" if is_right and c > 0 else "mistake"
    rewarded = ", rewarded" if c < 0 else ""
    text = f"{kind}: the KL is {name}, x = pi_{of} / pi, coefficient {abs(c):.3g}{rewarded}{words}"
    return [text], estimator(k, *parts, of, c / ours)


def estimator(k, derivative, score, of, c=1):
    def changed(log_x):
        stopped = k(log_x).detach()
        slope = derivative * (k(log_x) - stopped) + score * stopped * (log_x.detach() - log_x)
        return c * (stopped + slope)

    change = pieces(k3=changed)
    return together(change, setting(ref_logprobs=lambda b: b.old_logprobs)) if of == "old" else change
