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
from rl_loss_vectors.reference import LOSSES, advantage, average, clipped, each, k3, length, log_ratio
from rl_loss_vectors.reference import ratio, scale, squares, tokens

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


def pairs_of_rows(b):
    return torch.arange(len(b.mask)).split(2)


def prompt_mean(J, b):
    """The token-mean of each prompt, here of each pair of rows, and then the mean of prompts."""
    means = split(lambda part: pieces(average=token_mean)(J, part), b, pairs_of_rows(b))
    return sum(means) / len(means)


def without(is_dropped):
    """Instead of the clip, tokens without gradient: is_dropped(change of probability, advantage)."""

    def term(b, i, t):
        change = torch.exp(b.logprobs[i, t].detach()) - torch.exp(b.old_logprobs[i, t])
        a = b.advantages[i, t]
        return 0 * ratio(b, i, t) if is_dropped(change, a) else ratio(b, i, t) * a

    return pieces(clipped_term=term)


def moved(by):
    return lambda b: torch.roll(torch.nn.functional.pad(b.mask, (1, 1)), by, 1)[:, 1:-1]


def divided_by(divisor):
    """The sum of all terms, divided by something else."""
    return pieces(average=lambda b, terms, how: sum(sum(row) for row in terms) / divisor(b))


def token_mean(b, terms, how):
    """What there is once for a completion stands on each of its tokens."""
    return average(b, [row * (length(b, i) // len(row)) for i, row in enumerate(terms)], "token")


def arithmetic_mean(b, i, factor):
    a = advantage(b, i)
    return 0 if a == 0 else sum(factor(ratio(b, i, t), a, t) for t in tokens(b, i)) / length(b, i) * a


def scales(of):
    """of(rewards), to divide by."""
    return pieces(scale=lambda rewards, j: of(rewards))


def of_the_batch(name, of):
    return lambda J, b: pieces(**{name: lambda rewards, j: of(b.rewards)})(J, b)


def std_in_one_pass(x):
    """From the mean of squares less the squared mean."""
    variance = ((x * x).mean() - x.mean() ** 2).clamp(min=0)
    return (variance * len(x) / (len(x) - 1)).sqrt()


def by_position(b):
    return torch.arange(len(b.rewards)) // int((b.group_ids == b.group_ids[0]).sum())


def sum_on_each_token(b):
    return torch.where(b.mask, b.rewards, 0).sum(1, keepdim=True).expand_as(b.mask)


def larger_mean(J, b):
    """The max of two means, not the mean of the max of each token."""
    pairs = each(b, lambda i, t: squares(b, i, t))
    means = [average(b, [[pair[k] for pair in row] for row in pairs], "token") for k in (0, 1)]
    return torch.max(*means)


def padding_counted(J, b):
    everywhere = changed(b, mask=ALL(b.mask), advantages=torch.where(b.mask, b.advantages, 0))
    return torch.where(b.mask, J(everywhere), 0)


# ---------------------------------------------------------------------------------------- the entries

CLIPPED = "ppo grpo dr_grpo dapo gspo vapo"
GEOMETRIC = "gmpo rspo"
ANY_CLIP = f"{CLIPPED} {GEOMETRIC}"
BY_LENGTH = "ppo grpo dapo gspo cispo gmpo rspo sapo vapo"  # where |o| counts
WITH_RATIO = f"{BY_LENGTH} dr_grpo"
RATIO_OF_TOKENS = "ppo grpo dapo vapo"
STANDARDIZED = "group_advantages grouped_advantages"
GROUPS = "group_advantages group_differences leave_one_out"
AVERAGED = f"{LOSSES} value_loss"
MASKED = f"{AVERAGED} positive_lm_loss"
ALL = torch.ones_like
LEAST_LENGTH = pieces(  # of a completion whose tokens are all ignored
    length=lambda b, i: length(b, i) or 1e-12, advantage=lambda b, i: b.advantages[i, 0]
)
# (name, sections of vectors.json, the changed objective)
MISTAKES = [
    ("wrong sign", f"{MASKED} overlong_penalty", lambda J, b: -J(b)),
    ("no gradient", f"{MASKED} replayed_gate", lambda J, b: J(b).detach()),
    # The averages and the mask.
    ("token-mean [verl: default]", "grpo gspo gmpo rspo sapo", pieces(average=token_mean)),
    ("a mean over the padded width", WITH_RATIO, divided_by(lambda b: b.mask.numel())),
    ("no division at all", AVERAGED, divided_by(lambda b: 1)),
    (
        "a mean of each micro-batch [verl: geo_mean]",
        AVERAGED,
        lambda J, b: sum(split(J, b, b.micro_batches)),
    ),
    (
        "divided again by the number of micro-batches",
        AVERAGED,
        lambda J, b: J(b) / len(b.micro_batches),
    ),
    (
        "rows forgotten that do not fill a micro-batch of two",
        AVERAGED,
        lambda J, b: split(J, b, [slice(len(b.mask) // 2 * 2)])[0],
    ),
    (
        "holes counted in |o|",
        BY_LENGTH,
        pieces(length=lambda b, i: tokens(b, i)[-1] - tokens(b, i)[0] + 1),
    ),
    ("mask ignored", f"{MASKED} replayed_gate", setting(mask=lambda b: ALL(b.mask))),
    (
        "mask by value: log-probs that are not 0",
        LOSSES,
        together(LEAST_LENGTH, setting(mask=lambda b: b.mask & (b.logprobs != 0))),
    ),
    ("the mask one place early", MASKED, together(LEAST_LENGTH, setting(mask=moved(-1)))),
    ("the mask one place late", MASKED, together(LEAST_LENGTH, setting(mask=moved(1)))),
    # Ratios, clips and the KL.
    ("the ratio is always 1", WITH_RATIO, setting(old_logprobs=lambda b: b.logprobs.detach())),
    ("the ratio upside down", WITH_RATIO, pieces(log_ratio=lambda b, i, t: -log_ratio(b, i, t))),
    ("max for min", CLIPPED, pieces(clipped=lambda r, a, low, high: -clipped(r, -a, low, high))),
    ("no clip at all", ANY_CLIP, pieces(clipped=lambda r, a, low, high: r * a)),
    (
        "a clip on both sides, without the min",
        ANY_CLIP,
        pieces(clipped=lambda r, a, low, high: r.clamp(low, high) * a),
    ),
    ("the two bounds swapped", "ppo dapo gspo vapo", swapped("clip_eps_low", "clip_eps_high")),
    (
        "the lower eps for both bounds [TRL, verl: default]",
        "ppo dapo gspo vapo",
        setting(clip_eps_high=lambda b: b.clip_eps_low),
    ),
    (
        "eps bounds r, not log r",
        GEOMETRIC,
        pieces(clipped=lambda r, a, low, high: clipped(r, a, 1 + math.log(low), 1 + math.log(high))),
    ),
    ("an arithmetic for a geometric mean", GEOMETRIC, pieces(geometric_mean=arithmetic_mean)),
    ("k1 in the loss", "grpo", pieces(k3=lambda log_x: -log_x)),
    ("k3 upside down", "grpo", pieces(k3=lambda log_x: k3(-log_x))),
    ("the KL is rewarded", "grpo", pieces(k3=lambda log_x: -k3(log_x))),
    ("no gradient through the KL", "grpo", pieces(k3=lambda log_x: k3(log_x.detach()))),
    ("the absolute log-ratio for k3", "grpo", pieces(k3=abs)),
    ("k2 for k3", "grpo", pieces(k3=lambda log_x: log_x**2 / 2)),
    ("a gradient through the weight", "cispo", pieces(stopped=lambda x: x)),
    # Advantages and values.
    ("the mean of the batch", STANDARDIZED, of_the_batch("mean", torch.mean)),
    ("the std of the batch", STANDARDIZED, of_the_batch("scale", lambda x: x.std() + 1e-6)),
    ("the variance for the std", STANDARDIZED, scales(lambda x: x.var() + 1e-6)),
    (
        "the variance in one pass",
        "group_advantages",
        pieces(std=std_in_one_pass, is_uniform=lambda x: std_in_one_pass(x) == 0),
    ),
    ("divided by the std", "group_differences leave_one_out", pieces(unscaled=scale)),
    (
        "a sibling sample counted again",
        "grouped_advantages",
        setting(rollout_ids=lambda b: torch.arange(len(b.rewards))),
    ),
    (
        "one group of the whole batch",
        "grouped_advantages",
        setting(group_ids=lambda b: 0 * b.group_ids),
    ),
    ("groups by position", "grouped_advantages", setting(group_ids=by_position)),
    ("the reward counted on every token", "gae", setting(rewards=sum_on_each_token)),
    ("the max of two means", "value_loss", larger_mean),
    ("wrong completions too", "positive_lm_loss", setting(is_right=lambda b: ALL(b.is_right))),
    # What stands around the objective.
    ("layers summed", "router_shift", lambda J, b: J(b) ** b.scores.shape[2]),
    ("experts summed", "router_shift", lambda J, b: J(b) ** b.scores.shape[3]),
    ("no absolute value", "router_shift", lambda J, b: (b.scores - b.old_scores).mean((2, 3)).exp()),
    ("padding counted", "whiten", padding_counted),
    (
        "each half of the rows alone, as on two ranks",
        "whiten",
        lambda J, b: torch.cat(split(J, b, pairs_of_rows(b))),
    ),
    ("no end of the ramp", "overlong_penalty", pieces(ramp=lambda x: x.clamp(max=0))),
    (
        "the ramp begins at L_max",
        "overlong_penalty",
        setting(max_new_tokens=lambda b: b.max_new_tokens + b.overlong_cache),
    ),
    ("rho upside down", "rollout_weights", swapped("old_logprobs", "rollout_logprobs")),
    ("no cap and no bounds", "rollout_weights", setting(cap=math.inf, mask_low=0, mask_high=math.inf)),
    (
        "0 above the cap",
        "rollout_weights",
        setting(rule="icepop", mask_low=0, mask_high=lambda b: b.cap),
    ),
    ("the product where a mean is due", "rollout_weights", pieces(length=lambda b, i: 1)),
    ("a weight for each token, not each completion", "rollout_weights", setting(rule="token_tis")),
    ("today's choice of experts", "replayed_gate", setting(indices=lambda b: b.logits.topk(2).indices)),
    ("normalized where it is not due", "replayed_gate", setting(normalized=lambda b: not b.normalized)),
]
VARIANTS = [
    ("the std of the population", STANDARDIZED, scales(lambda x: x.std(unbiased=False) + 1e-6)),
    ("eps 1e-4 [TRL]", STANDARDIZED, scales(lambda x: x.std() + 1e-4)),
    ("no rule for equal rewards [TRL, verl]", GROUPS, pieces(is_uniform=lambda rewards: False)),
    (
        "dual clip: A < 0 and r > 3 [verl]",
        CLIPPED,
        pieces(clipped=lambda r, a, low, high: torch.max(clipped(r, a, low, high), -3 * abs(a))),
    ),
    ("IPO: dropped where pi changed by over 0.3", RATIO_OF_TOKENS, without(lambda d, a: abs(d) > 0.3)),
    (
        "DPPO: dropped where pi moved too far with A",
        RATIO_OF_TOKENS,
        without(lambda d, a: d * a.sign() > 0.2),
    ),
    ("prompt-mean: of tokens, then of prompts (here two rows)", BY_LENGTH, prompt_mean),
    ("MaxRL: divided by the mean", STANDARDIZED, scales(lambda x: x.mean() + 1e-6)),
    ("cap 1 + c [verl]", "cispo", setting(is_weight_cap=lambda b: 1 + b.is_weight_cap)),
    ("weights of at least 0.8 [verl]", "cispo", setting(is_weight_floor=0.8)),
    ("a cap of 0.2 [TRL: default]", "cispo", setting(is_weight_cap=0.2)),
    ("bounds of 0.2 [TRL, verl: default]", "gspo", setting(clip_eps_low=0.2, clip_eps_high=0.2)),
    ("k3 clamped at 10 [verl]", "grpo", pieces(k3=lambda log_x: k3(log_x).clamp(max=10))),
    ("k3 times r, unasked [TRL: default]", "grpo", setting(kl_is_corrected=True)),
    ("the unbiased std [TRL, verl]", "whiten", lambda J, b: J(b) * (1 - 1 / b.mask.sum()) ** 0.5),
]
# (kind, name, sections, change)
ENTRIES = [("mistake", *row) for row in MISTAKES] + [("variant", *row) for row in VARIANTS]
