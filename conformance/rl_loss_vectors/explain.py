"""What answers are made of, where no known mistake gives them. numpy alone.

In most losses the gradient at a token is a factor, such as A, times a weight, such as the ratio, over a
divisor, such as N, and 0 in some places. These are looked for, among those of parts.py, in the answers
and in what is expected, and both are printed, with the symbols of README.md.
"""

import numpy as np

from rl_loss_vectors import parts
from rl_loss_vectors.vectors import array, same

ZERO = 1e-9  # which finite differences are allowed
WORDS = {
    "holes": "have a hole in the mask",
    "different_lengths": "have completions of different lengths",
    "masked_places": "hold huge numbers or NaN in masked places",
    "micro_batches": "are a step in micro-batches",
    "kl": "have ref_logprobs: it is the KL",
    "token_advantages": "have an advantage for each token",
    "zero_advantage": "have an advantage of 0",
    "large_ratios": "have log-ratios of 15 and more",
}


@np.errstate(all="ignore")
def explanation(subject, tested):
    """Lines about [(case, answer)], some of which are wrong."""
    strange = [case["id"] for case, answer in tested if not is_finite(answer)]
    if strange:
        rest = [pair for pair in tested if pair[0]["id"] not in strange]
        return [f"not finite: {', '.join(strange)}", *(explanation(subject, rest) if rest else [])]
    agrees = [same(answer, *subject.expected(case), case["tolerance"]) for case, answer in tested]
    wrong = [pair for pair, fine in zip(tested, agrees, strict=True) if not fine]
    right = [case for (case, _), fine in zip(tested, agrees, strict=True) if fine]
    if not wrong:
        return []
    lines = in_common([case for case, _ in wrong], right)
    if subject.section == "gae":
        return lines + lines_of_gae(subject, wrong)
    if "rewards" in subject.arguments:
        return lines + lines_of_groups(subject, wrong)
    if tested[0][1].gradient is None:
        return lines + lines_of_arrays(subject, wrong)
    return lines + lines_of_gradient(subject, tested, wrong)


def is_finite(answer):
    has_gradient = answer.gradient is not None
    return np.isfinite(answer.value).all() and (not has_gradient or np.isfinite(answer.gradient).all())


def in_common(wrong, right):
    """What all cases that differ have, and few of the others."""
    lines = []
    for tag, words in WORDS.items():
        others = sum(tag in case["tags"] for case in right)
        if all(tag in case["tags"] for case in wrong) and others < len(right) / 4:
            only = "" if others else " and only they"
            lines.append(f"all cases that differ{only} {words}")
    for key in sorted({key for case in wrong + right for key in case["keywords"]}):
        values = {str(case["keywords"].get(key)) for case in wrong}
        others = {str(case["keywords"].get(key)) for case in right}
        if right and len(values) == 1 and not values & (others | {"None"}) and len(min(values)) < 30:
            lines.append(f"all cases that differ and only they have {key} = {min(values)}")
    return lines


def near(x, y):
    return np.abs(x - y) <= 1e-5 * (1 + np.abs(y))


# --------------------------------------------------------------------------------------- the gradient


def lines_of_gradient(subject, tested, wrong):
    expected = [subject.expected(case) for case, _ in tested]
    pairs = list(zip([answer for _, answer in tested], expected, strict=True))
    if all(near(answer.gradient, gradient).all() for answer, (_, gradient) in pairs):
        return ["every gradient is right: only the number that is reported differs"]
    lines = []
    is_difference = any(answer.is_difference for answer, _ in pairs)
    if not is_difference and all(near(answer.value, value).all() for answer, (value, _) in pairs):
        lines.append("every value is right: a detach is missing, or one too many")
    outside = [np.where(array(case["inputs"]["mask"]), 0, answer.gradient) for case, answer in tested]
    if any((np.abs(np.nan_to_num(x, nan=1)) > 1e-9).any() for x in outside):
        lines.append("there is a gradient in masked places")
    if subject.section == "replayed_gate":
        return lines
    special = {"kl", "settings", "large_ratios"}
    places = []
    for group, without in (
        (tested, special),
        (tested, special | {"micro_batches"}),
        (wrong, {"settings"}),
        (wrong, set()),
    ):
        chosen = [(case, answer) for case, answer in group if not without & set(case["tags"])]
        if any(case is other for case, _ in chosen for other, _ in wrong):
            table = joined(subject, chosen)
            both = both_forms(table)
            if both:
                return lines + both
            places = places or where_it_differs(near(*table["gradient"].values()), table["places"])
    return lines + (shifted(subject, tested) or places)


