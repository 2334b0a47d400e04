"""Known mistakes in these objectives, and known variants of them, as code.

A *mistake* contradicts the paper; a *variant* is a choice that the paper leaves open, or that a code
base documents. In brackets is the engine that does this, TRL 1.16.0 or verl 0.9.1. Each entry has a
change(J, batch), which returns what the changed code would. What measure.py finds, such as a different
divisor or range, has no entry.
"""

from types import SimpleNamespace
from unittest import mock

import torch

from rl_loss_vectors import reference
from rl_loss_vectors.reference import LOSSES, average, gate, k3, log_ratio, tokens

# ------------------------------------------------------------------------------------ ways to change


def unchanged(J, b):
    return J(b)


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

    def change(J, b):
        return J(changed(b, **{key: x(b) if callable(x) else x for key, x in fields.items()}))

    return change


def together(first, second):
    return lambda J, b: second(lambda other: first(J, other), b)


# ------------------------------------------------------------------------------ what they change it to


def sum_over_micro_batches(J, b):
    rows_of = {key: x for key, x in vars(b).items() if torch.is_tensor(x)}
    return sum(
        J(changed(b, **{key: x[rows] for key, x in rows_of.items()})) for rows in b.micro_batches
    )


def whitened(x, mask, correction=1):
    std = x[mask].std(correction=correction)
    return torch.where(mask, (x - x[mask].mean()) / (std + 1e-8), 0)


def every_pair(J, b):
    """(B,) times (B, 1) is (B, B)."""
    rolled = [changed(b, advantages=b.advantages.roll(k, 0)) for k in range(len(b.mask))]
    return sum(J(each) for each in rolled) / len(rolled)


def of_batch(piece, function):
    """Computes a group's mean or std from all rewards in the batch."""
    return lambda J, b: pieces(**{piece: lambda *_: function(b.rewards)})(J, b)


def standardized(eps, unbiased):
    return pieces(scale=lambda rewards: rewards.std(unbiased=unbiased) + eps)


def gae_whitened(correction):
    return lambda J, b: torch.stack([whitened(J(b)[0], b.mask, correction), J(b)[1]])


mean_back = lambda J, b: J(b) + b.mask * b.advantages[b.mask].mean()  # noqa: E731
unbiased = lambda J, b: J(b) * (1 - 1 / b.mask.sum()) ** 0.5  # noqa: E731
with_holes = pieces(length=lambda b, i: tokens(b, i)[-1] - tokens(b, i)[0] + 1)
whitened_again = setting(advantages=lambda b: whitened(b.advantages, b.mask))
by_area = pieces(average=lambda b, terms, divisors: average(b, terms, b.mask.numel()))
swapped = setting(tau_pos=lambda b: b.tau_neg, tau_neg=lambda b: b.tau_pos)
no_return = setting(returns=lambda b: b.returns - b.old_values)
no_step = setting(value_clip=lambda b: b.value_clip or 1e-300)

# ---------------------------------------------------------------------------------------- the entries

CLIPPED = ["ppo", "grpo", "grpo_offpolicy", "dr_grpo", "dapo", "gspo", "vapo"]
BY_ROOT = ["gspo", "gmpo", "rspo"]
WITH_RATIO = [*CLIPPED, "gmpo", "rspo", "cispo", "sapo"]
BY_LENGTH = [name for name in WITH_RATIO if name != "dr_grpo"]  # where |o| counts
STANDARDIZED = ["group_advantages", "grouped_advantages"]
GROUPS = ["group_advantages", "group_differences", "leave_one_out"]
AVERAGED = [*LOSSES, "value_loss"]
MASKED = [*AVERAGED, "positive_lm_loss", "replayed_gate"]

MISTAKES = {  # name: (sections of vectors.json, change)
    # The averages and the mask.
    "wrong sign": (["value_loss", "positive_lm_loss"], lambda J, b: -J(b)),
    "a mean over the padded width": (["value_loss"], by_area),
    "a mean of each micro-batch [verl: geo_mean]": (AVERAGED, sum_over_micro_batches),
    "holes counted in |o|": (BY_LENGTH, with_holes),
    "mask ignored": (MASKED, setting(mask=lambda b: torch.ones_like(b.mask))),
    "no gradient: something is detached": (LOSSES, lambda J, b: J(b).detach()),
    "the advantages whitened again": (LOSSES, whitened_again),
    # Ratios and clips.
    "every ratio times every A: (B,) times (B, 1)": (BY_ROOT, every_pair),
    "a ratio for each token: GRPO's": (["gspo"], lambda J, b: reference.grpo(b)),
    "a root by the padded width, not by |o|": (BY_ROOT, pieces(length=lambda b, i: b.mask.shape[1])),
    "a product instead of a geometric mean": (BY_ROOT, pieces(length=lambda b, i: 1)),
    "the ratio is always 1": (WITH_RATIO, setting(old_logprobs=lambda b: b.logprobs.detach())),
    "the ratio upside down": (WITH_RATIO, pieces(log_ratio=lambda b, i, t: -log_ratio(b, i, t))),
    "gamma ignored": (["rspo"], setting(gamma_min=1)),
    "no factor 4 / tau": (["sapo"], pieces(gate=lambda r, tau: gate(r, tau) * tau / 4)),
    "the two tau swapped": (["sapo"], swapped),
    "a gradient through the weight": (["cispo"], pieces(stopped=lambda x: x)),
    # Advantages and values.
    "the mean of the batch": (STANDARDIZED, of_batch("mean", torch.mean)),
    "the std of the batch": (STANDARDIZED, of_batch("scale", lambda rewards: rewards.std() + 1e-6)),
    "lambda ignored": (["gae"], setting(lam=1)),
    "the advantage returned as the return": (["gae"], lambda J, b: J(b)[[0, 0]]),
    "GAE, then whitened": (["gae"], gae_whitened(0)),
    "GAE, then whitened with the unbiased std": (["gae"], gae_whitened(1)),
    "the advantage taken for the return": (["value_loss"], no_return),
    "min instead of max": (["value_loss"], pieces(worse=torch.min)),
    "the values not clipped": (["value_loss"], setting(value_clip=0)),
}
VARIANTS = {
    "k3 clamped at 10 [verl]": (["grpo"], pieces(k3=lambda log_x: k3(log_x).clamp(max=10))),
    "k3 times r, unasked [TRL: default]": (["grpo"], setting(kl_is_corrected=True)),
    "eps 1e-4 [TRL]": (STANDARDIZED, standardized(1e-4, True)),
    "eps 1e-8": (STANDARDIZED[:1], standardized(1e-8, True)),
    "the std of the population, eps 1e-6": (STANDARDIZED, standardized(1e-6, False)),
    "the std of the population, eps 1e-4": (STANDARDIZED, standardized(1e-4, False)),
    "the std of the population, eps 1e-8": (STANDARDIZED[:1], standardized(1e-8, False)),
    "no rule for equal rewards [TRL, verl]": (GROUPS, pieces(is_uniform=lambda rewards: False)),
    "no step at all if the range is 0": (["value_loss"], no_step),
    "half of the squared error": (["value_loss"], lambda J, b: J(b) / 2),
    "the unbiased std [TRL, verl]": (["whiten"], unbiased),
    "the mean comes back [TRL, verl: on request]": (["whiten"], mean_back),
}
ENTRIES = {f"mistake: {name}": entry for name, entry in MISTAKES.items()}
ENTRIES |= {f"variant: {name}": entry for name, entry in VARIANTS.items()}
