"""What is computed in bfloat16 and what in float32, and that float32 masters make bfloat16 learn."""

import copy
import importlib
import sys
from pathlib import Path

import pytest
import torch
import transformers
from conftest import ROOT, run, script_args
from safetensors.torch import load_file
from test_resume import check
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import grpo
import ppo
from common import OldScores, collate, load_policy, sample, token_logprobs
from plumbing import Meter, TrainedModel
from plumbing.models import checkpoint_layers, logits_of
from plumbing.policy import Policy, working_copy
from test_runs import untimed
from test_sampler import MIXED, problems_of, settings

SMALL = """--prompts_per_iteration 6 --max_new_tokens 12 --num_minibatches 2
--micro_batch_size 5 --iterations 1""".split()
OWN = {"grpo": ("--group_size", 4), "ppo": ("--prompts_per_iteration", 24)}


# --------------------------------------------------------------- what a whole iteration computes with

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "mv", "dot", "matmul", "linear", "einsum", "_grouped_mm"}
CASTS = {"_to_copy", "copy_"}


def is_product(name):
    return name in PRODUCTS or "attention" in name or "mkldnn" in name


def tensors_in(values):
    """The tensors among arguments or results, those in lists too."""
    flat = torch.utils._pytree.tree_leaves(values)
    return [x for x in flat if isinstance(x, torch.Tensor)]


class Spy(TorchDispatchMode):
    """Of each matrix product: phase, operator, dtypes, and which learned weights are in it; and casts
    of learned weights, other than those of `refresh`."""

    def __init__(self):
        super().__init__()
        self.models = []
        self.products = []  # (phase, operator, {dtypes}, {names of weights})
        self.casts = []  # (phase, operator, name)
        self.is_on = False
        self.in_refresh = False

    def phase(self):
        if torch.is_inference_mode_enabled():
            return "rollout"
        if torch._C._current_autograd_node() is not None:
            return "backward"
        return "update" if torch.is_grad_enabled() else "old"

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        operator = function.overloadpacket.__name__
        if is_product(operator) or operator in CASTS:
            names = {w.untyped_storage().data_ptr(): name for name, w in self.weights()}
            inputs = tensors_in([args, kwargs])
            used = {names.get(x.untyped_storage().data_ptr()) for x in inputs} - {None}
            tensors = inputs + tensors_in(result)
            if "attention" in operator:
                # Queries, keys, values and output have 4 axes. The softmax's log-normaliser has 3: a
                # by-product, a number for each token and head, which the kernel keeps in float32.
                tensors = [x for x in tensors if x.dim() == 4]
            dtypes = {x.dtype for x in tensors if x.is_floating_point()}
            if is_product(operator):
                self.products.append((self.phase(), operator, dtypes, used))
            elif used and len(dtypes) > 1 and not self.in_refresh:
                self.casts.append((self.phase(), operator, used))
        return result

    def weights(self):
        """(model's number and name, weight) of the models that compute."""
        for number, model in enumerate(self.models):
            for name, weight in model.named_parameters():
                yield f"{number} {name}", weight


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request):
    return request.param


@pytest.fixture(scope="module", params=["grpo", "ppo"])
def spied(request, dtype, tmp_path_factory, tiny_model):
    """(dtype, spy, dtypes in the cache) of one iteration: rollout, old log-probs, update."""
    name = request.param
    module = importlib.import_module(name)
    spy = Spy()
    cached = set()
    with pytest.MonkeyPatch.context() as patch:

        def before(attribute, action):
            """Has `action` done before each call of the script's function, with its arguments."""
            original = getattr(module, attribute)

            def function(*args, **keywords):
                action(*args)
                return original(*args, **keywords)

            patch.setattr(module, attribute, function)

        def take_note(trained, *args):
            if not any(trained.model is other for other in spy.models):
                spy.models.append(trained.model)

        def refresh(trained):
            spy.in_refresh = True
            original_refresh(trained)
            spy.in_refresh = False

        def update(layer, *args, **keywords):
            result = original_update(layer, *args, **keywords)
            if spy.is_on:
                cached.update(x.dtype for x in (*result, layer.keys, layer.values))
            return result

        def start(*args):
            spy.is_on = True
            spy.__enter__()

        def stop(*args):
            spy.__exit__(None, None, None)
            spy.is_on = False

        original_refresh = TrainedModel.refresh
        original_update = transformers.cache_utils.DynamicLayer.update
        patch.setattr(TrainedModel, "refresh", refresh)
        patch.setattr(transformers.cache_utils.DynamicLayer, "update", update)
        before("Meter", start)
        before("sample", take_note)
        before("score", take_note)
        if name == "ppo":
            before("score_values", take_note)
        before("iteration_metrics", stop)
        flags = (*SMALL, *OWN[name], "--dtype", dtype, "--run_dir", tmp_path_factory.mktemp("run"))
        result = run(name, *flags, held_out=4)
    assert result.returncode == 0, result.stderr
    return dtype, spy, cached


