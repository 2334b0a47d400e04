"""Mismatch: GRPO when the sampler and the trainer differ (decoupled objective: arXiv 2110.00641).

  J = mean_i 1/|o_i| sum_t [ w_it min(r_it A_i, clip(r_it, 1 - eps, 1 + eps) A_i) - beta k3_it ]

  o_i    a completion of |o_i| tokens, EOS included; mean_i: over all completions in an optimizer step
  o_it   its token t; pi(o_it): its probability under the policy, given the prompt and o_i,<t
  r_it   = pi(o_it) / pi_old(o_it); pi_old: the policy before the rollout's first optimizer step
  eps    --clip_eps_low and --clip_eps_high
  w_it   the weight of o_it, a function of rho_it = pi_old(o_it) / mu(o_it): --rollout_correction
  mu     the sampler: --rollout_dtype, --rollout_refresh_every
  A_i    = (R_i - mean) / std; R_i: the reward of o_i; mean, std: over the prompt's G completions
  beta   --kl_coef; pi_ref: the policy before training, or at the last reset (--ref_reset_every)
  k3_it  = x - log x - 1, x = pi_ref(o_it) / pi(o_it): an estimate of KL(pi || pi_ref), never negative

Suffixes name axes: P prompts, G completions each, B rows, T response tokens, S prompt and response,
L layers of an MoE, K active experts, N response tokens of all rows, 1 for a size-1 axis.

Parent: grpo.py. Differs only in:
  1. Sampler: a copy of the policy with rounded or stale weights, as inference engines have them.
  2. Weights: r is clipped as usual; w, which corrects for pi_old / mu, is not. (If pi / mu were clipped
     instead, a staler batch would lose more of its gradient, as if its learning rate were lower.) w is
     never negative, so it can be a factor on A. The KL has no weight. With --old_logprobs sampler, mu
     takes the place of pi_old, and w is 1.
  3. Routing replay: in the update, an MoE's routers use the experts that the old policy (r2) or the
     sampler (r3) chose. The reference's routers choose freely.

rollout_weights can be copied into any of the scripts. gspo, gmpo and rspo have one ratio, and so one
weight, per completion: give the token rules the geometric mean of rho over the completion there.

Sources: Hilton et al., arXiv 2110.00641 (the decoupled objective); Yao et al. 2025 (truncated weights);
Liu, Li et al. 2025, "When Speed Kills Stability" (weights and masks of sequences, and the geometric
mean); the Ling team, arXiv 2510.18855 (icepop); the GSPO authors, arXiv 2512.01374 (r2 and r3).

Run:    python -m more.mismatch
Expect: like grpo.py, greedy held-out accuracy rises from 0.43 to at least 0.97. But the completions
        from which the policy learns, the int4 sampler's, are right less often: 0.86 to 0.89 in the last
        ten iterations (three seeds), where grpo.py has 0.93.
"""

import sys
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal

import torch
from torch.overrides import TorchFunctionMode

sys.path.insert(0, str(Path(__file__).parent.parent))  # run as a file, it finds common too

from common import RunArgs, flag, launch
from common import UserError
from common import load_grader, load_policy, load_problems, Run
from common import prepare_sampling
from common import evaluate, sample
from common import split_into_steps, token_logprobs
from common import Routing


@dataclass
class Args(RunArgs):  # more flags: --help
    iterations: int = flag(40, "number of iterations (one rollout plus its updates)")
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
    clip_eps_high: float = flag(0.2, "the ratio is clipped above 1 + this")
    kl_coef: float = flag(0.04, "beta, the weight of the KL to the reference [0: none]")
    ref_reset_every: int = flag(0, "reset the reference every n iterations [0: never]")
    rollout_dtype: Literal["same", "float32", "bfloat16", "int4"] = flag(
        "int4", "precision of the sampler's weights"
    )
    rollout_refresh_every: int = flag(1, "refresh the sampler's weights every n iterations")
    rollout_correction: Literal[
        "none", "token_tis", "sequence_tis", "sequence_mis", "geo_mask", "geo_filter", "icepop"
    ] = flag("sequence_tis", "the rule for w")
    rollout_cap: float = flag(2.0, "cap on w (unused by none, geo_filter and icepop)")
    rollout_mask_low: float = flag(0.95, "geo_mask, geo_filter: lowest mean rho that is kept")
    rollout_mask_high: float = flag(1.05, "geo_mask, geo_filter: highest mean rho that is kept")
    old_logprobs: Literal["trainer", "sampler"] = flag("trainer", "whose log-probs pi_old has")
    routing_replay: Literal["none", "r2", "r3"] = flag(
        "none", "whose experts the update uses: r2 the old policy's, r3 the sampler's"
    )

    def check(self):
        self.check_range(2, 1e6, "group_size")  # a group of one has no baseline
        self.check_range(0, 1, "clip_eps_low", "rollout_mask_low")
        self.check_range(1, 1e9, "rollout_refresh_every", "rollout_mask_high")
        self.check_range(1e-9, 1e9, "rollout_cap")
        self.check_unread("rollout_correction", ["none", "geo_filter", "icepop"], "rollout_cap")
        unmasked = ["none", "token_tis", "sequence_tis", "sequence_mis", "icepop"]
        self.check_unread("rollout_correction", unmasked, "rollout_mask_low", "rollout_mask_high")
        if self.old_logprobs == "sampler" and self.rollout_correction != "none":
            message = "has no rho to correct: --rollout_correction must be none"
            raise UserError(f"--old_logprobs sampler {message}, not {self.rollout_correction}")


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


