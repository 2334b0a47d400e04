"""DAPO: Decoupled Clip and Dynamic sAmpling Policy Optimization (arXiv 2503.14476).

  J = 1/(sum_i |o_i|) sum_i sum_t min(r_it A_i, clip(r_it, 1 - eps_low, 1 + eps_high) A_i)

  o_i    a completion of |o_i| tokens, EOS included; sum_i: over all completions in an optimizer step
  o_it   its token t; pi(o_it): its probability under the policy, given the prompt and o_i,<t
  r_it   = pi(o_it) / pi_old(o_it); pi_old: the policy before the rollout's first optimizer step
  eps_low, eps_high: --clip_eps_low, --clip_eps_high
  A_i    = (R_i - mean) / std; R_i: the reward of o_i; mean, std: over the prompt's G completions,
         of which some, but not all, are right

Suffixes name axes: P prompts, G completions each, B rows, T response tokens, 1 for a size-1 axis.

Parent: grpo.py. Differs only in:
  1. Clip-higher: eps_high 0.28 over eps_low 0.2, more headroom for low-probability tokens.
  2. Dynamic sampling: prompts are drawn until the batch is full of groups that are neither all right
     nor all wrong according to the verifier, before reward shaping. (Where a reward comes without a
     verdict, the group's rewards must not all be equal.) An iteration generates more completions, so we
     run fewer iterations: 22 generate about as many as grpo.py's 40.
  3. Token-mean: every token in an optimizer step has the same weight.
  4. Overlong reward shaping: R falls by up to 1 over the last L_cache tokens (--overlong_cache) before
     the cap, --max_new_tokens (soft), or the tokens of truncated completions get no policy gradient
     and are not counted (filter), or neither (none).
  5. No KL, so no reference model.

Not specified in the paper: how many prompts a round draws (here one per missing group), and the number
of rounds (--max_sampling_rounds; after that we train on the groups we have, in fewer steps of about
full size, and end the run if there are none). Generation is cut off at the cap, where the soft penalty
reaches -1. Unlike the paper, R is 1 or 0, not 1 or -1, so the penalty weighs more, and tokens are
counted over the whole optimizer step, not over one prompt's group.

Run:    python dapo.py
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
    iterations: int = flag(22, "number of iterations (one rollout plus its updates)")  # see the header
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
    clip_eps_high: float = flag(0.28, "the ratio is clipped above 1 + this")
    overlong: Literal["soft", "filter", "none"] = flag("soft", "how to treat completions near the cap")
    overlong_cache: int = flag(
        0, "L_cache: the soft penalty starts this far below the cap [0: a quarter of the cap]"
    )
    max_sampling_rounds: int = flag(10, "maximum rounds to fill the batch with mixed groups")

    def check(self):
        self.check_range(2, 1e6, "group_size")  # a group of one has no baseline
        self.check_range(0, 1, "clip_eps_low")
        self.check_range(1, 1e9, "max_sampling_rounds")
        if self.overlong == "soft":
            self.check_range(0, self.max_new_tokens - 1, "overlong_cache")
        self.check_unread("overlong", ["filter", "none"], "overlong_cache")

    @property
    def overlong_cache_tokens(self):
        """The number that `--overlong_cache` means."""
        return self.overlong_cache or max(1, self.max_new_tokens // 4)


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


def mixed_groups(completions, group_size):
    """[2] The completions of groups in which some, but not all, are right, and how many groups there
    are of each kind, for the log. Verdicts decide, not rewards, which may add a bonus for the format.
    But if a completion has no verdict, its group is kept if its rewards are not all equal."""
    kept = []
    num_right = []  # of each group whose verdicts are all known
    for start in range(0, len(completions), group_size):
        group = completions[start : start + group_size]
        verdicts = [c.verdict for c in group]
        if None in verdicts:
            is_mixed = len({c.reward for c in group}) > 1
        else:
            num_right.append(verdicts.count("correct"))
            is_mixed = 0 < num_right[-1] < group_size
        if is_mixed:
            kept += group
    counts = {
        "rollout/groups_generated": len(completions) // group_size,
        "rollout/groups_kept": len(kept) // group_size,
        "rollout/groups_dropped_all_right": num_right.count(group_size),
        "rollout/groups_dropped_all_wrong": num_right.count(0),
    }
    return kept, counts


def overlong_penalty(lengths_B, max_new_tokens, overlong_cache):
    """[4] Soft penalty, (B,): 0 up to L_cache tokens before the cap, then linear to -1 at the cap."""
    return ((max_new_tokens - overlong_cache - lengths_B) / overlong_cache).clamp(-1, 0)


def policy_loss(
    logprobs_BT,
    old_logprobs_BT,
    advantages_BT,
    mask_BT,
    *,
    clip_eps_low=0.2,
    clip_eps_high=0.28,
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
    clipped_BT = ratio_BT.clamp(1 - clip_eps_low, 1 + clip_eps_high)
    # PPO's pessimistic bound: the smaller of r A and clip(r) A
    objective_BT = torch.min(ratio_BT * advantages_BT, clipped_BT * advantages_BT)
    # [3] Token-mean: 1/(sum_i |o_i|) sum_i sum_t
    loss = -torch.where(mask_BT, objective_BT, 0).sum() / num_tokens
    # For the log. No gradient where A < 0 and r is below the clip's range, or A > 0 and r above it.
    clips_low_BT = (ratio_BT < clipped_BT) & (advantages_BT < 0)
    clips_high_BT = (ratio_BT > clipped_BT) & (advantages_BT > 0)
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
        # [2] Dynamic sampling: each round draws one prompt for every mixed group still missing.
        generated = []  # all completions, with their verdicts
        missing = args.prompts_per_iteration
        rounds = 0
        while missing > 0 and rounds < args.max_sampling_rounds:
            prompts = problems.take(missing)
            completions = sample(policy, prompts, args.group_size, args, run.noise)
            generated += grade(completions)
            kept, counts = mixed_groups(generated, args.group_size)
            missing = args.prompts_per_iteration - len(kept) // args.group_size
            rounds += 1
        counts["rollout/groups_sampling_rounds"] = rounds

        # ---------------------------------------------------------------------------- missing groups
        if missing > 0:
            run.say(f"iteration {iteration}: {missing} mixed groups missing after {rounds} rounds")
        if not kept:
            # [2] There is nothing to learn from: the run ends here, as after its last iteration.
            rewards_PG = torch.tensor([c.reward for c in generated]).view(-1, args.group_size)
            run.log_eval(evaluate(policy, held_out, grade, args, sampled=True))
            run.log([], generated, rewards_PG, **counts)
            run.early_end = "too few mixed groups"
            break
        # [2] Fewer steps of about full size, not as many small ones. (Our rule, not the paper's.)
        full_step = args.prompts_per_iteration * args.group_size / args.num_minibatches
        num_steps = max(1, round(len(kept) / full_step))

        # ------------------------------------------------------------------------------- advantages
        rewards_B = torch.tensor([c.reward for c in kept])
        if args.overlong == "soft":
            # [4] R falls by up to 1
            lengths_B = torch.tensor([len(c.ids) for c in kept])
            rewards_B += overlong_penalty(lengths_B, args.max_new_tokens, args.overlong_cache_tokens)
        # a row of rewards for each prompt
        rewards_PG = rewards_B.view(-1, args.group_size)
        advantages_B1 = compute_advantages(rewards_PG).view(-1, 1).to(args.torch_device)

        # ------------------------------------------------------------------------------- old policy
        # The update's forward on the update's micro-batches: in the first step, the ratio is exactly 1.
        steps = split_into_steps(kept, num_steps, args)
        with torch.no_grad():
            for micro in chain(*steps):
                micro.old = token_logprobs(policy, micro, args.temperature, only_logprobs=True)

        # ------------------------------------------------------------------------- overlong filter
        if args.overlong == "filter":
            # [4] Tokens of truncated completions get no policy gradient, and are not counted.
            for micro in chain(*steps):
                is_whole = [[not c.truncated] for c in micro.completions]
                micro.mask_BT &= torch.tensor(is_whole, device=args.torch_device)

        # ----------------------------------------------------------------------------------- update
        for step in steps * args.update_epochs:
            num_sequences = sum(len(micro) for micro in step)
            num_tokens = sum(micro.mask_BT.sum() for micro in step).clamp(min=1)  # filter may mask all
            for micro in step:
                outputs = token_logprobs(policy, micro, args.temperature)
                loss, stats = policy_loss(
                    outputs.logprobs_BT,
                    micro.old.logprobs_BT,
                    advantages_B1[micro.rows_B],
                    micro.mask_BT,
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
        # [2] all that were generated, and the rewards of the groups that were kept
        run.log(steps, generated, rewards_PG, **counts)  # logs, saves when due, stops on Ctrl-C
    run.finish()  # prints held-out accuracy before and after, and some answers


if __name__ == "__main__":
    launch(main, Args)