def joined(subject, pairs):
    """{group: {words: array}} over the places of the mask in all cases, of what all cases have."""
    tables = [table_of(subject, case, answer) for case, answer in pairs]
    result = {}
    for group in tables[0]:
        names = [name for name in tables[0][group] if all(name in table[group] for table in tables)]
        columns = {name: [table[group][name] for table in tables] for name in names}
        result[group] = {name: np.concatenate(arrays) for name, arrays in columns.items()}
    return result


def table_of(subject, case, answer):
    """The places of the mask in a case: their gradients, and what these may be made of."""
    given = case["inputs"] | case["keywords"]
    x = {key: array(value) for key, value in given.items() if not isinstance(value, str)}
    mask = x["mask"].astype(bool)
    x["mask"] = mask
    x["size"] = mask.sum(1, keepdims=True)
    table = {
        "gradient": {"yours": answer.gradient, "ours": subject.expected(case)[1]},
        "factors": {"": 1},
        "weights": {"": 1},
        "divisors": parts.divisors(x, case.get("micro_batches", [list(range(len(mask)))])),
        "places": {},
    }
    if "old_values" in x:
        table["weights"] = parts.weights_of_values(x)
        table["places"] = parts.places_of_values(x)
    elif "is_right" in x:
        table["divisors"]["(tokens of right completions)"] = (x["size"] * x["is_right"]).sum()
        table["places"]["the completion is wrong"] = x["is_right"] == 0
    elif "weights" in x:
        table["weights"] = {"w": x["weights"], "": 1}
    elif subject.way != "reduction":
        x["log r"] = np.where(mask, x["logprobs"] - x["old_logprobs"], 0)
        table["factors"] = parts.factors_of_policy(x)
        table["weights"] = parts.weights_of_policy(x)
        table["places"] = parts.places_of_policy(x)
    if "ref_logprobs" in x:
        kl_alone(table, x)
    table["places"] |= parts.positions(mask, x["size"])
    flat = {}
    for group, columns in table.items():
        flat[group] = {name: np.broadcast_to(y, mask.shape)[mask] for name, y in columns.items()}
    return flat


def kl_alone(table, x):
    """Takes the rest of grpo's loss away from the gradients."""
    places = table["places"]
    is_clipped = places["A > 0 and r is above the range"] | places["A < 0 and r is below the range"]
    rest = -x["advantages"] * np.exp(x["log r"]) / x["size"] / len(x["size"])
    rest = np.where(x["mask"] & ~is_clipped, rest, 0)
    table["gradient"] = {who: y - rest for who, y in table["gradient"].items()}
    x["log x"] = np.where(x["mask"], x["ref_logprobs"] - x["logprobs"], 0)
    table["factors"] = {"kl_coef": -x["kl_coef"]}
    table["weights"] = parts.weights_of_kl(x)
    places["x = 1"] = x["log x"] == 0
    places["|log x| > 1"] = np.abs(x["log x"]) > 1
    places["k3 > 10"] = np.expm1(x["log x"]) - x["log x"] > 10


