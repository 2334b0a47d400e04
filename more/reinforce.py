"""REINFORCE: the policy gradient with a baseline (Williams, 1992; on language models arXiv 2402.14740).

  J = mean_i (R_i - b) sum_t log pi(o_it)

  o_i    a completion; sum_t: over its tokens, EOS included; mean_i: mean over those of an iteration
  R_i    the verifier's reward of o_i
  b      the exponential mean of the rewards of earlier iterations, 0 before the first:
         after each one, b becomes d b + (1 - d) mean R
  _PG    axis suffixes: P prompts, G completions each, N = P G, B rows, T tokens, 1 a size-1 axis

Parent: grpo.py. Differs only in:
  1. Running baseline: b, the same for all prompts; no group, no std. It is fixed before the rollout,
     so it does not depend on the answers, and the gradient of J is unbiased.
  2. No ratio: the log-prob itself, without a clip, and one optimizer step per rollout: a second step
     would learn from completions of another policy.
  3. No length: a completion's log-probs are added up, since its probability is their product.
  4. No KL: and so no reference model.

Left open: d (here 0.9). One completion for each of 256 prompts: as many completions as the siblings
have. The learning rate is higher than theirs, since there is one step per rollout instead of four.
That J grows with the length of a completion does not matter: AdamW ignores the scale of a gradient.

Run:    python -m more.reinforce
Expect: greedy held-out accuracy on sums of two numbers rises from 0.43 to at least 0.98 in a minute
        on one CPU core.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))  # run as a file, it finds common too

from common import collate, evaluate, judge, load_policy, load_problems, load_verifier
from common import sample, score_old, token_logprobs
from plumbing import Meter, Run, RunArgs, flag, iteration_metrics, launch
from plumbing import plan_memory, rollout_correction


@dataclass
class Args(RunArgs):  # model, data, device, precision, output: see plumbing/args.py, or --help
    iterations: int = flag(60, "rounds of rollout and update")
    prompts_per_iteration: int = flag(256, "prompts in a rollout")  # 32 x 8
    group_size: int = flag(1, "completions per prompt")  # no groups here
    max_new_tokens: int = flag(48, "most tokens in a completion")
    temperature: float = flag(1.0, "temperature of the sampling and of all log-probs")
    lr: float = flag(5e-4, "AdamW's learning rate, constant")  # see the header
    max_grad_norm: float = flag(1.0, "gradients are clipped to this norm")
    router_aux_coef: float = flag(0.001, "weight of an MoE's load-balancing loss")
    # flags of the algorithm
    baseline_decay: float = flag(0.9, "d of the running baseline")

    def check(self):
        self.check_range(0, 1, "baseline_decay")


def masked_mean(x, mask):
    """Mean of x where the mask is 1; 0 for an empty mask. Masked-out values are ignored, even NaN."""
    return torch.where(mask.bool(), x, 0).sum() / mask.sum().clamp(min=1)


def compute_advantages(rewards_PG, baseline):
    """Rewards -> advantages, (P, G): [1] A = R - b."""
    return rewards_PG - baseline


def policy_loss(
    logprobs_BT,
    old_logprobs_BT,
    advantages_BT,
    mask_BT,
    *,
    num_sequences=None,
):
    """The loss -J of a micro-batch, normalised by the whole step's count, so that micro-batches add up.

    logprobs_BT      log-probs of the sampled tokens under the current policy, with gradient
    old_logprobs_BT  the same under the policy before the first step on this rollout [None: on-policy]
    advantages_BT    (B, 1) or (B,), broadcast over the tokens, or (B, T)
    mask_BT          1 on response tokens, the EOS included (bool or float); other tokens, such as
                     padding or tool output, get no gradient and enter no mean
    num_sequences    completions in the whole optimizer step [None: this is the whole step]; where
                     processes average their gradients, divide it by their number

    Returns (loss, stats): a scalar, and {name: scalar} for the log, over the given tokens.
    """
    if old_logprobs_BT is None:
        old_logprobs_BT = logprobs_BT.detach()
    advantages_BT = advantages_BT[:, None] if advantages_BT.dim() == 1 else advantages_BT
    shapes = [(len(mask_BT), 1), tuple(mask_BT.shape)]
    assert advantages_BT.shape in shapes, f"advantages_BT: {tuple(advantages_BT.shape)}, not {shapes}"
    mask_BT = mask_BT.bool()
    if num_sequences is None:
        num_sequences = len(mask_BT)
    # The ratio is only logged; it is 1 as long as there is one step per rollout.
    # Mask before exp, since 0 * inf is NaN, also in the backward pass; the clamp keeps exp finite.
    logratio_BT = torch.where(mask_BT, logprobs_BT - old_logprobs_BT, 0).clamp(-20, 20)
    ratio_BT = logratio_BT.exp()
    stats = {
        "approx_kl": masked_mean(logratio_BT.expm1() - logratio_BT, mask_BT),  # r - 1 - log r
        "ratio_max": torch.where(mask_BT, ratio_BT, 0).max(),
    }
    # [2] A log pi
    objective_BT = advantages_BT * torch.where(mask_BT, logprobs_BT, 0)
    # [3] mean_i sum_t
    loss = -torch.where(mask_BT, objective_BT, 0).sum() / num_sequences
    return loss, {name: value.detach() for name, value in stats.items()}


def main(args):
    # ---------------------------------------------------------------------------------------- setup
    run = Run(args)
    verify = load_verifier(args)
    policy = load_policy(args)  # the model with its tokenizer
    problem_stream, held_out = load_problems(args, policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr, weight_decay=0.0, fused=True)
    generator = torch.Generator().manual_seed(args.seed)  # for the sampler's noise
    run.restore(policy, problem_stream, generator, optimizer=optimizer)
    args = plan_memory(args, policy, problem_stream, held_out)
    run.extra_state.setdefault("baseline", 0.0)
    if run.before is None:
        run.before = evaluate(policy, held_out, verify, args, sampled=True)

    for iteration in range(run.iteration + 1, args.iterations + 1):
        # ---------------------------------------------------------------------------------- rollout
        meter = Meter(iteration)
        problems = problem_stream.take(args.prompts_per_iteration)
        sampler = policy.sampler_at(iteration)  # the policy, or its --rollout_dtype copy
        completions = sample(sampler, problems, args.group_size, args, generator)
        meter.lap("rollout_seconds")

        # ----------------------------------------------------------------------------------- reward
        completions = judge(completions, verify)
        rewards_PG = torch.tensor([c.reward for c in completions]).view(-1, args.group_size)

        # ------------------------------------------------------------------------------- advantages
        baseline = run.extra_state["baseline"]
        advantages_N1 = compute_advantages(rewards_PG, baseline).view(-1, 1).to(args.device)
        # [1] b becomes d b + (1 - d) mean R, for the next iteration
        baseline *= args.baseline_decay
        baseline += (1 - args.baseline_decay) * rewards_PG.mean().item()
        run.extra_state["baseline"] = baseline

        # ---------------------------------------------------------------------------- old log-probs
        # Recompute them with the training forward (unless --old_logprobs sampler), since the sampler's
        # differ by rounding. Rows are not shuffled and micro-batches are those of the update, so that
        # r is exactly 1 in the first step.
        batch = collate(completions, args)
        minibatches = batch.minibatches(1)  # one step
        old = score_old(policy, batch, minibatches, args)

        # ----------------------------------------------------------------------- rollout correction
        # Importance weights pi_old / sampler; all 1 unless --rollout_correction is on.
        correction = rollout_correction(old, batch, args)
        meter.add_global("rollout", correction.stats)
        advantages = correction.weights * advantages_N1  # (N, 1), or (N, T) with weights per token

        # ----------------------------------------------------------------------------------- update
        for rows, micro in batch.micro_batches(minibatches[0], args.micro_batch_size):
            outputs = token_logprobs(policy, micro, args.temperature)
            loss, stats = policy_loss(
                outputs.logprobs_BT,
                old.logprobs_NT[rows],
                advantages[rows],
                micro.mask_BT,
                num_sequences=len(completions),
            )
            # Unlike the loss, aux_loss, a product of means, does not add up over micro-batches.
            row_share = len(rows) / len(completions)
            total_loss = loss + args.router_aux_coef * outputs.aux_loss * row_share
            total_loss.backward()
            meter.add_pass({"policy_loss": loss}, stats, outputs, old, rows, micro.mask_BT)
        grad_norm = policy.clip_gradients(args.max_grad_norm)  # sums over ranks first
        meter.check_finite(grad_norm=grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        policy.refresh()  # in bfloat16: sync the working copy from the float32 master weights
        meter.add_step(len(completions), grad_norm)
        meter.lap("update_seconds")

        # ------------------------------------------------------------------- log, evaluate and save
        metrics = iteration_metrics(meter, completions, rewards_PG.view(-1, 1), args)
        if run.is_due(args.eval_every, iteration):
            is_last = iteration == args.iterations
            results = evaluate(policy, held_out, verify, args, sampled=is_last)
            metrics |= results["metrics"]
            if is_last:
                run.after = results
        run.log(iteration, metrics, completions)
        run.save_if_due(iteration)  # after a signal too, and then exits
    if run.after is None:  # resumed when it was done
        run.after = evaluate(policy, held_out, verify, args, sampled=True)
    run.finish()


if __name__ == "__main__":
    launch(main, Args)
