"""What the gradient of a loss may be made of, place by place: {words: array}.

x holds a case: its inputs and keywords as arrays, "mask", "size" (|o|, (B, 1)), and "log r" (0 outside
of the mask). Arrays are (B, T) or broadcast to it. The first words that fit are printed, so the usual
ones come first.
"""

import itertools

import numpy as np


def row_mean(x, y):
    return np.where(x["mask"], y, 0).sum(1, keepdims=True) / x["size"]


def divisors(x, micro_batches):
    """By what a sum over tokens may be divided."""
    size = x["size"]
    B, T = x["mask"].shape
    M = len(micro_batches)
    part_of = [next(part for part in micro_batches if row in part) for row in range(B)]
    b = np.array([[len(part)] for part in part_of])
    n = np.array([[size[part].sum()] for part in part_of])
    longest = np.array([[size[part].max()] for part in part_of])
    first = x["mask"].argmax(1)[:, None]
    last = T - x["mask"][:, ::-1].argmax(1)[:, None]
    rows = {"B": B, "": 1, "b": b, "B M": B * M}
    lengths = {
        "|o|": size,
        "": 1,
        "T": T,
        "L_max": x.get("max_new_tokens", np.nan),
        "|o| with holes": last - first,
        "|o| with holes and prompt": last,
        "(|o|+1)": size + 1,
        "(|o|-1)": size - 1,
        "longest |o|": longest,
        "|o|^2": size**2,
        "sqrt(|o|)": np.sqrt(size),
        "harmonic mean of |o|": B / (1 / size).sum(),
    }
    N = size.sum()
    result = {"N": N, "n": n, "N M": N * M, "B N": B * N, "(N-B)": N - B, "(N+B)": N + B}
    for (row, count), (length, width) in itertools.product(rows.items(), lengths.items()):
        result[f"{row} {length}".strip()] = count * width
    return result


def positions(mask, size):
    """Places that a mistake in the mask sets apart."""
    place = mask.cumsum(1)
    last = mask.shape[1] - 1 - mask[:, ::-1].argmax(1)[:, None]
    return {
        "it is in the last row": np.arange(len(mask))[:, None] == len(mask) - 1,
        "it is the last token": place == size,
        "it is the first token": place == 1,
        "the next place is a hole": (place < size) & ~np.pad(mask[:, 1:], ((0, 0), (0, 1))),
        "the place before is a hole": (place > 1) & ~np.pad(mask[:, :-1], ((0, 0), (1, 0))),
        "a hole is before it": place <= np.arange(mask.shape[1]) - mask.argmax(1)[:, None],
        "a hole is behind it": size - place < last - np.arange(mask.shape[1]),
        "the completion is shorter than the longest": size < size.max(),
    }


def factors_of_policy(x):
    """What may stand for A; with the sign of the loss, -J."""
    A = np.broadcast_to(x["advantages"], x["mask"].shape)
    return {"A": -A, "|A|": -np.abs(A), "sgn(A)": -np.sign(A)}


def weights_of_policy(x):
    """What may stand for the ratio."""
    log_r = x["log r"]
    r = np.exp(log_r)
    s = np.exp(row_mean(x, log_r))
    weights = {
        "r": r,
        "": 1,
        "s": s,
        "r^2": r**2,
        "(1/r)": 1 / r,
        "(1/s)": 1 / s,
        "r s": r * s,
        "log r": log_r,
        "(1 + log r)": 1 + log_r,
        "sqrt(r)": np.sqrt(r),
        "AM(r)": row_mean(x, r),
        "product(r)": s ** x["size"],
        "exp(sum(log r) / T)": np.exp(np.log(s) * x["size"] / x["mask"].shape[1]),
        "pi": np.exp(x["logprobs"]),
        "logprob": x["logprobs"],
    }
    if "clip_eps_low" in x:
        low, high = 1 - x["clip_eps_low"], 1 + x["clip_eps_high"]
        weights |= {"clip(r)": r.clip(low, high), "clip(s)": s.clip(low, high)}
    if "is_weight_cap" in x:
        cap = x["is_weight_cap"]
        capped = {"min(r, cap)": r.clip(max=cap), "max(r, cap)": r.clip(min=cap)}
        weights = capped | {"min(r, 1 + cap)": r.clip(max=1 + cap)} | weights
    if "log_ratio_clip" in x:
        weights = weights_of_means(x, x["log_ratio_clip"]) | weights
    if "tau_pos" in x:
        weights = weights_of_gates(x, r) | weights
    return weights