def both_forms(table):
    """Two lines, if both gradients have the form."""
    texts = [form_of(gradient, table) for gradient in table["gradient"].values()]
    if None in texts:
        return []
    of = {"": "", "A": " of J", "kl_coef": " of J through the KL"}[next(iter(table["factors"]))]
    return [f"your gradient{of}: {texts[0]}", f" our gradient{of}: {texts[1]}"]


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
    weights = np.array([y[where] for y in table["weights"].values()], float)
    divisors = np.array([y[where] for y in table["divisors"].values()], float)
    k = quotient[where] * divisors[:, None] / weights
    fits = np.isfinite(k).all(2) & (np.ptp(k, axis=2) <= 2e-5 * np.abs(k[:, :, 0]))
    found = [(abs(abs(k[d, w, 0]) - 1) > 1e-5, w, d) for d, w in np.argwhere(fits)]
    if not found:
        return None
    _, w, d = min(found)
    return k[d, w, 0], list(table["weights"])[w], list(table["divisors"])[d]


def words(factor, k, weight, divisor):
    number = {1: "", -1: "-"}.get(round(k, 5), f"{k:.5g}")
    if weight.startswith("/ "):
        divisor = f"{weight[2:]} {divisor}".strip()
        weight = ""
    top = " ".join(word for word in (number, factor, weight) if word) or "1"
    if not divisor:
        return top
    has_factors = " " in divisor and not divisor.startswith("(")
    return f"{top} / ({divisor})" if has_factors else f"{top} / {divisor}"


def zero_places(is_zero, places):
    """Words for the places whose gradient is 0, as a union of at most four that have names."""
    if not is_zero.any():
        return ""
    left = is_zero.copy()
    names = []
    inside = {name: where for name, where in places.items() if not (where & ~is_zero).any()}
    while left.any() and inside and len(names) < 4:
        name = max(inside, key=lambda name: (inside[name] & left).sum())
        if (inside[name] & left).sum() < max(1, 0.05 * is_zero.sum()):
            break
        names.append(f"where {name}")
        left &= ~inside[name]
    if left.sum() > is_zero.sum() / 3:
        return f"; 0 in {is_zero.sum()} of {len(left)} places"
    if left.any():
        names.append(f"in {left.sum()} more of {len(left)} places")
    return f"; 0 {' and '.join(names)}"


def where_it_differs(agrees, places):
    """The smallest of the places outside of which nothing differs."""
    around = {
        name: where
        for name, where in places.items()
        if agrees[~where].all() and not where.all() and (~agrees).sum() > 0.45 * where.sum()
    }
    if not around:
        return []
    name = min(around, key=lambda name: around[name].sum())
    return [f"it differs only where {name}: in {(~agrees).sum()} of {around[name].sum()} places"]


def shifted(subject, tested):
    """Advantages that are shifted or scaled once more, from the case whose ratios are all 1."""
    for case, answer in tested:
        if "on_policy" in case["tags"] and subject.way != "reduction":
            A = np.broadcast_to(array(case["inputs"]["advantages"]), answer.gradient.shape)
            expected = subject.expected(case)[1]
            counts = np.abs(expected) > 1e-9
            implied = answer.gradient[counts] / expected[counts] * A[counts]
            slope, shift = np.polyfit(A[counts], implied, 1)
            if (
                abs(slope) < 1e-6
                or abs(shift) < 1e-6
                or not near(slope * A[counts] + shift, implied).all()
            ):
                return []
            means = [y.mean() for y in (implied, slope * array(case["inputs"]["advantages"]) + shift)]
            why = "standardized again" if min(map(abs, means)) < 1e-6 else "another term is added"
            return [f"on policy it is as if A were {slope:.4g} A {shift:+.4g}: {why}"]
    return []


# ------------------------------------------------------------------------- arrays, advantages and gae


def lines_of_arrays(subject, wrong):
    """Whether each answer is a straight line of ours; else, where it differs."""
    pairs = [(case, answer.value, subject.expected(case)[0]) for case, answer in wrong]
    lines = [line for pair in pairs for line in straight_line(*pair, "yours")]
    if len(lines) == len(wrong):
        return lines[:2]
    return differing_places([(case, near(found, expected)) for case, found, expected in pairs])


