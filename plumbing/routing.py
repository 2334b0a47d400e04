"""Records which experts an MoE uses, and detects how its routers choose them."""

import contextlib
import dataclasses
import functools
import inspect

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
    """(routers in layer order, index of the router logits in what a router returns), as transformers
    records them. ([], 0) for a dense model."""
    for module in model.modules():
        recorders = getattr(module, "_can_record_outputs", None) or {}
        recorder = recorders.get("router_logits")
        kind = getattr(recorder, "target_class", None)
        if kind is not None:
            routers = [router for router in module.modules() if isinstance(router, kind)]
            return routers, recorder.index
    return [], 0


@dataclasses.dataclass
class Routers:
    """A model's routers, and how they choose experts, as detected by `read_routers`."""

    experts: list = ()  # the modules that compute a layer's experts, in layer order
    modules: list = ()  # the routers, in layer order
    logits_index: int = 0  # of the router logits in what a router returns
    num_experts: int = 0  # per layer; 0 if dense, or if the choices cannot be read
    has_softmax: bool = False  # whether experts are chosen by a softmax over all of them
    are_probabilities: bool = False  # what transformers calls router logits are probabilities
    are_balanced: bool = False  # by a load-balancing loss, not by other means

    def of(self, model):
        """The same for a different model of this architecture."""
        if self.num_experts == 0:
            return self
        return dataclasses.replace(self, experts=find_experts(model), modules=find_routers(model)[0])


class Routing:
    """This context records the experts that are used in one forward, in the order in which they were
    chosen, and the router logits. Contexts do not nest."""

    active = None  # the current forward's context, for its recomputation in the backward pass

    def __init__(self, routers):
        self.routers = routers
        # By layer. A recomputation in the backward pass comes second and changes nothing.
        self.used = {}  # experts that were used, (B * S, K)
        self.logits = {}  # (B * S, E)

    def __enter__(self):
        assert Routing.active is None, "contexts do not nest"
        Routing.active = self
        self.hooks = []
        for layer, module in enumerate(self.routers.experts):
            note = functools.partial(self.note_experts, layer)
            self.hooks.append(module.register_forward_pre_hook(note))
        for layer, module in enumerate(self.routers.modules):
            note = functools.partial(self.note_logits, layer)
            self.hooks.append(module.register_forward_hook(note))
        return self

    def __exit__(self, *exception):
        Routing.active = None
        for hook in self.hooks:
            hook.remove()

    def note_experts(self, layer, module, inputs):
        chosen = inputs[1]
        self.used.setdefault(layer, chosen.to(torch.int16))

    def note_logits(self, layer, module, inputs, output):
        logits = output[self.routers.logits_index] if isinstance(output, tuple) else output
        self.logits.setdefault(layer, logits)

    def choices(self):
        """What the routers chose, (B * S, L, K). Not for a dense model."""
        return torch.stack([self.used[layer] for layer in range(len(self.used))], dim=1)

    def token_logits(self):
        """The router logits: L tensors (B * S, E); () without a softmax."""
        if not self.routers.has_softmax:
            return ()
        layers = [self.logits[layer].float() for layer in range(len(self.routers.modules))]
        if self.routers.are_probabilities:
            layers = [probs.clamp(min=1e-30).log() for probs in layers]
        return tuple(layers)


class Functions(TorchFunctionMode):
    """Notes the names of the functions that are called in this context."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.names.add(getattr(function, "__name__", ""))
        return function(*args, **(kwargs or {}))


def balancing_loss(routing, is_token_BS):
    """transformers' load-balancing loss over prompt and response in the forward that `routing` has
    recorded, a scalar; 0 for routers that have none."""
    routers = routing.routers
    if not routers.are_balanced:
        return torch.zeros((), device=is_token_BS.device)
    K = routing.used[0].shape[-1]
    return load_balancing_loss_func(routing.token_logits(), routers.num_experts, K, is_token_BS)


@torch.no_grad()
def read_routers(model):
    """The `Routers` of a language model, detected by running it on a few tokens."""
    experts = find_experts(model)
    modules, logits_index = find_routers(model)
    if not experts or len(modules) != len(experts) or not hasattr(experts[0], "num_experts"):
        return Routers()
    num_experts = experts[0].num_experts
    routers = Routers(experts, modules, logits_index, num_experts)
    tokens = torch.arange(8, device=model.device)[None]
    calls = []  # of the routers
    note = lambda *call: calls.append(call)  # noqa: E731
    hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in modules]
    with Routing(routers) as routing:
        model.base_model(tokens, use_cache=False)
    for hook in hooks:
        hook.remove()
    with Functions() as functions:
        for module, args, kwargs in calls:
            module(*args, **kwargs)
    names = [name for module in modules for name in module.state_dict()]
    has_bias = any(name.endswith("_bias") for name in names)  # which is not part of the softmax
    logits = list(routing.logits.values())
    shape = (tokens.numel(), num_experts)
    has_logits = len(logits) == len(experts) and all(layer.shape == shape for layer in logits)
    routers.has_softmax = "softmax" in functions.names and has_logits and not has_bias
    sums = [layer.sum(-1) for layer in logits]
    routers.are_probabilities = all(((x - 1).abs() < 1e-4).all().item() for x in sums)
    routers.are_balanced = routers.has_softmax and hasattr(model, "router_aux_loss_coef")
    return routers


def routing_contexts():
    """For torch's checkpoint: a context for the forward pass (none: it is inside a `Routing` already),
    and one for its recomputation in the backward pass, which needs that same `Routing`."""
    return contextlib.nullcontext(), Routing.active or contextlib.nullcontext()
