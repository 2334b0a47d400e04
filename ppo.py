"""PPO: Proximal Policy Optimization (arXiv 1707.06347), as in InstructGPT (arXiv 2203.02155).

  J = 1/(sum_i |o_i|) sum_i sum_t min(r_it A_it, clip(r_it, 1 - eps, 1 + eps) A_it) - c_v L_V + c_e H

  o_i      a completion of |o_i| tokens, its EOS included; sum_i: over all of an optimizer step
  r_it     = pi(o_it) / pi_old(o_it), where pi_old generated the completion
  A_it     = sum_k (gamma lambda)^k delta_i,t+k, whitened (GAE);  delta_t = rew_t + gamma V_t+1 - V_t
  rew_it   = -beta log(pi_old(o_it) / pi_ref(o_it)), plus the verifier's reward R_i at the last token
  L_V      = mean over tokens of max((V - ret)^2, (V_old + clip(V - V_old, -d, d) - ret)^2)
  ret_it   = A_it + V_old,it, before A is whitened;  H: mean entropy over tokens

The root of the family: grpo.py is the child, and its header lists the differences.

Left open by the papers: the critic (here a second copy of the base model with a linear head that
starts at zero; V_t is read where o_t is predicted, and after the last token V is 0, or the critic's
value there if the completion was truncated); gamma 1, so that a right answer is worth the same
however long it is; beta 0.02; d 0.2; c_e 0; c_v 0.5, which matters only where the critic's gradient
is clipped, since the models share no weights and AdamW ignores the scale of a gradient. One completion
for each of 256 prompts: as many completions as the siblings'. The critic has a higher learning rate,
since it has to learn from nothing: at the policy's 2e-4 it explains 2 to 4 % of the variance of the
returns in the last ten iterations (benchmarks/results/ranges.csv at 39fcfb3), at 2e-3 8 to 14 %. With
--kl_coef 0 there is no reference.

Run:    python ppo.py
Expect: on sums of two numbers, greedy held-out accuracy from 0.43 to at least 0.95 in one minute
        on one CPU core.
"""

import copy
import time
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from transformers.hf_argparser import HfArg

from common import collate, describe, evaluate, load_model, load_problems, refresh
from common import router_stats, sample, take_problems, token_logprobs, transcripts, working_copy
from harness import Meter, Run, UserError, launch
from memory import plan_memory
from mismatch import RolloutCorrection, RolloutDtype, RoutingReplay, mismatch_stats
from mismatch import refresh_rollout_copy, rollout_copy, rollout_correction
from packing import forward_packed
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
    prompts_per_iteration: int = HfArg(default=256, help="prompts in a rollout")  # 32 x 8
    group_size: int = HfArg(default=1, help="completions per prompt")  # no groups here
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
    clip_eps_low: float = HfArg(default=0.2, help="the ratio is clipped at 1 - this")
    clip_eps_high: float = HfArg(default=0.2, help="the ratio is clipped at 1 + this")
    kl_coef: float = HfArg(default=0.02, help="beta, the weight of the KL to the reference [0: none]")
    gamma: float = HfArg(default=1.0, help="discount per token")
    gae_lambda: float = HfArg(default=0.95, help="lambda of GAE")
    value_coef: float = HfArg(default=0.5, help="weight of the value loss")
    value_clip: float = HfArg(default=0.2, help="how far a value may move [0: any distance]")
    entropy_coef: float = HfArg(default=0.0, help="weight of the entropy bonus")
    critic_lr: float = HfArg(default=2e-3, help="AdamW's learning rate of the critic, constant")


class Critic(nn.Module):
    """A copy of the base model with a scalar head that starts at zero."""

    def __init__(self, model):
        super().__init__()
        self.body = copy.deepcopy(model.base_model)
        self.head = nn.Linear(model.config.hidden_size, 1, bias=False, device=model.device)
        nn.init.zeros_(self.head.weight)

    def forward(self, batch):
        """Values, (B, T + 1): V_t, read where token t is predicted, and V after the last column."""
        output, place_BS, _ = forward_packed(self.body, batch)
        num_values = batch.mask_BT.shape[1] + 1
        hidden = output.last_hidden_state.flatten(0, 1)[place_BS[:, -num_values:]]
        return self.head(hidden)[..., 0].float()


