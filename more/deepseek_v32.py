"""DeepSeek-V3.2: GRPO for a sampler that differs from the trainer (arXiv 2512.02556).

  J = mean_i 1/|o_i| sum_t [ M_i min(r_it A_i, clip(r_it, 1 - eps, 1 + eps) A_i) - beta w_it k3_it ]

  o_i    a completion of |o_i| tokens, EOS included; mean_i: over all completions in an optimizer step
  o_it   its token t; pi(o_it): its probability under the policy, given the prompt and o_i,<t
  r_it   = pi(o_it) / pi_old(o_it); pi_old: the policy before the rollout's first optimizer step
  eps    --clip_eps_low and --clip_eps_high
  w_it   = pi(o_it) / mu(o_it); mu: the sampler, which may be quantized or have older weights
  M_i    = 0 if A_i < 0 and mean_t log(mu(o_it) / pi(o_it)) > delta, else 1; delta: --offpolicy_mask
  A_i    = R_i - mean; R_i: the reward of o_i; mean: over the prompt's G completions
  beta   --kl_coef; pi_ref: the policy before training, or at the last reset (--ref_reset_every)
  k3_it  = x - log x - 1, x = pi_ref(o_it) / pi(o_it)

Suffixes name axes: P prompts, G completions each, B rows, T response tokens, 1 for a size-1 axis.

Parent: grpo.py. Differs only in:
  1. No std: an advantage is the reward minus the group's mean.
  2. Unbiased KL: k3 is multiplied by w. Since w has a gradient, too, the expected gradient for a token
     is that of KL(pi || pi_ref) after its prefix, whichever policy sampled the token.
  3. Off-policy mask: a bad completion that the policy has moved away from loses its policy term, but
     not its KL, and still counts.

Not specified in the paper: eps and beta (here grpo.py's), and delta (here 0.05). If A varies within a
completion, the mask reads the sign of its sum. Here mu is pi_old, up to rounding.
The paper also replays the sampler's experts, as mismatch.py does with --routing_replay r3, and the
sampler's top-p mask, which a sampler without top-p does not need.

Run:    python -m more.deepseek_v32
Expect: like grpo.py, greedy held-out accuracy rises from 0.43 to at least 0.97.
"""

import sys
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))  # run as a file, it finds common too

from common import RunArgs, flag, launch
from common import load_grader, load_policy, load_problems, Run
from common import evaluate, sample
from common import split_into_steps, token_logprobs


@dataclass
class Args(RunArgs):  # more flags: --help
    iterations: int = flag(40, "number of iterations (one rollout plus its updates)")
    prompts_per_iteration: int = flag(32, "prompts per rollout")
    group_size: int = flag(8, "completions per prompt")
    max_new_tokens: int = flag(48, "maximum tokens per completion")
    temperature: float = flag(1.0, "temperature for sampling and for all log-probs")
    lr: float = flag(2e-4, "AdamW's constant learning rate")
    update_epochs: int = flag(1, "epochs per rollout")
    num_minibatches: int = flag(16, "optimizer steps per epoch")
    max_grad_norm: float = flag(1.0, "gradients are clipped to this norm")
    router_aux_coef: float = flag(0.001, "weight of an MoE's load-balancing loss")
    # flags of the algorithm
    clip_eps_low: float = flag(0.2, "the ratio is clipped below 1 - this")
    clip_eps_high: float = flag(0.2, "the ratio is clipped above 1 + this")
    offpolicy_mask: float = flag(0.05, "delta: drop bad completions with a higher mean log(mu / pi)")
    kl_coef: float = flag(0.04, "beta, the weight of the KL to the reference [0: none]")
    ref_reset_every: int = flag(0, "reset the reference every n iterations [0: never]")

    def check(self):
        self.check_range(2, 1e6, "group_size")  # a group of one has no baseline
        self.check_range(0, 1, "clip_eps_low")


def masked_mean(x, mask):
    """Mean of x where the mask is 1; 0 for an empty mask. Masked-out values are ignored, even NaN."""
    return torch.where(mask.bool(), x, 0).sum() / mask.sum().clamp(min=1)


def compute_advantages(rewards_PG):
    """[1] Rewards -> advantages, (P, G): A = R - mean in each group, 0 if all rewards are equal."""
    rewards_PG = 1.0 * rewards_PG  # rewards may be integers or booleans
    advantages_PG = rewards_PG - rewards_PG.mean(1, keepdim=True)
    # no std
    # The mean of equal floats may be off by rounding, which a tiny std, or AdamW, would amplify.
    is_uniform_P1 = (rewards_PG == rewards_PG[:, :1]).all(1, keepdim=True)
    return torch.where(is_uniform_P1, 0, advantages_PG)


