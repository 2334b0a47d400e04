"""What is known to go wrong in these objectives, and what others do differently, as literal code.

A *mistake* contradicts the paper; a *variant* is a choice that the paper leaves open, or that another
code base documents. Each entry takes an objective of reference.py and a batch, and returns what such
code would. In brackets: the engine that does so, TRL 1.16.0 or verl 0.9.1.
"""

from unittest import mock

import torch

from conformance import reference
from conformance.reference import advantage, clipped, k3, pessimistic
from conformance.reference import sequence_mean, sequence_ratio, token_mean, tokens


def pieces(**replacements):
    """The objective with some functions of reference.py replaced."""

    def change(objective, b):
        with mock.patch.multiple(reference, **replacements):
            return objective(b)

    return change


def inputs(fields):
    """The objective of a changed batch; fields(b) returns the changes."""
    return lambda objective, b: objective(reference.batch(**(vars(b) | fields(b))))


def together(first, *rest):
    if not rest:
        return first
    others = together(*rest)
    return lambda objective, b: others(lambda changed: first(objective, changed), b)


def max_if_negative(r, a, b):
    return -clipped(r, -a, b) if a < 0 else clipped(r, a, b)


def dual_clipped(r, a, b):
    return torch.max(clipped(r, a, b), 3 * a) if a < 0 else clipped(r, a, b)


def swapped(one, other):
    return inputs(lambda b: {one: getattr(b, other), other: getattr(b, one)})


def mean_per_micro_batch(objective, b):
    total = 0
    for rows in b.micro_batches or [slice(None)]:
        part = {key: value[rows] for key, value in vars(b).items() if torch.is_tensor(value)}
        total += objective(reference.batch(**(vars(b) | part)))
    return total


def over_tokens(b, term):
    return token_mean([[term(i)] * len(tokens(b, i)) for i in range(len(b.mask))])


def times_mask(objective, b):
    """Masked terms are multiplied by 0, but 0 times NaN is NaN."""
    x = b.logprobs if "logprobs" in vars(b) else b.values
    return objective(b) + (0 * x[~b.mask] ** 2).sum() * x[b.mask].sum()


def summed(b, i):
    return sequence_ratio(b, i) ** len(tokens(b, i))


def clipped_mean(b, i, factor):
    a = advantage(b, i)
    return pessimistic(sequence_ratio(b, i), a, b) * a if a != 0 else 0


def raw_range(r, a, b):
    return torch.min(r * a, torch.clamp(r, 1 - b.log_ratio_clip, 1 + b.log_ratio_clip) * a) / a


def sigmoid(r, a, b):
    return torch.sigmoid((b.tau_pos if a > 0 else b.tau_neg) * (r - 1))


def sum_on_each_token(b):
    rewards = torch.where(b.mask, b.rewards, 0).sum(1, keepdim=True)
    return {"rewards": rewards.expand_as(b.mask)}


def whitened(objective, b):
    A = objective(b)[0]
    A = (A - A[b.mask].mean()) / (A[b.mask].std(unbiased=False) + 1e-8)
    return torch.where(b.mask, torch.stack([A, A + b.values]), 0)


LOSSES = "ppo grpo dr_grpo dapo gspo cispo gmpo rspo sapo reinforce rloo vapo"
CLIPPED = "ppo grpo dr_grpo dapo gspo vapo"
GROUPS = "group_advantages group_differences leave_one_out"
OVER_TOKENS = pieces(completion_mean=over_tokens, sequence_mean=token_mean)
# (name, sections of vectors.json, the changed objective)
MISTAKES = [
    ("wrong sign", LOSSES, lambda objective, b: -objective(b)),
    ("no gradient", LOSSES, lambda objective, b: objective(b).detach()),
    ("max for min", CLIPPED, pieces(clipped=lambda r, a, b: -clipped(r, -a, b))),
    ("max for min where A < 0", CLIPPED, pieces(clipped=max_if_negative)),
    ("the two bounds swapped", "dapo gspo vapo", swapped("clip_eps_low", "clip_eps_high")),
    ("k3 of pi/pi_ref", "grpo", pieces(k3=lambda log_x: k3(-log_x))),
    ("k3 without its gradient", "grpo", pieces(k3=lambda log_x: k3(log_x).detach())),
    ("token-mean for sequence-mean [verl: default]", "grpo sapo", pieces(sequence_mean=token_mean)),
    ("sequence-mean for token-mean", "ppo dapo cispo vapo", pieces(token_mean=sequence_mean)),
    ("one term a completion, token-mean [verl: default]", "gspo gmpo rspo", OVER_TOKENS),
    ("a mean of each micro-batch [verl: geo_mean]", LOSSES, mean_per_micro_batch),
    ("divided by |o|", "dr_grpo", lambda objective, b: reference.grpo(b)),
    ("a gradient through the weight", "cispo", pieces(stopped=lambda x: x)),
    ("log-ratios summed, not averaged", "gspo", pieces(sequence_ratio=summed)),
    ("the ratio detached", "gspo", pieces(sequence_ratio=lambda b, i: sequence_ratio(b, i).detach())),
    ("the mean clipped, not each token", "gmpo", pieces(geometric_mean=clipped_mean)),
    ("eps bounds r, not log r", "gmpo rspo", pieces(pessimistic=raw_range)),
    ("A < 0 amplified", "rspo", inputs(lambda b: {"shift": b.shift.replace("damped", "literal")})),
    ("layers summed", "router_shift", lambda objective, b: objective(b) ** b.scores.shape[2]),
    ("temperatures swapped", "sapo", swapped("tau_pos", "tau_neg")),
    ("without 4/tau", "sapo", pieces(gate=sigmoid)),
    ("the reward counted on every token", "gae", inputs(sum_on_each_token)),
    ("returns made of whitened advantages", "gae", whitened),
    ("no bootstrap where it is due", "gae", inputs(lambda b: {"bootstrap": 0 * b.bootstrap})),
]
VARIANTS = [
    ("biased std", "group_advantages", inputs(lambda b: {"std_is_biased": True})),
    ("eps 1e-4 [TRL]", "group_advantages", inputs(lambda b: {"eps": 1e-4})),
    ("eps 1e-8", "group_advantages", inputs(lambda b: {"eps": 1e-8})),
    ("no rule for equal rewards [TRL, verl]", GROUPS, inputs(lambda b: {"has_zero_rule": False})),
    ("dual clip: A < 0 and r > 3 [verl]", CLIPPED, pieces(clipped=dual_clipped)),
    ("cap 1 + c [verl]", "cispo", inputs(lambda b: {"is_weight_cap": 1 + b.is_weight_cap})),
    ("weights of at least 0.8 [verl]", "cispo", inputs(lambda b: {"is_weight_floor": 0.8})),
    ("k3 clamped at 10 [verl]", "grpo", pieces(k3=lambda log_x: k3(log_x).clamp(max=10))),
    ("k3 times r, unasked [TRL: default]", "grpo", inputs(lambda b: {"kl_is_corrected": True})),
    ("NaN in masked places spreads [TRL, verl]", LOSSES + " gae", times_mask),
]
