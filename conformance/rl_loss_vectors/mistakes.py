"""Known mistakes as changes of the reference: change(J, b) is what the changed code would give.

These are the ones that tables do not make obvious, or that many make.
"""

import math
from types import SimpleNamespace
from unittest import mock

import torch

from rl_loss_vectors import reference
from rl_loss_vectors.reference import LOSSES, length, lengths, ratio, tokens


def changed(b, **fields):
    return SimpleNamespace(**(vars(b) | fields))


def setting(**fields):
    """J of a batch with other fields; if a field is a function, it is called with the batch."""
    return lambda J, b: J(changed(b, **{key: x(b) if callable(x) else x for key, x in fields.items()}))


def pieces(**functions):
    """J with some functions of reference.py replaced"""

    def change(J, b):
        with mock.patch.multiple(reference, **functions):
            return J(b)

    return change


def divided_by(divisor):
    """The same terms, divided by divisor(B, |o|, N, T)"""

    def average(b, terms, _):
        o = lengths(b).double()
        return (terms / divisor(len(o), o, o.sum(), b.mask.shape[1])).sum()

    return pieces(average=average)


def clip(f):
    """f(r, clip(r), a) in place of min(r a, clip(r) a)"""
    return pieces(clipped=lambda r, a, low, high: f(r, r.clamp(low, high), a))


def unbiased(J, b):
    return J(b) * math.sqrt(1 - 1 / b.mask.sum())


def with_mean(J, b):
    return unbiased(J, b) + b.mask * b.advantages[b.mask].mean()


def whitened(change):
    """GAE, then a whitening with this change"""

    def change_of_gae(J, b):
        A, returns = J(b)
        return torch.stack([change(reference.whiten, changed(b, advantages=A)), returns])

    return change_of_gae


def ratios(b, i):
    return [ratio(b, i, t) for t in tokens(b, i)]


MISTAKES = {  # sections of vectors.json: {name: change}
    " ".join([*LOSSES, "value_loss"]): {
        "wrong sign": lambda J, b: -J(b),
        "half of it": lambda J, b: J(b) / 2,
        "a token-mean": divided_by(lambda B, o, N, T: N),
        "a sequence-mean: divided by each |o|": divided_by(lambda B, o, N, T: B * o),
        "sums of completions, not divided by a length": divided_by(lambda B, o, N, T: B),
        "a mean over the padded width": divided_by(lambda B, o, N, T: B * T),
        "each completion times its |o|": divided_by(lambda B, o, N, T: B * T / o),
        "holes counted in |o|": pieces(length=lambda b, i: tokens(b, i)[-1] - tokens(b, i)[0] + 1),
        "the mask is ignored": setting(mask=lambda b: torch.ones_like(b.mask)),
    },
    " ".join(LOSSES): {
        "the ratio is always 1": setting(old_logprobs=lambda b: b.logprobs.detach()),
        "the ratio upside down": pieces(log_ratio=lambda b, i, t: (b.old_logprobs - b.logprobs)[i, t]),
    },
    "ppo grpo dr_grpo dapo gspo vapo deepseek_v32": {
        "no clip": clip(lambda r, c, a: r * a),
        "the clip without the min": clip(lambda r, c, a: c * a),
        "max instead of min": clip(lambda r, c, a: torch.max(r * a, c * a)),
        "min(r, clip(r)) times A": clip(lambda r, c, a: torch.min(r, c) * a),
        "a dual clip at 3": clip(lambda r, c, a: torch.max(torch.min(r * a, c * a), -3 * abs(a))),
        "the range is [0.8, 1.2]": setting(clip_eps_low=0.2, clip_eps_high=0.2),
        "the range is [0.8, 1.28]": setting(clip_eps_low=0.2, clip_eps_high=0.28),
        "the range is [0.72, 1.2]": setting(clip_eps_low=0.28, clip_eps_high=0.2),
    },
    "grpo deepseek_v32": {
        "the KL is k1": pieces(k3=lambda log_x: -log_x),
        "the KL is k2": pieces(k3=lambda log_x: log_x**2 / 2),
        "the KL is k3 upside down": pieces(k3=lambda log_x: torch.expm1(-log_x) + log_x),
        "there is no KL": setting(kl_coef=0),
        "the KL is rewarded": setting(kl_coef=lambda b: -b.kl_coef),
    },
    "gspo": {
        "the product of ratios, no root": pieces(sequence_ratio=lambda b, i: math.prod(ratios(b, i))),
        "the mean of ratios": pieces(sequence_ratio=lambda b, i: sum(ratios(b, i)) / length(b, i)),
        "a token's own ratio": lambda J, b: reference.grpo(changed(b, kl_coef=0)),
    },
    "cispo": {
        "a gradient through the weight": pieces(stopped=lambda x: x),
        "the weight is between 0.8 and 1.2": setting(is_weight_floor=0.8, is_weight_cap=1.2),
    },
    "sapo": {
        "the taus swapped": setting(tau_pos=lambda b: b.tau_neg, tau_neg=lambda b: b.tau_pos),
        "one tau for both signs": setting(tau_neg=lambda b: b.tau_pos),
    },
    "group_advantages": {
        "the std of the population": pieces(scale=lambda b: lambda R: R.std(correction=0) + b.eps),
        "the std of the batch": pieces(scale=lambda b: lambda R: b.rewards.std() + b.eps),
    },
    "gae": {
        "whitened behind the recursion": whitened(lambda J, b: J(b)),
        "whitened behind the recursion, with the unbiased std": whitened(unbiased),
        "whitened behind the recursion, and the mean comes back": whitened(with_mean),
    },
    "whiten": {"the unbiased std": unbiased, "the unbiased std, and the mean comes back": with_mean},
    "value_loss": {"the values are not clipped": setting(value_clip=0)},
}


def known_for(section):
    """(name, change) of each that a function of this section may have"""
    known = [entries for sections, entries in MISTAKES.items() if section in sections.split()]
    return [entry for entries in known for entry in entries.items()]