def test_every_matrix_product_is_in_the_dtype(spied):
    """A float32 product under bfloat16 would take many times as long on a GPU, and another dtype in
    float32 would lose digits: no input, and no result, is anything else."""
    dtype, spy, _ = spied
    others = [row for row in spy.products if row[2] != {getattr(torch, dtype)}]
    assert not others


def test_the_spy_sees_every_weight_in_every_phase(spied):
    """Sampling, old log-probs, update and backward pass, the experts and routers of all models: else
    the test above would say nothing about what it did not see."""
    _, spy, _ = spied
    matrices = {name for name, w in spy.weights() if w.dim() > 1}
    policy = {name for name in matrices if name.startswith("0 ")}
    trained = policy | {name for name in matrices if "body." in name or name.endswith(" head.weight")}
    assert (
        sum("experts" in name for name in policy) == 4 and sum(".gate." in name for name in policy) == 2
    )
    assert len(spy.models) == (3 if trained > policy else 2)  # policy, reference, and ppo's critic
    untouched = {name for name in matrices if name.endswith("body.embed_tokens.weight")}  # no head
    for phase, expected in (
        ("rollout", policy),
        ("old", matrices - untouched),
        ("update", trained - untouched),
        ("backward", trained - untouched),
    ):
        seen = [row for row in spy.products if row[0] == phase]
        assert set.union(*(row[3] for row in seen)) >= expected
        operators = {row[1] for row in seen}
        assert "_grouped_mm" in operators and any("attention" in name for name in operators)


def test_the_cache_is_in_the_dtype(spied):
    dtype, _, cached = spied
    assert cached == {getattr(torch, dtype)}


def test_no_weight_is_cast_in_a_pass(spied):
    """As autocast did, anew for each token."""
    _, spy, _ = spied
    assert not spy.casts


# ----------------------------------------------------------------------- masters and the working copy


@pytest.fixture
def masters(tiny_policy):
    """A float32 model to change, and two micro-batches of it."""
    policy = copy.deepcopy(tiny_policy)
    noise = torch.Generator().manual_seed(0)
    batch = collate(sample(policy, problems_of(policy, *MIXED), 4, settings(), noise), settings())
    return policy.master, [batch.rows(rows) for rows in torch.arange(20).split(12)]


def loss_of(model, batch):
    outputs = token_logprobs(Policy(model, tokenizer=None), batch, 0.7)
    return (outputs.logprobs_BT * torch.linspace(-1, 1, len(batch.mask_BT))[:, None]).sum()


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
    critic = working_copy(ppo.Critic(tiny_policy), "bfloat16")
    assert {w.dtype for w in critic.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in critic.buffers()} == {torch.float32}


def test_small_updates_add_up():
    """A weight that moves by 1e-4 of its size stays where it is in bfloat16, a hundred times; its
    master takes it along."""
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
        trained.refresh()
    torch.testing.assert_close(master.weight, 1.01 * start.float(), rtol=1e-5, atol=0)
    assert torch.equal(trained.model.weight, master.weight.bfloat16())
    assert ((trained.model.weight.float() / start.float() - 1.01).abs() < 2**-8).all()


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


