"""What answers are made of, where no known mistake gives them: for losses the weights on tokens by
their ratio, for advantages a straight line of the rewards, for GAE the coefficients of its recursion.
Where nothing fits, the smallest case that differs is printed token by token."""

import numpy as np

from rl_loss_vectors import measure
from rl_loss_vectors.reference import evaluate
from rl_loss_vectors.vectors import LOSSES, same

RATIOS = [1, 0.5, 0.9, 0.999, 1.001, 1.1, 1.5, 5]


@np.errstate(all="ignore")
def explanation(subject, tested, measured):
    """Lines about [(case, answer)], some of which are wrong."""
    strange = [case["id"] for case, answer in tested if not is_finite(answer)]
    lines = [f"not finite: {', '.join(strange)}"] if strange else []
    rows = [(case, answer, *subject.expected(case)) for case, answer in tested]
    rows = [row for row in rows if row[0]["id"] not in strange]
    wrong = [row for row in rows if not same(*row[1:], row[0]["tolerance"]["float32"])]
    if not wrong:
        return lines
    found = []
    if subject.section == "gae":
        found = lines_of_gae(wrong)
    elif "rewards" in subject.about["arguments"]:
        found = lines_of_groups(wrong)
    elif subject.section in LOSSES:
        found = lines_of_loss(subject, rows, measured)
    return lines + (found or smallest_case(wrong))


def is_finite(answer):
    return all(np.isfinite(x).all() for x in (answer.value, answer.gradient) if x is not None)


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


def lines_of_loss(subject, rows, measured):
    """What was measured, although it is not all; then the weights."""
    if all(near(answer.gradient, gradient).all() for _, answer, _, gradient in rows):
        return ["every gradient is right: only your value, the number that is reported, differs"]
    lines = [f"what was measured: {name}" for name, _ in measured]
    if all(near(answer.value, value).all() for _, answer, value, _ in rows):
        lines.append("every value is right: a detach is missing, or one too many")
    if any(answer.gradient[np.array(case["inputs"]["mask"]) == 0].any() for case, answer, *_ in rows):
        lines.append("there is a gradient in masked places")
    for case, answer, _, gradient in rows:
        if "on_policy" in case["tags"]:
            A = np.broadcast_to(case["inputs"]["advantages"], gradient.shape)[:, :1]
            acts = np.fmax.reduce(np.where(gradient, answer.gradient / gradient, np.nan) * A, 1)
            if not near(acts, A[:, 0]).all():
                lines.append(f"on policy, advantages of {in_columns(A[:, 0])}")
                lines.append(f"                 act like {in_columns(acts)}")
    try:
        size = measure.own_term(subject)
        yours, cases = measure.weights(subject, np.log(RATIOS[1:]))
        ours = [-evaluate(subject.section, x)[1].numpy().sum(1) / A for A, x in cases.items()]
        ours = np.array(ours) / abs(ours[0][0])
    except Exception:
        return lines
    if size > 1e-9:
        lines.append(f"a term has no advantage: where every A is 0 your gradient is up to {size:.2g}")
    for A, your, our in zip(("A > 0", "A < 0"), yours, ours, strict=True):
        if not near(your, our).all():
            lines += [f"where {A}, by r:   {in_columns(RATIOS)}"]
            lines += [f"  your weight     {in_columns(your)}", f"  our weight      {in_columns(our)}"]
    return lines


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
                found, right = line_of(R, yours, 4), line_of(R, ours, 4)
                if found == right:  # never two equal numbers
                    found, right = line_of(R, yours, 9), line_of(R, ours, 9)
                lines.append(f"in a group of {group} your A is {found}, not {right}")
    return lines[:3]


def line_of(R, A, digits):
    """Words for advantages, as a straight line of the rewards of their group."""
    if np.ptp(R) == 0:
        return f"{A[0]:.{digits}g}"
    k, shift = np.polyfit(R, A, 1)
    if not near(k * R + shift, A).all():
        return "no straight line of the reward (are groups mixed?)"
    return f"{k:.{digits}g} (R - {round(-shift / k, 9) + 0:.{digits}g})"


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
        after = [(R, {"A": A, "V": V, "reward": rewards}) for A, R in pairs]
        lines += fit("your return", mask == 1, *after)
    return list(dict.fromkeys(lines))[:4]


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
        sums.append(" ".join(f"{x:+.4g} {name}" for x, name in zip(k, columns, strict=True)))
    return [f"{what} is {sums[0]}, not {sums[1]}"] if sums[0] != sums[1] else []


def following(x):
    """What is one place behind."""
    return np.pad(x[:, 1:], ((0, 0), (0, 1)))
