"""Losses with the signatures that verl 0.9.1, slime and SkyRL had in November 2026, for the tests
beside this file. Written for them; the engines' own code stays in the engines."""

import torch


def compute_policy_loss_vanilla(
    old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config
):
    """As verl.trainer.ppo.core_algos has it: (loss, metrics)."""
    ratio = torch.exp((log_prob - old_log_prob).clamp(-20, 20))
    clipped = ratio.clamp(1 - config.clip_ratio_low, 1 + config.clip_ratio_high)
    losses = torch.maximum(-advantages * ratio, -advantages * clipped)
    return agg_loss(losses, response_mask, loss_agg_mode), {}


def agg_loss(loss_mat, loss_mask, loss_agg_mode, batch_num_tokens=None, global_batch_size=None):
    """Likewise."""
    if loss_agg_mode == "token-mean":
        return (loss_mat * loss_mask).sum() / (batch_num_tokens or loss_mask.sum())
    rows = (loss_mat * loss_mask).sum(-1) / loss_mask.sum(-1)
    return rows.sum() / (global_batch_size or len(rows))


def compute_policy_loss(ppo_kl, advantages, eps_clip, eps_clip_high):
    """As slime.utils.ppo_utils has it: (losses of tokens, whether each is clipped)."""
    ratio = (-ppo_kl).exp()
    losses = -ratio * advantages
    clipped = -ratio.clamp(1 - eps_clip, 1 + eps_clip_high) * advantages
    return torch.maximum(losses, clipped), (clipped > losses).float()


def sum_of_sample_mean(x, response_lengths, loss_masks):
    """As slime's reducer: x has the tokens of all samples, one after the other."""
    parts = zip(x.split(response_lengths), loss_masks, strict=True)
    return sum((part * mask).sum() / mask.sum().clamp(min=1) for part, mask in parts)


def ppo_policy_loss(log_probs, old_log_probs, advantages, config, loss_mask=None):
    """As SkyRL's loss registry has it: (loss, metrics)."""
    ratio = torch.where(loss_mask.bool(), log_probs - old_log_probs, 0).exp()
    clipped = ratio.clamp(1 - config.eps_clip_low, 1 + config.eps_clip_high)
    losses = -torch.min(ratio * advantages, clipped * advantages)
    losses = torch.where(loss_mask.bool(), losses, 0)
    return losses.sum(-1).div(config.max_seq_len).mean(), {}
