"""PPO: Proximal Policy Optimization (arXiv 1707.06347), as in InstructGPT (arXiv 2203.02155).

  J = 1/(sum_i |o_i|) sum_i sum_t min(r_it A_it, clip(r_it, 1 - eps, 1 + eps) A_it) - c_v L_V + c_e H

  o_i      a completion of |o_i| tokens, EOS included; sum_i: over all completions in an optimizer step
  o_it     its token t; pi(o_it): its probability under the policy, given the prompt and o_i,<t
  r_it     = pi(o_it) / pi_old(o_it); pi_old: the policy before the rollout's first optimizer step
  eps      --clip_eps_low and --clip_eps_high
  A_it     = sum_k (gamma lambda)^k delta_i,t+k, whitened (GAE)
  delta_it = rew_it + gamma V_old,i,t+1 - V_old,it; gamma, lambda: --gamma, --gae_lambda
  rew_it   = -beta log(pi_old(o_it) / pi_ref(o_it)), plus at the last token R_i: the reward of o_i
  beta     --kl_coef; pi_ref: the policy before training
  V_it     the critic's value where o_it is predicted; V_old: before the rollout's first optimizer step
  L_V      = mean over tokens of max((V - ret)^2, (V_old + clip(V - V_old, -d, d) - ret)^2)
  ret_it   = A_it + V_old,it, before A is whitened;  H: mean entropy over tokens
  c_v, c_e, d: --value_coef, --entropy_coef, --value_clip

Suffixes name axes: B rows, T response tokens, N those of all rows, S prompt and response, 1 for a
size-1 axis.

This is the root of the family. The header of its child, grpo.py, lists the differences.

Not specified in the papers:
  - d is 0.2.
  - There are 256 prompts with one completion each, as many completions as in the siblings.
As in InstructGPT:
  - gamma is 1, so that a right answer is worth the same at any length.
  - beta is 0.02 (with --kl_coef 0 there is no reference).
  - There is one epoch per rollout.
Unlike PPO's equations 10 to 12, V is 0 after the last token, even if the completion was truncated: the
reward ends it. With the critic's value beside that reward, the policy would learn to be truncated.
Unlike the papers, but as in verl 0.9.1 and OpenRLHF 0.11.2: A is whitened, and L_V is clipped.
Unlike the papers: c_e is 0 and c_v 0.5 (PPO on Atari: 0.01 and 1). The two models share no weights, so
c_v only scales the critic's gradient. AdamW ignores that, except where the gradient is clipped first
(--max_grad_norm). The critic starts as a second copy of the base model with a linear head of zeros, so
its lr is ten times the policy's. InstructGPT's starts from the reward model, with an lr of 9e-6 (5e-6
beside its 175B policy).

Run:    python ppo.py
Expect: greedy held-out accuracy on sums of two numbers rises from 0.43 to at least 0.97 in under a
        minute on one CPU core.
"""

from dataclasses import dataclass
from itertools import chain

import torch
from torch import nn

from common import RunArgs, flag, launch
from common import load_grader, load_policy, load_problems, Run
from common import TrainedModel, critic_stats
from common import evaluate, sample
from common import split_into_steps, token_logprobs


@dataclass
class Args(RunArgs):  # more flags: --help
    iterations: int = flag(40, "number of iterations (one rollout plus its updates)")
    prompts_per_iteration: int = flag(256, "prompts per rollout")  # group_size is 1
    max_new_tokens: int = flag(48, "maximum tokens per completion")
    temperature: float = flag(1.0, "temperature for sampling and for all log-probs")
    lr: float = flag(2e-4, "AdamW's constant learning rate")
    update_epochs: int = flag(1, "epochs per rollout")
    num_minibatches: int = flag(16, "optimizer steps per epoch")
    max_grad_norm: float = flag(1.0, "gradients are clipped to this norm")
    router_aux_coef: float = flag(0.001, "weight of an MoE's load-balancing loss")
    # flags of the algorithm
    clip_eps_low: float = flag(0.2, "the ratio is clipped below 1 - this")
    clip_eps_high: float = flag(0.2, "the ratio is clipped above 1 + this")
    kl_coef: float = flag(0.02, "beta, the weight of the KL to the reference [0: none]")
    gamma: float = flag(1.0, "discount per token")
    gae_lambda: float = flag(0.95, "lambda of GAE")
    value_coef: float = flag(0.5, "weight of the value loss; matters only if its gradient is clipped")
    value_clip: float = flag(0.2, "how far a value may move from the old one [0: no limit]")
    entropy_coef: float = flag(0.0, "weight of the entropy bonus")
    critic_lr: float = flag(2e-3, "the critic's constant learning rate")

    def check(self):
        self.check_range(0, 1, "clip_eps_low", "gamma", "gae_lambda")