def policy_loss(
    logprobs_BT,
    old_logprobs_BT,
    advantages_BT,
    mask_BT,
    *,
    clip_eps_low=0.2,
    clip_eps_high=0.2,
    offpolicy_mask=0.05,
    kl_coef=0.04,
    ref_logprobs_BT=None,
    sampler_logprobs_BT=None,
    num_sequences=None,
):
    """Returns (loss, stats). loss: the sum over this micro-batch, divided by the whole step's
    num_sequences, so the micro-batches of a step add up to -J. stats: {name: scalar} for the log.

    logprobs_BT      log-probs of the sampled tokens under the current policy, with gradient
    old_logprobs_BT  the same, under the policy before this rollout's first step [None: on-policy]
    advantages_BT    (B, 1) or (B,), broadcast over the tokens, or (B, T)
    mask_BT          1 on response tokens, including EOS (bool or float); other tokens, such as
                     padding or tool output, get no gradient and are excluded from all means
    ref_logprobs_BT  log-probs under the reference [None: no KL, whatever kl_coef is]
    sampler_logprobs_BT  log-probs under mu [None: old_logprobs_BT]
    num_sequences    completions in the whole optimizer step, in all micro-batches, on all ranks
                     [None: this call has them all]. If the framework averages afterward, divide it
                     by what that averages over: ranks (DDP), accumulation steps (accelerate; not
                     with HF Trainer if loss_is_scaled_for_ga is True)
    """
    if old_logprobs_BT is None:
        old_logprobs_BT = logprobs_BT.detach()
    if kl_coef == 0:  # 0 * inf would be NaN
        ref_logprobs_BT = None
    if sampler_logprobs_BT is None:
        sampler_logprobs_BT = old_logprobs_BT
    dtypes = {logprobs_BT.dtype, old_logprobs_BT.dtype}
    assert dtypes <= {torch.float32, torch.float64}, "log-probs need logits.float().log_softmax(-1)"
    if advantages_BT.dim() == 1:
        advantages_BT = advantages_BT[:, None]
    shapes = [(len(mask_BT), 1), mask_BT.shape]
    assert advantages_BT.shape in shapes, f"advantages_BT: {advantages_BT.shape}, not {shapes}"
    mask_BT = mask_BT.bool()
    length_B1 = mask_BT.sum(1, keepdim=True).clamp(min=1)
    if num_sequences is None:
        num_sequences = mask_BT.any(1).sum().clamp(min=1)
    # Mask before exp: 0 * inf is NaN, in the backward pass too. The clamp keeps exp finite.
    logratio_BT = torch.where(mask_BT, logprobs_BT - old_logprobs_BT, 0).clamp(-20, 20)
    ratio_BT = logratio_BT.exp()
    clipped_BT = ratio_BT.clamp(1 - clip_eps_low, 1 + clip_eps_high)
    # PPO's pessimistic bound: the smaller of r A and clip(r) A
    objective_BT = torch.min(ratio_BT * advantages_BT, clipped_BT * advantages_BT)
    # [3] M_i = 0 if A_i < 0 and mean_t log(mu / pi) > delta, else 1. The sign is that of the sum of A
    # over the tokens, since any one of them may have A = 0.
    log_w_BT = torch.where(mask_BT, logprobs_BT - sampler_logprobs_BT, 0).clamp(-20, 20)
    distance_B1 = -log_w_BT.sum(1, keepdim=True) / length_B1
    is_bad_B1 = torch.where(mask_BT, advantages_BT, 0).sum(1, keepdim=True) < 0
    is_dropped_B1 = is_bad_B1 & (distance_B1 > offpolicy_mask)
    objective_BT = torch.where(is_dropped_B1, 0, objective_BT)
    if ref_logprobs_BT is not None:
        # k3 = x - log x - 1, x = pi_ref / pi; expm1, as exp(log x) - 1 loses digits near x = 1
        # Clamped only above, to keep exp finite: a clamp below would stop the gradient there, too. If
        # pi_ref is 0, log x is -inf and the loss is infinite, which ends the run.
        log_x_BT = torch.where(mask_BT, ref_logprobs_BT - logprobs_BT, 0).clamp(max=20)
        k3_BT = log_x_BT.expm1() - log_x_BT
        objective_BT = objective_BT - kl_coef * log_w_BT.exp() * k3_BT  # [2] w is not detached
    # Sequence-mean: mean_i 1/|o_i| sum_t
    objective_B1 = torch.where(mask_BT, objective_BT, 0).sum(1, keepdim=True) / length_B1
    loss = -objective_B1.sum() / num_sequences
    # For the log. No gradient where A < 0 and r is below the clip's range, or A > 0 and r above it.
    clips_low_BT = (ratio_BT < clipped_BT) & (advantages_BT < 0)
    clips_high_BT = (ratio_BT > clipped_BT) & (advantages_BT > 0)
    stats = {
        "approx_kl": masked_mean(logratio_BT.expm1() - logratio_BT, mask_BT),  # r - 1 - log r
        "ratio_max": (ratio_BT * mask_BT).max() if mask_BT.numel() > 0 else loss.new_zeros(()),
        "clipfrac_low": masked_mean(clips_low_BT.float(), mask_BT),
        "clipfrac_high": masked_mean(clips_high_BT.float(), mask_BT),
        "offpolicy_mask_frac": masked_mean(is_dropped_B1.float(), mask_BT.any(1, keepdim=True)),
    }
    if ref_logprobs_BT is not None:
        stats["kl_ref"] = masked_mean(k3_BT, mask_BT)
    return loss, {name: value.detach() for name, value in stats.items()}


