"""Records and replays the experts of a mixture-of-experts model, and reads how its routers choose."""

import contextlib
import functools
import inspect
from typing import NamedTuple

import torch
from torch.overrides import TorchFunctionMode


@functools.cache
def is_told_its_experts(kind):
    """Whether modules of this class compute the experts that their caller has chosen, as those of
    transformers do: forward(hidden_states, top_k_index, top_k_weights)."""
    names = inspect.signature(kind.forward).parameters
    return "top_k_index" in names or "router_indices" in names


def find_experts(model):
    """The modules that compute the experts of a layer, in the order of the layers. [] for a dense
    model, and for the few whose modules choose and compute experts in one."""
    return [module for module in model.modules() if is_told_its_experts(type(module))]


def find_routers(model):
    """The routers, in the order of their layers: the modules whose logits transformers records. [] for
    a dense model."""
    for module in model.modules():
        recorders = getattr(module, "_can_record_outputs", None) or {}
        kind = getattr(recorders.get("router_logits"), "target_class", None)
        if kind is not None:
            return [router for router in module.modules() if isinstance(router, kind)]
    return []


def as_small(chosen, experts):
    """Numbers of a layer's experts in the smallest integers that hold them, and -1."""
    return chosen.to(torch.int8 if getattr(experts, "num_experts", 2**15) <= 128 else torch.int16)


class Chooser(TorchFunctionMode):
    """Inside this context torch.topk over all `num_experts` returns the entries at `chosen`, where
    these are not negative. Notes what it would have returned, and which functions were called."""

    def __init__(self, num_experts, chosen):
        super().__init__()
        self.num_experts = num_experts
        self.chosen = chosen
        self.own = []  # for each call, the indices that it would have returned
        self.functions = set()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.functions.add(getattr(function, "__name__", ""))
        is_top_k = function in (torch.topk, torch.Tensor.topk)
        # Some routers choose groups of experts first, by other calls.
        if not is_top_k or args[0].dim() != 2 or args[0].shape[1] != self.num_experts:
            return result
        self.own.append(result.indices)
        if self.chosen is None:
            return result
        indices = torch.where(self.chosen < 0, result.indices, self.chosen)
        return torch.return_types.topk((args[0].gather(-1, indices), indices))


class Routing:
    """Inside this context the experts that compute are noted, in the order in which they were chosen.
    With `replayed`, (tokens, L, K), the routers choose these, where they are not negative.

    Only the choice is replaced. The router's own code computes softmax and norm from its own logits, so
    that it still learns. Contexts do not nest. A context that is not enabled does nothing.
    """

    active = None  # the context of the current forward, which its repetition in the backward needs

    def __init__(self, model, replayed=None, enabled=True, watched=False):
        self.experts = find_experts(model) if enabled else []
        self.routers = find_routers(model) if replayed is not None or watched else []
        self.enabled = enabled
        self.replayed = replayed
        self.noted = [None] * len(self.experts)  # of each layer: experts that computed, (tokens, K)
        self.own = [None] * len(self.routers)  # what the routers would have chosen, if not only noted
        self.weights = [None] * len(self.experts)  # of the experts that computed
        self.functions = set()  # names of the functions that routers call

    def __enter__(self):
        if self.enabled:
            assert Routing.active is None, "contexts do not nest"
            Routing.active = self
        self.before = []
        for layer, module in enumerate(self.experts):
            self.replace(module, functools.partial(self.note, layer, module.forward))
        for layer, module in enumerate(self.routers):
            self.replace(module, functools.partial(self.route, layer, module.forward))
        return self

    def replace(self, module, forward):
        self.before.append((module, module.__dict__.get("forward")))
        module.forward = forward

    def __exit__(self, *exception):
        if self.enabled:
            Routing.active = None
        for module, forward in self.before:
            if forward is None:
                del module.forward  # the method of its class remains
            else:
                module.forward = forward

    def note(self, layer, forward, hidden, chosen, weights):
        self.noted[layer] = as_small(chosen, self.experts[layer])
        self.weights[layer] = weights.detach()
        return forward(hidden, chosen, weights)

    def route(self, layer, forward, *inputs):
        chosen = None
        if self.replayed is not None:
            chosen = self.replayed[:, layer]
        with Chooser(self.experts[layer].num_experts, chosen) as chooser:
            output = forward(*inputs)
        self.functions |= chooser.functions
        if len(chooser.own) == 1:
            self.own[layer] = as_small(chooser.own[0], self.experts[layer])
        return output

    def choices(self):
        """The routers' own choices, even where others are replayed: (tokens, L, K), or None if the
        model is dense."""
        if not self.experts:
            return None
        return torch.stack(self.noted if self.replayed is None else self.own, dim=1)