class Critic(nn.Module):
    """A copy of the base model with a scalar head that starts at zero."""

    def __init__(self, policy):
        super().__init__()
        self.body = policy.body_copy()
        hidden_size = policy.model.config.get_text_config().hidden_size
        self.head = nn.Linear(hidden_size, 1, bias=False, device=policy.model.device)
        nn.init.zeros_(self.head.weight)

    def forward(self, batch):
        """Values, (B, T): V_t, read where token t is predicted."""
        # No attention mask: padding is on the right, and attention is causal.
        hidden = self.body(batch.tokens_BS, use_cache=False).last_hidden_state
        # In float32, as the head is: near 0.5, bfloat16 has steps of 0.002 to 0.004.
        hidden_N = hidden.flatten(0, 1)[batch.predictor_N].float()
        return batch.as_rows(self.head(hidden_N)[:, 0])


def masked_mean(x, mask):
    """Mean of x where the mask is 1; 0 for an empty mask. Masked-out values are ignored, even NaN."""
    return torch.where(mask.bool(), x, 0).sum() / mask.sum().clamp(min=1)


def compute_gae(rewards_BT, values_BT, mask_BT, gamma, lam):
    """Generalized advantage estimation: (advantages, returns), both (B, T), 0 where the mask is 0.
    lam: a number, or (B,).

    The value after the last token is 0. A hole in the mask, such as tool output, is skipped: each token
    is followed by the next one in the mask.
    """
    mask_BT = mask_BT.bool()
    rewards_BT = torch.where(mask_BT, rewards_BT, 0)
    values_BT = torch.where(mask_BT, values_BT, 0)
    advantages_BT = torch.zeros_like(rewards_BT + values_BT)  # rewards may be integers or booleans
    next_advantage_B = torch.zeros_like(advantages_BT[:, 0])
    next_value_B = torch.zeros_like(values_BT[:, 0])
    for t in reversed(range(rewards_BT.shape[1])):
        # delta_t = rew_t + gamma V_t+1 - V_t;  A_t = delta_t + gamma lambda A_t+1
        delta_B = rewards_BT[:, t] + gamma * next_value_B - values_BT[:, t]
        advantage_B = delta_B + gamma * lam * next_advantage_B
        is_token_B = mask_BT[:, t]
        advantages_BT[:, t] = torch.where(is_token_B, advantage_B, 0)
        next_advantage_B = torch.where(is_token_B, advantage_B, next_advantage_B)
        next_value_B = torch.where(is_token_B, values_BT[:, t], next_value_B)
    return advantages_BT, advantages_BT + values_BT


def whiten(x_BT, mask_BT, all_N=None):
    """x minus the mean of all_N, divided by their standard deviation; 0 where the mask is 0, and if
    all_N are equal, up to rounding. all_N: x at all tokens of the rollout [None: x_BT has them all]."""
    mask_BT = mask_BT.bool()
    if all_N is None:
        all_N = x_BT[mask_BT]
    mean = all_N.mean()
    std = all_N.std(correction=0)
    # Dividing by a tiny std would amplify rounding.
    is_constant = std <= 1e-6 * all_N.abs().max().clamp(min=1)
    return torch.where(mask_BT & ~is_constant, (x_BT - mean) / (std + 1e-8), 0)


def token_rewards(rewards_B1, kl_BT, mask_BT, kl_coef):
    """rew, (B, T): -beta KL at each token, plus R at the last one."""
    # The response's last token, where the running count of tokens first reaches its maximum.
    last_B1 = mask_BT.cumsum(1).argmax(1, keepdim=True)
    return (-kl_coef * kl_BT).scatter_add(1, last_B1, rewards_B1)