def masked_mean(x, mask):
    """Mean of x where the mask is 1; 0 if it never is. Masked-out values are ignored, even NaN."""
    return torch.where(mask.bool(), x, 0).sum() / mask.sum().clamp(min=1)


def compute_gae(rewards_BT, values_BT, mask_BT, gamma, lam):
    """(advantages, returns), both (B, T), 0 on padding: generalized advantage estimation.

    Responses begin at t = 0, and the value after their last token is 0; for one that was cut off, the
    caller adds gamma times the value there to its last reward, which is the same as bootstrapping.
    """
    mask_BT = mask_BT.bool()
    rewards_BT = torch.where(mask_BT, rewards_BT, 0)
    values_BT = torch.where(mask_BT, values_BT, 0)
    advantages_BT = torch.zeros_like(rewards_BT)
    next_advantage_B = torch.zeros_like(rewards_BT[:, 0])
    next_value_B = torch.zeros_like(rewards_BT[:, 0])
    for t in reversed(range(rewards_BT.shape[1])):
        # delta_t = rew_t + gamma V_t+1 - V_t;  A_t = delta_t + gamma lambda A_t+1
        delta_B = rewards_BT[:, t] + gamma * next_value_B - values_BT[:, t]
        advantages_BT[:, t] = delta_B + gamma * lam * next_advantage_B
        next_advantage_B = advantages_BT[:, t]
        next_value_B = values_BT[:, t]
    return advantages_BT, advantages_BT + values_BT


def whiten(x_BT, mask_BT):
    """Mean 0 and standard deviation 1 over the tokens of the mask."""
    mean = masked_mean(x_BT, mask_BT)
    variance = masked_mean((x_BT - mean) ** 2, mask_BT)
    return (x_BT - mean) / (variance.sqrt() + 1e-8)


def value_loss(values_BT, old_values_BT, returns_BT, mask_BT, *, value_clip=0.2, num_tokens=None):
    """The micro-batch's share of L_V; the shares of an optimizer step add up to its loss.

    values_BT, old_values_BT, returns_BT, mask_BT: (B, T), the first with gradient. value_clip 0 takes
    the squared error of V alone. num_tokens counts the whole optimizer step [None: this is it].
    """
    mask_BT = mask_BT.bool()
    if num_tokens is None:
        num_tokens = mask_BT.sum().clamp(min=1)
    # Masked before the square, since 0 * NaN is NaN, in the backward pass too.
    error_BT = torch.where(mask_BT, values_BT - returns_BT, 0)
    squared_BT = error_BT**2
    if value_clip > 0:
        # max of the errors of V and of V kept near V_old
        moved_BT = torch.where(mask_BT, values_BT - old_values_BT, 0).clamp(-value_clip, value_clip)
        near_error_BT = torch.where(mask_BT, old_values_BT + moved_BT - returns_BT, 0)
        squared_BT = torch.max(squared_BT, near_error_BT**2)
    return squared_BT.sum() / num_tokens


def policy_loss(
    logprobs_BT,
    old_logprobs_BT,
    advantages_BT,
    mask_BT,
    *,
    clip_eps_low=0.2,
    clip_eps_high=0.2,
    num_tokens=None,
):
    """The micro-batch's share of the clipped term of -J; the shares of an optimizer step add up to it.

    logprobs_BT      log-probs of the sampled tokens under the current policy, with gradient
    old_logprobs_BT  the same before the first step on this batch
    advantages_BT    (B, 1), broadcast over the tokens, or (B, T)
    mask_BT          1 on response tokens, the EOS included (bool or float); the rest is ignored
    num_tokens       response tokens in the whole optimizer step [None: this is the whole step]

    Returns (loss, stats): a scalar, and {name: scalar}, means and a maximum over the given tokens.
    """
    assert advantages_BT.shape in ((len(mask_BT), 1), mask_BT.shape), "advantages_BT: (B, 1) or (B, T)"
    mask_BT = mask_BT.bool()
    if num_tokens is None:
        num_tokens = mask_BT.sum().clamp(min=1)
    # Masked before exp, since 0 * inf is NaN, in the backward pass too; clamped to keep exp finite.
    logratio_BT = torch.where(mask_BT, logprobs_BT - old_logprobs_BT, 0).clamp(-20, 20)
    ratio_BT = logratio_BT.exp()
    clipped_BT = ratio_BT.clamp(1 - clip_eps_low, 1 + clip_eps_high)
    # PPO's pessimistic bound, the smaller of r A and clip(r) A
    objective_BT = torch.min(ratio_BT * advantages_BT, clipped_BT * advantages_BT)
    # Where the clip takes the gradient away: A < 0 and r < 1 - eps, or A > 0 and r > 1 + eps.
    clips_low_BT = (ratio_BT < clipped_BT) & (advantages_BT < 0)
    clips_high_BT = (ratio_BT > clipped_BT) & (advantages_BT > 0)
    stats = {
        "approx_kl": masked_mean(ratio_BT - 1 - logratio_BT, mask_BT),
        "ratio_max": torch.where(mask_BT, ratio_BT, 0).max(),
        "clipfrac_low": masked_mean(clips_low_BT.float(), mask_BT),
        "clipfrac_high": masked_mean(clips_high_BT.float(), mask_BT),
    }
    # Token-mean: 1/(sum_i |o_i|) sum_i sum_t
    loss = -torch.where(mask_BT, objective_BT, 0).sum() / num_tokens
    return loss, {name: value.detach() for name, value in stats.items()}


