"""GMPO: Geometric-Mean Policy Optimization (arXiv 2507.20673).

  J = mean_i A_i exp(1/|o_i| sum_t c_it)

  o_i    a completion of |o_i| tokens, EOS included; mean_i: over all completions in an optimizer step
  o_it   its token t; pi(o_it): its probability under the policy, given the prompt and o_i,<t
  c_it   = min(l_it, eps) if A_i > 0, max(l_it, -eps) if A_i < 0; eps: --log_ratio_clip
  l_it   = log(pi(o_it) / pi_old(o_it)); pi_old: the policy before the rollout's first optimizer step
  A_i    = (R_i - mean) / std; R_i: the reward of o_i; mean, std: over the prompt's G completions

Suffixes name axes: P prompts, G completions each, B rows, T response tokens, 1 for a size-1 axis.

Parent: grpo.py. Differs only in:
  1. Geometric mean: a completion's clipped ratios are multiplied, not added. One token whose ratio
     explodes multiplies the mean by e^(l/|o|) instead of adding (e^l - 1)/|o| to it.
  2. No KL, so no reference model.

J equals the paper's sgn(A_i) (prod_t |min(r_it A_i, clip(r_it, e^-eps, e^eps) A_i)|)^(1/|o_i|).
The paper's eps, 0.4, bounds the log of the ratio.
--clip_level sequence is the paper's counterexample: it clips the whole product at once (the sum of l
over the completion, before the root), as in the authors' code. A single clip then removes the
completion's whole gradient.

Run:    python gmpo.py
Expect: like grpo.py, greedy held-out accuracy rises from 0.43 to at least 0.97.
"""

from dataclasses import dataclass
from itertools import chain
from typing import Literal

import torch

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
    log_ratio_clip: float = flag(0.4, "log r is at most this if A > 0, at least -this if A < 0")
    clip_level: Literal["token", "sequence"] = flag("token", "clip each token's log r, or their sum")

    def check(self):
        self.check_range(2, 1e6, "group_size")  # a group of one has no baseline


def masked_mean(x, mask):
    """Mean of x where the mask is 1; 0 for an empty mask. Masked-out values are ignored, even NaN."""
    return torch.where(mask.bool(), x, 0).sum() / mask.sum().clamp(min=1)


def compute_advantages(rewards_PG):
    """Rewards -> advantages, (P, G): A = (R - mean) / std in each group, 0 if all rewards are equal."""
    rewards_PG = 1.0 * rewards_PG  # rewards may be integers or booleans
    advantages_PG = rewards_PG - rewards_PG.mean(1, keepdim=True)
    advantages_PG = advantages_PG / (rewards_PG.std(1, keepdim=True) + 1e-6)
    # The mean of equal floats may be off by rounding, which a tiny std, or AdamW, would amplify.
    is_uniform_P1 = (rewards_PG == rewards_PG[:, :1]).all(1, keepdim=True)
    return torch.where(is_uniform_P1, 0, advantages_PG)