def value_loss(values_BT, old_values_BT, returns_BT, mask_BT, *, value_clip=0.2, num_tokens=None):
    """This micro-batch's part of L_V: its sum, divided by the whole step's num_tokens. Parts add up.

    values_BT, old_values_BT, returns_BT, mask_BT: (B, T), the first with gradient. value_clip 0
    means the plain squared error. num_tokens: as in policy_loss.
    """
    mask_BT = mask_BT.bool()
    if num_tokens is None:
        num_tokens = mask_BT.sum().clamp(min=1)
    # Mask before the square: 0 * NaN is NaN, in the backward pass too.
    error_BT = torch.where(mask_BT, values_BT - returns_BT, 0)
    squared_BT = error_BT**2
    if value_clip > 0:
        # the larger of two errors: of V, and of V kept near V_old
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
    """Returns (loss, stats). loss: the sum over this micro-batch, divided by the whole step's
    num_tokens, so the micro-batches of a step add up to the clipped term of -J. stats: {name: scalar}
    for the log.

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
    # Token-mean: 1/(sum_i |o_i|) sum_i sum_t
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
    # pi_ref has the initial weights: it is copied before Run, which may resume with later ones.
    reference = policy.frozen_copy() if args.kl_coef > 0 else None
    critic = TrainedModel(Critic(policy), args.dtype)  # critic.model is what computes
    policy_group = {"params": list(policy.parameters()), "lr": args.lr}
    critic_group = {"params": list(critic.parameters()), "lr": args.critic_lr}
    optimizer = torch.optim.AdamW([policy_group, critic_group], weight_decay=0.0, fused=True)
    # Run logs, saves, and resumes.
    run = Run(args, policy, problems, optimizer=optimizer, reference=reference, critic=critic)
    if run.needs_first_eval:
        run.log_eval(evaluate(policy, held_out, grade, args, sampled=True))

    for iteration in run.iterations():  # from 1
        # ---------------------------------------------------------------------------------- rollout
        prompts = problems.take(args.prompts_per_iteration)
        completions = sample(policy, prompts, args.group_size, args, run.noise)
        completions = grade(completions)

        # ------------------------------------------------------------------- old policy, advantages
        # The update's forward on the update's micro-batches: in the first step, the ratio is exactly 1.
        steps = split_into_steps(completions, args.num_minibatches, args)
        batches = list(chain(*steps))
        for micro in batches:
            with torch.no_grad():
                micro.old = token_logprobs(policy, micro, args.temperature, only_logprobs=True)
                if reference is not None:
                    micro.ref = token_logprobs(reference, micro, args.temperature, only_logprobs=True)
                micro.values_BT = critic.model(micro)
            micro.kl_BT = torch.zeros_like(micro.old.logprobs_BT)
            if reference is not None:
                # log(pi_old / pi_ref), the plain KL estimator for the old policy. grpo.py uses k3 for
                # the policy that is being updated.
                kl_BT = micro.old.logprobs_BT - micro.ref.logprobs_BT
                micro.kl_BT = torch.where(micro.mask_BT, kl_BT, 0)
            # On the CPU: a GPU would mostly wait for the host to launch GAE's many small operations.
            mask_BT = micro.mask_BT.cpu()
            rewards_B1 = torch.tensor([[c.reward] for c in micro.completions])
            token_rewards_BT = token_rewards(rewards_B1, micro.kl_BT.cpu(), mask_BT, args.kl_coef)
            inputs = (token_rewards_BT, micro.values_BT.cpu(), mask_BT)
            gae_BT, returns_BT = compute_gae(*inputs, args.gamma, args.gae_lambda)
            micro.gae_BT = gae_BT.to(args.torch_device)
            micro.returns_BT = returns_BT.to(args.torch_device)
        gae_N = torch.cat([micro.gae_BT[micro.mask_BT] for micro in batches])
        for micro in batches:
            micro.advantages_BT = whiten(micro.gae_BT, micro.mask_BT, gae_N)

        # ----------------------------------------------------------------------------------- update
        has_bonus = args.entropy_coef > 0
        for step in steps * args.update_epochs:
            num_sequences = sum(len(micro) for micro in step)
            num_tokens = sum(micro.mask_BT.sum() for micro in step)
            for micro in step:
                outputs = token_logprobs(policy, micro, args.temperature, entropy_grad=has_bonus)
                loss, stats = policy_loss(
                    outputs.logprobs_BT,
                    micro.old.logprobs_BT,
                    micro.advantages_BT,
                    micro.mask_BT,
                    clip_eps_low=args.clip_eps_low,
                    clip_eps_high=args.clip_eps_high,
                    num_tokens=num_tokens,
                )
                critic_loss = value_loss(
                    critic.model(micro),
                    micro.values_BT,
                    micro.returns_BT,
                    micro.mask_BT,
                    value_clip=args.value_clip,
                    num_tokens=num_tokens,
                )
                # H is divided by the whole step's tokens, like the loss.
                entropy = torch.where(micro.mask_BT, outputs.entropy_BT, 0).sum() / num_tokens
                total_loss = loss + args.value_coef * critic_loss - args.entropy_coef * entropy
                # loss is a part of the step's. aux_loss, the mean of this micro-batch, gets its share.
                share = len(micro) / num_sequences
                total_loss = total_loss + args.router_aux_coef * outputs.aux_loss * share
                total_loss.backward()
                run.record(loss, stats, outputs, micro, value_loss=critic_loss)
            grad_norm = policy.clip_gradients(args.max_grad_norm)
            critic_norm = critic.clip_gradients(args.max_grad_norm)
            # Stops the run here, before the step, if the loss or a norm is not finite.
            run.record_step(num_sequences, grad_norm, critic_grad_norm=critic_norm)
            optimizer.step()  # with --dtype bfloat16, a hook then updates the bfloat16 copies
            optimizer.zero_grad()

        # -------------------------------------------------------------------------------------- log
        if run.is_due(args.eval_every):
            run.log_eval(evaluate(policy, held_out, grade, args, sampled=run.is_last))
        rewards_B1 = torch.tensor([[c.reward] for c in completions])
        metrics = critic_stats(batches)
        run.log(steps, completions, rewards_B1, **metrics)  # logs, saves when due, stops on Ctrl-C
    run.finish()  # prints held-out accuracy before and after, and some answers


if __name__ == "__main__":
    launch(main, Args)