def weights_of_means(x, eps):
    """Of gmpo, and with gamma of rspo: the geometric mean, and what it is mistaken for."""
    log_r = x["log r"]
    is_positive = x["advantages"] > 0
    clips = {
        "clip r": np.where(is_positive, log_r.clip(max=eps), log_r.clip(min=-eps)),
        "r": log_r,
        "r clipped on both sides": log_r.clip(-eps, eps),
        "r clipped above": log_r.clip(max=eps),
        "r clipped on the other side": np.where(is_positive, log_r.clip(min=-eps), log_r.clip(max=eps)),
        "r clipped at 1 - eps, 1 + eps": np.log(np.exp(log_r).clip(1 - eps, 1 + eps)),
    }
    gammas = {"": 0}
    if "router_shift" in x:
        g = np.log(x["router_shift"])
        floor = np.log(x["gamma_min"])
        floored = g.clip(min=floor)
        gammas = {"g": floored, "": 0, "g without a floor": g, "(1/g)": -floored}
        gammas["g^sgn(A)"] = np.where(is_positive, floored, -floored)
        gammas["(mean of g, then its floor)"] = row_mean(x, g).clip(min=floor)
        gammas["(arithmetic mean of g)"] = np.log(row_mean(x, np.exp(floored)))
    weights = {}
    for (clip, c), (name, g) in itertools.product(clips.items(), gammas.items()):
        words = f"{clip} {name}".strip()
        mean = row_mean(x, c + g)
        weights[f"GM({words})"] = np.exp(mean)
        weights[f"(1/GM({words}))"] = np.exp(-mean)
        weights[f"AM({words})"] = row_mean(x, np.exp(c + g))
        weights[f"({words})"] = np.exp(c + g)
        weights[f"product({words})"] = np.exp(mean * x["size"])
        weights[f"GM(({clip})^{name}) {name}"] = np.exp(row_mean(x, c * np.exp(g)) + g)
    return weights


def weights_of_gates(x, r):
    """Of sapo: r f'(r), and what it is mistaken for."""
    of_sign = np.where(x["advantages"] > 0, x["tau_pos"], x["tau_neg"])
    taus = {
        "": of_sign,
        " with tau_pos": x["tau_pos"],
        " with tau_neg": x["tau_neg"],
        " with taus swapped": x["tau_pos"] + x["tau_neg"] - of_sign,
        " with tau by r > 1": np.where(r > 1, x["tau_pos"], x["tau_neg"]),
    }
    weights = {}
    for name, tau in taus.items():
        for at, distance in (("", r - 1), (" at 1 + log r", x["log r"]), (" at 1 + r", r)):
            gate = 1 / (1 + np.exp(-tau * distance))
            slope = 4 * gate * (1 - gate)
            words = f"{at}{name}"
            weights |= {f"r f'(r){words}": r * slope, f"f'(r){words}": slope}
            weights |= {
                f"tau r f'(r){words}": tau * r * slope,
                f"r f'(r) / tau{words}": r * slope / tau,
            }
            weights |= {f"f(r){words}": 4 / tau * gate, f"r f(r){words}": 4 / tau * gate * r}
    return weights


def places_of_policy(x):
    """Places that a clip sets apart: by the sign of A, by the size of a ratio, by both."""
    log_r = x["log r"]
    low, high = 1 - x.get("clip_eps_low", 0.2), 1 + x.get("clip_eps_high", 0.2)
    if "log_ratio_clip" in x:
        low, high = np.exp(-x["log_ratio_clip"]), np.exp(x["log_ratio_clip"])
    ranges = {
        "the range": (low, high),
        "1": (1 - 1e-9, 1 + 1e-9),
        "1 +- 0.2": (0.8, 1.2),
        "the bounds swapped": (2 - high, 2 - low),
        "the bounds as logarithms": (np.exp(low - 1), np.exp(high - 1)),
    }
    sizes = {}
    for name, y in {"r": np.exp(log_r), "s": np.exp(row_mean(x, log_r))}.items():
        for words, (bottom, top) in ranges.items():
            sizes |= {f"{name} is above {words}": y > top, f"{name} is below {words}": y < bottom}
            sizes[f"{name} is outside of {words}"] = (y > top) | (y < bottom)
            sizes[f"{name} is not above {words}"] = y <= top
            sizes[f"{name} is not below {words}"] = y >= bottom
        sizes |= {f"{name} > {k}": y > k for k in (2, 3, 5, 10)}
    sizes |= {"|log r| > 5": np.abs(log_r) > 5, "the log-prob is 0": x["logprobs"] == 0}
    if "is_weight_cap" in x:
        sizes["r is above the cap"] = log_r > np.log(x["is_weight_cap"])
    signs = {"A > 0": x["advantages"] > 0, "A < 0": x["advantages"] < 0}
    both = {f"{sign} and {size}": signs[sign] & sizes[size] for sign in signs for size in sizes}
    return signs | both | sizes


def of_values(x):
    """(weights, places) of the critic's loss."""
    V = x["values"]
    off = V - x["returns"]
    reach = x["value_clip"] or np.inf
    near = x["old_values"] + (V - x["old_values"]).clip(-reach, reach)
    has_left = near != V
    is_worse = np.abs(off) > np.abs(near - x["returns"])
    weights = {
        "(V - return)": off,
        "(clipped V - return)": near - x["returns"],
        "sgn(V - return)": np.sign(off),
    }
    places = {
        "V has left the range": has_left,
        "V has left the range and is off by more": has_left & is_worse,
        "V has left the range and is off by less": has_left & ~is_worse,
    }
    return weights, places
