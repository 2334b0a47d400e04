"""verl's own losses with the signature that the doctor, conformance/check.py, expects.

    pip install torch==2.13.0 verl==0.9.1    # in a separate environment
    python conformance/check.py examples/doctor_verl.py:grpo --algorithm grpo

Expect: the diagnosis that k3 is clamped at 10, and that NaN in masked places spreads.
Each function is a policy loss of verl 0.9.1 with the KL that its actor adds, for one process. `grpo`,
`gspo` and so on match the paper as far as verl's settings allow; those that end in `_default` keep
verl's defaults for everything that is not a keyword here.
"""

import numpy as np
import torch
from verl.trainer.ppo import core_algos
from verl.workers.config import ActorConfig, PolicyLossConfig

SEQUENCE_MEAN = {"loss_agg_mode": "seq-mean-token-mean"}
NO_DUAL_CLIP = {"clip_ratio_c": 1e9}


def verl_loss(loss_mode, tensors, counts, ref_logprobs=None, **settings):
    logprobs, old_logprobs, advantages, mask = tensors
    num_sequences, num_tokens = counts
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=4,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=PolicyLossConfig(loss_mode=loss_mode),
        **settings,
    )
    info = {
        "dp_size": 1,
        "batch_num_tokens": num_tokens or mask.sum(),
        "global_batch_size": num_sequences or len(mask),
        "loss_scale_factor": config.loss_scale_factor,
    }
    config.global_batch_info.update(info)
    given = old_logprobs, logprobs, advantages.expand_as(mask), mask
    policy_loss = core_algos.get_policy_loss_fn(loss_mode)
    loss, _ = policy_loss(*given, loss_agg_mode=config.loss_agg_mode, config=config)
    if ref_logprobs is not None:
        kl = core_algos.kl_penalty(logprobs, ref_logprobs, config.kl_loss_type)
        kl_loss = core_algos.agg_loss(kl, mask, loss_agg_mode=config.loss_agg_mode, **info)
        loss = loss + config.kl_loss_coef * kl_loss
    return loss


def vanilla(lp, old, A, mask, clip_eps_low=0.2, clip_eps_high=0.2, num_sequences=None, num_tokens=None):
    """For ppo and dapo."""
    settings = {"clip_ratio_low": clip_eps_low, "clip_ratio_high": clip_eps_high, **NO_DUAL_CLIP}
    return verl_loss("vanilla", (lp, old, A, mask), (num_sequences, num_tokens), **settings)


def vanilla_default(lp, old, A, mask, num_sequences=None, num_tokens=None):
    return verl_loss("vanilla", (lp, old, A, mask), (num_sequences, num_tokens))


def grpo(lp, old, A, mask, ref_logprobs=None, kl_coef=0.04, num_sequences=None, num_tokens=None):
    settings = {"ref_logprobs": ref_logprobs, "kl_loss_coef": kl_coef}
    settings |= {**SEQUENCE_MEAN, **NO_DUAL_CLIP}
    return verl_loss("vanilla", (lp, old, A, mask), (num_sequences, num_tokens), **settings)


def dr_grpo(lp, old, A, mask, max_new_tokens, num_sequences=None, num_tokens=None):
    settings = {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": max_new_tokens}
    tensors = lp, old, A, mask
    return verl_loss("vanilla", tensors, (num_sequences, num_tokens), **settings, **NO_DUAL_CLIP)


def gspo(lp, old, A, mask, clip_eps_low=3e-3, clip_eps_high=4e-3, num_sequences=None, num_tokens=None):
    settings = {"clip_ratio_low": clip_eps_low, "clip_ratio_high": clip_eps_high, **SEQUENCE_MEAN}
    return verl_loss("gspo", (lp, old, A, mask), (num_sequences, num_tokens), **settings)


def gspo_default(
    lp, old, A, mask, clip_eps_low=3e-3, clip_eps_high=4e-3, num_sequences=None, num_tokens=None
):
    """The range is set; the mean over tokens is verl's default."""
    settings = {"clip_ratio_low": clip_eps_low, "clip_ratio_high": clip_eps_high}
    return verl_loss("gspo", (lp, old, A, mask), (num_sequences, num_tokens), **settings)


def cispo(lp, old, A, mask, is_weight_cap=5.0, num_sequences=None, num_tokens=None):
    settings = {"clip_ratio_low": 1.0, "clip_ratio_high": is_weight_cap - 1}
    return verl_loss("cispo", (lp, old, A, mask), (num_sequences, num_tokens), **settings)


def cispo_default(lp, old, A, mask, is_weight_cap=5.0, num_sequences=None, num_tokens=None):
    """The cap is passed as clip_ratio_high; clip_ratio_low keeps its default."""
    settings = {"clip_ratio_high": is_weight_cap}
    return verl_loss("cispo", (lp, old, A, mask), (num_sequences, num_tokens), **settings)


def gmpo(lp, old, A, mask, log_ratio_clip=0.4, num_sequences=None, num_tokens=None):
    settings = {"clip_ratio_low": log_ratio_clip, "clip_ratio_high": log_ratio_clip}
    return verl_loss("geo_mean", (lp, old, A, mask), (num_sequences, num_tokens), **settings)


def sapo(lp, old, A, mask, tau_pos=1.0, tau_neg=1.05, num_sequences=None, num_tokens=None):
    settings = {"tau_pos": tau_pos, "tau_neg": tau_neg}
    return verl_loss("sapo", (lp, old, A, mask), (num_sequences, num_tokens), **settings)


def advantages_of(estimator, rewards, **settings):
    index = np.repeat(np.arange(len(rewards)), rewards.shape[1])
    rows = rewards.reshape(-1, 1)
    advantages, _ = estimator(rows, torch.ones_like(rows), index=index, **settings)
    return advantages.view(rewards.shape)


def grpo_advantages(rewards):
    return advantages_of(core_algos.compute_grpo_outcome_advantage, rewards)


def rloo_advantages(rewards):
    return advantages_of(core_algos.compute_rloo_outcome_advantage, rewards)