def policy_loss(
    logprobs_BT,
    old_logprobs_BT,
    advantages_BT,
    mask_BT,
    *,
    clip_eps_low=0.2,
    clip_eps_high=0.2,
    kl_coef=0.04,
    ref_logprobs_BT=None,
    num_sequences=None,
):
    """Returns (loss, stats). loss: the sum over this micro-batch, divided by the whole step's
    num_sequences, so the micro-batches of a step add up to -J. stats: {name: scalar} for the log.

    logprobs_BT      log-probs of the sampled tokens under the current policy, with gradient
    old_logprobs_BT  the same, under the policy before this rollout's first step [None: on-policy]
    advantages_BT    (B, 1) or (B,), broadcast over the tokens, or (B, T)
    mask_BT          1 on response tokens, including EOS (bool or float); other tokens, such as
                     padding or tool output, get no gradient and are excluded from all means
    ref_logprobs_BT  log-probs under the reference [None: no KL, whatever kl_coef is]
    num_sequences    completions in the whole optimizer step, in all micro-batches, on all ranks
                     [None: this call has them all]. If the framework averages afterward, divide it
                     by what that averages over: ranks (DDP), accumulation steps (accelerate; not
                     with HF Trainer if loss_is_scaled_for_ga is True)
    """
    if old_logprobs_BT is None:
        old_logprobs_BT = logprobs_BT.detach()
    if kl_coef == 0:  # 0 * inf would be NaN
        ref_logprobs_BT = None
    dtypes = {logprobs_BT.dtype, old_logprobs_BT.dtype}
    assert dtypes <= {torch.float32, torch.float64}, "log-probs need logits.float().log_softmax(-1)"
    if advantages_BT.dim() == 1:
        advantages_BT = advantages_BT[:, None]
    shapes = [(len(mask_BT), 1), mask_BT.shape]
    assert advantages_BT.shape in shapes, f"advantages_BT: {advantages_BT.shape}, not {shapes}"
    mask_BT = mask_BT.bool()
    length_B1 = mask_BT.sum(1, keepdim=True).clamp(min=1)
    if num_sequences is None:
        num_sequences = mask_BT.any(1).sum().clamp(min=1)
    # Mask before exp: 0 * inf is NaN, in the backward pass too. The clamp keeps exp finite.
    logratio_BT = torch.where(mask_BT, logprobs_BT - old_logprobs_BT, 0).clamp(-20, 20)
    ratio_BT = logratio_BT.exp()
    clipped_BT = ratio_BT.clamp(1 - clip_eps_low, 1 + clip_eps_high)
    # PPO's pessimistic bound: the smaller of r A and clip(r) A
    objective_BT = torch.min(ratio_BT * advantages_BT, clipped_BT * advantages_BT)
    if ref_logprobs_BT is not None:
        # k3 = x - log x - 1, x = pi_ref / pi. Near x = 1, exp(log x) - 1 would lose digits.
        # Clamped only above, to keep exp finite: a clamp below would stop the gradient there, too. If
        # pi_ref is 0, log x is -inf and the loss is infinite, which ends the run.
        log_x_BT = torch.where(mask_BT, ref_logprobs_BT - logprobs_BT, 0).clamp(max=20)
        k3_BT = log_x_BT.expm1() - log_x_BT
        objective_BT = objective_BT - kl_coef * k3_BT
    # Sequence-mean: mean_i 1/|o_i| sum_t
    objective_B1 = torch.where(mask_BT, objective_BT, 0).sum(1, keepdim=True) / length_B1
    loss = -objective_B1.sum() / num_sequences
    # For the log. No gradient where A < 0 and r is below the clip's range, or A > 0 and r above it.
    clips_low_BT = (ratio_BT < clipped_BT) & (advantages_BT < 0)
    clips_high_BT = (ratio_BT > clipped_BT) & (advantages_BT > 0)
    stats = {
        "approx_kl": masked_mean(logratio_BT.expm1() - logratio_BT, mask_BT),  # r - 1 - log r
        "ratio_max": (ratio_BT * mask_BT).max() if mask_BT.numel() > 0 else loss.new_zeros(()),
        "clipfrac_low": masked_mean(clips_low_BT.float(), mask_BT),
        "clipfrac_high": masked_mean(clips_high_BT.float(), mask_BT),
    }
    if ref_logprobs_BT is not None:
        stats["kl_ref"] = masked_mean(k3_BT, mask_BT)
    return loss, {name: value.detach() for name, value in stats.items()}


