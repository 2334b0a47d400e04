"""PPO: Proximal Policy Optimization (arXiv 1707.06347), as in InstructGPT (arXiv 2203.02155).

  J = 1/(sum_i |o_i|) sum_i sum_t min(r_it A_it, clip(r_it, 1 - eps, 1 + eps) A_it) - c_v L_V + c_e H

  o_i      a completion of |o_i| tokens, EOS included; sum_i: over all completions of an optimizer step
  r_it     = pi(o_it) / pi_old(o_it); pi_old: the policy before the rollout's first optimizer step
  A_it     = sum_k (gamma lambda)^k delta_i,t+k, whitened (GAE);  delta_t = rew_t + gamma V_t+1 - V_t
  rew_it   = -beta log(pi_old(o_it) / pi_ref(o_it)), plus the verifier's reward R_i at the last token
  L_V      = mean over tokens of max((V - ret)^2, (V_old + clip(V - V_old, -d, d) - ret)^2)
  ret_it   = A_it + V_old,it, before A is whitened;  H: mean entropy over tokens
  _NT      axis suffixes: N rows of a rollout, B rows, T tokens, U = T + 1, 1 a size-1 axis

The root of the family: grpo.py is the child, and its header lists the differences.

Left open by the papers: the critic (here a second copy of the base model with a linear head that
starts at zero; V_t is read where o_t is predicted; after the last token V is 0, or the critic's value
if the completion was truncated); gamma 1, so that a right answer has the same value at any length;
beta 0.02; d 0.2; c_e 0; c_v 0.5, which matters only where the critic's gradient is clipped, since the
models share no weights and AdamW ignores the scale of a gradient. One completion for each of 256
prompts: as many completions as the siblings have. The critic has a higher learning rate than the
policy because it starts from nothing. With --kl_coef 0 there is no reference.

Run:    python ppo.py
Expect: greedy held-out accuracy on sums of two numbers rises from 0.43 to at least 0.95 in a minute
        on one CPU core.
"""

import copy
from dataclasses import dataclass

import torch
from torch import nn

from common import collate, evaluate, judge, load_policy, load_problems, load_verifier
from common import sample, score, score_old, score_values, token_logprobs
from plumbing import Meter, Run, RunArgs, TrainedModel, critic_stats, flag, forward_packed
from plumbing import iteration_metrics, launch, plan_memory, rollout_correction


@dataclass
class Args(RunArgs):  # model, data, device, precision, output: see plumbing/args.py, or --help
    iterations: int = flag(60, "rounds of rollout and update")
    prompts_per_iteration: int = flag(256, "prompts in a rollout")  # one completion each
    max_new_tokens: int = flag(48, "most tokens in a completion")
    temperature: float = flag(1.0, "temperature of the sampling and of all log-probs")
    lr: float = flag(2e-4, "AdamW's learning rate, constant")
    update_epochs: int = flag(1, "passes over a rollout")
    num_minibatches: int = flag(4, "optimizer steps per pass")
    max_grad_norm: float = flag(1.0, "gradients are clipped to this norm")
    router_aux_coef: float = flag(0.001, "weight of an MoE's load-balancing loss")
    # flags of the algorithm
    clip_eps_low: float = flag(0.2, "the ratio is clipped below 1 - this")
    clip_eps_high: float = flag(0.2, "the ratio is clipped above 1 + this")
    kl_coef: float = flag(0.02, "beta, the weight of the KL to the reference [0: none]")
    gamma: float = flag(1.0, "discount per token")
    gae_lambda: float = flag(0.95, "lambda of GAE")
    value_coef: float = flag(0.5, "weight of the value loss, where the critic's gradient is clipped")
    value_clip: float = flag(0.2, "how far a value may move [0: any distance]")
    entropy_coef: float = flag(0.0, "weight of the entropy bonus")
    critic_lr: float = flag(2e-3, "AdamW's learning rate of the critic, constant")

    def check(self):
        self.check_range(0, 1, "clip_eps_low", "gamma", "gae_lambda")
        self.check_range(1e-9, 1e9, "critic_lr")


class Critic(nn.Module):
    """A copy of the base model with a scalar head that starts at zero."""

    def __init__(self, policy):
        super().__init__()
        self.one_sequence_per_row = policy.one_sequence_per_row
        self.body = copy.deepcopy(policy.master.base_model)
        hidden_size = policy.model.config.get_text_config().hidden_size
        self.head = nn.Linear(hidden_size, 1, bias=False, device=policy.model.device)
        nn.init.zeros_(self.head.weight)

    def forward(self, batch):
        """Values, (B, U): V_t, read where token t is predicted, and V after the last column."""
        packed = forward_packed(self.body, batch, self.one_sequence_per_row)
        U = batch.mask_BT.shape[1] + 1
        return self.head(packed.hidden[packed.place_BS[:, -U:]])[..., 0].float()


def masked_mean(x, mask):
    """Mean of x where the mask is 1; 0 for an empty mask. Masked-out values are ignored, even NaN."""
    return torch.where(mask.bool(), x, 0).sum() / mask.sum().clamp(min=1)