def straight_line(case, found, expected, yours):
    """A line, if an array is a multiple of ours, with or without a constant added."""
    counts = array(case["inputs"].get("mask", 1), "mask")
    if counts.shape != expected.shape:
        counts = np.ones(expected.shape, bool)
    found = found[counts]
    expected = expected[counts]
    if len(expected) < 3 or np.ptp(expected) < 1e-6 or near(found, expected).all():
        return []
    slope, shift = np.polyfit(expected, found, 1)
    if not near(slope * expected + shift, found).all():
        return []
    return [f"in {case['id']} {yours} is {slope:.5g} times ours {shift:+.5g}"]


def differing_places(pairs):
    """A line about [(case, whether each place agrees)], for arrays over the mask."""
    masks = [array(case["inputs"].get("mask", 0), "mask") for case, _ in pairs]
    if any(mask.shape != agrees.shape for mask, (_, agrees) in zip(masks, pairs, strict=True)):
        return []
    tables = [parts.positions(mask, mask.sum(1, keepdims=True)) for mask in masks]
    agrees = np.concatenate([y[mask] for mask, (_, y) in zip(masks, pairs, strict=True)])
    places = {}
    for name in tables[0]:
        where = [np.broadcast_to(x[name], mask.shape) for x, mask in zip(tables, masks, strict=True)]
        places[name] = np.concatenate([y[mask] for y, mask in zip(where, masks, strict=True)])
    return where_it_differs(agrees, places)


def lines_of_groups(subject, wrong):
    """Which baseline and which scale the answers have: A = (R - baseline) / scale in each group."""
    groups = []
    lines = []
    for case, answer in wrong:
        rewards = array(case["inputs"]["rewards"])
        ids = array(case["inputs"].get("group_ids", np.arange(len(rewards))))
        for k in np.unique(ids):
            row = rewards[ids == k].reshape(-1)
            found, ours = (y[ids == k].reshape(-1) for y in (answer.value, subject.expected(case)[0]))
            if np.ptp(row) > 1e-3 * (1 + np.abs(row).max()):
                groups.append((rewards, row, found, ours))
            elif np.ptp(row) == 0 and not near(found, 0).all():
                lines = ["in a group of equal rewards yours is not 0"]
    if not groups:
        return lines + ["only groups whose rewards are equal, or nearly so, differ"]
    fits = {"your": [], "our": []}
    for batch, row, *answers in groups:
        for who, found in zip(fits, answers, strict=True):
            slope, shift = np.polyfit(row, found, 1)
            if not near(slope * row + shift, found).all() or abs(slope) < 1e-9:
                return [*lines, "in a group yours is no straight line of the reward: groups are mixed"]
            fits[who].append((batch, row, -shift / slope, 1 / slope))
    for what, known, place in (("baseline", BASELINES, 2), ("scale", SCALES, 3)):
        yours, ours = (told(known, fits[who], place) for who in fits)
        lines.append(f"your {what} is {yours}" + ("" if yours == ours else f", not {ours}"))
    return lines


def told(known, fits, place):
    """What a baseline or a scale is: a known one, one with a constant added, or a multiple."""
    found = np.array([fit[place] for fit in fits])
    sizes = {name: np.array([of(*fit[:2]) for fit in fits]) for name, of in known.items()}
    for name, size in sizes.items():
        if (np.abs(found - size) <= 1e-7 * (1 + np.abs(size))).all():
            return name
    for name, size in sizes.items():
        if np.ptp(found - size) <= 1e-7 * (1 + np.abs(size).max()):
            return f"{name} {(found - size)[0]:+.3g}"
    batches = [fit[0].tobytes() for fit in fits]
    for name, size in sizes.items():
        if (np.abs(size) > 1e-9).all():
            k = found / size
            if np.ptp(k) <= 1e-4 * abs(k[0]):
                return f"{k[0]:.5g} times {name}"
            spreads = [np.ptp(k[[other == batch for other in batches]]) for batch in batches]
            if max(spreads) <= 1e-4 * abs(k[0]) and len(set(batches)) < len(batches):
                return f"a multiple of {name} that depends on the batch"
    shown = ", ".join(f"{x:.6g}" for x in found[:3])
    return f"none that is known ({shown} in the first groups that differ)"


