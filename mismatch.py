"""When the sampler is not the trainer: rollout precision, rollout correction, routing replay.

Engines sample with other kernels, and often with fewer bits, than they train with. So completions come
from a policy mu that is near, but not equal to, the policy pi_old that the training forward computes,
and a mixture of experts may send a token to other experts. Here `--rollout_dtype` makes such a
mismatch, `--rollout_correction` weighs completions by rho = pi_old / mu, and `--routing_replay` keeps
the experts. All three are off by default; to study an algorithm you need not read this file.
"""

import contextlib
import copy
import functools
from typing import Literal, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from harness import UserError

# Choices of the flags
RolloutDtype = Literal["same", "float32", "bfloat16", "int8", "int4"]
RolloutCorrection = Literal["none", "token_tis", "sequence_tis", "sequence_mis", "geo_mask", "icepop"]
RoutingReplay = Literal["none", "r2", "r3"]  # r2: the experts of the old policy, r3: of the sampler

# -------------------------------------------------------------------- rollouts in another precision


def rollout_copy(model, master, rollout_dtype):
    """The model that samples: `model` itself with "same", else a copy for `refresh_rollout_copy`."""
    if rollout_dtype == "same":
        return model
    is_transposed = any(getattr(module, "is_transposed", False) for module in master.modules())
    if rollout_dtype in ("int8", "int4") and is_transposed:
        raise UserError(f"--rollout_dtype {rollout_dtype}: the model keeps experts as (in, out)")
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    sampler = copy.deepcopy(master).requires_grad_(False)
    for weight, model_weight in zip(sampler.parameters(), model.parameters(), strict=True):
        # int8 and int4 are rounded only: their products are made in --dtype.
        weight.data = weight.data.to(dtypes.get(rollout_dtype, model_weight.dtype))
    return sampler


@torch.no_grad()
def refresh_rollout_copy(sampler, master, rollout_dtype, embeddings=False, routers=False):
    """Copies the master's weights into the sampler, rounded for int8 and int4: all matrices, but
    embeddings (and a head tied to them) and routers only if asked for."""
    if rollout_dtype == "same":
        return
    bits = {"int8": 8, "int4": 4}.get(rollout_dtype)
    kept = set()  # ids of weights that are not rounded
    if not embeddings:
        kept.add(id(sampler.get_input_embeddings().weight))
    if not routers:
        kept |= {id(weight) for router in find_routers(sampler) for weight in router.parameters()}
    for weight, master_weight in zip(sampler.parameters(), master.parameters(), strict=True):
        if bits and weight.dim() > 1 and id(weight) not in kept:
            weight.copy_(rounded(master_weight, bits))
        else:
            weight.copy_(master_weight)


def rounded(weight, bits):
    """The weight with each output channel on a symmetric grid of its own, of 2^bits - 1 values. The
    last axis is that of the inputs."""
    largest = 2 ** (bits - 1) - 1
    scale = weight.abs().amax(-1, keepdim=True) / largest
    scale = torch.where(scale > 0, scale, 1)
    return (weight / scale).round() * scale


# ------------------------------------------------------------------------------- rollout correction


class Correction(NamedTuple):
    """What `rollout_correction` returns."""

    weights: torch.Tensor  # (B, T), or (B, 1) where a completion has one; a factor on advantages
    rho_BT: torch.Tensor  # pi_old / mu; 1 with "none"
    stats: dict  # {name: scalar}; empty with "none"