def compute_gae(rewards_BT, values_BT, mask_BT, gamma, lam):
    """(advantages, returns), both (B, T), 0 where the mask is: generalized advantage estimation.

    The value after the last token is 0; for a response that was cut off, the caller adds gamma times
    the value there to its last reward, which is the same as bootstrapping. A hole in the mask, such as
    tool output, is skipped: what follows a token is the next one of the response.
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
        advantage_B = delta_B + gamma * lam * next_advantage_B
        is_token_B = mask_BT[:, t]
        advantages_BT[:, t] = torch.where(is_token_B, advantage_B, 0)
        next_advantage_B = torch.where(is_token_B, advantage_B, next_advantage_B)
        next_value_B = torch.where(is_token_B, values_BT[:, t], next_value_B)
    return advantages_BT, advantages_BT + values_BT


def whiten(x_BT, mask_BT):
    """Mean 0 and standard deviation 1 over the tokens of the mask."""
    mean = masked_mean(x_BT, mask_BT)
    variance = masked_mean((x_BT - mean) ** 2, mask_BT)
    return (x_BT - mean) / (variance.sqrt() + 1e-8)


def token_rewards(rewards_B1, kl_BT, values_BU, is_cut_off_B1, mask_BT, kl_coef, gamma):
    """rew, (B, T): -beta KL at each token; the last one adds R, and gamma V if it was cut off."""
    # The last token of the response: the count of tokens is complete there, and stays so after it.
    last_B1 = mask_BT.cumsum(1).argmax(1, keepdim=True)
    value_after_B1 = torch.where(is_cut_off_B1.bool(), values_BU.gather(1, last_B1 + 1), 0)
    last_reward_B1 = rewards_B1 + gamma * value_after_B1
    return (-kl_coef * kl_BT).scatter_add(1, last_B1, last_reward_B1)


def value_loss(values_BT, old_values_BT, returns_BT, mask_BT, *, value_clip=0.2, num_tokens=None):
    """L_V of a micro-batch, normalised by the whole step's count, so that micro-batches add up.

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
    """The clipped term of -J, normalised by the whole step's count, so that micro-batches add up.

    logprobs_BT      log-probs of the sampled tokens under the current policy, with gradient
    old_logprobs_BT  the same under the policy before the first step on this rollout [None: on-policy]
    advantages_BT    (B, 1) or (B,), broadcast over the tokens, or (B, T)
    mask_BT          1 on response tokens, the EOS included (bool or float); other tokens, such as
                     padding or tool output, get no gradient and enter no mean
    num_tokens       response tokens in the whole optimizer step [None: this is the whole step]; where
                     processes average their gradients, divide it by their number

    Returns (loss, stats): a scalar, and {name: scalar} for the log, over the given tokens.
    """
    if old_logprobs_BT is None:
        old_logprobs_BT = logprobs_BT.detach()
    advantages_BT = advantages_BT[:, None] if advantages_BT.dim() == 1 else advantages_BT
    shapes = [(len(mask_BT), 1), tuple(mask_BT.shape)]
    assert advantages_BT.shape in shapes, f"advantages_BT: {tuple(advantages_BT.shape)}, not {shapes}"
    mask_BT = mask_BT.bool()
    if num_tokens is None:
        num_tokens = mask_BT.sum().clamp(min=1)
    # Mask before exp, since 0 * inf is NaN, also in the backward pass; the clamp keeps exp finite.
    logratio_BT = torch.where(mask_BT, logprobs_BT - old_logprobs_BT, 0).clamp(-20, 20)
    ratio_BT = logratio_BT.exp()
    clipped_BT = ratio_BT.clamp(1 - clip_eps_low, 1 + clip_eps_high)
    # PPO's pessimistic bound, the smaller of r A and clip(r) A
    objective_BT = torch.min(ratio_BT * advantages_BT, clipped_BT * advantages_BT)
    # The clip removes the gradient where A < 0 and r < 1 - eps, or A > 0 and r > 1 + eps.
    clips_low_BT = (ratio_BT < clipped_BT) & (advantages_BT < 0)
    clips_high_BT = (ratio_BT > clipped_BT) & (advantages_BT > 0)
    stats = {
        "approx_kl": masked_mean(logratio_BT.expm1() - logratio_BT, mask_BT),  # r - 1 - log r
        "ratio_max": torch.where(mask_BT, ratio_BT, 0).max(),
        "clipfrac_low": masked_mean(clips_low_BT.float(), mask_BT),
        "clipfrac_high": masked_mean(clips_high_BT.float(), mask_BT),
    }
    # Token-mean: 1/(sum_i |o_i|) sum_i sum_t
    loss = -torch.where(mask_BT, objective_BT, 0).sum() / num_tokens
    return loss, {name: value.detach() for name, value in stats.items()}