BASELINES = {
    "the mean of the group": lambda batch, row: row.mean(),
    "0": lambda batch, row: 0,
    "the mean of the batch": lambda batch, row: batch.mean(),
    "the median of the group": lambda batch, row: np.median(row),
    "the lower median of the group": lambda batch, row: np.sort(row)[(len(row) - 1) // 2],
    "the largest of the group": lambda batch, row: row.max(),
    "the smallest of the group": lambda batch, row: row.min(),
    "the sum of the group over G + 1": lambda batch, row: row.sum() / (len(row) + 1),
}
SCALES = {
    "the std of the group": lambda batch, row: row.std(ddof=1),
    "the std of the population": lambda batch, row: row.std(),
    "1": lambda batch, row: 1,
    "the variance of the group": lambda batch, row: row.var(ddof=1),
    "the variance of the population": lambda batch, row: row.var(),
    "the std of the batch": lambda batch, row: batch.std(ddof=1),
    "the std of the batch as a population": lambda batch, row: batch.std(),
    "the range of the group": lambda batch, row: np.ptp(row),
    "the mean absolute difference": lambda batch, row: np.abs(row - row.mean()).mean(),
    "the mean of the group": lambda batch, row: row.mean(),
    "(G - 1) / G": lambda batch, row: (len(row) - 1) / len(row),
    "G / (G + 1)": lambda batch, row: len(row) / (len(row) + 1),
    "the std over the root of G": lambda batch, row: row.std(ddof=1) / np.sqrt(len(row)),
}


def lines_of_gae(subject, wrong):
    """A_t = a reward + b V + c next V + d next A and the return = a A + b V, fitted to the answers."""
    lines = []
    for k, name in ((0, "advantages"), (1, "returns")):
        if all(near(answer.value[k], subject.expected(case)[0][k]).all() for case, answer in wrong):
            lines.append(f"the {name} are right")
    for case, answer in wrong:
        x = {key: array(value) for key, value in case["inputs"].items()}
        if x["lam"].ndim or {"holes", "masked_places"} & set(case["tags"]):
            continue
        A, returns = answer.value
        lines += straight_line(case, A, subject.expected(case)[0][0], "your A")
        mask = x["mask"].astype(bool)
        next_V, next_A, is_next = (np.pad(y[:, 1:], ((0, 0), (0, 1))) for y in (x["values"], A, mask))
        here = {"reward": x["rewards"], "V": x["values"]}
        words = "with gamma {gamma:g}, lambda {lam:g} your A".format(**x)
        ours = (1, -1, x["gamma"], x["gamma"] * x["lam"])
        lines += fit(words, A, here | {"next V": next_V, "next A": next_A}, mask & is_next, ours)
        words = "on the last token your A"
        lines += fit(words, A, here | {"the V behind it": next_V}, mask & ~is_next, (1, -1, 0))
        lines += fit("your return", returns, {"A": A, "V": x["values"]}, mask, (1, 1))
    pairs = [(case, near(answer.value, subject.expected(case)[0]).all(0)) for case, answer in wrong]
    return list(dict.fromkeys(lines))[:4] + differing_places(pairs)


def fit(what, y, columns, where, ours):
    """A line, if y is a sum of multiples of the columns in these places, and not ours."""
    table = np.array([column[where] for column in columns.values()]).T
    if np.linalg.matrix_rank(table) < len(columns):
        return []
    k = np.linalg.lstsq(table, y[where], rcond=None)[0]
    if (
        len(table) <= len(columns)
        or not near(table @ k, y[where]).all()
        or near(k, np.array(ours)).all()
    ):
        return []
    yours = " ".join(
        f"{number:+.4g} {name}" for number, name in zip(k.round(9) + 0, columns, strict=True)
    )
    expected = " ".join(f"{number:+.4g} {name}" for number, name in zip(ours, columns, strict=True))
    return [f"{what} is {yours}, not {expected}"]
