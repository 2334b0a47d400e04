"""GSPO: Group Sequence Policy Optimization (arXiv 2507.18071).

  J = mean_i min(s_i A_i, clip(s_i, 1 - eps_low, 1 + eps_high) A_i)

  o_i  a completion of |o_i| tokens, its EOS included; mean_i: over all of an optimizer step
  s_i  = exp(1/|o_i| sum_t log(pi(o_it) / pi_old(o_it))), differentiated; pi_old generated the
       completion
  A_i  = (R_i - mean) / std, over the rewards R of the G completions of the same prompt

Parent: grpo.py. Differs only in:
  1. Sequence ratio: one for a completion, the geometric mean of those of its tokens, clipped as a
     whole.
  2. No KL: and so no reference model.

Left open by the paper: nothing. Departs from the paper: the range. Its 3e-4 and 4e-4 are for answers
of thousands of tokens; the mean of some 25 log-ratios scatters more, and that range clips half of our
tokens in the first ten iterations. Ten times as wide, 3e-3 and 4e-3, it clips 12 %
(benchmarks/results/ranges.csv at 39fcfb3); the paper reports some 15.
--variant gspo_token: s_it = sg[s_i] pi(o_it) / sg[pi(o_it)], tokens averaged within a completion;
sg[] stops the gradient. Value and gradient are those of gspo as long as A is the same for all tokens;
it exists for advantages (B, T) that are not.

Run:    python gspo.py
Expect: on sums of two numbers, as grpo.py: greedy held-out accuracy from 0.43 to at least 0.97 in
        forty seconds on one CPU core.
"""

import time
from dataclasses import dataclass
from typing import Literal

import torch
from transformers.hf_argparser import HfArg

from common import collate, describe, evaluate, load_model, load_problems, refresh, router_stats, sample
from common import take_problems, token_logprobs, transcripts, working_copy
from harness import Meter, Run, UserError, launch
from memory import plan_memory
from mismatch import RolloutCorrection, RolloutDtype, RoutingReplay, mismatch_stats
from mismatch import refresh_rollout_copy, rollout_copy, rollout_correction
from ranks import add_up, add_up_gradients, agree, collect, micro_batches
from verifier import load_verifier


@dataclass
class Args:
    seed: int = HfArg(default=1, help="seed of the prompts' order and of the sampling")
    device: str = HfArg(default="", help="cuda, cpu, or mps (untried) [cuda if it is there]")
    dtype: Literal["float32", "bfloat16"] = HfArg(
        default="float32", help="of weights and cache; AdamW moves float32 weights"
    )
    model: str = HfArg(default="tiny-moe", help="tiny-moe, or a folder or hub id of a language model")
    dataset: str = HfArg(default="addition", help="addition, a .jsonl or .parquet file, or a hub id")
    dataset_config: str = HfArg(default="", help="configuration of a hub dataset, if it has several")
    dataset_split: str = HfArg(default="train", help="split of a hub dataset")
    prompt_column: str = HfArg(default="question", help="column of the prompts: text or chat messages")
    answer_column: str = HfArg(
        default="answer", help="column of the gold answers, after '####' or alone"
    )
    num_held_out: int = HfArg(default=256, help="problems kept apart for evaluation")
    reward: str = HfArg(default="", help="FILE.py:FUNCTION in place of verifier.verify")
    system_prompt: str = HfArg(default="", help="system message before each prompt")
    instruction: str = HfArg(default="", help="text on a line of its own after each prompt")
    iterations: int = HfArg(default=60, help="rounds of rollout and update")
    prompts_per_iteration: int = HfArg(default=32, help="prompts in a rollout")
    group_size: int = HfArg(default=8, help="completions per prompt")
    max_new_tokens: int = HfArg(default=48, help="cap on the length of a completion")
    temperature: float = HfArg(default=1.0, help="sampling temperature, also that of all log-probs")
    rollout_batch_size: int = HfArg(default=0, help="completions sampled at a time [0: all]")
    rollout_dtype: RolloutDtype = HfArg(default="same", help="of a copy of the weights that samples")
    rollout_correction: RolloutCorrection = HfArg(default="none", help="weights of completions")
    rollout_cap: float = HfArg(default=2.0, help="where weights are cut off; not icepop's")
    rollout_mask_low: float = HfArg(default=0.95, help="geo_mask: mean ratio that is too low")
    rollout_mask_high: float = HfArg(default=1.05, help="geo_mask: mean ratio that is too high")
    routing_replay: RoutingReplay = HfArg(default="none", help="experts of an MoE, see mismatch.py")
    lr: float = HfArg(default=2e-4, help="AdamW's learning rate, constant")
    update_epochs: int = HfArg(default=1, help="passes over a rollout")
    num_minibatches: int = HfArg(default=4, help="optimizer steps per pass")
    micro_batch_size: int = HfArg(default=0, help="completions per update pass [0: 16,384 tokens]")
    gradient_checkpointing: bool = HfArg(default=False, help="less memory, more time")
    max_grad_norm: float = HfArg(default=1.0, help="gradients are clipped to this norm")
    router_aux_coef: float = HfArg(default=0.001, help="weight of the load-balancing loss of an MoE")
    eval_every: int = HfArg(default=10, help="iterations between evaluations [0: only at the end]")
    save_every: int = HfArg(default=20, help="iterations between checkpoints [0: only at the end]")
    resume: bool = HfArg(default=False, help="continue the run in --run_dir")
    run_dir: str = HfArg(default="", help="output folder [runs/<script>-seed<seed>]")
    tensorboard: bool = HfArg(default=False, help="also write the metrics for TensorBoard")
    # the algorithm's own
    clip_eps_low: float = HfArg(default=3e-3, help="the ratio is clipped at 1 - this")  # paper: 3e-4
    clip_eps_high: float = HfArg(default=4e-3, help="the ratio is clipped at 1 + this")  # paper: 4e-4
    variant: Literal["gspo", "gspo_token"] = HfArg(default="gspo", help="see the header")


