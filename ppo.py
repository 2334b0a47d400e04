"""PPO: Proximal Policy Optimization (arXiv 1707.06347), as in InstructGPT (arXiv 2203.02155).

  J = 1/(sum_i |o_i|) sum_i sum_t min(r_it A_it, clip(r_it, 1 - eps, 1 + eps) A_it) - c_v L_V + c_e entropy

  r_it = pi(o_it) / pi_old(o_it), o_i a completion of |o_i| tokens
  A_it = sum_k (gamma lambda)^k delta_i,t+k, whitened (GAE);  delta_t = rew_t + gamma V_t+1 - V_t
  rew_it = -beta log(pi_old(o_it) / pi_ref(o_it)), and the verifier's reward R_i on top at the last token
  L_V  = mean over tokens of max((V - returns)^2, (V_old + clip(V - V_old, -0.2, 0.2) - returns)^2)
  returns = A + V_old, before A is whitened

The root of the family: grpo.py is the child, and its header lists the differences.

Left open by the papers, chosen here: the critic is a second copy of the base model with a linear head that
starts at zero, and V_t is read where o_t is predicted; after the last token V is 0, or the critic's value
there if the completion was cut off; one completion per prompt, so that a rollout is as large as the
siblings'; gamma 1, so a right answer is worth the same however long it is; beta 0.02; c_v 0.5; c_e 0; a
gradient norm of its own for each model, and a higher learning rate for the critic, which has to learn from
nothing to see a wrong step (at the policy's 2e-4 it explains 2 % of the variance of the returns in the last
ten iterations of each of seeds 1, 2, 3; at 2e-3, 8 to 18 %).

Run:    python ppo.py
Expect: greedy held-out accuracy from 0.45 to 0.95 or more in about one minute on two CPU cores, and half
        a minute more for the base model, the first time.
"""

import copy
import time
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from transformers.hf_argparser import HfArg

