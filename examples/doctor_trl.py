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
DEFAULTS = dict(aux_loss_enabled=False, beta=0.0, current_gradient_accumulation_steps=1, delta=None)
DEFAULTS |= dict(epsilon_low=0.2, epsilon_high=0.2, importance_sampling_level="token", use_vllm=False)
DEFAULTS |= dict(off_policy_mask_threshold=None, steps_per_generation=1, top_entropy_quantile=1.0)


def compute_loss(logps, old_logps, advantages, mask, trainer=GRPOTrainer, **settings):
    num_tokens = settings.pop("num_tokens", None)
    self = SimpleNamespace(**DEFAULTS | settings)
    self.args = self  # TRL reads some settings there
    self.accelerator = ACCELERATOR
    self.model = SimpleNamespace(training=True)
    self._entropy_bonus_enabled = False
    self._get_per_token_logps_and_entropies = lambda *args, **kwargs: (logps, 0 * logps, None)
    self._metrics = {"train": defaultdict(list)}
    ids = torch.zeros(mask.shape, dtype=torch.long)
    inputs = {"prompt_ids": ids[:, :0], "prompt_mask": ids[:, :0], "completion_ids": ids}
    inputs |= {"completion_mask": mask.long(), "advantages": advantages}
    inputs |= {"old_per_token_logps": old_logps, "ref_per_token_logps": settings.get("ref")}
    inputs["num_items_in_batch"] = mask.sum() if num_tokens is None else torch.tensor(num_tokens)
    return trainer._compute_loss(self, None, inputs)


def grpo(
    logps,
    old_logps,
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
        settings |= {"beta": kl_coef, "ref": ref_logprobs, "use_bias_correction_kl": kl_is_corrected}
    return compute_loss(logps, old_logps, advantages, mask, **settings)


def dr_grpo(logps, old_logps, advantages, mask, *, max_new_tokens):
    settings = {"loss_type": "dr_grpo", "max_completion_length": max_new_tokens}
    return compute_loss(logps, old_logps, advantages, mask, **settings)


def dapo(logps, old_logps, advantages, mask, *, clip_eps_low=0.2, clip_eps_high=0.28, num_tokens=None):
    settings = {"loss_type": "dapo", "epsilon_low": clip_eps_low, "epsilon_high": clip_eps_high}
    return compute_loss(logps, old_logps, advantages, mask, num_tokens=num_tokens, **settings)


def gspo(logps, old_logps, advantages, mask, *, clip_eps_low=3e-3, clip_eps_high=4e-3):
    settings = {"loss_type": "grpo", "epsilon_low": clip_eps_low, "epsilon_high": clip_eps_high}
    settings["importance_sampling_level"] = "sequence"
    return compute_loss(logps, old_logps, advantages, mask, **settings)


def cispo(logps, old_logps, advantages, mask, *, is_weight_cap=5.0, num_tokens=None):
    settings = {"loss_type": "cispo", "epsilon_high": is_weight_cap, "num_tokens": num_tokens}
    return compute_loss(logps, old_logps, advantages, mask, **settings)


def gmpo(logps, old_logps, advantages, mask, *, log_ratio_clip=0.4):
    settings = {"epsilon_low": log_ratio_clip, "epsilon_high": log_ratio_clip}
    return compute_loss(logps, old_logps, advantages, mask, GMPOTrainer, **settings)


def sapo(logps, old_logps, advantages, mask, *, tau_pos=1.0, tau_neg=1.05):
    settings = {"sapo_temperature_pos": tau_pos, "sapo_temperature_neg": tau_neg}
    return compute_loss(logps, old_logps, advantages, mask, loss_type="sapo", **settings)
