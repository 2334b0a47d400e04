"""What is known to go wrong in these objectives, and what others do differently, as literal code.

A *mistake* contradicts the paper; a *variant* is a choice that the paper leaves open, or that another
code base documents. In brackets: the engine that does so, TRL 1.16.0 or verl 0.9.1. Each entry has a
change(J, batch), which returns what the changed code would. What explain.py says as well, such
as another divisor or range, mostly has no entry.
"""

import math
from unittest import mock

import torch

from rl_loss_vectors import reference
from rl_loss_vectors.reference import LOSSES, average, clipped, gate, k3, length, log_ratio, ratio
from rl_loss_vectors.reference import tokens

# ------------------------------------------------------------------------------------ ways to change


def pieces(**replacements):
    """The objective with some functions of reference.py replaced."""

    def change(J, b):
        with mock.patch.multiple(reference, **replacements):
            return J(b)

    return change


def changed(b, **fields):
    return reference.batch(**(vars(b) | fields))


def setting(**fields):
    """J of a batch with other fields; a function gives the field's value from the batch."""

    def change(J, b):
        return J(changed(b, **{key: x(b) if callable(x) else x for key, x in fields.items()}))

    return change


def swapped(one, other):
    return setting(**{one: lambda b: getattr(b, other), other: lambda b: getattr(b, one)})


def together(first, second):
    return lambda J, b: second(lambda other: first(J, other), b)


def split(J, b, parts):
    """[J of each part of the rows]"""
    rows_of = {key: x for key, x in vars(b).items() if torch.is_tensor(x)}
    return [J(changed(b, **{key: x[part] for key, x in rows_of.items()})) for part in parts]


# ------------------------------------------------------------------------------ what they change it to


