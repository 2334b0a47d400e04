"""What answers are made of, where no known mistake gives them.

In most losses the gradient at a token is a factor, such as A, times a weight, such as the ratio, over a
divisor, such as N, and 0 in some places. These are looked for, among those of parts.py, in the answers
and in what is expected, and both are printed, with the symbols of README.md. Where nothing fits, the
smallest case that differs is printed token by token.
"""

import numpy as np

from rl_loss_vectors import parts
from rl_loss_vectors.vectors import array, same

ZERO = 1e-9


@np.errstate(all="ignore")
def explanation(subject, tested):
    """Lines about [(case, answer)], some of which are wrong."""
    strange = [case["id"] for case, answer in tested if not is_finite(answer)]
    lines = [f"not finite: {', '.join(strange)}"] if strange else []
    rows = [(case, answer, *subject.expected(case)) for case, answer in tested]
    rows = [row for row in rows if row[0]["id"] not in strange]
    wrong = [row for row in rows if not same(*row[1:], row[0]["tolerance"])]
    if not wrong:
        return lines
    lines += in_common([row[0] for row in wrong], [row[0] for row in rows if row not in wrong])
    if subject.section == "gae":
        found = lines_of_gae(wrong)
    elif "rewards" in subject.arguments:
        found = lines_of_groups(wrong)
    elif rows[0][1].gradient is not None:
        found = lines_of_gradient(subject, rows, wrong)
    else:
        found = []
    is_explained = any("your" in line and " places" not in line for line in found)
    return lines + found + ([] if is_explained else smallest_case(wrong))


def is_finite(answer):
    return all(np.isfinite(x).all() for x in (answer.value, answer.gradient) if x is not None)


def features(case):
    return {*case["tags"], *(f"{key} = {value}" for key, value in case["keywords"].items())}


def in_common(wrong, right):
    """Tags and keywords that all cases that differ have, and no other, or few."""
    others = [feature for case in right for feature in features(case)]
    rare = {
        feature: others.count(feature)
        for feature in sorted(set.intersection(*map(features, wrong)))
        if others.count(feature) < len(right) / 4 and len(feature) < 60
    }
    only = [feature for feature, count in rare.items() if count == 0]
    if not rare:
        return []
    return [f"all cases that differ{' and only they' if only else ''} have {', '.join(only or rare)}"]


def near(x, y):
    return np.abs(x - y) <= 1e-5 * (1 + np.abs(y))


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


def smallest_case(wrong):
    """Your numbers and ours, token by token, in the case with the fewest of them."""
    case, answer, value, gradient = min(
        wrong, key=lambda row: row[2].size if row[3] is None else row[3].size
    )
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


def lines_of_gradient(subject, rows, wrong):
    if all(near(answer.gradient, gradient).all() for _, answer, _, gradient in rows):
        return ["every gradient is right: only your value, the number that is reported, differs"]
    lines = []
    if all(near(answer.value, value).all() for _, answer, value, _ in rows):
        lines.append("every value is right: a detach is missing, or one too many")
    outside = [np.where(array(case["inputs"]["mask"]), 0, answer.gradient) for case, answer, *_ in rows]
    if any((np.abs(x) > ZERO).any() for x in outside):
        lines.append("there is a gradient in masked places")
    if subject.section == "replayed_gate":
        return lines
    special = {"kl", "settings", "large_ratios"}
    groups = [
        (rows, special),
        (rows, special | {"micro_batches"}),
        (wrong, {"kl", "settings"}),
        (wrong, {"kl"}),
    ]
    for group, without in groups:
        chosen = [row for row in group if not without & set(row[0]["tags"])]
        if any(row in wrong for row in chosen):
            table = joined([(case, answer.gradient, ours) for case, answer, _, ours in chosen])
            both = both_forms(table)
            if both:
                return lines + both
    return lines + shifted(rows)


def joined(pairs):
    """{group: {words: array}} over the places of the mask in all cases, of what all cases have."""
    tables = [table_of(*pair) for pair in pairs]
    result = {}
    for group in tables[0]:
        names = [name for name in tables[0][group] if all(name in table[group] for table in tables)]
        result[group] = {
            name: np.concatenate([table[group][name] for table in tables]) for name in names
        }
    return result


