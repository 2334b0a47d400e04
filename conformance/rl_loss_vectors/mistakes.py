"""Known mistakes and variants, as code: what measure.py and groups.py cannot show, or cannot name.

A *mistake* contradicts the paper; a *variant* is a choice that the paper leaves open, or that a code
base documents. Each entry has a change(J, batch), which returns what the changed code would.
"""

from types import SimpleNamespace
from unittest import mock

import torch

from rl_loss_vectors import reference
from rl_loss_vectors.reference import LOSSES, tokens

# ------------------------------------------------------------------------------------ ways to change


def unchanged(J, b):
    return J(b)


def together(first, second):
    return lambda J, b: second(lambda other: first(J, other), b)


def pieces(**replacements):
    """The objective with some functions of reference.py replaced."""

    def change(J, b):
        with mock.patch.multiple(reference, **replacements):
            return J(b)

    return change


def changed(b, **fields):
    return SimpleNamespace(**(vars(b) | fields))


def setting(**fields):
    """J of a batch with different fields; if a field is a function, it is called with the batch."""
    return lambda J, b: J(changed(b, **{key: x(b) if callable(x) else x for key, x in fields.items()}))


# ------------------------------------------------------------------------------ what they change it to


def sum_over_micro_batches(J, b):
    rows_of = {key: x for key, x in vars(b).items() if torch.is_tensor(x)}
    return sum(
        J(changed(b, **{key: x[rows] for key, x in rows_of.items()})) for rows in b.micro_batches
    )


def whitened(x, mask, correction=1):
    std = x[mask].std(correction=correction)
    return torch.where(mask, (x - x[mask].mean()) / (std + 1e-8), 0)


def rows_whitened(b, correction=1):
    A = b.advantages
    A = A[:, :1] if (A == A[:, :1]).all() else A
    return ((A - A.mean()) / (A.std(correction=correction) + 1e-8)).expand_as(b.mask)


def every_pair(J, b):
    """(B,) times (B, 1) is (B, B)."""
    rolled = [changed(b, advantages=b.advantages.roll(k, 0)) for k in range(len(b.mask))]
    return sum(J(each) for each in rolled) / len(rolled)


def gae_whitened(correction, keeps_mean=False):
    def change(J, b):
        A, returns = J(b)
        back = keeps_mean * b.mask * A[b.mask].mean()
        return torch.stack([whitened(A, b.mask, correction) + back, returns])

    return change


def of_all_places(J, b):
    return torch.where(b.mask, J(changed(b, mask=torch.ones_like(b.mask))), 0)


with_holes = pieces(length=lambda b, i: tokens(b, i)[-1] - tokens(b, i)[0] + 1)
again_by_population = setting(advantages=lambda b: rows_whitened(b, correction=0))
whitened_again = setting(advantages=lambda b: whitened(b.advantages, b.mask))
no_return = setting(returns=lambda b: b.returns - b.old_values)

# ---------------------------------------------------------------------------------------- the entries

BY_ROOT = ["gspo", "gmpo", "rspo"]
BY_LENGTH = [
    "ppo",
    "grpo",
    "dapo",
    "vapo",
    "deepseek_v32",
    "cispo",
    "sapo",
    *BY_ROOT,
]  # where |o| counts
AVERAGED = [*LOSSES, "value_loss"]

MISTAKES = {  # name: (sections of vectors.json, change)
    "a mean of each micro-batch [verl: geo_mean]": (AVERAGED, sum_over_micro_batches),
    "holes counted in |o|": (BY_LENGTH, with_holes),
    "mask ignored": (AVERAGED, setting(mask=lambda b: torch.ones_like(b.mask))),
    "the advantages whitened again": (LOSSES, setting(advantages=rows_whitened)),
    "the advantages whitened again, with the std of the population": (LOSSES, again_by_population),
    "the advantages whitened again, over tokens": (LOSSES, whitened_again),
    "every ratio times every A: (B,) times (B, 1)": (BY_ROOT, every_pair),
    "a root by the padded width, not by |o|": (BY_ROOT, pieces(length=lambda b, i: b.mask.shape[1])),
    "a gradient through the weight": (["cispo"], pieces(stopped=lambda x: x)),
    "the mask is ignored in the recursion": (["gae"], of_all_places),
    "whitened behind the recursion": (["gae"], gae_whitened(0)),
    "whitened behind the recursion, with the unbiased std": (["gae"], gae_whitened(1)),
    "whitened behind the recursion, and the mean comes back": (["gae"], gae_whitened(1, True)),
    "the advantage taken for the return": (["value_loss"], no_return),
}
VARIANTS = {
    "gamma to the power sgn(A), as printed in the paper": (["rspo"], setting(shift="literal")),
    "gamma before the clip, the paper's second version": (["rspo"], setting(shift="before_clip")),
}
ENTRIES = {f"mistake: {name}": entry for name, entry in MISTAKES.items()}
ENTRIES |= {f"variant: {name}": entry for name, entry in VARIANTS.items()}
