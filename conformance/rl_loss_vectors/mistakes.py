"""What is known to go wrong in these objectives, and what others do differently, as literal code.

A *mistake* contradicts the paper; a *variant* is a choice that the paper leaves open, or that another
code base documents. In brackets: the engine that does so, TRL 1.16.0 or verl 0.9.1. Each entry has a
change(J, batch), which returns what the changed code would. What explain.py says as well, such
as another divisor or range, mostly has no entry.
"""

from unittest import mock

import torch

from rl_loss_vectors import reference
from rl_loss_vectors.reference import LOSSES, average, gate, k3, length, log_mu_over_pi
from rl_loss_vectors.reference import log_ratio, ratio, tokens

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


def together(first, second):
    return lambda J, b: second(lambda other: first(J, other), b)


def split(J, b, parts):
    """[J of each part of the rows]"""
    rows_of = {key: x for key, x in vars(b).items() if torch.is_tensor(x)}
    return [J(changed(b, **{key: x[part] for key, x in rows_of.items()})) for part in parts]


# ------------------------------------------------------------------------------ what they change it to


def mask_moved(by):
    """The least length is that of a completion whose tokens are all ignored."""
    least_length = pieces(
        length=lambda b, i: length(b, i) or 1e-12, advantage=lambda b, i: b.advantages[i, 0]
    )

    def moved(b):
        return torch.roll(torch.nn.functional.pad(b.mask, (1, 1)), by, 1)[:, 1:-1]

    return together(least_length, setting(mask=moved))


def arithmetic_mean(b, i, factor):
    a = b.advantages[i, tokens(b, i)[0]]
    factors = [factor(ratio(b, i, t), a, t) if a else 0 for t in tokens(b, i)]
    return sum(factors) / length(b, i) * a


def whitened(x, mask, correction):
    std = x[mask].std(correction=correction)
    return torch.where(mask, (x - x[mask].mean()) / (std + 1e-8), 0)


def gae_whitened(J, b, correction):
    return torch.stack([whitened(J(b)[0], b.mask, correction), J(b)[1]])


def standardized(eps, unbiased):
    return pieces(scale=lambda rewards: rewards.std(unbiased=unbiased) + eps)


def dropped(by_length=True, bad_only=True):
    def is_dropped(b, i):
        far = sum(reference.log_mu_over_pi(b, i, t) for t in tokens(b, i))
        is_far = far / (length(b, i) if by_length else 1) > b.offpolicy_mask > 0
        return is_far and (reference.advantage(b, i) < 0 or not bad_only)

    return pieces(is_dropped=is_dropped)


def every_pair(J, b):
    """(B,) times (B, 1) is (B, B)."""
    rolled = [changed(b, advantages=b.advantages.roll(k, 0)) for k in range(len(b.mask))]
    return sum(J(each) for each in rolled) / len(rolled)


def sequence_ratio_by(mean):
    """GSPO with another s of the ratios r of a completion and the width."""

    def s(b, i):
        return mean(torch.stack([ratio(b, i, t) for t in tokens(b, i)]), b.mask.shape[1])

    return pieces(sequence_ratio=s)


def clamped_ratio(J, b):
    """CISPO's weight with a gradient of its own, and no log-prob."""

    def term(i, t):
        return ratio(b, i, t).clamp(b.is_weight_floor, b.is_weight_cap) * b.advantages[i, t]

    return average(b, reference.each(b, term), "token")


# ---------------------------------------------------------------------------------------- the entries