@torch.no_grad()
def rollout_correction(old_logprobs_BT, batch, args, one_ratio=False):
    """Weights w >= 0 for completions that the sampler mu made in place of pi_old.

    The decoupled objective is w min(r A, clip(r) A), where r = pi / pi_old is clipped as always and w,
    made of rho = pi_old / mu, is not. As w is not negative, it goes into the min: a factor on A.

    old_logprobs_BT  log-probs of the training forward, before the first step
    batch            what has sampler_logprobs_BT and mask_BT
    args             what has --rollout_correction, --rollout_cap and --rollout_mask_low and _high
    one_ratio        for objectives with one ratio per completion, which then has one weight: rules for
                     tokens are applied to the geometric mean of its rho

    Sources: Hilton et al., arXiv 2110.00641 (the decoupled objective); Yao et al. 2025 (truncated and
    masked weights); the Ling team, arXiv 2510.18855 (icepop).
    """
    mask_BT = batch.mask_BT
    length_B1 = mask_BT.sum(1, keepdim=True).clamp(min=1)
    # As in the losses: masked before exp, and clamped to keep exp finite.
    log_rho_BT = torch.where(mask_BT, old_logprobs_BT - batch.sampler_logprobs_BT, 0).clamp(-20, 20)
    log_product_B1 = log_rho_BT.sum(1, keepdim=True)
    product_B1 = log_product_B1.clamp(-20, 20).exp()
    mean_B1 = (log_product_B1 / length_B1).exp()  # geometric
    rho_BT = log_rho_BT.exp()
    ratio = mean_B1 if one_ratio else rho_BT  # what the rules for tokens read
    rule = args.rollout_correction
    if rule == "none":
        return Correction(torch.ones_like(mean_B1), torch.ones_like(rho_BT), {})
    if rule == "token_tis":
        # w_t = min(rho_t, C)
        weights = ratio.clamp(max=args.rollout_cap)
    elif rule == "sequence_tis":
        # w_i = min(prod_t rho_t, C)
        weights = product_B1.clamp(max=args.rollout_cap)
    elif rule == "sequence_mis":
        # w_i = prod_t rho_t, and 0 above C
        is_below_B1 = log_product_B1.exp() <= args.rollout_cap  # before it is clamped
        weights = torch.where(is_below_B1, product_B1, 0)
    elif rule == "geo_mask":
        # w_t = min(rho_t, C), and 0 for all of a completion unless low <= mean_i <= high
        is_near_B1 = (args.rollout_mask_low <= mean_B1) & (mean_B1 <= args.rollout_mask_high)
        weights = torch.where(is_near_B1, ratio.clamp(max=args.rollout_cap), 0)
    elif rule == "icepop":
        # w_t = rho_t, and 0 outside [0.5, 5]
        weights = torch.where((ratio >= 0.5) & (ratio <= 5), ratio, 0)
    counted = weights.expand_as(mask_BT)[mask_BT]
    num_tokens = mask_BT.sum().clamp(min=1)
    mean = counted.sum() / num_tokens
    mean_square = (counted**2).sum() / num_tokens
    stats = {
        "weight_mean": mean,
        "weight_zero_frac": (counted == 0).sum() / num_tokens,
        # (sum w)^2 / (n sum w^2): 1 if all weights are equal, 1/n if one of them has everything
        "weight_effective_size": mean**2 / mean_square.clamp(min=1e-30),
    }
    return Correction(weights, rho_BT, stats)


@torch.no_grad()
def mismatch_stats(old_logprobs_BT, old_experts_BTLK, batch):
    """How far the training forward is from the sampler, mu: {name: scalar}. All of it is 0, and ratios
    are 1, up to rounding, where both compute alike."""
    mask_BT = batch.mask_BT
    num_tokens = mask_BT.sum().clamp(min=1)
    logratio_BT = torch.where(mask_BT, old_logprobs_BT - batch.sampler_logprobs_BT, 0)
    k3_BT = logratio_BT.exp() - 1 - logratio_BT  # its mean is an estimate of KL(mu || pi_old)
    ratio_B = logratio_BT.sum(1).clamp(-20, 20).exp()
    stats = {
        "sampler_kl": torch.where(mask_BT, k3_BT, 0).sum() / num_tokens,
        "sampler_logratio_max": logratio_BT.abs().max(),
        "sampler_sequence_ratio_min": ratio_B.min(),
        "sampler_sequence_ratio_max": ratio_B.max(),
    }
    if batch.sampler_experts_BSLK is not None:
        T = mask_BT.shape[1]
        experts_BTLK = batch.sampler_experts_BSLK[:, -T - 1 : -1].sort().values
        differ_BT = (experts_BTLK != old_experts_BTLK).any(-1).float().mean(-1)
        stats["sampler_expert_diff_frac"] = torch.where(mask_BT, differ_BT, 0).sum() / num_tokens
    return stats


