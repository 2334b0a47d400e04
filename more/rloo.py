"""RLOO: REINFORCE Leave-One-Out (Ahmadian et al., 2024, arXiv 2402.14740).

  J = mean_i A_i sum_t log pi(o_it)

  o_i    a completion; sum_t: over its tokens, EOS included; mean_i: over all completions of a step
  o_it   its token t; pi(o_it): its probability under the policy, given the prompt and o_i,<t
  A_i    = R_i - mean of the rewards of the other G - 1 completions of the same prompt
         = G / (G - 1) (R_i - mean of the rewards of all G); R_i: the reward of o_i

Suffixes name axes: P prompts, G completions each, B rows, T response tokens, 1 for a size-1 axis.

Parent: reinforce.py. Differs only in:
  1. Leave-one-out baseline: each completion is compared with the others of its prompt. Their rewards
     do not depend on o_i, so the gradient of J is unbiased; grpo.py's is not, because of its std and
     its 1/|o_i|. There is no running mean, so nothing extra to checkpoint.

No std: with the std of the other completions, one right completion among eight would have an advantage
of 1e6 (1 / 1e-6, since the others are all wrong), and each wrong one -0.38. With the std of all eight,
A would be grpo.py's advantage times 8/7, biased again.

Unlike the paper: no KL in the reward, since a verifier, unlike a reward model, can be trusted far from
any training data; and groups of 8, as in the siblings, instead of 2 and 4. The learning rate is
reinforce.py's, for the reason given there.

Run:    python -m more.rloo
Expect: greedy held-out accuracy on sums of two numbers rises from 0.43 to at least 0.98 in under a
        minute on one CPU core.
"""

import sys
from dataclasses import dataclass
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
    lr: float = flag(5e-4, "AdamW's constant learning rate")  # see the header
    max_grad_norm: float = flag(1.0, "gradients are clipped to this norm")
    router_aux_coef: float = flag(0.001, "weight of an MoE's load-balancing loss")

    def check(self):
        self.check_range(2, 1e6, "group_size")  # the rest of the group is the baseline


def masked_mean(x, mask):
    """Mean of x where the mask is 1; 0 for an empty mask. Masked-out values are ignored, even NaN."""
    return torch.where(mask.bool(), x, 0).sum() / mask.sum().clamp(min=1)


def compute_advantages(rewards_PG):
    """Rewards -> advantages, (P, G): R minus the mean of the other rewards, 0 if all are equal."""
    rewards_PG = 1.0 * rewards_PG  # rewards may be integers or booleans
    # [1] the mean of the other G - 1
    num_others = rewards_PG.shape[1] - 1
    mean_of_others_PG = (rewards_PG.sum(1, keepdim=True) - rewards_PG) / num_others
    advantages_PG = rewards_PG - mean_of_others_PG
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
    num_sequences=None,
):
    """Returns (loss, stats). loss: the sum over this micro-batch, divided by the whole step's
    num_sequences, so the micro-batches of a step add up to -J. stats: {name: scalar} for the log.

    logprobs_BT      log-probs of the sampled tokens under the current policy, with gradient
    old_logprobs_BT  the same, under the policy before this rollout's first step [None: on-policy]
    advantages_BT    (B, 1) or (B,), broadcast over the tokens, or (B, T)
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
    if advantages_BT.dim() == 1:
        advantages_BT = advantages_BT[:, None]
    shapes = [(len(mask_BT), 1), mask_BT.shape]
    assert advantages_BT.shape in shapes, f"advantages_BT: {advantages_BT.shape}, not {shapes}"
    mask_BT = mask_BT.bool()
    if num_sequences is None:
        num_sequences = mask_BT.any(1).sum().clamp(min=1)
    # A log pi
    objective_BT = advantages_BT * torch.where(mask_BT, logprobs_BT, 0)
    # mean_i sum_t
    loss = -torch.where(mask_BT, objective_BT, 0).sum() / num_sequences
    # The ratio is only logged; it is 1 with one step per rollout.
    logratio_BT = torch.where(mask_BT, logprobs_BT - old_logprobs_BT, 0).clamp(-20, 20)
    ratio_BT = logratio_BT.exp()
    stats = {
        "approx_kl": masked_mean(logratio_BT.expm1() - logratio_BT, mask_BT),  # r - 1 - log r
        "ratio_max": (ratio_BT * mask_BT).max() if mask_BT.numel() > 0 else loss.new_zeros(()),
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

        # no old policy: it takes a single step, whose ratio is 1

        # ----------------------------------------------------------------------------------- update
        (step,) = split_into_steps(completions, 1, args)
        for micro in step:
            outputs = token_logprobs(policy, micro, args.temperature)
            loss, stats = policy_loss(
                outputs.logprobs_BT,
                None,  # on-policy
                advantages_B1[micro.rows_B],
                micro.mask_BT,
                num_sequences=len(completions),
            )
            # loss is a part of the step's. aux_loss, the mean of this micro-batch, gets its share.
            share = len(micro) / len(completions)
            total_loss = loss + args.router_aux_coef * outputs.aux_loss * share
            total_loss.backward()
            run.record(loss, stats, outputs, micro)
        grad_norm = policy.clip_gradients(args.max_grad_norm)
        run.record_step(len(completions), grad_norm)  # stops the run if the loss or norm is not finite
        optimizer.step()  # with --dtype bfloat16, a hook then updates the bfloat16 copies
        optimizer.zero_grad()

        # -------------------------------------------------------------------------------------- log
        if run.is_due(args.eval_every):
            run.log_eval(evaluate(policy, held_out, grade, args, sampled=run.is_last))
        run.log([step], completions, rewards_PG)  # logs, saves when due, stops on Ctrl-C
    run.finish()  # prints held-out accuracy before and after, and some answers


if __name__ == "__main__":
    launch(main, Args)
