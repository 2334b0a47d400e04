"""What is computed in bfloat16 and what in float32, and that float32 masters make bfloat16 learn."""

import copy
import json
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, flags_it_has, run, script_args
from safetensors.torch import load_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import grpo
import ppo
from common import CachedForward, Problem, collate, critic_values, load_policy, prefill
from common import record_old_policy, sample, token_logprobs
from plumbing.metrics import Meter
from plumbing.models import logits_of
from plumbing.policy import Policy, TrainedModel, working_copy

SMALL = """--prompts_per_iteration 6 --group_size 4 --max_new_tokens 12 --num_minibatches 2
--micro_batch_size 5 --iterations 2""".split()
MIXED = ("57+308=", "12+34=", "999+999=", "5=", "100+20=")


def rollout(policy, args):
    problems = [Problem(text, "", policy.tokenizer(text).input_ids) for text in MIXED]
    return collate(sample(policy, problems, 4, args, torch.Generator().manual_seed(0)), args)


def settings(**changes):
    return script_args("grpo", device="cpu", max_new_tokens=12, **changes)[1]


def logged(folder):
    """The lines of metrics.jsonl, without times."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    return [{k: v for k, v in line.items() if "second" not in k} for line in lines]


def weights_of(folder):
    (checkpoint,) = folder.glob("checkpoint-*")
    return load_file(checkpoint / "model.safetensors")


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


def gradients(model, batch):
    """Without the hooks: as they come out of the backward pass."""
    return torch.autograd.grad(loss_of(model, batch), list(model.parameters()))


def test_in_float32_the_master_computes(tiny_model):
    """A copy would take memory, and could fall behind."""
    master = tiny_model[0]
    before = {name: (w.data_ptr(), w._version) for name, w in master.named_parameters()}
    trained = TrainedModel(master, "float32")
    trained.refresh()
    assert trained.model is master
    assert {name: (w.data_ptr(), w._version) for name, w in master.named_parameters()} == before
    assert not any(w._post_accumulate_grad_hooks for w in master.parameters())


def test_a_copy_has_weights_in_bfloat16_and_buffers_in_float32(tiny_policy):
    """In bfloat16 the rotary frequencies would put token 257 where token 256 is."""
    master = tiny_policy.master
    model = working_copy(master, "bfloat16")
    assert {w.dtype for w in model.parameters()} == {torch.bfloat16}
    assert {w.dtype for w in master.parameters()} == {torch.float32}
    buffers = dict(model.named_buffers())
    assert any("inv_freq" in name for name in buffers)
    for name, buffer in master.named_buffers():
        assert buffers[name].dtype == torch.float32 and torch.equal(buffers[name], buffer)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


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


def test_the_rollout_copy_gets_the_weights_after_the_step(tiny_policy):
    """Those of an iteration that is due, and not of the step before."""
    policy = Policy(copy.deepcopy(tiny_policy.master), None, "bfloat16", "float32", refresh_every=2)
    head = policy.master.model.norm.weight
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    sampled_with = []
    for iteration in range(1, 5):
        sampled_with.append(policy.sampler(iteration).model.model.norm.weight.clone())
        head.grad = torch.ones_like(head)
        optimizer.step()
    first, second, third, fourth = sampled_with
    assert torch.equal(first, second) and torch.equal(third, fourth)
    torch.testing.assert_close(third, first - 0.2)


def test_run_the_working_copy_follows_its_master(tmp_path, monkeypatch):
    """In each forward of the policy in a run."""
    original = ppo.token_logprobs
    seen = []

    def token_logprobs(policy, *inputs, **named):
        weights = dict(policy.master.named_parameters())
        for name, weight in policy.model.named_parameters():
            assert torch.equal(weight, weights[name].bfloat16())
        seen.append(weights["model.embed_tokens.weight"][3, 0].item())
        return original(policy, *inputs, **named)

    monkeypatch.setattr(ppo, "token_logprobs", token_logprobs)
    flags = [*flags_it_has("ppo", SMALL), "--dtype", "bfloat16", "--run_dir", tmp_path]
    result = run("ppo", *flags, held_out=4)
    assert result.returncode == 0, result.stderr
    assert len(set(seen)) == 4  # steps, before each of which the weights are others


def test_micro_batches_add_up_in_float32(masters):
    """Exactly; in bfloat16 a sum of many would stop growing. The copy keeps no gradients."""
    master, (one, two) = masters
    model = working_copy(master, "bfloat16")
    first, second = gradients(model, one), gradients(model, two)
    loss_of(model, one).backward()
    loss_of(model, two).backward()
    rounded = 0
    for weight, master_weight, a, b in zip(
        model.parameters(), master.parameters(), first, second, strict=True
    ):
        assert weight.grad is None and a.dtype == b.dtype == torch.bfloat16
        assert master_weight.grad.dtype == torch.float32
        assert torch.equal(master_weight.grad, a.float() + b.float())
        rounded += (master_weight.grad != (a + b).float()).sum()
    assert rounded > 1000  # the test can tell: bfloat16 sums are other ones


def test_a_frozen_weight_stays_without_gradient(masters):
    master, (batch, _) = masters
    master.model.norm.weight.requires_grad_(False)
    loss_of(working_copy(master, "bfloat16"), batch).backward()
    assert [name for name, w in master.named_parameters() if w.grad is None] == ["model.norm.weight"]


def test_a_tied_weight_gets_both_gradients_once(masters):
    """The embedding's and the head's, in the one master that they share."""
    master, (batch, _) = masters
    untied = working_copy(master, "bfloat16")
    untied.lm_head.weight = nn.Parameter(untied.lm_head.weight.detach().clone())
    weights = [untied.get_input_embeddings().weight, untied.lm_head.weight]
    of_embedding, of_head = torch.autograd.grad(loss_of(untied, batch), weights)
    assert of_embedding.norm() > 0.1 and of_head.norm() > 0.1
    model = working_copy(master, "bfloat16")
    loss_of(model, batch).backward()
    gradient = master.get_input_embeddings().weight.grad
    assert gradient is master.lm_head.weight.grad
    assert torch.equal(gradient, (of_embedding + of_head).float())


def test_run_a_checkpoint_holds_masters(tmp_path, sums):
    """Stopped and resumed, a run in bfloat16 is the same to the bit. Rounded masters would lose what
    small updates had added up."""
    flags = [*flags_it_has("ppo", SMALL), "--dtype", "bfloat16", "--dataset", sums, "--resume"]
    for name, count in (("whole", 2), ("parts", 1), ("parts", 2)):
        result = run("ppo", *flags, "--run_dir", tmp_path / name, "--iterations", count, held_out=8)
        assert result.returncode == 0, result.stderr
    weights, again = weights_of(tmp_path / "whole"), weights_of(tmp_path / "parts")
    assert all(torch.equal(weights[key], again[key]) for key in weights)
    assert logged(tmp_path / "whole")[-1] == logged(tmp_path / "parts")[-1]
    (checkpoint,) = (tmp_path / "parts").glob("checkpoint-*")
    parts = torch.load(checkpoint / "trainer_state.pt", weights_only=True)["parts"]
    for masters in (weights, parts["critic"]):
        assert {w.dtype for w in masters.values()} == {torch.float32}
        assert any((w != w.bfloat16()).any() for w in masters.values())
    for moments in parts["optimizer"]["state"].values():
        assert moments["exp_avg"].dtype == moments["exp_avg_sq"].dtype == torch.float32


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


@pytest.mark.parametrize("work", [lambda x: x[x > 0], lambda x: x.sum().item()])
def test_waits_are_seen(work, monkeypatch):
    """In a function of the project, which `work` stands for here."""
    monkeypatch.setattr(sys.modules[__name__], "caller", lambda: "work")
    with Waits() as waits:
        work(torch.ones(3))
    assert waits.seen


# ---------------------------------------------------------------------------------- the head's product


def test_head_in_float32():
    """The product of bfloat16 weights and states is not rounded to bfloat16: in the policy, and, each
    with its own weights, in a reference and in a copy that samples. Gradients reach the master."""
    hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    flags = {"dtype": "bfloat16", "rollout_dtype": "int8"}
    plain = load_policy(settings(**flags))
    policy = load_policy(settings(**flags, head_dtype="float32"))
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
    logits = logits_of(policy.model, hidden)
    rounded = logits_of(plain.model, hidden)
    assert rounded.dtype == torch.bfloat16 and (rounded - logits).abs().max() > 1e-3
    logits.sum().backward()
    assert policy.master.get_output_embeddings().weight.grad.dtype == torch.float32