def token_mean(b, terms, how):
    """What there is once for a completion stands on each of its tokens."""
    return average(b, [row * (length(b, i) // len(row)) for i, row in enumerate(terms)], "token")


def sequence_mean(b, terms, how):
    return average(b, terms, "sequence")


def padded_mean(b, terms, how):
    return sum(sum(row) for row in terms) / b.mask.numel()


def mean_of_micro_batches(J, b):
    return sum(split(J, b, b.micro_batches))


def without_the_odd_row(J, b):
    (value,) = split(J, b, [slice(len(b.mask) // 2 * 2)])
    return value


def length_with_holes(b, i):
    return tokens(b, i)[-1] - tokens(b, i)[0] + 1


def mask_moved(by):
    """The least length is that of a completion whose tokens are all ignored."""
    least_length = pieces(
        length=lambda b, i: length(b, i) or 1e-12, advantage=lambda b, i: b.advantages[i, 0]
    )

    def moved(b):
        return torch.roll(torch.nn.functional.pad(b.mask, (1, 1)), by, 1)[:, 1:-1]

    return together(least_length, setting(mask=moved))


def larger(r, a, low, high):
    return -clipped(r, -a, low, high)


def clipped_on_both_sides(r, a, low, high):
    return r.clamp(low, high) * a


def clipped_by_ratio(r, a, low, high):
    return clipped(r, a, 1 + math.log(low), 1 + math.log(high))


def arithmetic_mean(b, i, factor):
    a = b.advantages[i, tokens(b, i)[0]]
    factors = [factor(ratio(b, i, t), a, t) if a else 0 for t in tokens(b, i)]
    return sum(factors) / length(b, i) * a


def dual_clip(r, a, low, high):
    return torch.max(clipped(r, a, low, high), -3 * abs(a))


def std_of_the_batch(J, b):
    return pieces(scale=lambda rewards: b.rewards.std() + 1e-6)(J, b)


def mean_of_the_batch(J, b):
    return pieces(mean=lambda rewards, j: b.rewards.mean())(J, b)


def smallest_range(b):
    return b.value_clip or 1e-300


def sum_on_each_token(b):
    return torch.where(b.mask, b.rewards, 0).sum(1, keepdim=True).expand_as(b.mask)


# ---------------------------------------------------------------------------------------- the entries

CLIPPED = ["ppo", "grpo", "dr_grpo", "dapo", "gspo", "vapo"]
GEOMETRIC = ["gmpo", "rspo"]
WITH_RATIO = [*CLIPPED, *GEOMETRIC, "cispo", "sapo"]
BY_LENGTH = [name for name in WITH_RATIO if name != "dr_grpo"]  # where |o| counts
SEQUENCE_MEAN = ["grpo", "gspo", "gmpo", "rspo", "sapo"]
OTHER_MEAN = ["ppo", "dr_grpo", "dapo", "cispo", "reinforce", "rloo", "vapo", "value_loss"]
TWO_BOUNDS = ["ppo", "dapo", "gspo", "vapo"]
STANDARDIZED = ["group_advantages", "grouped_advantages"]
GROUPS = ["group_advantages", "group_differences", "leave_one_out"]
AVERAGED = [*LOSSES, "value_loss"]
MASKED = [*AVERAGED, "positive_lm_loss"]
# (name, sections of vectors.json, the changed objective)
MISTAKES = [
    ("wrong sign", MASKED, lambda J, b: -J(b)),
    # The averages and the mask.
    ("token-mean [verl: default]", SEQUENCE_MEAN, pieces(average=token_mean)),
    ("sequence-mean: divided by each |o|", OTHER_MEAN, pieces(average=sequence_mean)),
    ("a mean over the padded width", [*WITH_RATIO, "value_loss"], pieces(average=padded_mean)),
    ("a mean of each micro-batch [verl: geo_mean]", AVERAGED, mean_of_micro_batches),
    ("rows forgotten that do not fill a micro-batch of two", AVERAGED, without_the_odd_row),
    ("holes counted in |o|", BY_LENGTH, pieces(length=length_with_holes)),
    ("mask ignored", [*MASKED, "replayed_gate"], setting(mask=lambda b: torch.ones_like(b.mask))),
    ("the mask one place early", MASKED, mask_moved(-1)),
    ("the mask one place late", MASKED, mask_moved(1)),
    # Ratios, clips and the KL.
    ("the ratio is always 1", WITH_RATIO, setting(old_logprobs=lambda b: b.logprobs.detach())),
    ("the ratio upside down", WITH_RATIO, pieces(log_ratio=lambda b, i, t: -log_ratio(b, i, t))),
    ("max for min", CLIPPED, pieces(clipped=larger)),
    (
        "a clip on both sides, without the min",
        CLIPPED + GEOMETRIC,
        pieces(clipped=clipped_on_both_sides),
    ),
    ("eps bounds r, not log r", GEOMETRIC, pieces(clipped=clipped_by_ratio)),
    ("an arithmetic for a geometric mean", GEOMETRIC, pieces(geometric_mean=arithmetic_mean)),
    ("a product for a geometric mean", ["gspo", *GEOMETRIC], pieces(length=lambda b, i: 1)),
    ("gamma without its floor", ["rspo"], setting(gamma_min=0)),
    ("gamma ignored", ["rspo"], setting(gamma_min=1)),
    ("no factor 4 / tau", ["sapo"], pieces(gate=lambda r, tau: gate(r, tau) * tau / 4)),
    ("the gate at log r", ["sapo"], pieces(gate=lambda r, tau: gate(1 + torch.log(r), tau))),
    ("the gate at r, not r - 1", ["sapo"], pieces(gate=lambda r, tau: gate(1 + r, tau))),
    ("one tau for both signs", ["sapo"], setting(tau_neg=lambda b: b.tau_pos)),
    ("the two tau swapped", ["sapo"], swapped("tau_pos", "tau_neg")),
    ("the two bounds swapped", TWO_BOUNDS, swapped("clip_eps_low", "clip_eps_high")),
    (
        "the lower eps for both bounds [TRL, verl: default]",
        TWO_BOUNDS,
        setting(clip_eps_high=lambda b: b.clip_eps_low),
    ),
    ("k1 in the loss", ["grpo"], pieces(k3=lambda log_x: -log_x)),
    ("k2 for k3", ["grpo"], pieces(k3=lambda log_x: log_x**2 / 2)),
    ("k3 upside down", ["grpo"], pieces(k3=lambda log_x: k3(-log_x))),
    ("the KL is rewarded", ["grpo"], pieces(k3=lambda log_x: -k3(log_x))),
    ("a gradient through the weight", ["cispo"], pieces(stopped=lambda x: x)),
    # Advantages and values.
    ("the mean of the batch", STANDARDIZED, mean_of_the_batch),
    ("the std of the batch", STANDARDIZED, std_of_the_batch),
    (
        "a sibling sample counted again",
        ["grouped_advantages"],
        setting(rollout_ids=lambda b: torch.arange(len(b.rewards))),
    ),
    ("the reward counted on every token", ["gae"], setting(rewards=sum_on_each_token)),
    ("min for max", ["value_loss"], pieces(worse=torch.min)),
    ("the values not clipped", ["value_loss"], setting(value_clip=0)),
    ("rho upside down", ["rollout_weights"], swapped("old_logprobs", "rollout_logprobs")),
]
VARIANTS = [
    ("the std of the population", STANDARDIZED, pieces(scale=lambda R: R.std(unbiased=False) + 1e-6)),
    ("eps 1e-4 [TRL]", STANDARDIZED, pieces(scale=lambda R: R.std() + 1e-4)),
    ("no rule for equal rewards [TRL, verl]", GROUPS, pieces(is_uniform=lambda rewards: False)),
    ("MaxRL: divided by the mean", STANDARDIZED, pieces(scale=lambda R: R.mean() + 1e-6)),
    ("dual clip: A < 0 and r > 3 [verl]", CLIPPED, pieces(clipped=dual_clip)),
    ("cap 1 + c [verl]", ["cispo"], setting(is_weight_cap=lambda b: 1 + b.is_weight_cap)),
    ("weights of at least 0.8 [verl]", ["cispo"], setting(is_weight_floor=0.8)),
    ("a cap of 0.2 [TRL: default]", ["cispo"], setting(is_weight_cap=0.2)),
    ("bounds of 0.2 [TRL, verl: default]", ["gspo"], setting(clip_eps_low=0.2, clip_eps_high=0.2)),
    ("k3 clamped at 10 [verl]", ["grpo"], pieces(k3=lambda log_x: k3(log_x).clamp(max=10))),
    ("k3 times r, unasked [TRL: default]", ["grpo"], setting(kl_is_corrected=True)),
    ("no step at all if the range is 0", ["value_loss"], setting(value_clip=smallest_range)),
    ("half of the squared error", ["value_loss"], lambda J, b: J(b) / 2),
    ("the unbiased std [TRL, verl]", ["whiten"], lambda J, b: J(b) * (1 - 1 / b.mask.sum()) ** 0.5),
]
# (kind, name, sections, change)
ENTRIES = [("mistake", *row) for row in MISTAKES] + [("variant", *row) for row in VARIANTS]