def masked_mean(x, mask):
    """Mean of x where the mask is 1; 0 if it never is. Masked-out values are ignored, even NaN."""
    return torch.where(mask.bool(), x, 0).sum() / mask.sum().clamp(min=1)


def compute_advantages(rewards_PG):
    """Rewards -> advantages, (P, G): A = (R - mean) / std in each group, 0 if all rewards are equal."""
    advantages_PG = rewards_PG - rewards_PG.mean(1, keepdim=True)
    advantages_PG = advantages_PG / (rewards_PG.std(1, keepdim=True) + 1e-6)
    # The mean of equal floats may be off by rounding, which a tiny std would blow up into advantages.
    is_uniform_P1 = (rewards_PG == rewards_PG[:, :1]).all(1, keepdim=True)
    return torch.where(is_uniform_P1, 0, advantages_PG)


def policy_loss(
    logprobs_BT,
    old_logprobs_BT,
    advantages_BT,
    mask_BT,
    *,
    clip_eps_low=3e-3,
    clip_eps_high=4e-3,
    variant="gspo",
    num_sequences=None,
):
    """The micro-batch's share of the loss -J; the shares of an optimizer step add up to its loss.

    logprobs_BT      log-probs of the sampled tokens under the current policy, with gradient
    old_logprobs_BT  the same before the first step on this batch
    advantages_BT    (B, 1), broadcast over the tokens; with variant "gspo_token" also (B, T)
    mask_BT          1 on response tokens, the EOS included (bool or float); the rest is ignored
    num_sequences    completions in the whole optimizer step [None: this is the whole step]

    Returns (loss, stats): a scalar, and {name: scalar}, means and a maximum over the given tokens.
    """
    assert advantages_BT.shape in ((len(mask_BT), 1), mask_BT.shape), "advantages_BT: (B, 1) or (B, T)"
    assert variant in ("gspo", "gspo_token")
    assert variant == "gspo_token" or advantages_BT.shape[1] == 1, "one advantage per completion"
    mask_BT = mask_BT.bool()
    length_B1 = mask_BT.sum(1, keepdim=True).clamp(min=1)
    if num_sequences is None:
        num_sequences = len(mask_BT)
    # Masked before exp, since 0 * inf is NaN, in the backward pass too; clamped to keep exp finite.
    logratio_BT = torch.where(mask_BT, logprobs_BT - old_logprobs_BT, 0).clamp(-20, 20)
    # [1] s_i = exp(1/|o_i| sum_t log r_it), one for all tokens
    ratio_B1 = (logratio_BT.sum(1, keepdim=True) / length_B1).exp()
    ratio_BT = ratio_B1.expand_as(logratio_BT)
    if variant == "gspo_token":
        # s_it = sg[s_i] pi / sg[pi]: the value of s_i, but the gradient of the token's own probability
        own_BT = torch.where(mask_BT, logprobs_BT - logprobs_BT.detach(), 0).exp()
        ratio_BT = ratio_B1.detach() * own_BT
    clipped_BT = ratio_BT.clamp(1 - clip_eps_low, 1 + clip_eps_high)
    # PPO's pessimistic bound, the smaller of r A and clip(r) A
    objective_BT = torch.min(ratio_BT * advantages_BT, clipped_BT * advantages_BT)
    # Where the clip takes the gradient away: A < 0 and r < 1 - eps, or A > 0 and r > 1 + eps.
    clips_low_BT = (ratio_BT < clipped_BT) & (advantages_BT < 0)
    clips_high_BT = (ratio_BT > clipped_BT) & (advantages_BT > 0)
    stats = {
        "approx_kl": masked_mean(logratio_BT.exp() - 1 - logratio_BT, mask_BT),
        "ratio_max": torch.where(mask_BT, ratio_BT, 0).max(),
        "clipfrac_low": masked_mean(clips_low_BT.float(), mask_BT),
        "clipfrac_high": masked_mean(clips_high_BT.float(), mask_BT),
    }
    # Sequence-mean: mean_i 1/|o_i| sum_t
    objective_B1 = torch.where(mask_BT, objective_BT, 0).sum(1, keepdim=True) / length_B1
    loss = -objective_B1.sum() / num_sequences
    return loss, {name: value.detach() for name, value in stats.items()}


