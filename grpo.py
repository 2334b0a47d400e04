"""GRPO: Group Relative Policy Optimization (DeepSeekMath, arXiv 2402.03300).

  J = 1/N sum_i 1/|o_i| sum_t [ min(r_it A_i, clip(r_it, 1 - eps, 1 + eps) A_i) - beta k3_it ]

  N     = completions o_i in an optimizer step, |o_i| tokens long
  r_it  = pi(o_it) / pi_old(o_it)
  A_i   = (R_i - mean) / std, over the rewards of the G completions of the same prompt
  k3_it = x - log x - 1, x = pi_ref(o_it) / pi(o_it): an estimate of KL(pi || pi_ref), never negative

Parent: ppo.py. Differs only in:
  1. Group baseline: the mean reward of the group; no critic, no GAE, no whitening, no entropy bonus, and one
     advantage for a whole completion.
  2. KL in the loss: a term of its own there, not a part of the reward.
  3. Sequence-mean: tokens are averaged within a completion, then completions are averaged.

Left open by the paper, chosen here: the unbiased std plus 1e-6, with advantages of exactly 0 for a group of
equal rewards; eps 0.2; four optimizer steps per rollout, where the paper takes one (r is then 1 and no clip
binds). Beyond the paper: --kl_is_corrected (DeepSeek-V3.2: k3 times r, whose gradient is that of the
KL) and --ref_reset_every (ProRL: the policy becomes the reference every n iterations;
the optimizer keeps its state).

Run:    python grpo.py
Expect: greedy held-out accuracy from 0.45 to 0.97 or more; answers without working go from half to almost
        none. About half a minute on two CPU cores, and half a minute more the first time, for the base model.
"""

import copy
import time
from dataclasses import dataclass
from typing import Literal

import torch
from transformers.hf_argparser import HfArg

from common import Meter, Run, collate, evaluate, fail, load_model, load_problems, masked_mean
from common import parse_args, router_stats, sample, take_problems, token_logprobs, verify


@dataclass
class Args:
    seed: int = HfArg(default=1, help="seed of the prompts' order and of the sampling")
    device: str = HfArg(default="", help="cuda, mps or cpu [the best there is]")
    dtype: Literal["float32", "bfloat16"] = HfArg(default="float32", help="precision of matrix products")
    model: str = HfArg(default="tiny-moe", help="tiny-moe, or a folder or hub id of a causal language model")
    dataset: str = HfArg(default="addition", help="addition, or a JSON-lines or parquet file, or a hub id")
    dataset_config: str = HfArg(default="", help="configuration of a hub dataset, if it has several")
    dataset_split: str = HfArg(default="train", help="split of the dataset")
    prompt_column: str = HfArg(default="question", help="column of the prompts: text or chat messages")
    answer_column: str = HfArg(default="answer", help="column of the gold answers, GSM8K's '####' or not")
    num_held_out: int = HfArg(default=256, help="problems kept apart for evaluation")
    system_prompt: str = HfArg(default="", help="system message before each prompt")
    instruction: str = HfArg(default="", help="text on a line of its own after each prompt")
    iterations: int = HfArg(default=60, help="rounds of rollout and update")
    prompts_per_iteration: int = HfArg(default=32, help="prompts in a rollout")
    group_size: int = HfArg(default=8, help="completions per prompt")
    max_new_tokens: int = HfArg(default=48, help="cap on the length of a completion")
    temperature: float = HfArg(default=1.0, help="of sampling, and so of all log-probs")
    lr: float = HfArg(default=2e-4, help="AdamW's learning rate, constant")
    update_epochs: int = HfArg(default=1, help="passes over a rollout")
    num_minibatches: int = HfArg(default=4, help="optimizer steps per pass")
    micro_batch_size: int = HfArg(default=0, help="completions per forward pass [0: a whole minibatch]")
    gradient_checkpointing: bool = HfArg(default=False, help="recompute activations: less memory, more time")
    max_grad_norm: float = HfArg(default=1.0, help="gradients are scaled down to this norm")
    router_aux_coef: float = HfArg(default=0.001, help="weight of the load-balancing loss of an MoE")
    eval_every: int = HfArg(default=10, help="iterations between evaluations [0: only at the end]")
    save_every: int = HfArg(default=20, help="iterations between checkpoints [0: only at the end]")
    resume: bool = HfArg(default=False, help="go on with the run in --run_dir")
    run_dir: str = HfArg(default="", help="output folder [runs/<script>-seed<seed>]")
    tensorboard: bool = HfArg(default=False, help="also write the metrics for TensorBoard")
    warm_start_steps: int = HfArg(default=1200, help="supervised steps of the tiny MoE before RL")
    # the algorithm's own
    clip_eps_low: float = HfArg(default=0.2, help="the ratio is clipped at 1 - this")
    clip_eps_high: float = HfArg(default=0.2, help="the ratio is clipped at 1 + this")
    kl_coef: float = HfArg(default=0.04, help="beta, the weight of the KL to the reference")
    kl_is_corrected: bool = HfArg(default=False, help="multiply k3 by the ratio r")
    ref_reset_every: int = HfArg(default=0, help="iterations between resets to the policy [0: none]")