class Routers(NamedTuple):
    """How a model's routers choose experts, as `read_routers` finds out."""

    num_experts: int = 0  # in a layer; 0 if the model is dense, or does not say which experts it uses
    no_replay: str = "it is dense"  # why choices cannot be replayed; "" if they can
    no_softmax: str = "it is dense"  # why there is no softmax over all experts; "" if there is one
    are_probabilities: bool = False  # what transformers records as router logits has been through it
    are_balanced: bool = False  # by a loss, and not by other means


@torch.no_grad()
def read_routers(model):
    """`Routers` of a language model, which runs on a few tokens."""
    experts = find_experts(model)
    routers = find_routers(model)
    num_active = getattr(model.config.get_text_config(), "num_experts_per_tok", None)
    if not routers and not experts and not num_active:
        return Routers()
    if len(routers) != len(experts) or not experts or not hasattr(experts[0], "num_experts"):
        reason = "its layers do not say which experts they use"
        return Routers(no_replay=reason, no_softmax=reason)
    count = min(8, model.get_input_embeddings().num_embeddings)
    tokens = torch.arange(count, device=model.device)[None]

    def forward(**options):
        with Routing(model, **options) as routing:
            output = model.base_model(tokens, use_cache=False, output_router_logits=True)
        return routing, output

    num_experts = experts[0].num_experts
    routing, output = forward(watched=True)
    no_replay = ""
    if any(own is None for own in routing.own):
        no_replay = "its routers do not choose experts by one torch.topk"
    else:
        own = torch.stack(routing.own, dim=1)
        _, again = forward(replayed=own)
        others, _ = forward(replayed=(own.long() + 1) % num_experts)
        gap = (again.last_hidden_state - output.last_hidden_state).abs().max().item()
        if not gap < 1e-4:
            no_replay = f"with its own experts replayed, hidden states differ by {gap:.2g}"
        elif any((weights == 0).any() for weights in others.weights):
            no_replay = "its routers give no weight to experts that they have not chosen"
    recorded = getattr(output, "router_logits", None) or ()
    no_softmax = ""
    names = [name for router in routers for name in router.state_dict()]
    if "softmax" not in routing.functions or len(recorded) != len(experts):
        no_softmax = "its routers score experts one by one, not by a softmax over all"
    elif any(name.endswith("_bias") for name in names):
        no_softmax = "its routers choose by a bias that is not part of their softmax"
    return Routers(
        num_experts=num_experts,
        no_replay=no_replay,
        no_softmax=no_softmax,
        are_probabilities=bool(recorded)
        and all(((layer.sum(-1) - 1).abs() < 1e-4).all() for layer in recorded),
        are_balanced=no_softmax == "" and hasattr(model, "router_aux_loss_coef"),
    )


def routing_contexts():
    """For torch's checkpoint: the contexts of a forward pass, which is already inside its `Routing`,
    and of its repetition in the backward pass, which has to be inside the same one."""
    return contextlib.nullcontext(), Routing.active or contextlib.nullcontext()


def experts_by_completion(noted, prompts, lengths):
    """The experts used in sampling -> [(prompt and response, L, K)], a tensor per completion.

    noted    for each step (sampled rows, (tokens, L, K)). The tokens of the first step are those of all
             prompts, padded on the left; later, each row's token sampled before. The experts of a
             completion's last token are not needed: -1, unknown.
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
        start = prompt_width - len(completion.problem.prompt_ids)
        experts[start : start + len(completion.experts)] = completion.experts
    return experts_BSLK