def main(args):
    # ---------------------------------------------------------------------------------------- setup
    if args.group_size < 2:
        raise UserError("--group_size must be at least 2: the mean of the group is the baseline")
    run = Run(args)
    verify = load_verifier(args)
    master, tokenizer = load_model(args)
    model = working_copy(master, args.dtype)
    sampler = rollout_copy(model, master, args.rollout_dtype)
    train_problems, held_out_problems = load_problems(args, model, tokenizer)
    generator = torch.Generator().manual_seed(args.seed)
    optimizer = torch.optim.AdamW(master.parameters(), lr=args.lr, weight_decay=0.0, fused=True)
    parts = {"optimizer": optimizer}  # what a checkpoint holds besides the policy
    state = run.restore(master, generator, **parts)
    refresh(model, master)
    plan_memory(args, master, train_problems + held_out_problems, parts)
    if "before" not in state:  # a resumed run has it already
        state["before"] = evaluate(model, tokenizer, held_out_problems, args, verify, sampled=True)

    after = {}
    for iteration in range(state["iteration"] + 1, args.iterations + 1):
        # ---------------------------------------------------------------------------------- rollout
        meter = Meter()
        rollout_start = time.time()
        refresh_rollout_copy(sampler, master, args.rollout_dtype)
        problems = take_problems(
            train_problems, state["position"], args.prompts_per_iteration, args.seed
        )
        state["position"] += len(problems)
        prompts = [problem.prompt_ids for problem in problems]
        completions = sample(sampler, tokenizer, prompts, args.group_size, args, generator)
        batch = collate(completions, args.device)
        rollout_end = time.time()

        # ----------------------------------------------------------------------------------- reward
        answers = [problem.answer for problem in problems for _ in range(args.group_size)]
        pairs = zip(completions, answers, strict=True)
        verdicts = agree([verify(c.text, answer, c.truncated) for c, answer in pairs])
        rewards_PG = torch.tensor([reward for reward, _ in verdicts]).view(-1, args.group_size)

        # ------------------------------------------------------------------------------- advantages
        advantages_N1 = compute_advantages(rewards_PG).view(-1, 1).to(args.device)

        # -------------------------------------------------------------- old and reference log-probs
        # Recomputed, since the sampler's log-probs differ by rounding. Rows are not shuffled, so that
        # this pass and the update use the same micro-batches: the first ratio is then exactly 1.
        rows_N = torch.arange(len(completions), device=args.device)
        minibatches = rows_N.tensor_split(args.num_minibatches)
        if args.routing_replay == "r3":  # the sampler's experts, from here on; r2: the old policy's
            batch.replayed_experts_BSLK = batch.sampler_experts_BSLK
        old_logprobs = []
        old_experts = []
        old_choices = []
        with torch.no_grad():
            for minibatch in minibatches:
                for rows in micro_batches(minibatch, args.micro_batch_size):
                    micro = batch.rows(rows)
                    outputs = token_logprobs(model, micro, args.temperature)
                    old_logprobs.append(outputs.logprobs_BT)
                    old_experts.append(outputs.experts_BTLK)
                    if args.routing_replay == "r2":
                        old_choices.append(outputs.experts_BSLK)
        old_logprobs_NT = collect(old_logprobs, minibatches)
        old_experts_NTLK = collect(old_experts, minibatches)
        if args.routing_replay == "r2":
            batch.replayed_experts_BSLK = collect(old_choices, minibatches)
        # w, made of rho = pi_old / mu, where mu is the sampler: a factor on A, 1 without a correction
        correction = rollout_correction(old_logprobs_NT, batch, args, one_ratio=args.variant == "gspo")
        meter.add_once("rollout", correction.stats, 1)
        meter.add_once("rollout", mismatch_stats(old_logprobs_NT, old_experts_NTLK, batch), 1)

        # ----------------------------------------------------------------------------------- update
        for epoch in range(args.update_epochs):
            for step, minibatch in enumerate(minibatches):
                num_sequences = len(minibatch)
                step_loss = torch.zeros((), device=args.device)
                for rows in micro_batches(minibatch, args.micro_batch_size):
                    micro = batch.rows(rows)
                    outputs = token_logprobs(model, micro, args.temperature)
                    loss, stats = policy_loss(
                        outputs.logprobs_BT,
                        old_logprobs_NT[rows],
                        correction.weights[rows] * advantages_N1[rows],
                        micro.mask_BT,
                        clip_eps_low=args.clip_eps_low,
                        clip_eps_high=args.clip_eps_high,
                        variant=args.variant,
                        num_sequences=num_sequences,
                    )
                    # The aux loss is a mean over its micro-batch, so it is weighted by the share of the
                    # step in it; it alone depends, slightly, on --micro_batch_size.
                    share = len(rows) / num_sequences
                    total_loss = loss + args.router_aux_coef * outputs.aux_loss * share
                    total_loss.backward()
                    step_loss += loss.detach()
                    num_micro_tokens = micro.mask_BT.sum()
                    stats["entropy"] = masked_mean(outputs.entropy_BT, micro.mask_BT)
                    meter.add("losses", stats, num_micro_tokens)
                    router = router_stats(outputs, old_experts_NTLK[rows], micro.mask_BT)
                    meter.add("moe", router, num_micro_tokens)
                    meter.add("moe", {"aux_loss": outputs.aux_loss}, len(rows))
                    if epoch == 0 and step == 0:  # nothing has been updated yet: the ratio has to be 1
                        error_BT = (outputs.logprobs_BT - old_logprobs_NT[rows]).exp() - 1
                        error = torch.where(micro.mask_BT, error_BT, 0).abs().max()
                        meter.add("losses", {"first_step_ratio_error_max": error}, 1)
                add_up(step_loss)
                add_up_gradients(master)
                grad_norm = torch.nn.utils.clip_grad_norm_(master.parameters(), args.max_grad_norm)
                run.check_finite(iteration, loss=step_loss, grad_norm=grad_norm)
                optimizer.step()
                optimizer.zero_grad()
                refresh(model, master)
                meter.add_once("losses", {"policy_loss": step_loss}, num_sequences)
                meter.add_once("charts", {"grad_norm": grad_norm}, 1)

        # ------------------------------------------------------------------- log, evaluate and save
        end = time.time()
        state["iteration"] = iteration
        is_uniform_P = (rewards_PG == rewards_PG[:, :1]).all(1)
        metrics = {
            **meter.means(),
            **describe(completions, verdicts, args.group_size, prefix="rollout/"),
            "rollout/reward_mean": rewards_PG.mean().item(),
            "rollout/frac_zero_std_groups": is_uniform_P.float().mean().item(),
            "charts/learning_rate": args.lr,
            "charts/tokens_per_second": sum(len(c.ids) for c in completions) / (end - rollout_start),
            "charts/rollout_seconds": rollout_end - rollout_start,
            "charts/update_seconds": end - rollout_end,
        }
        if run.is_due(args.eval_every, iteration):
            is_last = iteration == args.iterations
            after = evaluate(model, tokenizer, held_out_problems, args, verify, sampled=is_last)
            metrics["eval/accuracy"] = after["greedy"]["accuracy"]
            metrics["eval/response_len_mean"] = after["greedy"]["response_len_mean"]
        run.log(iteration, metrics, transcripts(problems, completions, verdicts))
        if run.is_due(args.save_every, iteration) or run.stop:
            run.save(state, master, tokenizer, generator, **parts)
        run.exit_if_stopped()
    if "sampled" not in after:  # resumed at its end
        after = evaluate(model, tokenizer, held_out_problems, args, verify, sampled=True)
    run.finish(state["before"], after)


if __name__ == "__main__":
    launch(main, Args)