def test_recomputed_layers_hand_over_the_same_gradients(masters):
    """--gradient_checkpointing: the layers of the copy are those that are computed again."""
    master, (batch, _) = masters
    loss_of(working_copy(master, "bfloat16"), batch).backward()
    saving = copy.deepcopy(master)
    checkpoint_layers(saving)
    saving.zero_grad()
    loss_of(working_copy(saving, "bfloat16"), batch).backward()
    for a, b in zip(saving.parameters(), master.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_a_checkpoint_holds_masters_and_a_killed_run_goes_on(name, tmp_path, sums):
    """Bit for bit in bfloat16 too: weights, optimizer, critic, reference and metrics. Rounded masters
    would lose what small updates had added up."""
    check(name, ["step:4"], tmp_path, sums, "--dtype", "bfloat16", "--iterations", 2)
    (checkpoint,) = (tmp_path / "parts").glob("checkpoint-*")
    parts = torch.load(checkpoint / "trainer_state.pt", weights_only=True)["parts"]
    masters = [load_file(checkpoint / "model.safetensors")]
    if name == "ppo":
        masters.append(parts["critic"])
    for weights in masters:
        assert {w.dtype for w in weights.values()} == {torch.float32}
        assert any((w != w.bfloat16()).any() for w in weights.values())
    assert {w.dtype for w in parts["reference"].values()} == {torch.bfloat16}
    for moments in parts["optimizer"]["state"].values():
        assert moments["exp_avg"].dtype == moments["exp_avg_sq"].dtype == torch.float32


# ------------------------------------------------------------------------------------- entropy bonus


@pytest.mark.parametrize("coef", [0.0, 0.1])
def test_run_the_entropy_bonus_of_ppo_has_a_gradient_if_it_counts(coef, tmp_path, monkeypatch):
    """With a coefficient above 0 it moves the policy; with 0 none is computed, which moves nothing."""
    original = ppo.token_logprobs
    asked = set()
    weights = []

    def token_logprobs(policy, batch, temperature, entropy_grad):
        asked.add(entropy_grad)
        return original(policy, batch, temperature, entropy_grad=forced or entropy_grad)

    monkeypatch.setattr(ppo, "token_logprobs", token_logprobs)
    for forced, number in ((False, coef), (True, 0.0)):
        folder = tmp_path / str(forced)
        flags = (*SMALL, *OWN["ppo"], "--entropy_coef", number, "--run_dir", folder)
        result = run("ppo", *flags, held_out=4)
        assert result.returncode == 0, result.stderr
        (checkpoint,) = folder.glob("checkpoint-*")
        weights.append(load_file(checkpoint / "model.safetensors"))
        assert asked == {number > 0}
        asked.clear()
    same = all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    assert same == (coef == 0)


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
    with torch.no_grad():
        outputs = token_logprobs(policy, batch, 1.0)
    old = OldScores(outputs.logprobs_BT, outputs.experts_BTLK)
    waits = Waits()
    tolist = torch.Tensor.tolist

    def counted(tensor):
        waits.seen.append((caller(), "tolist"))
        return tolist(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", counted)
    meter = Meter(1)
    minibatch = torch.arange(2, 9)
    with waits:
        ((rows, micro),) = batch.micro_batches(minibatch, 7)
        outputs = token_logprobs(policy, micro, 1.0, entropy_grad=True)
        old_logprobs_BT = old.logprobs_NT[rows]
        inputs = outputs.logprobs_BT, old_logprobs_BT, torch.ones(7, 1), micro.mask_BT
        loss, stats = grpo.policy_loss(*inputs)
        values = critic(micro)[:, :-1]
        value_loss = ppo.value_loss(values, values.detach(), old_logprobs_BT, micro.mask_BT)
        (loss + value_loss + outputs.aux_loss + outputs.entropy_BT.sum()).backward()
        meter.add_pass({"policy_loss": loss}, stats, outputs, old, rows, micro.mask_BT)
    assert [row for row in waits.seen if row[0] is not None] == [("lengths", "tolist")]


@pytest.mark.parametrize(
    "work", [lambda x: x[x > 0], lambda x: x.sum().item(), lambda x: x.masked_select(x > 0)]
)
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
    flags = {"device": "cpu", "dtype": "bfloat16", "rollout_dtype": "int8"}
    plain = load_policy(script_args("grpo", **flags)[1])
    policy = load_policy(script_args("grpo", **flags, head_dtype="float32")[1])
    reference = policy.frozen_copy()
    with torch.no_grad():
        reference.model.get_output_embeddings().weight.mul_(2)
    for who in (policy, reference, policy.sampler_at(1)):
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


def test_run_with_the_head_in_float32(tmp_path):
    """In float32 it changes nothing."""
    lines = []
    for dtype in ("same", "float32"):
        flags = ("--head_dtype", dtype, "--run_dir", tmp_path / dtype, *SMALL, *OWN["grpo"])
        assert run("grpo", *flags, held_out=8).returncode == 0
        lines.append(untimed(tmp_path / dtype))
    assert lines[0] == lines[1]