CLIPPED = ["ppo", "grpo", "grpo_offpolicy", "dr_grpo", "dapo", "gspo", "vapo"]
GEOMETRIC = ["gmpo", "rspo"]
OFFPOLICY = ["grpo_offpolicy"]
WITH_RATIO = [*CLIPPED, *GEOMETRIC, "cispo", "sapo"]
BY_LENGTH = [name for name in WITH_RATIO if name != "dr_grpo"]  # where |o| counts
TWO_BOUNDS = ["ppo", "dapo", "gspo", "vapo"]
STANDARDIZED = ["group_advantages", "grouped_advantages"]
GROUPS = ["group_advantages", "group_differences", "leave_one_out"]
AVERAGED = [*LOSSES, "value_loss"]
MASKED = [*AVERAGED, "positive_lm_loss"]
# (name, sections of vectors.json, the changed objective)
MISTAKES = [
    ("wrong sign", ["value_loss", "positive_lm_loss"], lambda J, b: -J(b)),
    # The averages and the mask.
    (
        "sequence-mean: divided by each |o|",
        ["value_loss"],
        pieces(average=lambda b, terms, how: average(b, terms, "sequence")),
    ),
    (
        "a mean over the padded width",
        ["value_loss"],
        pieces(average=lambda b, terms, how: sum(map(sum, terms)) / b.mask.numel()),
    ),
    (
        "a mean of each micro-batch [verl: geo_mean]",
        AVERAGED,
        lambda J, b: sum(split(J, b, b.micro_batches)),
    ),
    (
        "rows forgotten that do not fill a micro-batch of two",
        AVERAGED,
        lambda J, b: sum(split(J, b, [slice(len(b.mask) // 2 * 2)])),
    ),
    (
        "holes counted in |o|",
        BY_LENGTH,
        pieces(length=lambda b, i: tokens(b, i)[-1] - tokens(b, i)[0] + 1),
    ),
    ("mask ignored", [*MASKED, "replayed_gate"], setting(mask=lambda b: torch.ones_like(b.mask))),
    ("the mask one place early", MASKED, mask_moved(-1)),
    ("the mask one place late", MASKED, mask_moved(1)),
    ("no gradient: something is detached", LOSSES, lambda J, b: J(b).detach()),
    (
        "the advantages whitened again",
        LOSSES,
        setting(advantages=lambda b: whitened(b.advantages, b.mask, 1)),
    ),
    # Ratios, clips and the KL.
    ("every ratio times every A: (B,) times (B, 1)", ["gspo", *GEOMETRIC], every_pair),
    ("a ratio for each token: GRPO's", ["gspo"], lambda J, b: reference.grpo(b)),
    (
        "an arithmetic instead of a geometric mean",
        ["gspo"],
        sequence_ratio_by(lambda r, width: r.mean()),
    ),
    (
        "log s is a mean over the padded width",
        ["gspo"],
        sequence_ratio_by(lambda r, width: torch.exp(r.log().sum() / width)),
    ),
    ("the clamped ratio itself, no weight of a log-prob", ["cispo"], clamped_ratio),
    ("the ratio is always 1", WITH_RATIO, setting(old_logprobs=lambda b: b.logprobs.detach())),
    ("the ratio upside down", WITH_RATIO, pieces(log_ratio=lambda b, i, t: -log_ratio(b, i, t))),
    ("an arithmetic instead of a geometric mean", GEOMETRIC, pieces(geometric_mean=arithmetic_mean)),
    ("a product instead of a geometric mean", ["gspo", *GEOMETRIC], pieces(length=lambda b, i: 1)),
    ("gamma without its floor", ["rspo"], setting(gamma_min=0)),
    ("gamma ignored", ["rspo"], setting(gamma_min=1)),
    ("no factor 4 / tau", ["sapo"], pieces(gate=lambda r, tau: gate(r, tau) * tau / 4)),
    ("the gate at log r", ["sapo"], pieces(gate=lambda r, tau: gate(1 + torch.log(r), tau))),
    ("the gate at r, not r - 1", ["sapo"], pieces(gate=lambda r, tau: gate(1 + r, tau))),
    ("one tau for both signs", ["sapo"], setting(tau_neg=lambda b: b.tau_pos)),
    (
        "the two tau swapped",
        ["sapo"],
        setting(tau_pos=lambda b: b.tau_neg, tau_neg=lambda b: b.tau_pos),
    ),
    (
        "the lower eps for both bounds [TRL, verl: default]",
        TWO_BOUNDS,
        setting(clip_eps_high=lambda b: b.clip_eps_low),
    ),
    ("a gradient through the weight", ["cispo"], pieces(stopped=lambda x: x)),
    # The off-policy mask.
    ("a sum of log(mu / pi), not a mean", OFFPOLICY, dropped(by_length=False)),
    ("completions with A > 0 are masked as well", OFFPOLICY, dropped(bad_only=False)),
    ("log(pi / mu)", OFFPOLICY, pieces(log_mu_over_pi=lambda b, i, t: -log_mu_over_pi(b, i, t))),
    ("no sampler: log(pi_old / pi)", OFFPOLICY, setting(rollout_ratio=None)),
    # Advantages and values.
    (
        "the mean of the batch",
        STANDARDIZED,
        lambda J, b: pieces(mean=lambda rewards, j: b.rewards.mean())(J, b),
    ),
    (
        "the std of the batch",
        STANDARDIZED,
        lambda J, b: pieces(scale=lambda rewards: b.rewards.std() + 1e-6)(J, b),
    ),
    (
        "a sibling sample counted again",
        ["grouped_advantages"],
        setting(rollout_ids=lambda b: torch.arange(len(b.rewards))),
    ),
    (
        "the reward counted on every token",
        ["gae"],
        setting(
            rewards=lambda b: 0 * b.rewards + torch.where(b.mask, b.rewards, 0).sum(1, keepdim=True)
        ),
    ),
    ("GAE, then whitened", ["gae"], lambda J, b: gae_whitened(J, b, 0)),
    ("GAE, then whitened with the unbiased std", ["gae"], lambda J, b: gae_whitened(J, b, 1)),
    (
        "the advantage taken for the return",
        ["value_loss"],
        setting(returns=lambda b: b.returns - b.old_values),
    ),
    ("min instead of max", ["value_loss"], pieces(worse=torch.min)),
    ("the values not clipped", ["value_loss"], setting(value_clip=0)),
    (
        "rho upside down",
        ["rollout_weights"],
        setting(old_logprobs=lambda b: b.rollout_logprobs, rollout_logprobs=lambda b: b.old_logprobs),
    ),
]
EPS = {1e-6: "eps 1e-6", 1e-4: "eps 1e-4 [TRL]", 1e-8: "eps 1e-8"}
SCALES = []  # of the eps and both kinds of std; ours comes first
for unbiased in (True, False):
    for eps, name in EPS.items():
        sections = STANDARDIZED[:1] if eps == 1e-8 else STANDARDIZED
        words = name if unbiased else f"the std of the population, {name}"
        SCALES.append((words, sections, standardized(eps, unbiased)))
VARIANTS = [
    *SCALES[1:],
    ("no rule for equal rewards [TRL, verl]", GROUPS, pieces(is_uniform=lambda rewards: False)),
    ("MaxRL: divided by the mean", STANDARDIZED, pieces(scale=lambda R: R.mean() + 1e-6)),
    ("a cap of 0.2 [TRL: default]", ["cispo"], setting(is_weight_cap=0.2)),
    ("k3 clamped at 10 [verl]", ["grpo"], pieces(k3=lambda log_x: k3(log_x).clamp(max=10))),
    ("k3 times r, unasked [TRL: default]", ["grpo"], setting(kl_is_corrected=True)),
    (
        "no step at all if the range is 0",
        ["value_loss"],
        setting(value_clip=lambda b: b.value_clip or 1e-300),
    ),
    ("half of the squared error", ["value_loss"], lambda J, b: J(b) / 2),
    ("the unbiased std [TRL, verl]", ["whiten"], lambda J, b: J(b) * (1 - 1 / b.mask.sum()) ** 0.5),
    (
        "the mean comes back [TRL, verl: on request]",
        ["whiten"],
        lambda J, b: J(b) + b.mask * b.advantages[b.mask].mean(),
    ),
]
# (kind, name, sections, change)
ENTRIES = [("mistake", *row) for row in MISTAKES] + [("variant", *row) for row in VARIANTS]
