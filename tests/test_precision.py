"""What is computed in bfloat16 and what in float32, and that float32 masters make bfloat16 learn. Which
weights of an architecture stay in float32: test_architectures.py. Resumed runs: test_resume.py."""

import copy
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, script_args
from test_sampler import MIXED, problems_of
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import grpo
import ppo
from common import CachedForward, collate, critic_values, load_policy, prefill, record_old_policy
from common import sample, token_logprobs
from plumbing.metrics import Meter
from plumbing.models import logits_of
from plumbing.policy import Policy, TrainedModel, working_copy


def settings(**changes):
    return script_args("grpo", max_new_tokens=12, **changes)[1]


def rollout(policy, args):
    noise = torch.Generator().manual_seed(0)
    return collate(sample(policy, problems_of(policy, *MIXED), 4, args, noise), args)


# --------------------------------------------------------------- what a whole iteration computes with

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "mv", "dot", "matmul", "linear", "einsum", "_grouped_mm"}


def tensors_in(values):
    """The tensors among arguments or results, those in lists too."""
    flat = torch.utils._pytree.tree_leaves(values)
    return [x for x in flat if isinstance(x, torch.Tensor)]


class Products(TorchDispatchMode):
    """Collects the dtypes in each matrix product, of inputs and results."""

    def __init__(self):
        super().__init__()
        self.dtypes = {}  # {operator: {dtype}}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        operator = function.overloadpacket.__name__
        if operator in PRODUCTS or "attention" in operator:
            tensors = tensors_in([args, kwargs, result])
            if "attention" in operator:
                # Its softmax's log-normalizer, with 3 axes, is in float32.
                tensors = [x for x in tensors if x.dim() == 4]
            seen = self.dtypes.setdefault(operator, set())
            seen |= {x.dtype for x in tensors if x.is_floating_point()}
        return result


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_matrix_product_and_the_cache_are_in_the_dtype(dtype, tiny_policy):
    """In sampling, old log-probs, update and backward pass. A float32 product under bfloat16 would take
    many times as long on a GPU, and another dtype in float32 would lose digits."""
    policy = Policy(copy.deepcopy(tiny_policy.master), tiny_policy.tokenizer, dtype)
    critic = TrainedModel(ppo.Critic(policy), dtype)
    args = settings()
    with Products() as products:
        batch = rollout(policy, args)
        record_old_policy(policy, batch, args)
        critic_values(critic, batch, args)
        loss = token_logprobs(policy, batch, 1.0).logprobs_BT.sum() + critic.model(batch).sum()
        loss.backward()
    expected = {getattr(torch, dtype)}
    assert all(dtypes == expected for dtypes in products.dtypes.values())
    assert "_grouped_mm" in products.dtypes and len(products.dtypes) > 3
    forward = CachedForward(policy.model, record_experts=False)
    prefill(forward, [[3, 4, 5]], 2)
    assert {x.dtype for layer in forward.cache.layers for x in (layer.keys, layer.values)} == expected


def test_head_in_float32():
    """The product of bfloat16 weights and states is not rounded to bfloat16: in the policy, and, each
    with its own weights, in a reference and in a copy that samples. Gradients reach the master."""
    hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    policy = load_policy(settings(dtype="bfloat16", rollout_dtype="int8", head_dtype="float32"))
    reference = policy.frozen_copy()
    with torch.no_grad():
        reference.model.get_output_embeddings().weight.mul_(2)
    for who in (policy, reference, policy.sampler(1)):
        weight = who.model.get_output_embeddings().weight
        assert weight.dtype == torch.bfloat16
        logits = logits_of(who.model, hidden)
        assert logits.dtype == torch.float32
        expected = hidden.double() @ weight.double().T
        torch.testing.assert_close(logits.double(), expected, rtol=1e-5, atol=1e-5)
    logits_of(policy.model, hidden).sum().backward()
    assert policy.master.get_output_embeddings().weight.grad.dtype == torch.float32


# ----------------------------------------------------------------------- masters and the working copy


@pytest.fixture
def masters(tiny_policy):
    """A float32 model to change, and two micro-batches of it."""
    policy = copy.deepcopy(tiny_policy)
    batch = rollout(policy, settings())
    return policy.master, (batch[:12], batch[12:])


def loss_of(model, batch):
    outputs = token_logprobs(Policy(model, tokenizer=None), batch, 0.7)
    return (outputs.logprobs_BT * torch.linspace(-1, 1, len(batch))[:, None]).sum()


