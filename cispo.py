"""CISPO: Clipped Importance Sampling-weight Policy Optimization (MiniMax-M1, arXiv 2506.13585).

  J = 1/(sum_i |o_i|) sum_i sum_t sg[min(r_it, cap)] A_i log pi(o_it)

  o_i    a completion of |o_i| tokens, EOS included; sum_i: over all completions in an optimizer step
  o_it   its token t; pi(o_it): its probability under the policy, given the prompt and o_i,<t
  r_it   = pi(o_it) / pi_old(o_it); pi_old: the policy before the rollout's first optimizer step
  cap    --is_weight_cap; sg[] stops the gradient
  A_i    = (R_i - mean) / std; R_i: the reward of o_i; mean, std: over the prompt's G completions

Suffixes name axes: P prompts, G completions each, B rows, T response tokens, 1 for a size-1 axis.

Parent: grpo.py. Differs only in:
  1. Capped weight: REINFORCE with a truncated importance weight, instead of a clipped update. The
     gradient flows only through log pi, so every token keeps its gradient, even outside PPO's range.
  2. Token-mean: every token in an optimizer step has the same weight.
  3. No KL, so no reference model.

The paper also has DAPO's dynamic sampling and length penalty, which are left out here.
Not specified in the paper: the cap. --is_weight_cap 5 is the cap on the weight itself, not an offset
from 1. The paper's formula also has a lower bound, which its runs do not use: --is_weight_floor.
Unlike the paper, tokens are counted over the whole optimizer step, not over one prompt's group.
--ppo_mask is the paper's unified form, with PPO's mask M_it (its bounds: --clip_eps_low and
--clip_eps_high) and without a cap. Its gradient is exactly that of the clipped objective at the same
bounds (dapo.py's, with --clip_eps_high 0.28).

Run:    python cispo.py
Expect: like grpo.py, greedy held-out accuracy rises from 0.43 to at least 0.97.
"""

from dataclasses import dataclass
from itertools import chain

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
    is_weight_cap: float = flag(5.0, "cap on the importance weight itself")
    is_weight_floor: float = flag(0.0, "lower bound on the importance weight")
    ppo_mask: bool = flag(False, "use PPO's mask (at the bounds below) instead of the cap")
    clip_eps_low: float = flag(0.2, "the ratio is clipped below 1 - this")
    clip_eps_high: float = flag(0.2, "the ratio is clipped above 1 + this")

    def check(self):
        self.check_range(2, 1e6, "group_size")  # a group of one has no baseline
        self.check_range(0, 1, "clip_eps_low")
        self.check_range(1, 1e9, "is_weight_cap")
        self.check_range(0, self.is_weight_cap, "is_weight_floor")
        self.check_unread("ppo_mask", [True], "is_weight_cap", "is_weight_floor")
        self.check_unread("ppo_mask", [False], "clip_eps_low", "clip_eps_high")


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
    advantages_BT,
    mask_BT,
    *,
    is_weight_cap=5.0,
    is_weight_floor=0.0,
    ppo_mask=False,
    clip_eps_low=0.2,
    clip_eps_high=0.2,
    num_tokens=None,
):
    """Returns (loss, stats). loss: the sum over this micro-batch, divided by the whole step's
    num_tokens, so the micro-batches of a step add up to -J. stats: {name: scalar} for the log.

    logprobs_BT      log-probs of the sampled tokens under the current policy, with gradient
    old_logprobs_BT  the same, under the policy before this rollout's first step [None: on-policy]
    advantages_BT    (B, 1) or (B,), broadcast over the tokens, or (B, T)
    mask_BT          1 on response tokens, including EOS (bool or float); other tokens, such as
                     padding or tool output, get no gradient and are excluded from all means
    num_tokens       response tokens in the whole optimizer step, in all micro-batches, on all ranks
                     [None: this call has them all]. If the framework averages afterward, divide it
                     by what that averages over: ranks (DDP), accumulation steps (accelerate; not
                     with HF Trainer if loss_is_scaled_for_ga is True)
    """
    if old_logprobs_BT is None:
        old_logprobs_BT = logprobs_BT.detach()
    dtypes = {logprobs_BT.dtype, old_logprobs_BT.dtype}
    assert dtypes <= {torch.float32, torch.float64}, "log-probs need logits.float().log_softmax(-1)"
    if advantages_BT.dim() == 1:
        advantages_BT = advantages_BT[:, None]
    shapes = [(len(mask_BT), 1), mask_BT.shape]
    assert advantages_BT.shape in shapes, f"advantages_BT: {advantages_BT.shape}, not {shapes}"
    mask_BT = mask_BT.bool()
    if num_tokens is None:
        num_tokens = mask_BT.sum().clamp(min=1)
    # Mask before exp: 0 * inf is NaN, in the backward pass too. The clamp keeps exp finite.
    logratio_BT = torch.where(mask_BT, logprobs_BT - old_logprobs_BT, 0).clamp(-20, 20)
    ratio_BT = logratio_BT.exp()
    if ppo_mask:
        # M_it = 0 where A > 0 and r > 1 + eps_high, and where A < 0 and r < 1 - eps_low
        clips_low_BT = (advantages_BT < 0) & (ratio_BT < 1 - clip_eps_low)
        clips_high_BT = (advantages_BT > 0) & (ratio_BT > 1 + clip_eps_high)
        weight_BT = torch.where(clips_low_BT | clips_high_BT, 0, ratio_BT)
    else:
        clips_low_BT = ratio_BT < is_weight_floor  # with 0 there is no lower bound
        clips_high_BT = ratio_BT > is_weight_cap
        weight_BT = ratio_BT.clamp(is_weight_floor, is_weight_cap)
    # [1] sg[min(r, cap)] A log pi
    objective_BT = weight_BT.detach() * advantages_BT * torch.where(mask_BT, logprobs_BT, 0)
    # [2] Token-mean: 1/(sum_i |o_i|) sum_i sum_t
    loss = -torch.where(mask_BT, objective_BT, 0).sum() / num_tokens
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
            num_tokens = sum(micro.mask_BT.sum() for micro in step)
            for micro in step:
                outputs = token_logprobs(policy, micro, args.temperature)
                loss, stats = policy_loss(
                    outputs.logprobs_BT,
                    micro.old.logprobs_BT,
                    advantages_B1[micro.rows_B],
                    micro.mask_BT,
                    is_weight_cap=args.is_weight_cap,
                    is_weight_floor=args.is_weight_floor,
                    ppo_mask=args.ppo_mask,
                    clip_eps_low=args.clip_eps_low,
                    clip_eps_high=args.clip_eps_high,
                    num_tokens=num_tokens,
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