# ------------------------------------------------------------------------------------ [1] the sampler


def fake_quantize(weight):
    """The weight rounded to 15 values, from -7 to 7 times a scale along the last axis: for nearly all
    weights, one scale per output channel."""
    scale = weight.abs().amax(-1, keepdim=True) / 7
    scale = torch.where(scale > 0, scale, 1)
    return (weight / scale).round() * scale


@torch.no_grad()
def refresh_sampler(sampler, policy, is_int4):
    """Copies the policy's weights into the sampler. int4 rounds every weight except vectors, embeddings
    (and a head tied to them) and routers; also those that transformers keeps in float32. Rounded
    weights are stored and multiplied in --dtype."""
    exact = set()
    for module in (sampler.model.get_input_embeddings(), *sampler.routers.modules):
        exact |= {id(weight) for weight in module.parameters()}
    for weight, policy_weight in zip(sampler.parameters(), policy.parameters(), strict=True):
        if is_int4 and weight.dim() > 1 and id(weight) not in exact:
            policy_weight = fake_quantize(policy_weight)
        weight.copy_(policy_weight)


# ------------------------------------------------------------------------------------- [2] the weights


def rollout_weights(
    old_logprobs_BT,
    sampler_logprobs_BT,
    mask_BT,
    *,
    rule,
    cap=2.0,
    mask_low=0.95,
    mask_high=1.05,
):
    """w, (B, T), or (B, 1) if a completion has one weight.

    old_logprobs_BT      log-probs under the training forward, before the first step
    sampler_logprobs_BT  log-probs of the same tokens under the sampler
    mask_BT              1 on response tokens
    rule                 none, token_tis, sequence_tis, sequence_mis, geo_mask, geo_filter or icepop
    """
    mask_BT = mask_BT.bool()
    length_B1 = mask_BT.sum(1, keepdim=True).clamp(min=1)
    # As in the losses: mask before exp, and clamp to keep exp finite.
    log_rho_BT = torch.where(mask_BT, old_logprobs_BT - sampler_logprobs_BT, 0).clamp(-20, 20)
    log_product_B1 = log_rho_BT.sum(1, keepdim=True)
    product_B1 = log_product_B1.exp()  # may be infinite; the cap is not
    mean_B1 = (log_product_B1 / length_B1).exp()  # the geometric mean of rho
    is_near_B1 = (mask_low <= mean_B1) & (mean_B1 <= mask_high)
    rho_BT = log_rho_BT.exp()
    if rule == "none":
        weights = torch.ones_like(rho_BT)
    elif rule == "token_tis":
        # w_t = min(rho_t, cap)
        weights = rho_BT.clamp(max=cap)
    elif rule == "sequence_tis":
        # w_i = min(prod_t rho_t, cap)
        weights = product_B1.clamp(max=cap)
    elif rule == "sequence_mis":
        # w_i = prod_t rho_t, or 0 above the cap
        weights = torch.where(product_B1 <= cap, product_B1, 0)
    elif rule == "geo_mask":
        # w_t = min(rho_t, cap), or 0 for the whole completion if its mean is outside the bounds
        weights = torch.where(is_near_B1, rho_BT.clamp(max=cap), 0)
    elif rule == "geo_filter":
        # w_i = 1, or 0 if the completion's mean is outside the bounds: only the mask
        weights = is_near_B1.to(rho_BT.dtype)
    elif rule == "icepop":
        # w_t = rho_t, or 0 outside [0.5, 5]
        weights = torch.where((rho_BT >= 0.5) & (rho_BT <= 5), rho_BT, 0)
    else:
        raise ValueError(f"unknown rule: {rule}")
    # NaN stays NaN, which ends the run. Comparisons would turn it into 0.
    return torch.where(mean_B1.isnan(), mean_B1, weights)


