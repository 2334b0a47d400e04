"""RSPO: Router-Shift Policy Optimization (arXiv 2510.23027).

  J = mean_i A_i exp(1/|o_i| sum_t (c_it + log gamma_it))

  o_i       a completion of |o_i| tokens, its EOS included; mean_i: over all of an optimizer step
  c_it      = min(l_it, eps) if A_i > 0, max(l_it, -eps) if A_i < 0
  l_it      = log(pi(o_it) / pi_old(o_it)), where pi_old generated the completion
  gamma_it  = sg[max(gamma_min, exp(-1/L sum_l 1/K sum_k |log p_l(e_lk) - log p_old,l(e_lk)|))]
  p_l       = softmax over all experts of layer l's router logits, where o_it is predicted
  e_lk      the K experts that were active there under the old policy; sg[] stops the gradient
  A_i       = (R_i - mean) / std, over the rewards R of the G completions of the same prompt

Parent: gmpo.py. Differs only in:
  1. Router shift: gamma, 1 while the router does what it did in the rollout and smaller the more it
     has shifted, damps completions whose ratio compares two different subnetworks.
  2. Token-level clip only: no --clip_level.

Left open by the paper's first version: how gamma enters, since its text and its formula differ. --shift
damped (J above) is the text, gamma "after token-level clipping", whatever the sign of A. --shift
literal is the formula as printed, c + sgn(A) log gamma: its product is raised to the power sgn(A), so
it amplifies A < 0 where the router has shifted. --shift before_clip is the second version, and what
public implementations do: gamma times the ratio, then clipped, so for A > 0 a ratio up to e^eps / gamma
keeps its gradient. A dense model is refused: there it is gmpo.py.

Run:    python rspo.py
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
    log_ratio_clip: float = HfArg(default=0.4, help="log r at most this if A > 0, else at least -this")
    gamma_min: float = HfArg(default=0.8, help="floor of the router shift factor gamma")
    shift: Literal["damped", "literal", "before_clip"] = HfArg(default="damped", help="see the header")


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


def active_scores(router_logits, experts_BTLK):
    """log p of the given experts, p the softmax over all: L tensors (B, T, E) -> (B, T, L, K)."""
    scores = []
    for layer, logits_BTE in enumerate(router_logits):
        logp_BTE = logits_BTE.log_softmax(-1)
        scores.append(logp_BTE.gather(-1, experts_BTLK[:, :, layer]))
    return torch.stack(scores, dim=2)


def router_shift(scores_BTLK, old_scores_BTLK):
    """[1] gamma, (B, T), before its floor: exp(-1/L sum_l 1/K sum_k |log p - log p_old|)."""
    return (-(scores_BTLK - old_scores_BTLK).abs().mean(dim=(2, 3))).exp()


def policy_loss(
    logprobs_BT,
    old_logprobs_BT,
    advantages_B1,
    mask_BT,
    *,
    log_ratio_clip=0.4,
    gamma_min=0.8,
    shift="damped",
    router_shift_BT=None,
    num_sequences=None,
):
    """The micro-batch's share of the loss -J; the shares of an optimizer step add up to its loss.

    logprobs_BT      log-probs of the sampled tokens under the current policy, with gradient
    old_logprobs_BT  the same before the first step on this batch
    advantages_B1    one per completion
    mask_BT          1 on response tokens, the EOS included (bool or float); the rest is ignored
    router_shift_BT  gamma, before its floor; 1 where the router has not moved [None: 1 everywhere]
    num_sequences    completions in the whole optimizer step [None: this is the whole step]

    Returns (loss, stats): a scalar, and {name: scalar}, means and a maximum over the given tokens.
    """
    assert advantages_B1.shape == (len(mask_BT), 1), "advantages_B1: (B, 1)"
    assert shift in ("damped", "literal", "before_clip")
    mask_BT = mask_BT.bool()
    length_B1 = mask_BT.sum(1, keepdim=True).clamp(min=1)
    if num_sequences is None:
        num_sequences = len(mask_BT)
    # Masked before exp, since 0 * inf is NaN, in the backward pass too; clamped to keep exp finite.
    logratio_BT = torch.where(mask_BT, logprobs_BT - old_logprobs_BT, 0).clamp(-20, 20)
    ratio_BT = logratio_BT.exp()
    # [1] sg[max(gamma, gamma_min)], and 1 on padding
    log_gamma_BT = torch.zeros_like(logratio_BT)
    if router_shift_BT is not None:
        gamma_BT = router_shift_BT.detach().clamp(min=gamma_min)
        log_gamma_BT = torch.where(mask_BT, gamma_BT.log(), 0)
    l_BT = logratio_BT
    if shift == "before_clip":
        l_BT = logratio_BT + log_gamma_BT
    # c_t = min(l_t, eps) where A > 0, max(l_t, -eps) where A < 0
    capped_BT = l_BT.clamp(max=log_ratio_clip)
    floored_BT = l_BT.clamp(min=-log_ratio_clip)
    c_BT = torch.where(advantages_B1 > 0, capped_BT, floored_BT)
    if shift == "damped":
        log_weight_BT = c_BT + log_gamma_BT
    elif shift == "literal":
        log_weight_BT = c_BT + advantages_B1.sign() * log_gamma_BT
    else:  # before_clip: gamma is in l already
        log_weight_BT = c_BT
    # Where the clip takes the gradient away: A < 0 and l < -eps, or A > 0 and l > eps.
    clips_low_BT = (l_BT < c_BT) & (advantages_B1 < 0)
    clips_high_BT = (l_BT > c_BT) & (advantages_B1 > 0)
    stats = {
        "approx_kl": masked_mean(ratio_BT - 1 - logratio_BT, mask_BT),
        "ratio_max": torch.where(mask_BT, ratio_BT, 0).max(),
        "clipfrac_low": masked_mean(clips_low_BT.float(), mask_BT),
        "clipfrac_high": masked_mean(clips_high_BT.float(), mask_BT),
    }
    # A exp(1/|o_i| sum_t log weight_it); on padding log weight is 0
    log_geometric_mean_B1 = log_weight_BT.sum(1, keepdim=True) / length_B1
    objective_B1 = advantages_B1 * log_geometric_mean_B1.exp()
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
    if not getattr(model.config, "num_experts_per_tok", 0):
        raise UserError(
            f"--model {args.model} is dense, there is no router that could shift: use gmpo.py"
        )
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
        old_scores = []
        with torch.no_grad():
            for minibatch in minibatches:
                for rows in micro_batches(minibatch, args.micro_batch_size):
                    micro = batch.rows(rows)
                    outputs = token_logprobs(model, micro, args.temperature)
                    old_logprobs.append(outputs.logprobs_BT)
                    old_experts.append(outputs.experts_BTLK)
                    if args.routing_replay == "r2":
                        old_choices.append(outputs.experts_BSLK)
                    old_scores.append(active_scores(outputs.router_logits, outputs.experts_BTLK))
        old_logprobs_NT = collect(old_logprobs, minibatches)
        old_experts_NTLK = collect(old_experts, minibatches)
        old_scores_NTLK = collect(old_scores, minibatches)
        if args.routing_replay == "r2":
            batch.replayed_experts_BSLK = collect(old_choices, minibatches)
        # w, made of rho = pi_old / mu, where mu is the sampler: a factor on A, 1 without a correction
        correction = rollout_correction(old_logprobs_NT, batch, args, one_ratio=True)
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
                    scores_BTLK = active_scores(outputs.router_logits, old_experts_NTLK[rows])
                    gamma_BT = router_shift(scores_BTLK, old_scores_NTLK[rows])
                    loss, stats = policy_loss(
                        outputs.logprobs_BT,
                        old_logprobs_NT[rows],
                        correction.weights[rows] * advantages_N1[rows],
                        micro.mask_BT,
                        log_ratio_clip=args.log_ratio_clip,
                        gamma_min=args.gamma_min,
                        shift=args.shift,
                        router_shift_BT=gamma_BT,
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
                    router["router_shift"] = masked_mean(gamma_BT, micro.mask_BT)
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
