"""What answers are made of, where no known mistake gives them.

In most losses the gradient at a token is a factor, such as A, times a weight, such as the ratio, over a
divisor, such as N, and 0 in some places. These are looked for in the answers and in what is expected,
and both are printed, with the symbols of README.md. Where nothing fits, the smallest case that differs
is printed token by token.
"""

import itertools

import numpy as np

from rl_loss_vectors.vectors import LOSSES, same

ZERO = 1e-9


@np.errstate(all="ignore")
def explanation(subject, tested):
    """Lines about [(case, answer)], some of which are wrong."""
    strange = [case["id"] for case, answer in tested if not is_finite(answer)]
    lines = [f"not finite: {', '.join(strange)}"] if strange else []
    rows = [(case, answer, *subject.expected(case)) for case, answer in tested]
    rows = [row for row in rows if row[0]["id"] not in strange]
    wrong = [row for row in rows if not same(*row[1:], row[0]["tolerance"]["float32"])]
    if not wrong:
        return lines
    lines += in_common([row[0] for row in wrong], [row[0] for row in rows if row not in wrong])
    found = []
    if subject.section == "gae":
        found = lines_of_gae(wrong)
    elif "rewards" in subject.arguments:
        found = lines_of_groups(wrong)
    elif subject.section in LOSSES:
        found = lines_of_gradient(rows, wrong)
    is_explained = any("your" in line and " more of " not in line for line in found)
    return lines + found + ([] if is_explained else smallest_case(wrong))


def is_finite(answer):
    return all(np.isfinite(x).all() for x in (answer.value, answer.gradient) if x is not None)


def in_common(wrong, right):
    """A line about the tags that all cases that differ have, and no others."""
    shared = set.intersection(*(set(case["tags"]) for case in wrong))
    shared -= {tag for case in right for tag in case["tags"]}
    if not shared or not right:
        return []
    return [f"all cases that differ, and only they, have {', '.join(sorted(shared))}"]


def near(x, y):
    return np.abs(x - y) <= 1e-5 * (1 + np.abs(y))


def smallest_case(wrong):
    """Your numbers and ours, token by token, in the case with the fewest of them."""

    def size(row):
        return "masked_places" in row[0]["tags"], len(str(row[0]["inputs"]))

    case, answer, value, gradient = min(wrong, key=size)
    what, yours, ours = ("value", answer.value, value)
    if gradient is not None and not near(answer.gradient, gradient).all():
        what, yours, ours = ("gradient of the loss", answer.gradient, gradient)
    lines = [f"the smallest case that differs is {case['id']}, {case['name']}; the {what}:"]
    masks = case["inputs"].get("mask", [])
    yours, ours = (x.reshape(-1, *x.shape[-1:]) for x in (yours, ours))
    for i in np.flatnonzero(~near(yours, ours).reshape(len(ours), -1).all(1)):
        if masks and np.size(ours[i]) == len(masks[0]):
            lines.append(f"  mask  {in_columns(masks[i % len(masks)])}")  # GAE has rows of two kinds
        lines += [f"  yours {in_columns(yours[i])}", f"  ours  {in_columns(ours[i])}"]
    return lines


def in_columns(row):
    return " ".join(f"{x:9.4g}" for x in np.atleast_1d(row))


# --------------------------------------------------------------------------------------- the gradient


def lines_of_gradient(rows, wrong):
    if all(near(answer.gradient, gradient).all() for _, answer, _, gradient in rows):
        return ["every gradient is right: only your value, the number that is reported, differs"]
    lines = []
    if all(near(answer.value, value).all() for _, answer, value, _ in rows):
        lines.append("every value is right: a detach is missing, or one too many")
    if any(answer.gradient[np.array(case["inputs"]["mask"]) == 0].any() for case, answer, *_ in rows):
        lines.append("there is a gradient in masked places")
    others = {"kl", "settings", "large_ratios", "micro_batches"}
    for group, special in ((rows, others), (wrong, {"kl", "settings"})):
        chosen = [row for row in group if not special & set(row[0]["tags"])]
        if any(row in wrong for row in chosen):
            forms = both_forms(joined(chosen))
            if forms:
                return lines + forms
    return lines + shifted(rows)


def joined(rows):
    """{name: array} of what all cases have, one case below the other, (rows, T)."""
    tables = []
    for case, answer, _, ours in rows:
        given = case["inputs"] | case["keywords"] | {"your": answer.gradient, "our": ours}
        x = {key: np.array(value, float) for key, value in given.items() if not isinstance(value, str)}
        x["mask"] = x["mask"].astype(bool)
        x["size"] = x["mask"].sum(1, keepdims=True)
        x["log r"] = np.where(x["mask"], x["logprobs"] - x["old_logprobs"], 0)
        x |= {"B": len(x["mask"]), "T": x["mask"].shape[1], "N": x["size"].sum()}
        x |= {"longest": x["size"].max(), "inverses": (1 / x["size"]).sum()}
        tables.append({key: np.broadcast_to(y, ours.shape) for key, y in x.items()})
    names = set.intersection(*map(set, tables))
    return {name: np.concatenate([table[name] for table in tables]) for name in names}