# ----------------------------------------------------------------------------------- routing replay


def find_routers(model):
    """The routers, in the order of their layers: modules whose logits transformers records. [] if the
    model is dense."""
    for module in model.modules():
        recorders = getattr(module, "_can_record_outputs", None) or {}
        kind = getattr(recorders.get("router_logits"), "target_class", None)
        if kind is not None:
            return [router for router in module.modules() if isinstance(router, kind)]
    return []


class ChosenTopK(TorchFunctionMode):
    """Inside, torch.topk gives what is at the places `chosen`, where these are not negative."""

    def __init__(self, chosen):
        super().__init__()
        self.chosen = chosen
        self.indices = []  # of each call

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function is not torch.topk:
            return result
        indices = result.indices
        if self.chosen is not None:
            indices = torch.where(self.chosen < 0, indices, self.chosen)
            result = (args[0].gather(-1, indices), indices)
        self.indices.append(indices)
        return result


class Routing:
    """Inside this context the model's routers note the experts that they choose, and choose those of
    `replayed`, (tokens, L, K) in the order of the top-k, where they are not negative.

    Only the choice is replaced. What a router does with it, its softmax and norm, is its own code over
    its own logits, so that it still learns. Contexts do not nest.
    """

    active = None  # the context that a forward pass is in, for its repetition in a backward pass

    def __init__(self, model, replayed=None):
        self.routers = find_routers(model)
        self.replayed = replayed
        self.noted = [None] * len(self.routers)  # (tokens, K) of each layer

    def __enter__(self):
        assert Routing.active is None, "contexts do not nest"
        Routing.active = self
        for layer, router in enumerate(self.routers):
            router.forward = functools.partial(self.route, layer, router.forward)
        return self

    def __exit__(self, *exception):
        Routing.active = None
        for router in self.routers:
            del router.forward  # what is left is the method of its class

    def route(self, layer, forward, *inputs):
        chosen = None
        if self.replayed is not None:
            chosen = self.replayed[:, layer]
        with ChosenTopK(chosen) as top_k:
            output = forward(*inputs)
        if len(top_k.indices) != 1:
            name = type(self.routers[layer]).__name__
            raise ValueError(f"{name} does not choose its experts by one torch.topk")
        self.noted[layer] = top_k.indices[0].int()
        return output


def routing_contexts():
    """For torch's checkpoint: what a forward pass is in, and what its repetition has to be in."""
    return contextlib.nullcontext(), Routing.active or contextlib.nullcontext()


def experts_by_completion(noted, prompts, lengths):
    """The experts that sampling has used -> [(prompt and response, L, K)], a tensor per completion.

    noted    of each step (rows that were sampled, (tokens, L, K)): in the first step the tokens are
             those of all prompts, padded on the left; later, of each row, the one sampled before. The
             last token of a completion is not needed: its experts are -1, not known.
    lengths  of the responses
    """
    group_size = len(lengths) // len(prompts)
    _, of_prompts = noted[0]
    L, K = of_prompts.shape[1:]
    of_prompts = of_prompts.view(len(prompts), -1, L, K)
    width = of_prompts.shape[1]
    table = of_prompts.new_full((len(lengths), width + len(noted), L, K), -1)
    table[:, :width] = of_prompts.repeat_interleave(group_size, dim=0)
    for step, (rows, experts) in enumerate(noted[1:]):
        table[rows, width + step] = experts
    table = table.cpu()
    completions = []
    for i, length in enumerate(lengths):
        experts = table[i, width - len(prompts[i // group_size]) : width + length]
        completions.append(experts.index_fill(0, torch.tensor(len(experts) - 1), -1))
    return completions


def pad_experts(completions, prompt_width, response_width):
    """The experts of `Completion`s as one tensor, (B, S, L, K), prompts padded on the left; -1 on
    padding."""
    first = completions[0].experts
    shape = (len(completions), prompt_width + response_width, *first.shape[1:])
    experts_BSLK = first.new_full(shape, -1)
    for experts, completion in zip(experts_BSLK, completions, strict=True):
        start = prompt_width - len(completion.prompt_ids)
        experts[start : start + len(completion.experts)] = completion.experts
    return experts_BSLK