def weight_stats(batches):
    """{key: scalar} for the log, over tokens. weight_effective_size: (sum w)^2 / (N sum w^2), the
    fraction of N tokens that, weighted equally, would have the same variance."""
    weights_N = torch.cat([micro.weights.expand_as(micro.mask_BT)[micro.mask_BT] for micro in batches])
    return {
        "rollout/weight_zero_frac": (weights_N == 0).float().mean(),
        "rollout/weight_mean": weights_N.mean(),
        "rollout/weight_effective_size": weights_N.mean() ** 2 / (weights_N**2).mean(),
    }


# ------------------------------------------------------------------------------ [3] routing replay


class Replay(Routing):
    """A forward in which the routers use the given experts, (B * S, L, K).

    Only the choice, the result of torch.topk, is replaced. The router's own code still computes softmax
    and norm from its own logits, so the router still learns."""

    def __init__(self, routers, experts):
        super().__init__(routers)
        self.experts = experts.long()
        self.replaced = {}  # what the routers chose, by layer

    def __enter__(self):
        super().__enter__()
        for layer, module in enumerate(self.routers.modules):
            mode = ReplacedChoice(self, layer)
            self.hooks.append(module.register_forward_pre_hook(mode.enter))
            self.hooks.append(module.register_forward_hook(mode.leave, always_call=True))
        return self

    def choices(self):
        """What the routers chose, and did not use, (B * S, L, K)."""
        return torch.stack([self.replaced[layer] for layer in range(len(self.replaced))], dim=1)


class ReplacedChoice(TorchFunctionMode):
    """While a layer's router runs, its calls to torch go through this."""

    def __init__(self, replay, layer):
        super().__init__()
        self.replay = replay
        self.layer = layer

    def enter(self, *_):
        self.__enter__()

    def leave(self, *_):
        self.__exit__(None, None, None)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if function not in (torch.topk, torch.Tensor.topk):
            return result
        scores = args[0] if args else kwargs["input"]
        # Some routers first choose groups of experts, with topk calls on other shapes.
        if scores.shape[1:] != (self.replay.routers.num_experts,):
            return result
        # A recomputation in the backward pass comes second and changes nothing.
        self.replay.replaced.setdefault(self.layer, result.indices.to(torch.int16))
        indices = self.replay.experts[:, self.layer]
        return torch.return_types.topk((scores.gather(-1, indices), indices))


@torch.no_grad()
def can_replay(policy):
    """Whether experts that are replayed are used, with weights. Some routers do not use a single
    torch.topk, or give no weight to experts that they did not choose."""
    routers = policy.routers
    if routers.num_experts == 0:
        return False
    tokens = torch.arange(8, device=policy.model.device)[None]
    with Routing(routers) as routing:
        policy.model(tokens, use_cache=False)
    others = (routing.choices() + 1) % routers.num_experts
    weights = []  # by layer

    def record_weights(module, inputs):
        weights.append(inputs[2])

    hooks = [module.register_forward_pre_hook(record_weights) for module in routers.experts]
    with Replay(routers, others) as replay:
        policy.model(tokens, use_cache=False)
    for hook in hooks:
        hook.remove()
    used = [replay.used[layer] for layer in range(len(weights))]
    return torch.equal(torch.stack(used, dim=1), others) and all(layer.all() for layer in weights)


def sampler_experts(sampler, micro, args):
    """The experts that the sampler's routers choose, (B * S, L, K), in a forward over whole sequences.
    In float32 they are the ones that it used while sampling; in bfloat16 a few differ."""
    routing = Routing(sampler.routers)
    token_logprobs(sampler, micro, args.temperature, only_logprobs=True, routing=routing)
    return routing.choices()


def routing_for(policy, micro):
    """Replay of the micro-batch's experts, if it has some."""
    if micro.replayed is None:
        return Routing(policy.routers)
    return Replay(policy.routers, micro.replayed)


def sampler_flips(batches):
    """{key: scalar} for the log: the fraction of (response token, layer) pairs where the trainer would
    have chosen other experts than the sampler, if all earlier layers replay the sampler's."""
    flips = []
    for micro in batches:
        sampler_BTLK = micro.where_predicted(micro.replayed).sort().values
        flips_BTL = (sampler_BTLK != micro.old.experts_BTLK).any(-1)
        flips.append(flips_BTL[micro.mask_BT])
    return {"moe/sampler_flip_frac": torch.cat(flips).float().mean()}


