"""The losses of this repository in verl 0.9, registered as nine_ppo, nine_grpo and so on.

    pip install torch==2.13.0 verl==0.9.1    # in a separate environment: it pins its own transformers
    PYTHONPATH=. python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \
        actor_rollout_ref.model.external_lib=examples.verl_losses \
        actor_rollout_ref.actor.policy_loss.loss_mode=nine_gspo ...

Expect: verl trains with one of our losses. We have not run this, for lack of GPUs. We did check that
the function that verl's actor calls gives the scripts' gradients (conformance/engines.md).
Advantages, KL and entropy bonus are verl's. Settings come from verl's flags, actor_rollout_ref.actor.*,
whose defaults are not always the paper's. A clip_ratio* or tau_* that a loss does not read has to stay
at verl's default. These settings match our scripts:

nine_ppo      (nothing; for the rest of PPO see below)
nine_grpo     use_kl_loss=True kl_loss_coef=0.04 loss_agg_mode=seq-mean-token-mean
nine_dr_grpo  loss_scale_factor=<longest response>, and algorithm.norm_adv_by_std_in_grpo=False
nine_dapo     clip_ratio_high=0.28
nine_gspo     clip_ratio_low=0.003 clip_ratio_high=0.004 (the paper: 0.0003 and 0.0004)
nine_cispo    clip_ratio_high=4 (verl adds 1: a cap of 5)
nine_gmpo     clip_ratio_high=0.4
nine_sapo     (nothing)

loss_agg_mode applies only to KL and entropy: each loss averages as in its paper. rspo cannot be plugged
in because verl provides no router scores. dapo is more than its loss: verl has algorithm.filter_groups
for dynamic sampling and the reward manager dapo for the overlong penalty, both off by default.

With nine_ppo, the critic, GAE and the KL in the reward are verl's. These settings match ppo.py. By
default, verl has a lambda of 1, no KL, a weight decay of 0.01, and learning rates of 1e-6 and 1e-5:

algorithm.adv_estimator=gae algorithm.lam=0.95 critic.cliprange_value=0.2
algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.02
actor_rollout_ref.actor.optim.weight_decay=0 critic.optim.weight_decay=0
actor_rollout_ref.actor.optim.lr=<--lr> critic.optim.lr=<--critic_lr>

Then verl's token rewards, returns and value loss are those of ppo.py. Two differences remain: it
whitens advantages with the unbiased std, and its critic's head has a bias and starts at random.
"""

import importlib
import inspect
import sys
from pathlib import Path

from verl.trainer.ppo.core_algos import register_policy_loss

sys.path.insert(0, str(Path(__file__).parent.parent))

CLIP = {"clip_ratio_low": "clip_eps_low", "clip_ratio_high": "clip_eps_high"}
READS = {  # algorithm: {verl's setting: our flag}
    "ppo": CLIP,
    "grpo": CLIP,
    "dr_grpo": CLIP | {"loss_scale_factor": "max_new_tokens"},
    "dapo": CLIP,
    "gspo": CLIP,
    "cispo": {"clip_ratio_high": "is_weight_cap"},
    "gmpo": {"clip_ratio_high": "log_ratio_clip"},
    "sapo": {"tau_pos": "tau_pos", "tau_neg": "tau_neg"},
}
DEFAULTS = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0}
DEFAULTS |= {"tau_pos": 1.0, "tau_neg": 1.05}  # verl's


def from_config(name, config):
    """{our flag: its value in verl's configuration}"""
    for setting, default in DEFAULTS.items():
        if setting not in READS[name] and getattr(config, setting) != default:
            raise ValueError(f"nine_{name} does not read actor.{setting}: leave it at {default}")
    values = {flag: getattr(config, setting) for setting, flag in READS[name].items()}
    if name == "dr_grpo" and values["max_new_tokens"] is None:
        raise ValueError("nine_dr_grpo: set actor.loss_scale_factor to the longest response")
    if name == "cispo":
        values["is_weight_cap"] += 1
    if name == "gspo":
        values["variant"] = "gspo_token"  # the same as gspo, for advantages (B, T)
    return values


def step_counts(info, mask_BT):
    """The normalizers N / W, where N is the number of completions or tokens in the whole optimizer
    step. verl sums the gradients of a process's micro-batches, and then averages over the W
    data-parallel processes, which divides by W."""
    processes = info.get("dp_size") or 1
    num_sequences = info.get("global_batch_size") or len(mask_BT)
    num_tokens = info.get("batch_num_tokens") or mask_BT.sum().clamp(min=1)
    return {"num_sequences": num_sequences / processes, "num_tokens": num_tokens / processes}


def adapted(name):
    """The policy_loss of a script, with verl's signature."""
    policy_loss = importlib.import_module(name).policy_loss
    names = inspect.signature(policy_loss).parameters

    def loss(
        old_log_prob,
        log_prob,
        advantages,
        response_mask,
        loss_agg_mode="token-mean",
        config=None,
        rollout_is_weights=None,
    ):
        values = from_config(name, config) | step_counts(config.global_batch_info, response_mask)
        keywords = {key: value for key, value in values.items() if key in names}
        if name == "gmpo":
            # One advantage per completion: that of its first response token.
            if rollout_is_weights is not None:
                raise ValueError("nine_gmpo has no place for rollout_is_weights, which are per token")
            advantages = advantages.gather(1, response_mask.int().argmax(1, keepdim=True))
        elif rollout_is_weights is not None:
            # A can absorb a non-negative factor, because min, clip and gate depend only on A's sign.
            advantages = advantages * rollout_is_weights
        value, stats = policy_loss(log_prob, old_log_prob, advantages, response_mask, **keywords)
        return value, {f"actor/{key}": stat.item() for key, stat in stats.items()}

    return loss


for algorithm in READS:
    register_policy_loss(f"nine_{algorithm}")(adapted(algorithm))
