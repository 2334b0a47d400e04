"""Importance weights for completions that come from the sampler mu and not from the trainer's pi_old.

Engines sample with other kernels than they train with, often with fewer bits or older weights.
"""

from typing import NamedTuple

import torch


def rollout_weights(
    old_logprobs_BT,
    sampler_logprobs_BT,
    mask_BT,
    *,
    rule,
    cap=2.0,
    mask_low=0.95,
    mask_high=1.05,
    one_ratio=False,
):
    """(weights, rho): weights of at least 0, (B, T), or (B, 1) if one per completion; rho, (B, T).

    The decoupled objective is w min(r A, clip(r) A): r = pi / pi_old is clipped as always, and w, which
    is made of rho = pi_old / mu, is not. Since w is not negative, it can be a factor on A.

    old_logprobs_BT      log-probs of the training forward, before the first step
    sampler_logprobs_BT  log-probs of the same tokens when they were sampled
    mask_BT              1 on response tokens
    rule                 token_tis, sequence_tis, sequence_mis, geo_mask, geo_filter or icepop
    one_ratio            for objectives with one ratio, and so one weight, per completion: rules for
                         tokens are applied to the geometric mean of its rho

    Sources: Hilton et al., arXiv 2110.00641 (the decoupled objective); Yao et al. 2025 (truncated and
    masked weights); the Ling team, arXiv 2510.18855 (icepop).
    """
    mask_BT = mask_BT.bool()
    length_B1 = mask_BT.sum(1, keepdim=True).clamp(min=1)
    # As in the losses: masked before exp, and clamped to keep exp finite.
    log_rho_BT = torch.where(mask_BT, old_logprobs_BT - sampler_logprobs_BT, 0).clamp(-20, 20)
    log_product_B1 = log_rho_BT.sum(1, keepdim=True)
    product_B1 = log_product_B1.clamp(-20, 20).exp()
    mean_B1 = (log_product_B1 / length_B1).exp()  # geometric
    is_near_B1 = (mask_low <= mean_B1) & (mean_B1 <= mask_high)
    rho_BT = log_rho_BT.exp()
    ratio = mean_B1 if one_ratio else rho_BT  # for the rules for tokens
    if rule == "token_tis":
        # w_t = min(rho_t, C)
        weights = ratio.clamp(max=cap)
    elif rule == "sequence_tis":
        # w_i = min(prod_t rho_t, C); the product is compared with C before it is clamped
        weights = torch.where(log_product_B1.exp() <= cap, product_B1, cap)
    elif rule == "sequence_mis":
        # w_i = prod_t rho_t, and 0 above C, compared as before
        weights = torch.where(log_product_B1.exp() <= cap, product_B1, 0)
    elif rule == "geo_mask":
        # w_t = min(rho_t, C), and 0 for the whole completion unless low <= mean_i <= high
        weights = torch.where(is_near_B1, ratio.clamp(max=cap), 0)
    elif rule == "geo_filter":
        # w_i = 1, and 0 unless low <= mean_i <= high: the mask alone
        weights = is_near_B1.to(rho_BT.dtype)
    elif rule == "icepop":
        # w_t = rho_t, and 0 outside [0.5, 5]
        weights = torch.where((ratio >= 0.5) & (ratio <= 5), ratio, 0)
    else:
        raise ValueError(f"no rule {rule}")
    return weights, rho_BT


class Correction(NamedTuple):
    """The result of `rollout_correction`."""

    weights: torch.Tensor  # a factor on advantages; all 1 unless --rollout_correction is on
    rho_NT: torch.Tensor  # pi_old / mu; all 1 unless it is on
    stats: dict  # {name: scalar} of the mismatch, and of the weights


@torch.no_grad()
def rollout_correction(old, batch, args, one_ratio=False):
    """The weights of `--rollout_correction`, and statistics for the log.

    old    the policy's `OldScores`, from common.score_old
    batch  all rows, with the sampler's log-probs and, if recorded, its experts
    """
    stats = {}
    if args.old_logprobs == "trainer":
        stats = mismatch_stats(old.logprobs_NT, old.experts_NTLK, batch)
    if args.rollout_correction == "none":
        ones_NT = torch.ones_like(old.logprobs_NT)
        return Correction(ones_NT[:, :1], ones_NT, stats)
    weights, rho_NT = rollout_weights(
        old.logprobs_NT,
        batch.sampler_logprobs_BT,
        batch.mask_BT,
        rule=args.rollout_correction,
        cap=args.rollout_cap,
        mask_low=args.rollout_mask_low,
        mask_high=args.rollout_mask_high,
        one_ratio=one_ratio,
    )
    return Correction(weights, rho_NT, stats | weight_stats(weights, batch.mask_BT))


def weight_stats(weights, mask_BT):
    """Statistics of the weights of the tokens in the mask: {name: scalar}."""
    counted = weights.expand_as(mask_BT)[mask_BT]
    num_tokens = mask_BT.sum().clamp(min=1)
    mean = counted.sum() / num_tokens
    mean_square = (counted**2).sum() / num_tokens
    return {
        "weight_mean": mean,
        "weight_zero_frac": (counted == 0).sum() / num_tokens,
        # (sum w)^2 / (n sum w^2): 1 if all weights are equal, 1/n if only one is not 0
        "weight_effective_size": mean**2 / mean_square.clamp(min=1e-30),
    }


def mismatch_stats(old_logprobs_BT, old_experts_BTLK, batch):
    """The mismatch of training forward and sampler: {name: scalar}. Without one they are 0, and the
    ratios 1. If dapo's filter has masked all completions, the ratios are infinite, and not logged."""
    mask_BT = batch.mask_BT
    num_tokens = mask_BT.sum().clamp(min=1)
    logratio_BT = torch.where(mask_BT, old_logprobs_BT - batch.sampler_logprobs_BT, 0)
    # r - 1 - log r, whose mean is an estimate of KL(mu || pi_old); near 0, exp(x) - 1 would be noise
    k3_BT = logratio_BT.expm1() - logratio_BT
    ratio_B = logratio_BT.sum(1).clamp(-20, 20).exp()
    has_tokens_B = mask_BT.any(1)
    stats = {
        "sampler_kl": torch.where(mask_BT, k3_BT, 0).sum() / num_tokens,
        "sampler_logratio_max": logratio_BT.abs().max(),
        "sampler_sequence_ratio_min": torch.where(has_tokens_B, ratio_B, torch.inf).min(),
        "sampler_sequence_ratio_max": torch.where(has_tokens_B, ratio_B, -torch.inf).max(),
    }
    if batch.sampler_experts_BSLK is not None:
        T = mask_BT.shape[1]
        experts_BTLK = batch.sampler_experts_BSLK[:, -T - 1 : -1].sort().values
        differ_BT = (experts_BTLK != old_experts_BTLK).any(-1).float().mean(-1)
        stats["sampler_expert_diff_frac"] = torch.where(mask_BT, differ_BT, 0).sum() / num_tokens
    return stats