def main(args):
    # ---------------------------------------------------------------------------------------- setup
    grade = load_grader(args)  # the verifier, or --reward
    policy = load_policy(args)  # a transformers model, without dropout, and its tokenizer
    problems, held_out = load_problems(args, policy, grade)
    # pi_ref has the initial weights: it is copied before Run, which may resume with later ones.
    reference = policy.frozen_copy() if args.kl_coef > 0 else None
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr, weight_decay=0.0, fused=True)
    # Run logs, saves, and resumes.
    run = Run(args, policy, problems, optimizer=optimizer, reference=reference)
    if run.needs_first_eval:
        run.log_eval(evaluate(policy, held_out, grade, args, sampled=True))

    for iteration in run.iterations():  # from 1
        # ---------------------------------------------------------------------------------- rollout
        prompts = problems.take(args.prompts_per_iteration)
        completions = sample(policy, prompts, args.group_size, args, run.noise)
        completions = grade(completions)

        # ------------------------------------------------------------------------------- advantages
        # a row of rewards for each prompt
        rewards_PG = torch.tensor([c.reward for c in completions]).view(-1, args.group_size)
        advantages_B1 = compute_advantages(rewards_PG).view(-1, 1).to(args.torch_device)

        # ------------------------------------------------------------------------------- old policy
        # The update's forward on the update's micro-batches: in the first step, the ratio is exactly 1.
        steps = split_into_steps(completions, args.num_minibatches, args)
        with torch.no_grad():
            for micro in chain(*steps):
                micro.old = token_logprobs(policy, micro, args.temperature, only_logprobs=True)
                if reference is not None:
                    micro.ref = token_logprobs(reference, micro, args.temperature, only_logprobs=True)

        # ----------------------------------------------------------------------------------- update
        for step in steps * args.update_epochs:
            num_sequences = sum(len(micro) for micro in step)
            for micro in step:
                outputs = token_logprobs(policy, micro, args.temperature)
                loss, stats = policy_loss(
                    outputs.logprobs_BT,
                    micro.old.logprobs_BT,
                    advantages_B1[micro.rows_B],
                    micro.mask_BT,
                    clip_eps_low=args.clip_eps_low,
                    clip_eps_high=args.clip_eps_high,
                    offpolicy_mask=args.offpolicy_mask,
                    kl_coef=args.kl_coef,
                    ref_logprobs_BT=micro.ref.logprobs_BT,
                    sampler_logprobs_BT=micro.sampler_logprobs_BT,
                    num_sequences=num_sequences,
                )
                # loss is a part of the step's. aux_loss, the mean of this micro-batch, gets its share.
                share = len(micro) / num_sequences
                total_loss = loss + args.router_aux_coef * outputs.aux_loss * share
                total_loss.backward()
                run.record(loss, stats, outputs, micro)
            grad_norm = policy.clip_gradients(args.max_grad_norm)
            run.record_step(num_sequences, grad_norm)  # stops the run if the loss or norm is not finite
            optimizer.step()  # with --dtype bfloat16, a hook then updates the bfloat16 copies
            optimizer.zero_grad()
        if args.ref_reset_every > 0 and iteration % args.ref_reset_every == 0:
            reference.load_state_dict(policy.state_dict())

        # -------------------------------------------------------------------------------------- log
        if run.is_due(args.eval_every):
            run.log_eval(evaluate(policy, held_out, grade, args, sampled=run.is_last))
        run.log(steps, completions, rewards_PG)  # logs, saves when due, stops on Ctrl-C
    run.finish()  # prints held-out accuracy before and after, and some answers


if __name__ == "__main__":
    launch(main, Args)
