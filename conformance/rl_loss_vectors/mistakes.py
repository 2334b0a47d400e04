"""What is known to go wrong in these objectives, and what others do differently, as literal code.

A *mistake* contradicts the paper; a *variant* is a choice that the paper leaves open, or that another
code base documents. In brackets: the engine that does so, TRL 1.16.0 or verl 0.9.1. Each entry has a
change(objective, batch), which returns what the changed code would. What explain.py says as well, such
as a wrong factor, mostly has no entry.
"""

import math
from unittest import mock

import torch

from rl_loss_vectors import reference
from rl_loss_vectors.reference import LOSSES, advantage, average, clipped, k3, length, mean
from rl_loss_vectors.reference import pessimistic, ratio, scale, sequence_ratio, tokens

# ------------------------------------------------------------------------------------ ways to change


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


def swapped(one, other):
    return inputs(lambda b: {one: getattr(b, other), other: getattr(b, one)})


def of_rows(b, rows):
    part = {key: x[rows] for key, x in vars(b).items() if torch.is_tensor(x)}
    return reference.batch(**(vars(b) | part))


def averaging(how):
    """Another mean; what there is once for a completion then stands on each of its tokens."""

    def mean_of(b, terms, _):
        if all(len(row) == 1 for row in terms):
            terms = [row * length(b, i) for i, row in enumerate(terms)]
        return average(b, terms, how)

    return pieces(average=mean_of)


def divided_by(divisor):
    """The sum of all terms, divided by something else."""
    return pieces(average=lambda b, terms, how: sum(sum(row) for row in terms) / divisor(b))


def per_micro_batch(objective, b):
    return sum(objective(of_rows(b, rows)) for rows in b.micro_batches or [slice(None)])


def per_half(objective, b):
    return (objective(of_rows(b, slice(0, 2))) + objective(of_rows(b, slice(2, None)))) / 2


def masks(mask_of):
    """mask_of(b, i) of each completion; one that is empty then has a length of nearly 0."""
    of_empty_rows = {
        "length": lambda b, i: max(length(b, i), 1e-12),
        "advantage": lambda b, i: b.advantages[i, tokens(b.whole, i)[0]],
    }

    def change(objective, b):
        mask = torch.stack([mask_of(b, i) for i in range(len(b.mask))])
        return pieces(**of_empty_rows)(
            objective, reference.batch(**vars(b) | {"mask": mask, "whole": b})
        )

    return change


def without_last(b, i):
    mask = b.mask[i].clone()
    mask[tokens(b, i)[-1]] = False
    return mask


def moved(by):
    return lambda b, i: torch.roll(torch.nn.functional.pad(b.mask[i], (1, 1)), by)[1:-1]


def clips(term):
    """term(r, its clipped value, A)"""
    return pieces(
        clipped=lambda r, a, b: term(r, torch.clamp(r, 1 - b.clip_eps_low, 1 + b.clip_eps_high), a)
    )


def max_if_negative(r, a, b):
    return -clipped(r, -a, b) if a < 0 else clipped(r, a, b)


def dual_clipped(r, a, b):
    return torch.max(clipped(r, a, b), 3 * a) if a < 0 else clipped(r, a, b)


def arithmetic_mean(b, i, factor):
    a = advantage(b, i)
    return 0 if a == 0 else sum(factor(ratio(b, i, t), a, t) for t in tokens(b, i)) / length(b, i) * a


def clipped_mean(b, i, factor):
    a = advantage(b, i)
    return pessimistic(sequence_ratio(b, i), a, b) * a if a != 0 else 0


def bounds(of):
    """of(r, low, high, A) for the clip of gmpo and rspo."""
    return pieces(
        pessimistic=lambda r, a, b: of(r, math.exp(-b.log_ratio_clip), math.exp(b.log_ratio_clip), a)
    )


def raw_range(r, a, b):
    return torch.min(r * a, torch.clamp(r, 1 - b.log_ratio_clip, 1 + b.log_ratio_clip) * a) / a