def main(args):
    # ---------------------------------------------------------------------------------------- setup
    run = Run(args)
    verify = load_verifier(args)
    policy = load_policy(args)  # the model with its tokenizer
    problem_stream, held_out = load_problems(args, policy)
    critic = TrainedModel(Critic(policy), args.dtype)
    policy_group = {"params": list(policy.parameters()), "lr": args.lr}
    critic_group = {"params": list(critic.parameters()), "lr": args.critic_lr}
    has_bonus = args.entropy_coef > 0
    optimizer = torch.optim.AdamW([policy_group, critic_group], weight_decay=0.0, fused=True)
    generator = torch.Generator().manual_seed(args.seed)  # for the sampler's noise
    reference = policy.frozen_copy() if args.kl_coef > 0 else None
    parts = {"optimizer": optimizer, "critic": critic, "reference": reference}
    run.restore(policy, problem_stream, generator, **parts)
    args = plan_memory(args, policy, problem_stream, held_out)
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
        rewards_N1 = torch.tensor([[c.reward] for c in completions], device=args.device)

        # ---------------------------------------------------------------------------- old log-probs
        # Recompute them with the training forward (unless --old_logprobs sampler), since the sampler's
        # differ by rounding. Rows are not shuffled and micro-batches are those of the update, so that
        # r is exactly 1 in the first step.
        batch = collate(completions, args)
        minibatches = batch.minibatches(args.num_minibatches)
        old = score_old(policy, batch, minibatches, args)
        if args.kl_coef > 0:
            ref_logprobs_NT = score(reference, batch, minibatches, args)
        values_NU = score_values(critic, batch, minibatches, args)

        # ----------------------------------------------------------------------- rollout correction
        # Importance weights pi_old / sampler; all 1 unless --rollout_correction is on.
        correction = rollout_correction(old, batch, args)
        meter.add_global("rollout", correction.stats)

        # ------------------------------------------------------------------------------- advantages
        # The KL that token_rewards subtracts is log(pi_old / pi_ref), the plain estimator, of the old
        # policy; in grpo.py it is k3, of the policy during the update.
        kl_NT = torch.zeros_like(old.logprobs_NT)
        if args.kl_coef > 0:
            kl_NT = torch.where(batch.mask_BT, old.logprobs_NT - ref_logprobs_NT, 0)
            meter.add_global("losses", {"kl_ref": masked_mean(kl_NT, batch.mask_BT)})
        is_cut_off_N1 = torch.tensor([[c.truncated] for c in completions], device=args.device)
        token_rewards_NT = token_rewards(
            rewards_N1, kl_NT, values_NU, is_cut_off_N1, batch.mask_BT, args.kl_coef, args.gamma
        )
        old_values_NT = values_NU[:, :-1]
        advantages_NT, returns_NT = compute_gae(
            token_rewards_NT, old_values_NT, batch.mask_BT, args.gamma, args.gae_lambda
        )
        meter.add_global("losses", critic_stats(old_values_NT, returns_NT, batch.mask_BT))
        advantages_NT = correction.weights * whiten(advantages_NT, batch.mask_BT)

        # ----------------------------------------------------------------------------------- update
        for _ in range(args.update_epochs):
            for minibatch in minibatches:
                num_tokens = batch.mask_BT[minibatch].sum()
                for rows, micro in batch.micro_batches(minibatch, args.micro_batch_size):
                    outputs = token_logprobs(policy, micro, args.temperature, entropy_grad=has_bonus)
                    loss, stats = policy_loss(
                        outputs.logprobs_BT,
                        old.logprobs_NT[rows],
                        advantages_NT[rows],
                        micro.mask_BT,
                        clip_eps_low=args.clip_eps_low,
                        clip_eps_high=args.clip_eps_high,
                        num_tokens=num_tokens,
                    )
                    critic_loss = value_loss(
                        critic.model(micro)[:, :-1],
                        old_values_NT[rows],
                        returns_NT[rows],
                        micro.mask_BT,
                        value_clip=args.value_clip,
                        num_tokens=num_tokens,
                    )
                    # H over the whole step's tokens, as the loss; what is logged is a plain mean.
                    entropy = torch.where(micro.mask_BT, outputs.entropy_BT, 0).sum() / num_tokens
                    total_loss = loss + args.value_coef * critic_loss - args.entropy_coef * entropy
                    # Unlike the loss, aux_loss, a product of means, does not add up over micro-batches.
                    row_share = len(rows) / len(minibatch)
                    total_loss = total_loss + args.router_aux_coef * outputs.aux_loss * row_share
                    total_loss.backward()
                    losses = {"policy_loss": loss, "value_loss": critic_loss}
                    meter.add_pass(losses, stats, outputs, old, rows, micro.mask_BT)
                grad_norm = policy.clip_gradients(args.max_grad_norm)  # sums over ranks first
                critic_norm = critic.clip_gradients(args.max_grad_norm)
                meter.check_finite(grad_norm=grad_norm, critic_grad_norm=critic_norm)
                optimizer.step()
                optimizer.zero_grad()
                policy.refresh()  # in bfloat16: sync the working copy from the float32 master weights
                critic.refresh()
                meter.add_step(len(minibatch), grad_norm)
        meter.lap("update_seconds")

        # ------------------------------------------------------------------- log, evaluate and save
        metrics = iteration_metrics(meter, completions, rewards_N1, args)
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
