"""Records and replays an MoE's experts, and detects how its routers choose."""

import contextlib
import functools
import inspect
from typing import NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func


@functools.cache
def computes_given_experts(kind):
    """Whether modules of this class compute experts that the caller has chosen, as in transformers:
    forward(hidden_states, top_k_index, top_k_weights)."""
    names = inspect.signature(kind.forward).parameters
    return "top_k_index" in names or "router_indices" in names


def find_experts(model):
    """The modules that compute a layer's experts, in layer order. [] for a dense model, and for the few
    models that choose and compute experts in one module."""
    return [module for module in model.modules() if computes_given_experts(type(module))]


def find_routers(model):
    """The routers, in layer order: the modules from which transformers records router logits. [] for a
    dense model."""
    for module in model.modules():
        recorders = getattr(module, "_can_record_outputs", None) or {}
        kind = getattr(recorders.get("router_logits"), "target_class", None)
        if kind is not None:
            return [router for router in module.modules() if isinstance(router, kind)]
    return []


class Routing(TorchFunctionMode):
    """This context records the experts that are used, in the order in which they were chosen. With
    `replayed_BSLK`, the routers choose these experts, except where they are negative.

    Only the choice, the result of torch.topk, is replaced. The router's own code still computes softmax
    and norm from its own logits, so the router still learns. Contexts do not nest.
    """

    active = None  # the current forward's context, for its recomputation in the backward pass

    def __init__(self, model, replayed_BSLK=None):
        super().__init__()
        self.experts = find_experts(model)
        self.routers = []
        self.replayed = None
        if replayed_BSLK is not None:
            self.routers = find_routers(model)
            self.replayed = replayed_BSLK.flatten(0, 1)  # (tokens, L, K)
        self.noted = [None] * len(self.experts)  # per layer: experts that were used, (tokens, K)
        self.weights = [None] * len(self.experts)  # their weights
        self.own = [None] * len(self.routers)  # the routers' own choices, during replay
        self.functions = set()  # names of functions that the routers call

    def __enter__(self):
        assert Routing.active is None, "contexts do not nest"
        Routing.active = self
        self.hooks = []
        for layer, module in enumerate(self.experts):
            note = functools.partial(self.note, layer)
            self.hooks.append(module.register_forward_pre_hook(note))
        for layer, module in enumerate(self.routers):
            enter = functools.partial(self.enter_router, layer)
            self.hooks.append(module.register_forward_pre_hook(enter))
            self.hooks.append(module.register_forward_hook(self.leave_router, always_call=True))
        return self

    def __exit__(self, *exception):
        Routing.active = None
        for hook in self.hooks:
            hook.remove()

    def note(self, layer, module, inputs):
        _, chosen, weights = inputs
        self.noted[layer] = chosen.to(torch.int16)
        self.weights[layer] = weights.detach()

    def enter_router(self, layer, *_):
        self.layer = layer
        super().__enter__()  # until the router returns, calls to torch go through __torch_function__

    def leave_router(self, *_):
        super().__exit__(None, None, None)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.functions.add(getattr(function, "__name__", ""))
        is_top_k = function in (torch.topk, torch.Tensor.topk)
        # Some routers first choose groups of experts, with separate topk calls.
        if not is_top_k or args[0].shape[1:] != (self.experts[self.layer].num_experts,):
            return result
        self.own[self.layer] = result.indices.to(torch.int16)
        replayed = self.replayed[:, self.layer]
        indices = torch.where(replayed < 0, result.indices, replayed)
        return torch.return_types.topk((args[0].gather(-1, indices), indices))

    def choices(self):
        """The routers' own choices, even during replay: (tokens, L, K). Not for a dense model."""
        return torch.stack(self.noted if self.replayed is None else self.own, dim=1)


class Routers(NamedTuple):
    """How a model's routers choose experts, as detected by `read_routers`."""

    num_experts: int = 0  # per layer; 0 if dense, or if the choices cannot be read
    can_replay: bool = False  # whether the choice of experts can be replaced
    has_softmax: bool = False  # whether experts are chosen by a softmax over all of them
    are_probabilities: bool = False  # transformers records probabilities as router logits
    are_balanced: bool = False  # by a loss, not by other means

    @property
    def options(self):
        """What a model's forward needs so that its output has router logits."""
        return {"output_router_logits": True} if self.has_softmax else {}

    def choices(self, routing, tokens_BS):
        """The routers' own choices in a forward of these tokens, (B, S, L, K); L = 0 if dense."""
        if self.num_experts == 0:
            return tokens_BS.new_empty(*tokens_BS.shape, 0, 0)
        return routing.choices().unflatten(0, tokens_BS.shape)

    def logits_of(self, output):
        """The router logits in a model's output: L tensors (tokens, E); () without a softmax."""
        layers = [layer.float() for layer in getattr(output, "router_logits", None) or ()]
        if self.are_probabilities:
            layers = [probs.clamp(min=1e-30).log() for probs in layers]
        return tuple(layers)

    def aux_loss(self, router_logits, choices_BSLK, is_token_BS):
        """transformers' load-balancing loss, a scalar; 0 for routers that have none."""
        if not self.are_balanced:
            return torch.zeros((), device=is_token_BS.device)
        K = choices_BSLK.shape[-1]
        return load_balancing_loss_func(router_logits, self.num_experts, K, is_token_BS)


@torch.no_grad()
def read_routers(model):
    """The `Routers` of a language model, detected by running it on a few tokens."""
    experts = find_experts(model)
    routers = find_routers(model)
    if not experts or len(routers) != len(experts) or not hasattr(experts[0], "num_experts"):
        return Routers()
    num_experts = experts[0].num_experts
    tokens = torch.arange(8, device=model.device)[None]
    options = {"use_cache": False, "output_router_logits": True}
    with Routing(model) as routing:
        output = model.base_model(tokens, **options)
    others = (routing.choices() + 1) % num_experts
    with Routing(model, others[None]) as routing:
        model.base_model(tokens, **options)
    # Some routers do not use a single torch.topk, or give no weight to experts they did not choose.
    can_replay = torch.equal(torch.stack(routing.noted, dim=1), others)
    can_replay = can_replay and all(weights.all() for weights in routing.weights)
    recorded = getattr(output, "router_logits", None) or ()
    names = [name for router in routers for name in router.state_dict()]
    has_bias = any(name.endswith("_bias") for name in names)  # which is not part of the softmax
    has_softmax = "softmax" in routing.functions and len(recorded) == len(experts) and not has_bias
    sums = [layer.sum(-1) for layer in recorded]
    return Routers(
        num_experts=num_experts,
        can_replay=can_replay,
        has_softmax=has_softmax,
        are_probabilities=bool(sums) and all(((x - 1).abs() < 1e-4).all() for x in sums),
        are_balanced=has_softmax and hasattr(model, "router_aux_loss_coef"),
    )


def routing_contexts():
    """For torch's checkpoint: the contexts of the forward pass, which is already inside its `Routing`,
    and of its recomputation in the backward pass, which must be inside the same one."""
    return contextlib.nullcontext(), Routing.active or contextlib.nullcontext()


def experts_by_completion(noted, prompts, lengths):
    """The experts used in sampling -> [(prompt and response, L, K)], one tensor per completion. `noted`
    has (sampled rows, (tokens, L, K)) for each step: first for all prompt tokens, padded on the left,
    then for the token that each row sampled last. A completion's final token needs no experts: -1."""
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
        table[i, width + length - 1] = -1
        # A copy, since a view would keep the whole table in memory.
        completions.append(table[i, width - len(prompts[i // group_size]) : width + length].clone())
    return completions
