"""Compares the losses in verl with the scripts': value and gradient, in float64, in shares of a step.

    pip install torch==2.13.0 verl==0.9.1     # in an environment of its own
    python benchmarks/losses_verl.py

verl's actor calls a loss for each micro-batch of each data-parallel process, adds up the gradients of a
process, and takes the mean over processes. The same is done here, with `ppo_loss`, the function that
the actor calls, on 32 random completions of 1 to 24 tokens. `gradient_error` is the distance of the
gradient, with respect to the log-probs, from that of the script on all completions at once, relative
to the norm of the latter. Two batches: near the old policy, and far from it. Writes
results/verl_losses.csv.
"""

import importlib
import logging
import sys
from pathlib import Path

import torch
from tensordict import TensorDict

sys.path.insert(0, str(Path(__file__).parent.parent))
import sweep  # noqa: E402

logging.disable(logging.WARNING)
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage  # noqa: E402
from verl.utils import tensordict_utils  # noqa: E402
from verl.utils.import_utils import import_external_libs  # noqa: E402
from verl.workers.config import ActorConfig, PolicyLossConfig  # noqa: E402
from verl.workers.utils.losses import ppo_loss  # noqa: E402

B, T = 32, 24
SHARES = [(1, 1), (1, 4), (2, 1), (2, 2), (4, 2)]  # processes, micro-batches of each
SEQUENCE_MEAN = {"loss_agg_mode": "seq-mean-token-mean"}
NO_DUAL_CLIP = {"clip_ratio_c": 1e9}
KL = {"use_kl_loss": True, "kl_loss_coef": 0.04}
# script: (verl's name for its loss, what has to be set for it to be the script's; what examples/
# verl_losses.py registers is the script's with these settings too)
LOSSES = {
    "grpo": ("vanilla", {**KL, **SEQUENCE_MEAN, **NO_DUAL_CLIP}),
    "dr_grpo": (
        "vanilla",
        {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": T, **NO_DUAL_CLIP},
    ),
    "dapo": ("vanilla", {"clip_ratio_high": 0.28, **NO_DUAL_CLIP}),
    "gspo": ("gspo", {"clip_ratio_low": 3e-3, "clip_ratio_high": 4e-3, **SEQUENCE_MEAN}),
    "cispo": ("cispo", {"clip_ratio_low": 1.0, "clip_ratio_high": 4.0}),
    "gmpo": ("geo_mean", {"clip_ratio_low": 0.4, "clip_ratio_high": 0.4}),
    "sapo": ("sapo", {}),
}
# Where verl's own loss is another one, one thing at a time: (case, script, batch, what is different).
# A value of None: verl's default.
DEPARTURES = [
    ("dual clip", "grpo", "far", {"clip_ratio_c": None, "use_kl_loss": False}),
    ("dual clip", "dr_grpo", "far", {"clip_ratio_c": None}),
    ("dual clip", "dapo", "far", {"clip_ratio_c": None}),
    ("k3 clamped", "grpo", "far", {}),
    ("token mean", "grpo", "near", {"loss_agg_mode": None}),
    ("padded width", "dr_grpo", "near", {"loss_scale_factor": None}),
    ("token mean", "gspo", "near", {"loss_agg_mode": None}),
    ("range", "gspo", "near", {"clip_ratio_low": None, "clip_ratio_high": None}),
    ("floor", "cispo", "near", {"clip_ratio_low": None}),
    ("cap", "cispo", "far", {"clip_ratio_high": None}),
    ("range", "gmpo", "far", {"clip_ratio_low": None, "clip_ratio_high": None}),
    ("mean of a micro-batch", "gmpo", "near", {}),
]
BY_SHARES = ("padded width", "mean of a micro-batch")  # these depend on how a step is shared out


def normal(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(B, T, generator=generator, dtype=torch.float64)


def make_batch(name):
    """{name: tensor}; the log-ratios to the old policy and to the reference have the given std."""
    spread, ref_spread = {"near": (0.1, 0.1), "far": (0.8, 1.5)}[name]
    lengths_B1 = torch.randint(1, T + 1, (B, 1), generator=torch.Generator().manual_seed(0))
    old_BT = -normal(1).abs()
    rewards_B = (normal(4)[:, 0] > 0).double()
    return {
        "mask": torch.arange(T) < lengths_B1,
        "old": old_BT,
        "new": old_BT + spread * normal(2),
        "ref": old_BT + ref_spread * normal(3),
        "rewards": rewards_B,
    }


def by_the_script(name, batch, with_kl):
    """(loss, gradient) of the script's own function, on all completions at once."""
    script = importlib.import_module(name)
    logprobs_BT = batch["new"].clone().requires_grad_()
    keywords = {}
    if name == "grpo" and with_kl:
        keywords["ref_logprobs_BT"] = batch["ref"]
    if name == "dr_grpo":
        keywords["max_new_tokens"] = T
    advantages_B1 = script.compute_advantages(batch["rewards"].view(-1, 8)).view(-1, 1)
    loss, _ = script.policy_loss(logprobs_BT, batch["old"], advantages_B1, batch["mask"], **keywords)
    (gradient,) = torch.autograd.grad(loss, logprobs_BT)
    return loss.item(), gradient


def by_verl(name, loss_mode, settings, batch, processes, micro_batches):
    """(loss, gradient) as verl's actor makes them of the shares of all processes."""
    script = importlib.import_module(name)
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=8,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=PolicyLossConfig(loss_mode=loss_mode),
        **settings,
    )
    mask_BT = batch["mask"]
    advantages_B1 = script.compute_advantages(batch["rewards"].view(-1, 8)).view(-1, 1)
    logprobs_BT = batch["new"].clone().requires_grad_()
    value = 0.0
    for rows in torch.arange(B).chunk(processes * micro_batches):
        width = mask_BT[rows].sum(1).max().item()  # verl pads to the longest of a micro-batch
        mask = mask_BT[rows][:, :width]
        data = {
            "prompts": torch.ones(len(rows), 1, dtype=torch.long),
            "responses": torch.ones(len(rows), width, dtype=torch.long),
            "attention_mask": torch.cat([torch.ones(len(rows), 1), mask], dim=1).long(),
            "response_mask": mask.long(),
            "old_log_probs": batch["old"][rows][:, :width],
            "ref_log_prob": batch["ref"][rows][:, :width],
            "advantages": advantages_B1[rows] * mask,
        }
        data = TensorDict(data, batch_size=len(rows))
        tensordict_utils.assign_non_tensor(
            data,
            dp_size=processes,
            batch_num_tokens=mask_BT.sum().item(),
            global_batch_size=B,
        )
        # Side by side, as the model returns them; what it says behind a response is not used.
        parts = []
        for row, length in zip(rows.tolist(), mask.sum(1).tolist(), strict=True):
            parts += [logprobs_BT[row, :length], torch.zeros(1, dtype=torch.float64)]
        loss, _ = ppo_loss(config, {"log_probs": torch.cat(parts)}, data)
        loss.backward()
        value += loss.item() / processes
    return value, logprobs_BT.grad / processes


def compare(kind, case, name, loss_mode, settings, batch_name, shares):
    batch = make_batch(batch_name)
    value, gradient = by_the_script(name, batch, settings.get("use_kl_loss", False))
    rows = []
    for processes, micro_batches in shares:
        result, result_gradient = by_verl(name, loss_mode, settings, batch, processes, micro_batches)
        rows.append(
            {
                "kind": kind,
                "case": case,
                "script": name,
                "loss_mode": loss_mode,
                "batch": batch_name,
                "processes": processes,
                "micro_batches": micro_batches,
                "loss": value,
                "value_error": abs(result - value),
                "gradient_error": ((result_gradient - gradient).norm() / gradient.norm()).item(),
                "gradient_ratio": (result_gradient.norm() / gradient.norm()).item(),
            }
        )
        print(*rows[-1].values(), flush=True)
    return rows


def equal_rewards():
    """The largest advantage in a group of eight equal rewards, in verl and in grpo.py."""
    rewards_PG = torch.full((1, 8), 0.1)
    grpo = importlib.import_module("grpo")
    theirs, _ = compute_grpo_outcome_advantage(rewards_PG.view(8, 1), torch.ones(8, 1), index=["a"] * 8)
    row = {"kind": "departure", "case": "equal rewards", "script": "grpo", "loss_mode": "(advantages)"}
    row["value_error"] = (theirs.flatten() - grpo.compute_advantages(rewards_PG)[0]).abs().max().item()
    return row


def main():
    import_external_libs("examples.verl_losses")  # as verl does it, for model.external_lib
    table = []
    for name, (loss_mode, settings) in LOSSES.items():
        for batch in ("near", "far"):
            # verl adds the KL itself, and clamps it, which the far batch would show.
            without_kl = {"use_kl_loss": False} if batch == "far" else {}
            for kind, mode in (("plugged", f"nine_{name}"), ("verl", loss_mode)):
                table += compare(kind, "", name, mode, settings | without_kl, batch, SHARES)
    for case, name, batch, changes in DEPARTURES:
        loss_mode, settings = LOSSES[name]
        changed = {key: value for key, value in (settings | changes).items() if value is not None}
        shares = SHARES if case in BY_SHARES else SHARES[:1]
        table += compare("departure", case, name, loss_mode, changed, batch, shares)
    table.append(equal_rewards())
    sweep.write_csv(sweep.RESULTS / "verl_losses.csv", table)


if __name__ == "__main__":
    main()