def table_of(case, yours, ours):
    """The places of the mask in a case: what is found there, and what it may be made of."""
    given = case["inputs"] | case["keywords"]
    x = {key: array(value) for key, value in given.items() if not isinstance(value, str)}
    mask = x["mask"].astype(bool)
    x["mask"] = mask
    x["size"] = mask.sum(1, keepdims=True)
    table = {
        "found": {"your": yours, "our": ours},
        "factors": {"": 1},
        "weights": {"": 1},
        "divisors": parts.divisors(x, case.get("micro_batches", [list(range(len(mask)))])),
        "places": {},
    }
    if "old_values" in x:
        table["weights"], table["places"] = parts.of_values(x)
    elif "is_right" in x:
        table["divisors"]["tokens of right completions"] = (x["size"] * x["is_right"]).sum()
        table["places"]["the completion is wrong"] = x["is_right"] == 0
    else:
        x["log r"] = np.where(mask, x["logprobs"] - x["old_logprobs"], 0)
        table["factors"] = parts.factors_of_policy(x)
        table["weights"] = parts.weights_of_policy(x)
        table["places"] = parts.places_of_policy(x)
    table["places"] |= parts.positions(mask, x["size"])
    flat = {}
    for group, columns in table.items():
        flat[group] = {name: np.broadcast_to(y, mask.shape)[mask] for name, y in columns.items()}
    return flat


def both_forms(table):
    """Two lines, if both gradients have the form, and differ in it."""
    of = " of J" if "A" in table["factors"] else ""
    forms = {who: form_of(gradient, table) for who, gradient in table["found"].items()}
    if None in forms.values() or forms["your"] == forms["our"]:
        return []
    return [f"{who:>4} gradient{of}: {form}" for who, form in forms.items()]


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
        if whole is not None:
            return f"{words(name, *whole)}{zero}"
        for place, where in part["places"].items():
            inside = fitted(quotient, where & ~is_zero, part)
            outside = fitted(quotient, ~where & ~is_zero, part) if inside else None
            if outside:
                return f"{words(name, *inside)} where {place}, else {words(name, *outside)}{zero}"
    return None


