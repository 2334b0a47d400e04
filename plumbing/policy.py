"""A trained model: float32 master weights, a working copy that computes, and a copy that samples."""

import copy
import functools
import re
import weakref

import torch
import transformers
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers.utils.generic import ContextManagers

from plumbing import ranks
from plumbing.data import hash_of
from plumbing.routing import find_routers, read_routers


class TrainedModel:
    """Master weights and the model that computes with them: a policy, a critic, or a reference, for
    which both are the same model."""

    def __init__(self, master, dtype):
        self.master = master
        self.model = working_copy(master, dtype)
        if self.model is not master:
            this = weakref.ref(self)  # the hook must not keep it alive

            def refresh_copy(*_):
                if this() is not None:
                    this().refresh()

            register_optimizer_step_post_hook(refresh_copy)

    def parameters(self):
        return self.master.parameters()

    def state_dict(self):
        return self.master.state_dict()

    def load_state_dict(self, state):
        self.master.load_state_dict(state)
        self.refresh()

    def clip_gradients(self, max_norm):
        """Adds up the gradients of all ranks and clips their norm; returns the norm before clipping."""
        ranks.all_reduce_gradients(self.parameters())
        return torch.nn.utils.clip_grad_norm_(self.parameters(), max_norm)

    @torch.no_grad()
    def refresh(self):
        """Copies the master weights into the working copy, if there is one."""
        if self.model is not self.master:
            weights = zip(self.model.parameters(), self.master.parameters(), strict=True)
            for weight, master_weight in weights:
                weight.copy_(master_weight)


class Policy(TrainedModel):
    """A language model with its tokenizer, the capabilities detected at load time, and the copy that
    samples."""

    def __init__(self, master, tokenizer, dtype="float32", rollout_dtype="same", refresh_every=1):
        super().__init__(master, dtype)
        self.tokenizer = tokenizer
        self.weights_hash = hash_of_weights(master)  # as loaded
        self.rollout_dtype = rollout_dtype
        self.refresh_every = refresh_every  # iterations
        self.one_sequence_per_row = False  # see common.check_logprobs
        self.routers = read_routers(master)
        self.rollout_policy = None
        if rollout_dtype != "same" or refresh_every > 1:
            if rollout_dtype in ("float32", "bfloat16"):
                dtype = rollout_dtype
            # int4 weights are only rounded; their products are computed in --dtype.
            sampler = cast_weights(copy.deepcopy(master).requires_grad_(False), dtype)
            self.rollout_policy = self.with_model(sampler)

    def with_model(self, model):
        """A policy with a different model of the same architecture, and the same tokenizer."""
        policy = copy.copy(self)
        policy.master = model
        policy.model = model
        policy.rollout_policy = None
        return policy

    def save_pretrained(self, folder):
        """Writes the master weights and the tokenizer as an ordinary transformers folder."""
        self.master.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def load_pretrained(self, folder):
        saved = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, use_safetensors=True, trust_remote_code=False
        )
        self.load_state_dict(saved.state_dict())

    def frozen_copy(self):
        """A reference: the current weights, frozen."""
        return self.with_model(copy.deepcopy(self.model).requires_grad_(False))

    def sampler(self, iteration):
        """The policy itself, or its copy in --rollout_dtype, which is given the current weights in
        iteration 1 and every --rollout_refresh_every iterations after that."""
        if self.rollout_policy is None:
            return self
        if (iteration - 1) % self.refresh_every == 0:
            refresh_rollout_copy(self.rollout_policy.model, self.master, self.rollout_dtype)
        return self.rollout_policy


@functools.lru_cache(maxsize=1)  # a rollout copy needs it in each iteration
def kept_in_float32(model):
    """ids of the weights that stay in float32 when transformers loads the model in bfloat16: those that
    the architecture lists, and those that it creates in float32."""
    bodies = [part for part in model.modules() if isinstance(part, transformers.PreTrainedModel)]
    if not bodies:
        return set()
    body = bodies[0]  # the whole model, or a critic's body
    kind = type(body)
    with ContextManagers(kind.get_init_context(torch.bfloat16, False, False, False)):
        # on the meta device, without allocating weights
        empty = kind._from_config(copy.deepcopy(body.config), dtype=torch.bfloat16)
    patterns = [pattern.replace("*", ".*") for pattern in empty._get_dtype_plan(torch.bfloat16)]
    kept = set()
    for name, weight in empty.named_parameters():
        is_listed = any(re.search(pattern, name) for pattern in patterns)
        if is_listed or weight.dtype == torch.float32:
            kept.add(id(body.get_parameter(name)))
    return kept


def working_copy(master, dtype):
    """The model that computes: `master` itself in float32, else a copy of it in `dtype`. The copy's
    gradients are moved to the master, in float32, as soon as they are computed."""
    if dtype == "float32":
        return master

    def hand_over(weight, master_weight):
        if master_weight.grad is None:
            master_weight.grad = weight.grad.float()
        else:
            master_weight.grad += weight.grad
        weight.grad = None

    model = cast_weights(copy.deepcopy(master), dtype)
    for weight, master_weight in zip(model.parameters(), master.parameters(), strict=True):
        if weight.requires_grad:
            hook = functools.partial(hand_over, master_weight=master_weight)
            weight.register_post_accumulate_grad_hook(hook)
    return model


def cast_weights(model, dtype):
    """Casts the model's weights to `dtype`, except those that stay in float32. All buffers stay as they
    are, since positions are computed from them."""
    kept = set() if dtype == "float32" else kept_in_float32(model)
    for weight in model.parameters():
        if id(weight) not in kept:
            weight.data = weight.data.to(getattr(torch, dtype))
    return model


@torch.no_grad()
def refresh_rollout_copy(sampler, master, rollout_dtype):
    """Copies the master weights into the sampler. For int4 all matrices are rounded except embeddings
    (and a head tied to them), routers, and what stays in float32."""
    exact = {id(sampler.get_input_embeddings().weight)} | kept_in_float32(sampler)
    exact |= {id(weight) for router in find_routers(sampler) for weight in router.parameters()}
    for weight, master_weight in zip(sampler.parameters(), master.parameters(), strict=True):
        if rollout_dtype == "int4" and weight.dim() > 1 and id(weight) not in exact:
            weight.copy_(fake_quantize(master_weight))
        else:
            weight.copy_(master_weight)


def hash_of_weights(model):
    """Bits are summed, which is exact, so the hash is the same on every device."""
    weights = model.state_dict().items()
    return hash_of({name: x.float().view(torch.int32).sum().item() for name, x in weights})


def fake_quantize(weight):
    """The weight rounded to 15 values, from -7 to 7 times a scale along the last axis: for nearly all
    weights, one scale per output channel."""
    scale = weight.abs().amax(-1, keepdim=True) / 7
    scale = torch.where(scale > 0, scale, 1)
    return (weight / scale).round() * scale
