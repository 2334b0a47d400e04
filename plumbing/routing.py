"""Records and replays the experts that the routers of a mixture-of-experts model choose.

With `--routing_replay r2` an update uses the experts of the old policy's forward, with r3 those of the
sampler. Only the choice is replayed.
"""

import contextlib
import functools

import torch
from torch.overrides import TorchFunctionMode


def find_routers(model):
    """The routers, in the order of their layers: the modules whose logits transformers records. [] for
    a dense model."""
    for module in model.modules():
        recorders = getattr(module, "_can_record_outputs", None) or {}
        kind = getattr(recorders.get("router_logits"), "target_class", None)
        if kind is not None:
            return [router for router in module.modules() if isinstance(router, kind)]
    return []


class ChosenTopK(TorchFunctionMode):
    """Inside this context torch.topk returns the entries at `chosen`, where these are not negative."""

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
    `replayed`, (tokens, L, K) in top-k order, where they are not negative.

    Only the choice is replaced. The router's own code computes softmax and norm from its own logits, so
    that it still learns. Contexts do not nest. A context that is not enabled does nothing.
    """

    active = None  # the context of the current forward, which its repetition in the backward needs

    def __init__(self, model, replayed=None, enabled=True):
        self.routers = find_routers(model) if enabled else []
        self.enabled = enabled
        self.replayed = replayed
        self.noted = [None] * len(self.routers)  # (tokens, K) of each layer

    def __enter__(self):
        if self.enabled:
            assert Routing.active is None, "contexts do not nest"
            Routing.active = self
        self.before = [router.__dict__.get("forward") for router in self.routers]
        for layer, router in enumerate(self.routers):
            router.forward = functools.partial(self.route, layer, router.forward)
        return self

    def __exit__(self, *exception):
        if self.enabled:
            Routing.active = None
        for router, forward in zip(self.routers, self.before, strict=True):
            if forward is None:
                del router.forward  # the method of its class remains
            else:
                router.forward = forward

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
