"""Where no known mistake gives the answers: what weights a loss puts on tokens by their ratio, or else
the smallest case that differs, number by number."""

import numpy as np

from rl_loss_vectors import measure
from rl_loss_vectors.reference import LOSSES, evaluate
from rl_loss_vectors.vectors import expected

RATIOS = [1, 0.5, 0.9, 0.999, 1.001, 1.1, 1.5, 5]


@np.errstate(all="ignore")
def explanation(subject, wrong, measured):
    """Lines about [(case, answer)], none of which is right."""
    rows = [(case, answer, *expected(case)) for case, answer in wrong]
    found = lines_of_loss(subject, rows, measured) if subject.section in LOSSES else []
    return found or smallest_case(rows)


def near(x, y):
    return np.abs(x - y) <= 1e-5 * (1 + np.abs(y))


def in_columns(row):
    return " ".join(f"{x:9.4g}" for x in np.atleast_1d(row))


def smallest_case(rows):
    """Your numbers and ours, in the case with the fewest of them."""
    case, answer, value, gradient = min(rows, key=lambda row: len(str(row[0]["inputs"])))
    what, yours, ours = ("value", answer.value, value)
    if gradient is not None and not near(answer.gradient, gradient).all():
        what, yours, ours = ("gradient of the loss", answer.gradient, gradient)
    lines = [f"the smallest case that differs is {case['id']}, {case['name']}; the {what}:"]
    for row in case["inputs"].get("mask", []):
        lines.append(f"  mask  {in_columns(row)}")
    width = np.atleast_1d(ours).shape[-1]
    for your, our in zip(yours.reshape(-1, width), ours.reshape(-1, width), strict=True):
        lines += [f"  yours {in_columns(your)}", f"  ours  {in_columns(our)}"]
    return lines


def lines_of_loss(subject, rows, measured):
    """What was measured, although it is not all; then the weights."""
    lines = [f"what was measured: {name}" for name, _ in measured]
    if any(answer.gradient[np.array(case["inputs"]["mask"]) == 0].any() for case, answer, *_ in rows):
        lines.append("there is a gradient in masked places")
    for case, answer, _, gradient in rows:
        if "on_policy" in case["tags"]:
            A = np.array(case["inputs"]["advantages"])[:, 0]
            acts = A * np.nanmax(np.where(gradient, answer.gradient / gradient, np.nan), 1)
            if not near(acts, A).all():
                lines.append(f"on policy, advantages of {in_columns(A)}")
                lines.append(f"                 act like {in_columns(acts)}")
    try:
        size = np.abs(measure.asked(subject, np.zeros(2), [0, 0])[0].gradient).max()
        yours, cases = measure.weights(subject, np.log(RATIOS[1:]))
        ours = [-evaluate(subject.section, x)[1].sum(1) / A for A, x in cases.items()]
    except Exception:  # of a function that does not take such cases
        return lines
    if size > 1e-9:
        lines.append(f"a term has no advantage: where every A is 0 your gradient is up to {size:.2g}")
    ours = np.array(ours) / abs(ours[0][0])
    for A, your, our in zip(("A > 0", "A < 0"), yours, ours, strict=True):
        if not near(your, our).all():
            lines += [f"where {A}, by r:   {in_columns(RATIOS)}"]
            lines += [f"  your weight     {in_columns(your)}", f"  our weight      {in_columns(our)}"]
    return lines
