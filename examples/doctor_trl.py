"""TRL's own losses, with the signature that the doctor (conformance/check.py) expects.

    pip install -r examples/requirements.txt
    python conformance/check.py examples/doctor_trl.py:grpo --algorithm grpo

Expect: all cases agree except NaN in masked places, which TRL multiplies by 0.
Each function calls `_compute_loss` of TRL 1.16.0's GRPOTrainer or GMPOTrainer with log-probs instead of
a model, for one process and one optimizer step per rollout. TRL divides by the number of rows in a
micro-batch, which is always the same, so losses that average over completions need no count here.
"""

from collections import defaultdict
from types import SimpleNamespace

import torch
from accelerate import Accelerator
from trl import GRPOTrainer
from trl.experimental.gmpo import GMPOTrainer

ACCELERATOR = Accelerator(cpu=True)


def compute_loss(logprobs, old_logprobs, advantages, mask, trainer=GRPOTrainer, **settings):
    num_tokens = settings.pop("num_tokens", None)
    ref_logprobs = settings.pop("ref_logprobs", None)
    names = ("delta", "use_bias_correction_kl", "sapo_temperature_pos", "sapo_temperature_neg")
    args = {"steps_per_generation": 1, **{name: settings.pop(name, None) for name in names}}
    self = SimpleNamespace(
        args=SimpleNamespace(**args),
        accelerator=ACCELERATOR,
        model=SimpleNamespace(training=True),
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (logprobs, 0 * logprobs, None),
        _metrics={"train": defaultdict(list)},
        _entropy_bonus_enabled=False,
        aux_loss_enabled=False,
        beta=0.0,
        current_gradient_accumulation_steps=1,
        importance_sampling_level="token",
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        use_vllm=False,
    )
    vars(self).update(settings)
    ids = torch.zeros(mask.shape, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :0],
        "prompt_mask": ids[:, :0],
        "completion_ids": ids,
        "completion_mask": mask.long(),
        "advantages": advantages,
        "old_per_token_logps": old_logprobs,
        "ref_per_token_logps": ref_logprobs,
        "num_items_in_batch": mask.sum() if num_tokens is None else torch.tensor(num_tokens),
    }
    return trainer._compute_loss(self, None, inputs)


def grpo(
    logprobs,
    old_logprobs,
    advantages,
    mask,
    *,
    clip_eps_low=0.2,
    clip_eps_high=0.2,
    ref_logprobs=None,
    kl_coef=0.0,
    kl_is_corrected=True,
):
    settings = {"loss_type": "grpo", "epsilon_low": clip_eps_low, "epsilon_high": clip_eps_high}
    if ref_logprobs is not None:
        settings |= {"beta": kl_coef, "ref_logprobs": ref_logprobs}
    settings["use_bias_correction_kl"] = kl_is_corrected
    return compute_loss(logprobs, old_logprobs, advantages, mask, **settings)


def grpo_default_kl(logprobs, old_logprobs, advantages, mask, *, ref_logprobs=None, kl_coef=0.04):
    """With TRL's default for use_bias_correction_kl."""
    return grpo(logprobs, old_logprobs, advantages, mask, ref_logprobs=ref_logprobs, kl_coef=kl_coef)


def dr_grpo(logprobs, old_logprobs, advantages, mask, *, max_new_tokens):
    settings = {"loss_type": "dr_grpo", "epsilon_low": 0.2, "epsilon_high": 0.2}
    settings["max_completion_length"] = max_new_tokens
    return compute_loss(logprobs, old_logprobs, advantages, mask, **settings)


def dapo(
    logprobs, old_logprobs, advantages, mask, *, clip_eps_low=0.2, clip_eps_high=0.28, num_tokens=None
):
    settings = {"loss_type": "dapo", "epsilon_low": clip_eps_low, "epsilon_high": clip_eps_high}
    return compute_loss(logprobs, old_logprobs, advantages, mask, num_tokens=num_tokens, **settings)


def gspo(logprobs, old_logprobs, advantages, mask, *, clip_eps_low=3e-3, clip_eps_high=4e-3):
    settings = {"loss_type": "grpo", "importance_sampling_level": "sequence"}
    settings |= {"epsilon_low": clip_eps_low, "epsilon_high": clip_eps_high}
    return compute_loss(logprobs, old_logprobs, advantages, mask, **settings)


def cispo(logprobs, old_logprobs, advantages, mask, *, is_weight_cap=5.0, num_tokens=None):
    settings = {"loss_type": "cispo", "epsilon_high": is_weight_cap, "epsilon_low": 0.2}
    return compute_loss(logprobs, old_logprobs, advantages, mask, num_tokens=num_tokens, **settings)


def gmpo(logprobs, old_logprobs, advantages, mask, *, log_ratio_clip=0.4):
    settings = {"trainer": GMPOTrainer, "epsilon_low": log_ratio_clip, "epsilon_high": log_ratio_clip}
    return compute_loss(logprobs, old_logprobs, advantages, mask, **settings)


def sapo(logprobs, old_logprobs, advantages, mask, *, tau_pos=1.0, tau_neg=1.05):
    settings = {"loss_type": "sapo", "epsilon_low": 0.2, "epsilon_high": 0.2}
    settings |= {"sapo_temperature_pos": tau_pos, "sapo_temperature_neg": tau_neg}
    return compute_loss(logprobs, old_logprobs, advantages, mask, **settings)


# With TRL's default clip range. If epsilon_high is None, TRL uses epsilon.


def dapo_default(logprobs, old_logprobs, advantages, mask, *, num_tokens=None):
    return dapo(logprobs, old_logprobs, advantages, mask, clip_eps_high=0.2, num_tokens=num_tokens)


def cispo_default(logprobs, old_logprobs, advantages, mask, *, num_tokens=None):
    return cispo(logprobs, old_logprobs, advantages, mask, is_weight_cap=0.2, num_tokens=num_tokens)