def main(args):
    # ---------------------------------------------------------------------------------------- setup
    grade = load_grader(args)  # the verifier, or --reward
    policy = load_policy(args)  # a transformers model, without dropout, and its tokenizer
    if args.routing_replay != "none" and not can_replay(policy):  # [3]
        reason = "it is dense, or its routers do not support replay"
        raise UserError(f"--routing_replay cannot be used with --model {args.model}: {reason}")
    problems, held_out = load_problems(args, policy, grade)
    # [1] mu
    dtype = args.rollout_dtype if args.rollout_dtype in ("float32", "bfloat16") else args.dtype
    sampler = policy.frozen_copy(dtype)
    prepare_sampling(sampler, args)
    # pi_ref has the initial weights: it is copied before Run, which may resume with later ones.
    reference = policy.frozen_copy() if args.kl_coef > 0 else None
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr, weight_decay=0.0, fused=True)
    # Run logs, saves, and resumes.
    run = Run(args, policy, problems, optimizer=optimizer, reference=reference, sampler=sampler)
    if run.needs_first_eval:
        run.log_eval(evaluate(policy, held_out, grade, args, sampled=True))

    for iteration in run.iterations():  # from 1
        # ---------------------------------------------------------------------------------- rollout
        prompts = problems.take(args.prompts_per_iteration)
        if (iteration - 1) % args.rollout_refresh_every == 0:
            refresh_sampler(sampler, policy, is_int4=args.rollout_dtype == "int4")  # [1]
        completions = sample(sampler, prompts, args.group_size, args, run.noise)
        completions = grade(completions)

        # ------------------------------------------------------------------------------- advantages
        # a row of rewards for each prompt
        rewards_PG = torch.tensor([c.reward for c in completions]).view(-1, args.group_size)
        advantages_B1 = compute_advantages(rewards_PG).view(-1, 1).to(args.torch_device)

        # ------------------------------------------------------------------------------- old policy
        # The update's forward on the update's micro-batches: in the first step, the ratio is exactly 1
        # (with --old_logprobs trainer).
        steps = split_into_steps(completions, args.num_minibatches, args)
        with torch.no_grad():
            for micro in chain(*steps):
                micro.replayed = None  # [3] experts, (B * S, L, K)
                if args.routing_replay == "r3":
                    micro.replayed = sampler_experts(sampler, micro, args)
                routing = routing_for(policy, micro)
                micro.old = token_logprobs(
                    policy,
                    micro,
                    args.temperature,
                    only_logprobs=True,
                    routing=routing,
                )
                if args.routing_replay == "r2":
                    micro.replayed = routing.choices()
                micro.prox_logprobs_BT = micro.old.logprobs_BT  # [2] the ratio's denominator
                if args.old_logprobs == "sampler":
                    micro.prox_logprobs_BT = micro.sampler_logprobs_BT
                micro.weights = rollout_weights(
                    micro.old.logprobs_BT,
                    micro.sampler_logprobs_BT,
                    micro.mask_BT,
                    rule=args.rollout_correction,
                    cap=args.rollout_cap,
                    mask_low=args.rollout_mask_low,
                    mask_high=args.rollout_mask_high,
                )
                if reference is not None:
                    micro.ref = token_logprobs(reference, micro, args.temperature, only_logprobs=True)
        metrics = weight_stats(chain(*steps))
        if args.routing_replay == "r3":
            metrics |= sampler_flips(chain(*steps))

        # ----------------------------------------------------------------------------------- update
        for step in steps * args.update_epochs:
            num_sequences = sum(len(micro) for micro in step)
            for micro in step:
                routing = routing_for(policy, micro)  # [3]
                outputs = token_logprobs(policy, micro, args.temperature, routing=routing)
                loss, stats = policy_loss(
                    outputs.logprobs_BT,
                    micro.prox_logprobs_BT,
                    micro.weights * advantages_B1[micro.rows_B],  # [2]
                    micro.mask_BT,
                    clip_eps_low=args.clip_eps_low,
                    clip_eps_high=args.clip_eps_high,
                    kl_coef=args.kl_coef,
                    ref_logprobs_BT=micro.ref.logprobs_BT,
                    num_sequences=num_sequences,
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
        if args.ref_reset_every > 0 and iteration % args.ref_reset_every == 0:
            reference.load_state_dict(policy.state_dict())

        # -------------------------------------------------------------------------------------- log
        if run.is_due(args.eval_every):
            run.log_eval(evaluate(policy, held_out, grade, args, sampled=run.is_last))
        # [2] [3] with metrics of the weights, and of the sampler's experts
        run.log(steps, completions, rewards_PG, **metrics)  # logs, saves when due, stops on Ctrl-C
    run.finish()  # prints held-out accuracy before and after, and some answers


if __name__ == "__main__":
    launch(main, Args)