def candidates(x):
    """{group: {words: array}} over the places of the mask: what a gradient may be made of. The first
    words that fit are printed, so the usual ones come first."""
    groups = {"divisors": divisors(x), "weights": weights(x), "places": places(x)}
    A = x["advantages"]
    groups["factors"] = {"A": -A, "|A|": -np.abs(A), "sgn(A)": -np.sign(A)}
    for name, columns in groups.items():
        groups[name] = {words: np.broadcast_to(y, A.shape)[x["mask"]] for words, y in columns.items()}
    return groups


def divisors(x):
    """By what a sum over tokens may be divided."""
    rows = {"B": x["B"], "": 1}
    lengths = {"|o|": x["size"], "": 1, "T": x["T"], "longest |o|": x["longest"]}
    lengths["harmonic mean of |o|"] = x["B"] / x["inverses"]
    if "max_new_tokens" in x:
        lengths = {"L_max": x["max_new_tokens"]} | lengths
    result = {"N": x["N"], "(N-B)": x["N"] - x["B"]}
    for (row, count), (length, width) in itertools.product(rows.items(), lengths.items()):
        result[f"{row} {length}".strip()] = count * width
    return result


def row_sum(x, y):
    return np.where(x["mask"], y, 0).sum(1, keepdims=True)


def bounds(x):
    if "is_weight_cap" in x:
        return x["is_weight_floor"], x["is_weight_cap"]
    return 1 - x.get("clip_eps_low", 0.2), 1 + x.get("clip_eps_high", 0.2)


def weights(x):
    """What may stand for the ratio."""
    r = np.exp(x["log r"])
    total = row_sum(x, x["log r"])
    result = {
        "r": r,
        "": 1,
        "s": np.exp(total / x["size"]),
        "clip(r)": r.clip(*bounds(x)),
        "clip(s)": np.exp(total / x["size"]).clip(*bounds(x)),
        "r^2": r**2,
        "(1/r)": 1 / r,
        "log r": x["log r"],
        "AM(r)": row_sum(x, r) / x["size"],
        "exp(sum(log r) / T)": np.exp(total / x["T"]),
        "pi": np.exp(x["logprobs"]),
        "logprob": x["logprobs"],
    }
    if "is_weight_cap" in x:
        result = {"min(r, cap)": r.clip(max=x["is_weight_cap"])} | result
    return result


def places(x):
    """Places that a clip sets apart, or a mistake in the mask."""
    low, high = bounds(x)
    place = x["mask"].cumsum(1)
    sizes = {"it is the last token": place == x["size"], "it is the first token": place == 1}
    sizes["the log-prob is 0"] = x["logprobs"] == 0
    s = np.exp(row_sum(x, x["log r"]) / x["size"])
    for name, y in {"r": np.exp(x["log r"]), "s": s}.items():
        sizes |= {f"{name} is above the range": y > high, f"{name} is below the range": y < low}
        sizes |= {f"{name} is not above the range": y <= high, f"{name} is not below it": y >= low}
        sizes |= {f"{name} > 1": y > 1, f"{name} < 1": y < 1}
    signs = {"A > 0": x["advantages"] > 0, "A < 0": x["advantages"] < 0}
    both = {f"{sign} and {size}": signs[sign] & sizes[size] for sign in signs for size in sizes}
    return signs | both | sizes


def both_forms(x):
    """Two lines, if your gradient has the form, and ours has not, or a different one."""
    table = candidates(x)
    yours, ours = (form_of(x[who][x["mask"]], table) for who in ("your", "our"))
    if not yours or yours == ours:
        return []
    return [f"your gradient of J: {yours}", f" our gradient of J: {ours or 'of a different form'}"]


def form_of(gradient, table):
    """Words for a gradient, or None."""
    if (np.abs(gradient) < ZERO).all():
        return "0"
    for name, factor in table["factors"].items():
        counts = np.abs(factor) > ZERO
        if (np.abs(gradient[~counts]) > ZERO).any():
            continue
        part = {group: {key: y[counts] for key, y in table[group].items()} for group in table}
        quotient = gradient[counts] / factor[counts]
        is_zero = np.abs(quotient) < ZERO
        zero = zero_places(is_zero, part["places"])
        whole = fitted(quotient, ~is_zero, part)
        if whole:
            return f"{term(name, *whole)}{zero}"
        for place, where in part["places"].items():
            inside = fitted(quotient, where & ~is_zero, part)
            outside = fitted(quotient, ~where & ~is_zero, part) if inside else None
            if outside:
                return f"{term(name, *inside)} where {place}, else {term(name, *outside)}{zero}"
    return None