def compute_advantages(rewards_PG, args):
    """Rewards -> advantages, both (P, G): A = (R - mean) / std in each group, 0 if its rewards are equal."""
    advantages_PG = rewards_PG - rewards_PG.mean(1, keepdim=True)
    advantages_PG = advantages_PG / (rewards_PG.std(1, keepdim=True) + 1e-6)
    # The mean of equal floats may be off by rounding, which a tiny std would blow up into advantages.
    return torch.where((rewards_PG == rewards_PG[:, :1]).all(1, keepdim=True), 0, advantages_PG)


def policy_loss(
    logprobs_BT, old_logprobs_BT, advantages_B, mask_BT, num_sequences, num_tokens, args,
    ref_logprobs_BT=None,
):
    """-J of the header on a micro-batch; the micro-batches of an optimizer step add up to the step's loss.

    mask_BT (bool or float) is 1 on response tokens, the EOS included; whatever stands elsewhere does no harm.
    num_sequences and num_tokens count the whole optimizer step. Returns (loss, stats), the stats being means
    over the tokens given here.
    """
    mask_BT, advantages_B1 = mask_BT.bool(), advantages_B[:, None]
    # Masked and clamped before exp, since 0 * inf is NaN, in the backward pass too.
    logratio_BT = torch.where(mask_BT, logprobs_BT - old_logprobs_BT, 0).clamp(-20, 20)
    ratio_BT = logratio_BT.exp()
    clipped_BT = ratio_BT.clamp(1 - args.clip_eps_low, 1 + args.clip_eps_high)
    # min(r A, clip(r) A), the pessimistic one of the two: for A < 0 that is the one with the larger ratio.
    objective_BT = torch.min(ratio_BT * advantages_B1, clipped_BT * advantages_B1)
    stats = {
        "approx_kl": masked_mean(ratio_BT - 1 - logratio_BT, mask_BT),
        "ratio_max": ratio_BT.max(),
        # Only where the clip binds, that is, where it takes the gradient away.
        "clipfrac_low": masked_mean(((ratio_BT < clipped_BT) & (advantages_B1 < 0)).float(), mask_BT),
        "clipfrac_high": masked_mean(((ratio_BT > clipped_BT) & (advantages_B1 > 0)).float(), mask_BT),
    }
    if ref_logprobs_BT is not None:
        # k3 = x - log x - 1, x = pi_ref / pi
        log_x_BT = torch.where(mask_BT, ref_logprobs_BT - logprobs_BT, 0).clamp(-20, 20)
        k3_BT = log_x_BT.exp() - log_x_BT - 1
        if args.kl_is_corrected:
            k3_BT = ratio_BT * k3_BT  # not detached: in expectation its gradient is that of KL(pi || pi_ref)
        objective_BT = objective_BT - args.kl_coef * k3_BT
        stats["kl_ref"] = masked_mean(k3_BT, mask_BT)
    # Sequence-mean: 1/N sum_i 1/|o_i| sum_t
    objective_B = torch.where(mask_BT, objective_BT, 0).sum(1) / mask_BT.sum(1).clamp(min=1)
    loss = -objective_B.sum() / num_sequences
    return loss, stats