def test_in_float32_the_master_computes(tiny_model):
    """A copy would take memory, and could fall behind."""
    trained = TrainedModel(tiny_model[0], "float32")
    assert trained.model is trained.master is tiny_model[0]
    assert not any(weight._post_accumulate_grad_hooks for weight in trained.parameters())


def test_small_updates_add_up():
    """A weight that moves by 1e-4 of its size stays where it is in bfloat16, a hundred times; its
    master takes it along, and the copy follows after each step of the master's own optimizer."""
    master = nn.Linear(8, 8, bias=False)
    nn.init.uniform_(master.weight, 0.5, 2.0)
    start = master.weight.detach().bfloat16()
    with torch.no_grad():
        master.weight.copy_(start)
    assert torch.equal(start + 1e-4 * start, start)
    trained = TrainedModel(master, "bfloat16")
    optimizer = torch.optim.SGD(trained.parameters(), lr=1e-4)
    for _ in range(100):
        (-trained.model.weight * start).sum().backward()  # the gradient is -start: up by 1e-4 of it
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(trained.model.weight, master.weight.bfloat16())
    torch.testing.assert_close(master.weight, 1.01 * start.float(), rtol=1e-5, atol=0)
    assert ((trained.model.weight.float() / start.float() - 1.01).abs() < 2**-8).all()


def test_micro_batches_add_up_in_float32(masters):
    """Exactly; in bfloat16 a sum of many would stop growing. The copy keeps no gradients, and a frozen
    weight gets none."""
    master, batches = masters
    master.model.norm.weight.requires_grad_(False)
    model = working_copy(master, "bfloat16")
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    first, second = (torch.autograd.grad(loss_of(model, batch), weights) for batch in batches)
    for batch in batches:
        loss_of(model, batch).backward()
    seen = [weight.grad for weight in master.parameters() if weight.grad is not None]
    assert len(seen) == len(list(master.parameters())) - 1
    assert all(weight.grad is None for weight in model.parameters())
    rounded = 0
    for gradient, a, b in zip(seen, first, second, strict=True):
        assert a.dtype == torch.bfloat16 and gradient.dtype == torch.float32
        assert torch.equal(gradient, a.float() + b.float())
        rounded += (gradient != (a + b).float()).sum()
    assert rounded > 1000  # the test can tell: bfloat16 sums are other ones


# ------------------------------------------------------------------------------ waiting for the device

WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "index", "index_put", "index_put_"}


def caller():
    """Name of the function that runs, if it is the project's; None if a library's."""
    frame = sys._getframe()
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if "transformers" in path.parts:
            return None
        if path.parent in (ROOT, ROOT / "plumbing"):
            return frame.f_code.co_name
        frame = frame.f_back
    return None


class Waits(TorchDispatchMode):
    """Collects the project's functions that use what makes the host wait for a GPU, as it needs a value
    or a shape from there. An index counts if it is boolean."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        operator = function.overloadpacket.__name__
        if operator in WAITS:
            indices = tensors_in(args[1]) if operator.startswith("index") else []
            if not indices or any(x.dtype in (torch.bool, torch.uint8) for x in indices):
                self.seen.append((caller(), operator))
        return function(*args, **(kwargs or {}))


def test_a_micro_batch_waits_for_the_device_once(masters, monkeypatch):
    """For the lengths, to pack by; policy, critic, losses and statistics need no more."""
    master, (batch, _) = masters
    policy = Policy(master, tokenizer=None)
    critic = ppo.Critic(policy)
    args = settings(micro_batch_size=12, num_minibatches=1)
    record_old_policy(policy, batch, args)
    waits = Waits()
    tolist = torch.Tensor.tolist

    def counted(tensor):
        waits.seen.append((caller(), "tolist"))
        return tolist(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", counted)
    meter = Meter()
    with waits:
        (micro,) = batch.micro_batches(args)
        outputs = token_logprobs(policy, micro, 1.0, entropy_grad=True)
        inputs = outputs.logprobs_BT, micro.old_logprobs_BT, torch.ones(12, 1), micro.mask_BT
        loss, stats = grpo.policy_loss(*inputs)
        values = critic(micro)[:, :-1]
        value_loss = ppo.value_loss(values, values.detach(), micro.old_logprobs_BT, micro.mask_BT)
        (loss + value_loss + outputs.aux_loss + outputs.entropy_BT.sum()).backward()
        meter.add_pass({"policy_loss": loss}, stats, outputs, micro)
    assert [row for row in waits.seen if row[0] is not None] == [("lengths", "tolist")]