def policy_loss(
    logprobs_BT,
    old_logprobs_BT,
    advantages_B1,
    mask_BT,
    *,
    log_ratio_clip=0.4,
    clip_level="token",
    num_sequences=None,
):
    """Returns (loss, stats). loss: the sum over this micro-batch, divided by the whole step's
    num_sequences, so the micro-batches of a step add up to -J. stats: {name: scalar} for the log.

    logprobs_BT      log-probs of the sampled tokens under the current policy, with gradient
    old_logprobs_BT  the same, under the policy before this rollout's first step [None: on-policy]
    advantages_B1    one per completion, (B, 1) or (B,)
    mask_BT          1 on response tokens, including EOS (bool or float); other tokens, such as
                     padding or tool output, get no gradient and are excluded from all means
    num_sequences    completions in the whole optimizer step, in all micro-batches, on all ranks
                     [None: this call has them all]. If the framework averages afterward, divide it
                     by what that averages over: ranks (DDP), accumulation steps (accelerate; not
                     with HF Trainer if loss_is_scaled_for_ga is True)
    """
    if old_logprobs_BT is None:
        old_logprobs_BT = logprobs_BT.detach()
    dtypes = {logprobs_BT.dtype, old_logprobs_BT.dtype}
    assert dtypes <= {torch.float32, torch.float64}, "log-probs need logits.float().log_softmax(-1)"
    if advantages_B1.dim() == 1:
        advantages_B1 = advantages_B1[:, None]
    shape = (len(mask_BT), 1)
    assert advantages_B1.shape == shape, f"advantages_B1: {advantages_B1.shape}, not {shape}"
    assert clip_level in ("token", "sequence")
    mask_BT = mask_BT.bool()
    length_B1 = mask_BT.sum(1, keepdim=True).clamp(min=1)
    if num_sequences is None:
        num_sequences = mask_BT.any(1).sum().clamp(min=1)
    # Mask before exp: 0 * inf is NaN, in the backward pass too. The clamp keeps exp finite.
    logratio_BT = torch.where(mask_BT, logprobs_BT - old_logprobs_BT, 0).clamp(-20, 20)
    l_BT = logratio_BT
    if clip_level == "sequence":
        # The paper's counterexample clips once per completion: here l and c are sums, (B, 1).
        l_BT = logratio_BT.sum(1, keepdim=True)
    # [1] c_t = min(l_t, eps) where A > 0, max(l_t, -eps) where A < 0
    capped_BT = l_BT.clamp(max=log_ratio_clip)
    floored_BT = l_BT.clamp(min=-log_ratio_clip)
    c_BT = torch.where(advantages_B1 > 0, capped_BT, floored_BT)
    # A exp(1/|o_i| sum_t c_it); 0 on padding; a row without tokens is not counted
    geometric_mean_B1 = (c_BT.sum(1, keepdim=True) / length_B1).exp()
    objective_B1 = torch.where(mask_BT.any(1, keepdim=True), advantages_B1 * geometric_mean_B1, 0)
    loss = -objective_B1.sum() / num_sequences
    # For the log. The clip removes the gradient where A < 0 and l < -eps, or A > 0 and l > eps.
    clips_low_BT = (l_BT < c_BT) & (advantages_B1 < 0)
    clips_high_BT = (l_BT > c_BT) & (advantages_B1 > 0)
    ratio_BT = logratio_BT.exp()
    stats = {
        "approx_kl": masked_mean(logratio_BT.expm1() - logratio_BT, mask_BT),  # r - 1 - log r
        "ratio_max": (ratio_BT * mask_BT).max() if mask_BT.numel() > 0 else loss.new_zeros(()),
        "clipfrac_low": masked_mean(clips_low_BT.float(), mask_BT),
        "clipfrac_high": masked_mean(clips_high_BT.float(), mask_BT),
    }
    return loss, {name: value.detach() for name, value in stats.items()}


def main(args):
    # ---------------------------------------------------------------------------------------- setup
    grade = load_grader(args)  # the verifier, or --reward
    policy = load_policy(args)  # a transformers model, without dropout, and its tokenizer
    problems, held_out = load_problems(args, policy, grade)
    # no reference
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr, weight_decay=0.0, fused=True)
    # Run logs, saves, and resumes.
    run = Run(args, policy, problems, optimizer=optimizer)
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
                    log_ratio_clip=args.log_ratio_clip,
                    clip_level=args.clip_level,
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

        # -------------------------------------------------------------------------------------- log
        if run.is_due(args.eval_every):
            run.log_eval(evaluate(policy, held_out, grade, args, sampled=run.is_last))
        run.log(steps, completions, rewards_PG)  # logs, saves when due, stops on Ctrl-C
    run.finish()  # prints held-out accuracy before and after, and some answers


if __name__ == "__main__":
    launch(main, Args)