def main(args):
    # -------------------------------------------------------------------------------------------------- setup
    if args.group_size < 2:
        fail("--group_size must be at least 2: the mean of the group is the baseline")
    run = Run(args)
    model, tokenizer = load_model(args)
    train_problems, held_out_problems = load_problems(args, model, tokenizer)
    generator = torch.Generator().manual_seed(args.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0)
    parts = {"optimizer": optimizer}  # what a checkpoint holds beside the policy
    ref_model = parts["reference"] = copy.deepcopy(model)
    state = run.restore(model, generator, **parts)
    if "before" not in state:
        state["before"] = evaluate(model, tokenizer, held_out_problems, args)

    for iteration in range(state["iteration"] + 1, args.iterations + 1):
        # -------------------------------------------------------------------------------------------- rollout
        meter, rollout_start = Meter(), time.time()
        problems = take_problems(train_problems, state["position"], args.prompts_per_iteration, args.seed)
        state["position"] += len(problems)
        prompts = [problem.prompt_ids for problem in problems]
        completions = sample(model, tokenizer, prompts, args.group_size, args, generator)
        batch, update_start = collate(completions, args.device), time.time()

        # --------------------------------------------------------------------------------------------- reward
        answers = [problem.answer for problem in problems for _ in range(args.group_size)]
        pairs = zip(completions, answers, strict=True)
        verdicts = [verify(c.text, answer, c.truncated) for c, answer in pairs]
        rewards_PG = torch.tensor([reward for reward, _ in verdicts]).view(-1, args.group_size)

        # ----------------------------------------------------------------------------------------- advantages
        advantages_N = compute_advantages(rewards_PG, args).flatten().to(args.device)

        # -------------------------------------------------------- old log-probs, by the forward of the update
        # Of the same rows in the same micro-batches as below: the first step's ratio is 1 to the last bit.
        minibatches = torch.arange(len(completions), device=args.device).tensor_split(args.num_minibatches)
        micro_batches = [rows for minibatch in minibatches for rows in minibatch.split(args.micro_batch_size)]
        old_logprobs, old_experts = [], []
        with torch.no_grad():
            for rows in micro_batches:
                outputs = token_logprobs(model, batch.rows(rows), args.temperature, args.dtype)
                old_logprobs.append(outputs.logprobs_BT)
                old_experts.append(outputs.experts_BTLK)
            ref_logprobs_NT = torch.cat([
                token_logprobs(ref_model, batch.rows(rows), args.temperature, args.dtype).logprobs_BT
                for rows in micro_batches
            ])
        old_logprobs_NT, old_experts_NTLK = torch.cat(old_logprobs), torch.cat(old_experts)
        sampler_logratio_NT = old_logprobs_NT - batch.sampler_logprobs_NT
        sampler_kl_NT = sampler_logratio_NT.exp() - 1 - sampler_logratio_NT
        meter.add("rollout", {"sampler_kl": masked_mean(sampler_kl_NT, batch.mask_NT)}, 1)

        # --------------------------------------------------------------------------------------------- update
        for epoch in range(args.update_epochs):
            for step, minibatch in enumerate(minibatches):
                num_sequences, num_tokens = len(minibatch), batch.mask_NT[minibatch].sum()
                for rows in minibatch.split(args.micro_batch_size):
                    micro, share = batch.rows(rows), len(rows) / num_sequences
                    outputs = token_logprobs(model, micro, args.temperature, args.dtype)
                    loss, stats = policy_loss(
                        outputs.logprobs_BT, old_logprobs_NT[rows], advantages_N[rows], micro.mask_NT,
                        num_sequences, num_tokens, args,
                        ref_logprobs_BT=ref_logprobs_NT[rows],
                    )
                    # The aux loss is not a sum over tokens: it alone depends, a little, on the micro-batches.
                    (loss + args.router_aux_coef * outputs.aux_loss * share).backward()
                    stats["entropy"] = masked_mean(outputs.entropy_BT, micro.mask_NT)
                    router = router_stats(outputs, old_experts_NTLK[rows], micro.mask_NT)
                    meter.add("losses", stats, micro.mask_NT.sum())
                    meter.add("moe", router, micro.mask_NT.sum())
                    meter.add("moe", {"aux_loss": outputs.aux_loss}, len(rows))
                    meter.add("losses", {"policy_loss": loss / share}, len(rows))  # as of a whole step
                    if epoch == step == 0:  # nothing has been updated yet, so the ratio has to be 1
                        error_BT = (outputs.logprobs_BT - old_logprobs_NT[rows]).exp() - 1
                        error = torch.where(micro.mask_NT, error_BT, 0).abs().max()
                        meter.add("losses", {"first_step_ratio_error_max": error}, 1)
                grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                run.check_finite(iteration, rewards=rewards_PG, loss=loss, grad_norm=grad_norm)
                optimizer.step()
                optimizer.zero_grad()
                meter.add("charts", {"grad_norm": grad_norm}, 1)
        if args.ref_reset_every and iteration % args.ref_reset_every == 0:
            ref_model.load_state_dict(model.state_dict())

        # ----------------------------------------------------------------------------- log, evaluate and save
        state["iteration"], end = iteration, time.time()
        metrics = meter.means() | {
            "rollout/reward_mean": rewards_PG.mean().item(),
            "rollout/frac_zero_std_groups": (rewards_PG == rewards_PG[:, :1]).all(1).float().mean().item(),
            "charts/learning_rate": args.lr,
            "charts/tokens_per_second": sum(len(c.ids) for c in completions) / (end - rollout_start),
            "charts/rollout_seconds": update_start - rollout_start,
            "charts/update_seconds": end - update_start,
        }
        if run.due(args.eval_every, iteration):
            after = evaluate(model, tokenizer, held_out_problems, args)["greedy"]
            metrics |= {f"eval/{key}": after[key] for key in ("accuracy", "response_len_mean")}
        run.log(iteration, metrics, problems, completions, verdicts)
        if run.due(args.save_every, iteration) or run.stop:
            run.save(state, model, tokenizer, generator, **parts)
    run.finish(state["before"], evaluate(model, tokenizer, held_out_problems, args))


if __name__ == "__main__":
    main(parse_args(Args))