from common import Meter, Run, collate, evaluate, fail, forward_packed, load_model, load_problems
from common import masked_mean, parse_args, router_stats, sample, take_problems, token_logprobs, verify


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
    prompts_per_iteration: int = HfArg(default=256, help="prompts in a rollout")  # 32 x 8
    group_size: int = HfArg(default=1, help="completions per prompt")  # no groups here
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
    kl_coef: float = HfArg(default=0.02, help="beta, the weight of the KL to the reference in the reward")
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

    def forward(self, batch, dtype):
        """Values, (B, T + 1): V_t, read where token t is predicted, and the value after the last column."""
        with torch.autocast(batch.mask_NT.device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
            output, index_BS, _ = forward_packed(self.body, batch)
        index_BU = index_BS[:, -batch.mask_NT.shape[1] - 1 :]  # U = T + 1
        return self.head(output.last_hidden_state.flatten(0, 1)[index_BU].float())[..., 0]


def compute_gae(rewards_BT, values_BT, mask_BT, gamma, lam):
    """(advantages, returns), both (B, T), 0 on padding: generalized advantage estimation on response tokens.

    Responses begin at t = 0, and the value after their last token is 0; for one that was cut off, the caller
    adds gamma times the value there to its last reward, which comes to the same.
    """
    mask_BT = mask_BT.bool()
    rewards_BT, values_BT = torch.where(mask_BT, rewards_BT, 0), torch.where(mask_BT, values_BT, 0)
    advantages_BT, next_advantage_B = torch.zeros_like(rewards_BT), torch.zeros_like(rewards_BT[:, 0])
    next_values_BT = torch.cat([values_BT[:, 1:], torch.zeros_like(values_BT[:, :1])], dim=1)
    for t in reversed(range(rewards_BT.shape[1])):
        # delta_t = rew_t + gamma V_t+1 - V_t;  A_t = delta_t + gamma lambda A_t+1
        delta_B = rewards_BT[:, t] + gamma * next_values_BT[:, t] - values_BT[:, t]
        next_advantage_B = advantages_BT[:, t] = delta_B + gamma * lam * next_advantage_B
    return advantages_BT, advantages_BT + values_BT


def whiten(x_BT, mask_BT):
    """Mean 0 and standard deviation 1 over the tokens of the mask."""
    mean = masked_mean(x_BT, mask_BT)
    return (x_BT - mean) / (masked_mean((x_BT - mean) ** 2, mask_BT).sqrt() + 1e-8)


def value_loss(values_BT, old_values_BT, returns_BT, mask_BT, num_tokens, args):
    """Mean squared error over the tokens of the step, of V or of V kept near V_old: the larger one."""
    error_BT = (values_BT - returns_BT) ** 2
    if args.value_clip:
        near_BT = old_values_BT + (values_BT - old_values_BT).clamp(-args.value_clip, args.value_clip)
        error_BT = torch.max(error_BT, (near_BT - returns_BT) ** 2)
    return torch.where(mask_BT.bool(), error_BT, 0).sum() / num_tokens


def policy_loss(
    logprobs_BT, old_logprobs_BT, advantages_BT, mask_BT, num_sequences, num_tokens, args,
):
    """The clipped term of -J on a micro-batch; the micro-batches of an optimizer step add up to the step's.

    mask_BT (bool or float) is 1 on response tokens, the EOS included; whatever stands elsewhere does no harm.
    num_sequences and num_tokens count the whole optimizer step. Returns (loss, stats), the stats being means
    over the tokens given here.
    """
    mask_BT = mask_BT.bool()
    # Masked and clamped before exp, since 0 * inf is NaN, in the backward pass too.
    logratio_BT = torch.where(mask_BT, logprobs_BT - old_logprobs_BT, 0).clamp(-20, 20)
    ratio_BT = logratio_BT.exp()
    clipped_BT = ratio_BT.clamp(1 - args.clip_eps_low, 1 + args.clip_eps_high)
    # min(r A, clip(r) A), the pessimistic one of the two: for A < 0 that is the one with the larger ratio.
    objective_BT = torch.min(ratio_BT * advantages_BT, clipped_BT * advantages_BT)
    stats = {
        "approx_kl": masked_mean(ratio_BT - 1 - logratio_BT, mask_BT),
        "ratio_max": ratio_BT.max(),
        # Only where the clip binds, that is, where it takes the gradient away.
        "clipfrac_low": masked_mean(((ratio_BT < clipped_BT) & (advantages_BT < 0)).float(), mask_BT),
        "clipfrac_high": masked_mean(((ratio_BT > clipped_BT) & (advantages_BT > 0)).float(), mask_BT),
    }
    # Token-mean: sum_i sum_t / sum_i |o_i|
    loss = -torch.where(mask_BT, objective_BT, 0).sum() / num_tokens
    return loss, stats


def main(args):
    # -------------------------------------------------------------------------------------------------- setup
    if args.group_size != 1:
        fail("--group_size must be 1: the critic is the baseline, not a group")
    run = Run(args)
    model, tokenizer = load_model(args)
    train_problems, held_out_problems = load_problems(args, model, tokenizer)
    generator = torch.Generator().manual_seed(args.seed)
    critic, ref_model = Critic(model), copy.deepcopy(model)
    critic_group = {"params": list(critic.parameters()), "lr": args.critic_lr}
    policy_group = {"params": list(model.parameters()), "lr": args.lr}
    optimizer = torch.optim.AdamW([policy_group, critic_group], weight_decay=0.0)
    parts = {"optimizer": optimizer}  # what a checkpoint holds beside the policy
    parts |= {"reference": ref_model, "critic": critic}
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
        rewards_N = torch.tensor([reward for reward, _ in verdicts], device=args.device)

        # -------------------------------------------------------- old log-probs, by the forward of the update
        # Of the same rows in the same micro-batches as below: the first step's ratio is 1 to the last bit.
        minibatches = torch.arange(len(completions), device=args.device).tensor_split(args.num_minibatches)
        micro_batches = [rows for minibatch in minibatches for rows in minibatch.split(args.micro_batch_size)]
        old_logprobs, old_experts, values = [], [], []
        with torch.no_grad():
            for rows in micro_batches:
                outputs = token_logprobs(model, batch.rows(rows), args.temperature, args.dtype)
                old_logprobs.append(outputs.logprobs_BT)
                old_experts.append(outputs.experts_BTLK)
                values.append(critic(batch.rows(rows), args.dtype))
            ref_logprobs_NT = torch.cat([
                token_logprobs(ref_model, batch.rows(rows), args.temperature, args.dtype).logprobs_BT
                for rows in micro_batches
            ])
        old_logprobs_NT, old_experts_NTLK = torch.cat(old_logprobs), torch.cat(old_experts)
        sampler_logratio_NT = old_logprobs_NT - batch.sampler_logprobs_NT
        sampler_kl_NT = sampler_logratio_NT.exp() - 1 - sampler_logratio_NT
        meter.add("rollout", {"sampler_kl": masked_mean(sampler_kl_NT, batch.mask_NT)}, 1)

        # ----------------------------------------------------------------------------------------- advantages
        values_NU = torch.cat(values)  # U = T + 1
        old_values_NT, length_N1 = values_NU[:, :-1], batch.mask_NT.sum(1, keepdim=True)
        truncated_N = torch.tensor([c.truncated for c in completions], device=args.device)
        # rew_t = -beta log(pi_old / pi_ref); at the last token, R and, if there is no EOS, gamma V after it
        log_ratio_NT = torch.where(batch.mask_NT, old_logprobs_NT - ref_logprobs_NT, 0)
        last_N = rewards_N + truncated_N * args.gamma * values_NU.gather(1, length_N1)[:, 0]
        token_rewards_NT = (-args.kl_coef * log_ratio_NT).scatter_add(1, length_N1 - 1, last_N[:, None])
        advantages_NT, returns_NT = compute_gae(
            token_rewards_NT, old_values_NT, batch.mask_NT, args.gamma, args.gae_lambda
        )
        errors, returns = (returns_NT - old_values_NT)[batch.mask_NT], returns_NT[batch.mask_NT]
        explained = {"explained_variance": 1 - errors.var() / returns.var().clamp(min=1e-8)}
        meter.add("losses", explained | {"kl_ref": masked_mean(log_ratio_NT, batch.mask_NT)}, 1)
        advantages_NT = whiten(advantages_NT, batch.mask_NT)

        # --------------------------------------------------------------------------------------------- update
        for epoch in range(args.update_epochs):
            for step, minibatch in enumerate(minibatches):
                num_sequences, num_tokens = len(minibatch), batch.mask_NT[minibatch].sum()
                for rows in minibatch.split(args.micro_batch_size):
                    micro, share = batch.rows(rows), len(rows) / num_sequences
                    outputs = token_logprobs(model, micro, args.temperature, args.dtype)
                    loss, stats = policy_loss(
                        outputs.logprobs_BT, old_logprobs_NT[rows], advantages_NT[rows], micro.mask_NT,
                        num_sequences, num_tokens, args,
                    )
                    critic_loss = value_loss(
                        critic(micro, args.dtype)[:, :-1], old_values_NT[rows], returns_NT[rows],
                        micro.mask_NT, num_tokens, args,
                    )
                    entropy = torch.where(micro.mask_NT, outputs.entropy_BT, 0).sum() / num_tokens
                    total = loss + args.value_coef * critic_loss - args.entropy_coef * entropy
                    # The aux loss is not a sum over tokens: it alone depends, a little, on the micro-batches.
                    (total + args.router_aux_coef * outputs.aux_loss * share).backward()
                    stats["entropy"] = masked_mean(outputs.entropy_BT, micro.mask_NT)
                    router = router_stats(outputs, old_experts_NTLK[rows], micro.mask_NT)
                    meter.add("losses", stats, micro.mask_NT.sum())
                    meter.add("moe", router, micro.mask_NT.sum())
                    meter.add("moe", {"aux_loss": outputs.aux_loss}, len(rows))
                    meter.add("losses", {"policy_loss": loss / share}, len(rows))  # as of a whole step
                    meter.add("losses", {"value_loss": critic_loss / share}, len(rows))
                    if epoch == step == 0:  # nothing has been updated yet, so the ratio has to be 1
                        error_BT = (outputs.logprobs_BT - old_logprobs_NT[rows]).exp() - 1
                        error = torch.where(micro.mask_NT, error_BT, 0).abs().max()
                        meter.add("losses", {"first_step_ratio_error_max": error}, 1)
                grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                critic_norm = torch.nn.utils.clip_grad_norm_(critic.parameters(), args.max_grad_norm)
                norms = {"grad_norm": grad_norm, "critic_grad_norm": critic_norm}
                run.check_finite(iteration, rewards=rewards_N, loss=total, **norms)
                optimizer.step()
                optimizer.zero_grad()
                meter.add("charts", {"grad_norm": grad_norm}, 1)

        # ----------------------------------------------------------------------------- log, evaluate and save
        state["iteration"], end = iteration, time.time()
        metrics = meter.means() | {
            "rollout/reward_mean": rewards_N.mean().item(),
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