def fitted(quotient, where, table):
    """(k, weight, divisor) for which the quotient is k weight / divisor in these places, or None."""
    if where.sum() < 3:
        return None
    found = []
    for weight, y in table["weights"].items():
        divisors = np.array([x[where] for x in table["divisors"].values()])
        k = quotient[where] / y[where] * divisors
        is_constant = np.isfinite(k[:, 0]) & (np.ptp(k, axis=1) <= 2e-5 * np.abs(k[:, 0]))
        for n in np.flatnonzero(is_constant):
            found.append((k[n, 0], weight, list(table["divisors"])[n]))
    # A factor of 1 or -1 is the likeliest.
    return min(found, key=lambda form: abs(abs(form[0]) - 1) > 1e-5, default=None)


def term(factor, k, weight, divisor):
    number = {1: "", -1: "-"}.get(round(k, 5), f"{k:.5g}")
    top = " ".join(word for word in (number, factor, weight) if word) or "1"
    if not divisor:
        return top
    return f"{top} / ({divisor})" if " " in divisor else f"{top} / {divisor}"


def zero_places(is_zero, places):
    """Words for the places whose gradient is 0, at most four that have names and the rest."""
    left = is_zero.copy()
    names = []
    inside = {name: where for name, where in places.items() if not (where & ~is_zero).any()}
    for _ in range(4):
        name = max(inside, key=lambda name: (inside[name] & left).sum(), default=None)
        if name and (inside[name] & left).sum() > 0.05 * is_zero.sum():
            names.append(f"where {name}")
            left &= ~inside[name]
    if left.any():
        names.append(f"in {left.sum()} more of {len(left)}")
    return f"; 0 {' and '.join(names)}" if names else ""


def fit(what, where, yours, ours):
    """A line, if yours is a sum of multiples of its columns in these places, and a different one than
    ours; both are (array, {words: column})."""
    sums = []
    for y, columns in (yours, ours):
        table = np.array([column[where] for column in columns.values()]).T
        if len(table) <= len(columns) or np.linalg.matrix_rank(table) < len(columns):
            return []
        k = np.linalg.lstsq(table, y[where], rcond=None)[0].round(9) + 0
        if not near(table @ k, y[where]).all():
            return []
        sums.append(" ".join(f"{x:+.4g} {name}".strip() for x, name in zip(k, columns, strict=True)))
    return [f"{what} is {sums[0]}, not {sums[1]}"] if sums[0] != sums[1] else []


def shifted(rows):
    """Advantages that are shifted or scaled once more, from the case whose ratios are all 1."""
    for case, answer, _, ours in rows:
        if "on_policy" in case["tags"]:
            A = np.broadcast_to(case["inputs"]["advantages"], ours.shape)
            columns = {"A": A, "": np.ones_like(A)}
            implied = answer.gradient / ours * A
            return fit("on policy your A", np.abs(ours) > ZERO, (implied, columns), (A, columns))
    return []


# ------------------------------------------------------------------------------- advantages and GAE


def lines_of_groups(wrong):
    """A = k (R - baseline) in the groups that differ, at most three."""
    lines = []
    for case, answer, expected, _ in wrong:
        rewards = np.array(case["inputs"]["rewards"])
        ids = np.array(case["inputs"].get("group_ids", range(len(rewards))))
        for k in np.unique(ids):
            R, yours, ours = (x[ids == k].reshape(-1) for x in (rewards, answer.value, expected))
            if not near(yours, ours).all():
                group = ", ".join(f"{x:g}" for x in R)
                lines.append(
                    f"in a group of {group} your A is {line_of(R, yours)}, not {line_of(R, ours)}"
                )
    return lines[:3]


def line_of(R, A):
    """Words for advantages, as a straight line of the rewards of their group."""
    if np.ptp(R) == 0:
        return f"{A[0]:.4g}"
    k, shift = np.polyfit(R, A, 1)
    if not near(k * R + shift, A).all():
        return "no straight line of the reward (are groups mixed?)"
    return f"{k:.4g} (R - {round(-shift / k, 9) + 0:.4g})"


def lines_of_gae(wrong):
    """A = a reward + b V + c next V + d next A and the return = a A + b V, fitted to the answers."""
    lines = []
    for case, answer, expected, _ in wrong:
        if "masked_places" in case["tags"]:
            continue
        V, rewards, mask = (np.array(case["inputs"][key]) for key in ("values", "rewards", "mask"))
        is_last = following(mask) < mask
        before = {"reward": rewards, "V": V, "next V": following(V)}
        pairs = (answer.value, expected)
        inside = [(A, before | {"next A": following(A)}) for A, _ in pairs]
        lines += fit("your A", (mask == 1) & ~is_last, *inside)
        lines += fit("before padding or a hole your A", is_last, *((A, before) for A, _ in pairs))
        lines += fit("your return", mask == 1, *((R, {"A": A, "V": V}) for A, R in pairs))
    return list(dict.fromkeys(lines))[:4]


def following(x):
    """What is one place behind."""
    return np.pad(x[:, 1:], ((0, 0), (0, 1)))