def main(args):
    # ---------------------------------------------------------------------------------------- setup
    if args.group_size != 1:
        raise UserError("--group_size must be 1: the critic is the baseline, not a group")
    run = Run(args)
    verify = load_verifier(args)
    master, tokenizer = load_model(args)
    model = working_copy(master, args.dtype)
    sampler = rollout_copy(model, master, args.rollout_dtype)
    train_problems, held_out_problems = load_problems(args, model, tokenizer)
    generator = torch.Generator().manual_seed(args.seed)
    master_critic = Critic(master)
    critic = working_copy(master_critic, args.dtype)
    critic_group = {"params": list(master_critic.parameters()), "lr": args.critic_lr}
    policy_group = {"params": list(master.parameters()), "lr": args.lr}
    optimizer = torch.optim.AdamW([policy_group, critic_group], weight_decay=0.0, fused=True)
    # what a checkpoint holds besides the policy
    parts = {"optimizer": optimizer, "critic": master_critic}
    if args.kl_coef > 0:
        ref_model = copy.deepcopy(model)
        parts["reference"] = ref_model
    state = run.restore(master, generator, **parts)
    refresh(model, master)
    refresh(critic, master_critic)
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
        rewards_N = torch.tensor([reward for reward, _ in verdicts])

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
        ref_logprobs = []
        values = []
        with torch.no_grad():
            for minibatch in minibatches:
                for rows in micro_batches(minibatch, args.micro_batch_size):
                    micro = batch.rows(rows)
                    outputs = token_logprobs(model, micro, args.temperature)
                    old_logprobs.append(outputs.logprobs_BT)
                    old_experts.append(outputs.experts_BTLK)
                    if args.routing_replay == "r2":
                        old_choices.append(outputs.experts_BSLK)
                    if args.kl_coef > 0:
                        ref_outputs = token_logprobs(ref_model, micro, args.temperature, replay=False)
                        ref_logprobs.append(ref_outputs.logprobs_BT)
                    values.append(critic(micro))
        old_logprobs_NT = collect(old_logprobs, minibatches)
        old_experts_NTLK = collect(old_experts, minibatches)
        if args.routing_replay == "r2":
            batch.replayed_experts_BSLK = collect(old_choices, minibatches)
        # w, made of rho = pi_old / mu, where mu is the sampler: a factor on A, 1 without a correction
        correction = rollout_correction(old_logprobs_NT, batch, args)
        meter.add_once("rollout", correction.stats, 1)
        meter.add_once("rollout", mismatch_stats(old_logprobs_NT, old_experts_NTLK, batch), 1)

        # ------------------------------------------------------------------------------- advantages
        values_NU = collect(values, minibatches)  # U = T + 1: also the value after the last column
        old_values_NT = values_NU[:, :-1]
        length_N1 = batch.mask_BT.sum(1, keepdim=True)
        value_after_N1 = values_NU.gather(1, length_N1)
        is_cut_off_N1 = torch.tensor([[c.truncated] for c in completions], device=args.device)
        # rew_t = -beta log(pi_old / pi_ref); the last token adds R, and gamma V if it was cut off
        rewards_N1 = rewards_N[:, None].to(args.device)
        last_reward_N1 = rewards_N1 + is_cut_off_N1 * args.gamma * value_after_N1
        token_rewards_NT = torch.zeros_like(old_logprobs_NT)
        if args.kl_coef > 0:
            ref_logprobs_NT = collect(ref_logprobs, minibatches)
            log_ratio_NT = torch.where(batch.mask_BT, old_logprobs_NT - ref_logprobs_NT, 0)
            token_rewards_NT = -args.kl_coef * log_ratio_NT
            # The plain estimator, of pi_old; grpo.py's kl_ref is k3, of the policy during the update.
            meter.add_once("losses", {"kl_ref": masked_mean(log_ratio_NT, batch.mask_BT)}, 1)
        token_rewards_NT = token_rewards_NT.scatter_add(1, length_N1 - 1, last_reward_N1)
        advantages_NT, returns_NT = compute_gae(
            token_rewards_NT, old_values_NT, batch.mask_BT, args.gamma, args.gae_lambda
        )
        errors = (returns_NT - old_values_NT)[batch.mask_BT]
        explained_variance = 1 - errors.var() / returns_NT[batch.mask_BT].var().clamp(min=1e-8)
        meter.add_once("losses", {"explained_variance": explained_variance}, 1)
        advantages_NT = whiten(advantages_NT, batch.mask_BT)

        # ----------------------------------------------------------------------------------- update
        for epoch in range(args.update_epochs):
            for step, minibatch in enumerate(minibatches):
                num_sequences = len(minibatch)
                num_tokens = batch.mask_BT[minibatch].sum()
                step_loss = torch.zeros((), device=args.device)
                step_value_loss = torch.zeros((), device=args.device)
                for rows in micro_batches(minibatch, args.micro_batch_size):
                    micro = batch.rows(rows)
                    outputs = token_logprobs(
                        model, micro, args.temperature, entropy_grad=args.entropy_coef > 0
                    )
                    loss, stats = policy_loss(
                        outputs.logprobs_BT,
                        old_logprobs_NT[rows],
                        correction.weights[rows] * advantages_NT[rows],
                        micro.mask_BT,
                        clip_eps_low=args.clip_eps_low,
                        clip_eps_high=args.clip_eps_high,
                        num_tokens=num_tokens,
                    )
                    critic_loss = value_loss(
                        critic(micro)[:, :-1],
                        old_values_NT[rows],
                        returns_NT[rows],
                        micro.mask_BT,
                        value_clip=args.value_clip,
                        num_tokens=num_tokens,
                    )
                    entropy = torch.where(micro.mask_BT, outputs.entropy_BT, 0).sum() / num_tokens
                    total_loss = loss + args.value_coef * critic_loss - args.entropy_coef * entropy
                    # The aux loss is a mean over its micro-batch, so it is weighted by the share of the
                    # step in it; it alone depends, slightly, on --micro_batch_size.
                    share = len(rows) / num_sequences
                    total_loss = total_loss + args.router_aux_coef * outputs.aux_loss * share
                    total_loss.backward()
                    step_loss += loss.detach()
                    step_value_loss += critic_loss.detach()
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
                add_up(step_value_loss)
                add_up_gradients(master)
                add_up_gradients(master_critic)
                grad_norm = torch.nn.utils.clip_grad_norm_(master.parameters(), args.max_grad_norm)
                critic_norm = torch.nn.utils.clip_grad_norm_(
                    master_critic.parameters(), args.max_grad_norm
                )
                norms = {"grad_norm": grad_norm, "critic_grad_norm": critic_norm}
                run.check_finite(iteration, loss=step_loss, **norms)
                optimizer.step()
                optimizer.zero_grad()
                refresh(model, master)
                refresh(critic, master_critic)
                meter.add_once("losses", {"policy_loss": step_loss}, num_sequences)
                meter.add_once("losses", {"value_loss": step_value_loss}, num_sequences)
                meter.add_once("charts", {"grad_norm": grad_norm}, 1)

        # ------------------------------------------------------------------- log, evaluate and save
        end = time.time()
        state["iteration"] = iteration
        metrics = {
            **meter.means(),
            **describe(completions, verdicts, args.group_size, prefix="rollout/"),
            "rollout/reward_mean": rewards_N.mean().item(),
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