def sigmoid(r, a, b):
    return torch.sigmoid((b.tau_pos if a > 0 else b.tau_neg) * (r - 1))


def scales(of):
    """of(rewards as a tensor), to divide by."""
    return pieces(scale=lambda rewards, j: of(torch.stack(list(rewards))))


def of_the_batch(name, of):
    return lambda objective, b: pieces(**{name: lambda rewards, j: of(b.rewards)})(objective, b)


def std_in_one_pass(rewards):
    """The mean of squares less the squared mean."""
    x = torch.stack(list(rewards))
    variance = ((x * x).mean() - x.mean() ** 2).clamp(min=0)
    return (variance * len(x) / (len(x) - 1)).sqrt()


def guarded(rewards, j):
    """The std of the others in one pass, unless it is 0 as it comes out."""
    std = std_in_one_pass([*rewards[:j], *rewards[j + 1 :]])
    return std + 1e-6 if std > 0 else 1


def by_position(b):
    size = int((b.group_ids == b.group_ids[0]).sum())
    return {"group_ids": torch.arange(len(b.rewards)) // size}


def sum_on_each_token(b):
    rewards = torch.where(b.mask, b.rewards, 0).sum(1, keepdim=True)
    return {"rewards": rewards.expand_as(b.mask)}


def whitened(objective, b):
    A = objective(b)[0]
    A = (A - A[b.mask].mean()) / (A[b.mask].std(unbiased=False) + 1e-8)
    return torch.where(b.mask, torch.stack([A, A + b.values]), 0)


def gae_over_holes(masked):
    """GAE from the end. Masked places are tokens ("counted"), or end the completion ("ends")."""

    def change(objective, b):
        A = torch.zeros_like(b.rewards)
        for i in range(len(b.mask)):
            lam = b.lam[i] if torch.is_tensor(b.lam) else b.lam
            next_v = b.bootstrap[i, 0]
            next_a = 0
            for t in reversed(range(b.mask.shape[1])):
                if not b.mask[i, t:].any() and masked == "ends":
                    continue  # nothing has come yet, from the end
                if not b.mask[i, t] and masked == "ends":
                    next_v = 0 * next_v
                    next_a = 0
                else:
                    delta = b.rewards[i, t] + b.gamma * next_v - b.values[i, t]
                    next_a = delta + b.gamma * lam * next_a
                    next_v = b.values[i, t]
                    A[i, t] = next_a
        return torch.where(b.mask, torch.stack([A, A + b.values]), 0)

    return change


def squares(pick):
    """pick of the two squares of the value loss"""

    def term(b, i, t):
        V, old, ret = (x[i, t] for x in (b.values, b.old_values, b.returns))
        reach = b.value_clip or math.inf
        return pick((V - ret) ** 2, (old + torch.clamp(V - old, -reach, reach) - ret) ** 2)

    return lambda objective, b: average(b, reference.each(b, lambda i, t: term(b, i, t)), "token")


def larger_mean(objective, b):
    """The max of two means, not the mean of the max of each token."""
    means = [squares(lambda *pair, k=k: pair[k])(objective, b) for k in (0, 1)]
    return torch.max(*means)


def whitening(of):
    """of(x, mask) -> (mean, divisor)"""

    def change(objective, b):
        x = torch.where(b.mask, b.advantages, 0)
        mean, divisor = of(x, b.mask)
        return torch.where(b.mask, (x - mean) / divisor, 0)

    return change


def weights(of):
    """of(rho, b) of each token"""
    return pieces(rollout_weight=lambda b, i, t: of(reference.sampler_ratio(b, i, t), b))


# ---------------------------------------------------------------------------------------- the entries

CLIPPED = "ppo grpo dr_grpo dapo gspo vapo"
WITH_RATIO = "ppo grpo dr_grpo dapo gspo cispo gmpo rspo sapo vapo"
TOKEN_MEANS = "ppo dapo cispo vapo"
BY_LENGTH = "ppo grpo dapo gspo cispo gmpo rspo sapo vapo"  # where |o| counts
STANDARDIZED = "group_advantages grouped_advantages"
GROUPS = "group_advantages group_differences leave_one_out"
AVERAGED = LOSSES + " value_loss"
MASKED = AVERAGED + " positive_lm_loss"
ALL = torch.ones_like
# (name, sections of vectors.json, the changed objective)
MISTAKES = [
    ("wrong sign", MASKED, lambda objective, b: -objective(b)),
    ("no gradient", MASKED, lambda objective, b: objective(b).detach()),
    # The averages.
    ("token-mean for sequence-mean [verl: default]", "grpo sapo", averaging("token")),
    ("sequence-mean for token-mean", TOKEN_MEANS, averaging("sequence")),
    ("one term a completion, token-mean [verl: default]", "gspo gmpo rspo", averaging("token")),
    ("divided by |o|", "dr_grpo reinforce rloo", averaging("sequence")),
    ("a mean over the padded width", BY_LENGTH, divided_by(lambda b: b.mask.numel())),
    ("no division at all", AVERAGED, divided_by(lambda b: 1)),
    ("a mean of each micro-batch [verl: geo_mean]", AVERAGED, per_micro_batch),
    (
        "divided again by the number of micro-batches",
        AVERAGED,
        lambda objective, b: objective(b) / len(b.micro_batches or [0]),
    ),
    ("a token-mean of each prompt group, then of groups", TOKEN_MEANS, per_half),
    (
        "holes counted in |o|",
        BY_LENGTH,
        pieces(length=lambda b, i: tokens(b, i)[-1] - tokens(b, i)[0] + 1),
    ),
    # The mask.
    ("mask ignored", MASKED, inputs(lambda b: {"mask": ALL(b.mask)})),
    (
        "mask by value: log-probs that are not 0",
        LOSSES,
        masks(lambda b, i: b.mask[i] & (b.logprobs[i] != 0)),
    ),
    ("the last token masked", MASKED, masks(without_last)),
    ("the mask one place early", MASKED, masks(moved(-1))),
    ("the mask one place late", MASKED, masks(moved(1))),
    # Ratios and clips.
    ("the ratio is always 1", WITH_RATIO, inputs(lambda b: {"old_logprobs": b.logprobs.detach()})),
    (
        "the ratio upside down",
        WITH_RATIO,
        pieces(log_ratio=lambda b, i, t: b.old_logprobs[i, t] - b.logprobs[i, t]),
    ),
    (
        "log-ratios summed, not averaged",
        "gspo",
        pieces(sequence_ratio=lambda b, i: sequence_ratio(b, i) ** length(b, i)),
    ),
    ("the ratio detached", "gspo", pieces(sequence_ratio=lambda b, i: sequence_ratio(b, i).detach())),
    (
        "a ratio for each token",
        "gspo",
        lambda objective, b: average(
            b, reference.each(b, lambda i, t: reference.clipped_term(b, i, t)), "sequence"
        ),
    ),
    ("max for min", CLIPPED, pieces(clipped=lambda r, a, b: -clipped(r, -a, b))),
    ("max for min where A < 0", CLIPPED, pieces(clipped=max_if_negative)),
    ("no clip at all", CLIPPED, clips(lambda r, near, a: r * a)),
    ("the clip without the min", CLIPPED, clips(lambda r, near, a: near * a)),
    ("the two bounds swapped", "ppo dapo gspo vapo", swapped("clip_eps_low", "clip_eps_high")),
    (
        "the lower eps for both bounds [TRL, verl: default]",
        "ppo dapo gspo vapo",
        inputs(lambda b: {"clip_eps_high": b.clip_eps_low}),
    ),
    # The KL of grpo.
    ("k3 of pi/pi_ref", "grpo", pieces(k3=lambda log_x: k3(-log_x))),
    ("k3 without its gradient", "grpo", pieces(k3=lambda log_x: k3(log_x).detach())),
    ("k1 in the loss", "grpo", pieces(k3=lambda log_x: -log_x)),
    ("k2 for k3", "grpo", pieces(k3=lambda log_x: log_x**2 / 2)),
    # cispo, gmpo, rspo and sapo.
    ("a gradient through the weight", "cispo", pieces(stopped=lambda x: x)),
    ("the mean clipped, not each token", "gmpo", pieces(geometric_mean=clipped_mean)),
    ("an arithmetic for a geometric mean", "gmpo rspo", pieces(geometric_mean=arithmetic_mean)),
    ("a clip on both sides", "gmpo rspo", bounds(lambda r, low, high, a: r.clamp(low, high))),
    ("no clip", "gmpo rspo", bounds(lambda r, low, high, a: r)),
    ("eps bounds r, not log r", "gmpo rspo", pieces(pessimistic=raw_range)),
    ("A < 0 amplified", "rspo", inputs(lambda b: {"shift": b.shift.replace("damped", "literal")})),
    ("temperatures swapped", "sapo", swapped("tau_pos", "tau_neg")),
    ("without 4/tau", "sapo", pieces(gate=sigmoid)),
    # Advantages.
    ("the mean of the batch", STANDARDIZED, of_the_batch("mean", torch.mean)),
    ("the std of the batch", STANDARDIZED, of_the_batch("scale", lambda x: x.std() + 1e-6)),
    ("the variance for the std", STANDARDIZED, scales(lambda x: x.var() + 1e-6)),
    ("the variance in one pass", "group_advantages", pieces(std=std_in_one_pass)),
    (
        "the variance of the others in one pass, and no rule",
        "leave_one_out_std",
        pieces(scale_of_others=guarded),
    ),
    (
        "divided though the others are equal [NeMo-RL]",
        "leave_one_out_std",
        pieces(scale_of_others=lambda r, j: reference.std([*r[:j], *r[j + 1 :]]) + 1e-6),
    ),
    ("the std of all rewards of the group", "leave_one_out_std", pieces(scale_of_others=scale)),
    ("its own reward in the baseline", "leave_one_out leave_one_out_std", pieces(mean_of_others=mean)),
    ("divided by the std", "group_differences leave_one_out", pieces(unscaled=scale)),
    (
        "a sibling sample counted again",
        "grouped_advantages",
        inputs(lambda b: {"rollout_ids": torch.arange(len(b.rewards))}),
    ),
    (
        "one group of the whole batch",
        "grouped_advantages",
        inputs(lambda b: {"group_ids": 0 * b.group_ids}),
    ),
    ("groups by position", "grouped_advantages", inputs(by_position)),
    # GAE and the critic.
    ("the reward counted on every token", "gae", inputs(sum_on_each_token)),
    ("returns made of whitened advantages", "gae", whitened),
    ("no bootstrap where it is due", "gae", inputs(lambda b: {"bootstrap": 0 * b.bootstrap})),
    ("masked places are tokens", "gae", gae_over_holes("counted")),
    ("a hole ends the completion", "gae", gae_over_holes("ends")),
    ("the max of two means", "value_loss", larger_mean),
    ("the smaller square", "value_loss", squares(torch.min)),
    ("wrong completions too", "positive_lm_loss", inputs(lambda b: {"is_right": ALL(b.is_right)})),
    # What stands around the objective.
    ("layers summed", "router_shift", lambda objective, b: objective(b) ** b.scores.shape[2]),
    ("experts summed", "router_shift", lambda objective, b: objective(b) ** b.scores.shape[3]),
    (
        "no absolute value",
        "router_shift",
        lambda objective, b: (b.scores - b.old_scores).mean((2, 3)).exp(),
    ),
    ("padding counted", "whiten", whitening(lambda x, mask: (x.mean(), x.std(unbiased=False) + 1e-8))),
    (
        "half of the rows at a time, as on two ranks",
        "whiten",
        lambda objective, b: torch.cat([objective(of_rows(b, [0, 1])), objective(of_rows(b, [2, 3]))]),
    ),
    ("a bonus for a penalty", "overlong_penalty", lambda objective, b: -objective(b)),
    ("no end of the ramp", "overlong_penalty", pieces(ramp=lambda x: x.clamp(max=0))),
    (
        "the ramp begins at L_max",
        "overlong_penalty",
        inputs(lambda b: {"max_new_tokens": b.max_new_tokens + b.overlong_cache}),
    ),
    ("rho upside down", "rollout_weights", swapped("old_logprobs", "rollout_logprobs")),
    (
        "no cap and no bounds",
        "rollout_weights",
        inputs(lambda b: {"cap": math.inf, "mask_low": 0, "mask_high": math.inf}),
    ),
    ("0 above the cap", "rollout_weights", weights(lambda rho, b: rho * (rho <= b.cap))),
    ("the product where a mean is due", "rollout_weights", pieces(length=lambda b, i: 1)),
    (
        "a weight for each token where one is due for a completion",
        "rollout_weights",
        weights(lambda rho, b: rho.clamp(max=b.cap)),
    ),
    ("rejected tokens are counted", "weighted_mean", inputs(lambda b: {"rejected": "counted"})),
    ("rejected tokens are left out", "weighted_mean", inputs(lambda b: {"rejected": "left_out"})),
    (
        "a mean over the sum of weights",
        "weighted_mean",
        lambda objective, b: (b.losses * b.weights)[b.mask].sum() / b.weights[b.mask].sum(),
    ),
    ("no gradient to the router", "replayed_gate", lambda objective, b: objective(b).detach()),
    (
        "today's choice, not the old one",
        "replayed_gate",
        inputs(lambda b: {"indices": b.logits.topk(b.indices.shape[1]).indices}),
    ),
    ("weights where there is padding", "replayed_gate", inputs(lambda b: {"mask": ALL(b.mask)})),
    (
        "normalized where it is not due, or the other way round",
        "replayed_gate",
        inputs(lambda b: {"normalized": not b.normalized}),
    ),
]
VARIANTS = [
    ("biased std", STANDARDIZED, scales(lambda x: x.std(unbiased=False) + 1e-6)),
    ("eps 1e-4 [TRL]", STANDARDIZED, scales(lambda x: x.std() + 1e-4)),
    ("eps 1e-8", "group_advantages", scales(lambda x: x.std() + 1e-8)),
    ("no rule for equal rewards [TRL, verl]", GROUPS, pieces(is_uniform=lambda rewards: False)),
    ("dual clip: A < 0 and r > 3 [verl]", CLIPPED, pieces(clipped=dual_clipped)),
    ("cap 1 + c [verl]", "cispo", inputs(lambda b: {"is_weight_cap": 1 + b.is_weight_cap})),
    ("weights of at least 0.8 [verl]", "cispo", inputs(lambda b: {"is_weight_floor": 0.8})),
    ("a cap of 0.2 [TRL: default]", "cispo", inputs(lambda b: {"is_weight_cap": 0.2})),
    (
        "bounds of 0.2 [TRL, verl: default]",
        "gspo",
        inputs(lambda b: {"clip_eps_low": 0.2, "clip_eps_high": 0.2}),
    ),
    ("k3 clamped at 10 [verl]", "grpo", pieces(k3=lambda log_x: k3(log_x).clamp(max=10))),
    ("k3 times r, unasked [TRL: default]", "grpo", inputs(lambda b: {"kl_is_corrected": True})),
    (
        "the unbiased std [TRL, verl]",
        "whiten",
        whitening(lambda x, mask: (x[mask].mean(), x[mask].std() + 1e-8)),
    ),
]