def fitted(quotient, where, table):
    """(k, weight, divisor) for which the quotient is k weight / divisor in these places, or None."""
    if where.sum() < 3:
        return None
    y = quotient[where]
    weights = np.array([x[where] for x in table["weights"].values()], float).T
    divisors = np.array([x[where] for x in table["divisors"].values()], float).T
    few = slice(None, None, len(y) // 3)  # places where most already do not fit
    k = y[few, None, None] * divisors[few, :, None] / weights[few, None, :]
    d, w = np.nonzero(is_constant(k))
    k = y[:, None] * divisors[:, d] / weights[:, w]
    found = [(abs(abs(k[0, n]) - 1) > 1e-5, w[n], d[n], n) for n in np.flatnonzero(is_constant(k))]
    if not found:
        return None
    _, w, d, n = min(found)
    return k[0, n], list(table["weights"])[w], list(table["divisors"])[d]


def is_constant(k):
    """Whether each column is one number."""
    return np.isfinite(k[0]) & (np.ptp(k, axis=0) <= 2e-5 * np.abs(k[0]))


def words(factor, k, weight, divisor):
    number = {1: "", -1: "-"}.get(round(k, 5), f"{k:.5g}")
    top = " ".join(word for word in (number, factor, weight) if word) or "1"
    if not divisor:
        return top
    return f"{top} / ({divisor})" if " " in divisor else f"{top} / {divisor}"


def zero_places(is_zero, places):
    """Words for the places whose gradient is 0, as a union of at most four that have names."""
    left = is_zero.copy()
    names = []
    inside = {name: where for name, where in places.items() if not (where & ~is_zero).any()}
    for _ in range(4):
        name = max(inside, key=lambda name: (inside[name] & left).sum(), default=None)
        if name and (inside[name] & left).sum() > 0.05 * is_zero.sum():
            names.append(f"where {name}")
            left &= ~inside[name]
    if left.sum() > is_zero.sum() / 3:
        return f"; 0 in {is_zero.sum()} of {len(left)} places"
    if left.any():
        names.append(f"in {left.sum()} more of {len(left)}")
    return f"; 0 {' and '.join(names)}" if names else ""


def shifted(rows):
    """Advantages that are shifted or scaled once more, from the case whose ratios are all 1."""
    for case, answer, _, ours in rows:
        if "on_policy" in case["tags"]:
            A = np.broadcast_to(array(case["inputs"]["advantages"]), ours.shape)
            columns = {"A": A, "": np.ones_like(A)}
            implied = answer.gradient / ours * A
            return fit("on policy your A", np.abs(ours) > ZERO, (implied, columns), (A, columns))
    return []


# ------------------------------------------------------------------------------- advantages and GAE


def lines_of_groups(wrong):
    """Which baseline and which scale the answers have: A = (R - baseline) / scale in each group."""
    lines = []
    fits = {"your": [], "our": []}  # (batch, group, baseline, scale) of each group
    for case, answer, expected, _ in wrong:
        rewards = array(case["inputs"]["rewards"])
        ids = array(case["inputs"].get("group_ids", np.arange(len(rewards))))
        for k in np.unique(ids):
            row = rewards[ids == k].reshape(-1)
            answers = {
                "your": answer.value[ids == k].reshape(-1),
                "our": expected[ids == k].reshape(-1),
            }
            if np.ptp(row) == 0 and not near(answers["your"], 0).all():
                lines = ["in a group of equal rewards yours is not 0"]
            if np.ptp(row) <= 1e-3 * (1 + np.abs(row).max()):
                continue
            for who, found in answers.items():
                slope, shift = np.polyfit(row, found, 1)
                if not near(slope * row + shift, found).all() or abs(slope) < 1e-9:
                    return [
                        *lines,
                        "in a group your A is no straight line of the reward: groups are mixed",
                    ]
                fits[who].append((rewards, row, -shift / slope, 1 / slope))
    if not fits["our"]:
        return lines + ["only your groups whose rewards are equal, or nearly so, differ"]
    for what, place in (("baseline", 2), ("scale", 3)):
        yours, ours = (name_of(fits[who], place) for who in fits)
        lines.append(f"your {what} is {yours}" + ("" if yours == ours else f", not {ours}"))
    return lines


def name_of(fits, place):
    """What a baseline or a scale is: a known number, one with a constant added, or a multiple."""
    found = np.array([fit[place] for fit in fits])
    tables = [statistics(batch, row) for batch, row, *_ in fits]
    sizes = {name: np.array([table[name] for table in tables]) for name in tables[0]}
    for name in sorted(sizes, key=lambda name: np.abs(found - sizes[name]).max()):
        rest = found - sizes[name]
        allowed = 1e-7 * (1 + np.abs(sizes[name]).max())
        if np.ptp(rest) <= allowed:
            return name if np.abs(rest).max() <= allowed else f"{name} {rest[0]:+.3g}"
    for name, size in sizes.items():
        k = found / size
        if np.ptp(k) <= 1e-4 * abs(k[0]):
            return f"{k[0]:.5g} times {name}"
    shown = ", ".join(f"{x:.6g}" for x in found[:3])
    return f"none that is known ({shown} in the first groups that differ)"


def statistics(batch, group):
    """What a baseline or a scale may be."""
    sizes = {"0": 0, "1": 1, "(G - 1) / G": (len(group) - 1) / len(group)}
    for of, x in (("group", group), ("batch", batch.reshape(-1))):
        columns = {
            "mean": x.mean(),
            "std": x.std(ddof=1),
            "population std": x.std(),
            "variance": x.var(ddof=1),
            "population variance": x.var(),
            "median": np.median(x),
            "maximum": x.max(),
            "minimum": x.min(),
            "range": np.ptp(x),
            "mean absolute difference": np.abs(x - x.mean()).mean(),
        }
        sizes |= {f"the {name} of the {of}": size for name, size in columns.items()}
    return sizes


def lines_of_gae(wrong):
    """A_t = a reward + b V + c next V + d next A and the return = a A + b V, fitted to the answers."""
    lines = []
    for k, (mine, other) in enumerate((("advantages", "returns"), ("returns", "advantages"))):
        if all(near(answer.value[k], expected[k]).all() for _, answer, expected, _ in wrong):
            lines.append(f"the {mine} are right, the {other} are not")
    for case, answer, expected, _ in wrong:
        if "masked_places" in case["tags"]:
            continue
        V, rewards, mask = (array(case["inputs"][key], key) for key in ("values", "rewards", "mask"))
        A, returns = answer.value
        our_A, our_returns = expected
        is_next = following(mask)
        here = {"reward": rewards, "V": V}
        inside = [(x, here | {"next V": following(V), "next A": following(x)}) for x in (A, our_A)]
        behind = here | {"the V behind it": following(V)}
        lines += fit("your A", mask & is_next, *inside)
        lines += fit("before padding or a hole your A", mask & ~is_next, (A, behind), (our_A, behind))
        lines += fit(
            "your return", mask, (returns, {"A": A, "V": V}), (our_returns, {"A": our_A, "V": V})
        )
    return list(dict.fromkeys(lines))[:4]


def following(x):
    """What is one place behind."""
    return np.pad(x[:, 1:], ((0, 0), (0, 1)))
