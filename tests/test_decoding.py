"""The sampler's fixed cache, which CUDA graphs need, against its growing one. Here a graph is a tape.
Which architectures can use it: test_architectures.py; what only a GPU shows: test_gpu.py."""

import contextlib
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from conftest import MIXED, interfere, problems_of, script_args
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import common
from common import sample
from plumbing import decoding
from plumbing.decoding import FixedLayer, StretchDecoder, check_stretches, graphs_for


def storage_of(tensor):
    return tensor.untyped_storage().data_ptr()


class Tape(TorchDispatchMode):
    """In place of a CUDA graph: notes the operators of a step, with their tensors and numbers, and runs
    these again, not the step. Since a capture computes nothing, `rewind` undoes what was written and
    fills new tensors with garbage."""

    def __init__(self):
        super().__init__()
        self.operators = []  # (operator, arguments, keywords, result)
        self.written = {}  # {storage: (a tensor in it, all its content before)}
        self.made = {}  # {storage: a tensor in it}

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        for argument, value in zip(operator._schema.arguments, args, strict=False):
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if is_written and storage_of(value) not in self.written | self.made:
                self.written[storage_of(value)] = value, value.untyped_storage().clone()
        result = operator(*args, **kwargs)
        known = {storage_of(x) for x in given}
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and storage_of(x) not in known:
                self.made[storage_of(x)] = x
        self.operators.append((operator, args, kwargs, result))
        return result

    def rewind(self):
        for x, content in self.written.values():
            x.untyped_storage().copy_(content)
        for x in self.made.values():
            x.fill_(torch.nan if x.is_floating_point() else -1)

    def play(self):
        for operator, args, kwargs, result in self.operators:
            again = tree_leaves(operator(*args, **kwargs))
            for noted, x in zip(tree_leaves(result), again, strict=True):
                if isinstance(x, torch.Tensor) and storage_of(x) != storage_of(noted):
                    noted.copy_(x)


class Tapes:
    """In place of `Graphs`. Notes what was asked."""

    def __init__(self):
        self.calls = []

    def run(self, step):
        self.calls.append("run")
        step()

    def capture(self, step):
        self.calls.append("capture")
        tape = Tape()
        with tape:
            step()
        tape.rewind()

        def play():
            self.calls.append("play")
            tape.play()

        return play

    @contextlib.contextmanager
    def refuse_to_wait(self):
        self.calls.append("refuse")
        yield


ON_GPU = SimpleNamespace(
    model=SimpleNamespace(device=torch.device("cuda")), routers=SimpleNamespace(num_experts=0)
)
PROMPTS = ([3, 8, 4, 9, 6], [3, 4, 12], [10])


def sampled(policy, graphs, seed, **changes):
    """Completions of prompts of mixed lengths."""
    _, args = script_args("grpo", **{"max_new_tokens": 20} | changes)
    policy.graphs = graphs
    noise = torch.Generator().manual_seed(seed)
    return sample(policy, problems_of(policy, *MIXED), 4, args, noise)


def assert_same(completions, others):
    for c, other in zip(completions, others, strict=True):
        assert c.ids == other.ids and c.truncated == other.truncated
        assert c.logprobs == pytest.approx(other.logprobs, abs=1e-5)


@pytest.mark.parametrize("stretch", [3, 5])
def test_a_fixed_cache_gives_the_same_completions(stretch, own_policy, monkeypatch):
    """Whether rows end inside a stretch or at its edge."""
    monkeypatch.setattr(decoding, "STRETCH", (stretch, stretch))
    own_policy.model.generation_config.eos_token_id = [1, 5]
    changes = {"temperature": 1.5, "max_new_tokens": 16}
    growing = sampled(own_policy, None, 1, **changes)
    graphs = Tapes()
    fixed = sampled(own_policy, graphs, 1, **changes)
    assert_same(fixed, growing)
    of_a_stretch = ["run", "capture", *["play"] * (stretch - 1)]
    assert graphs.calls[: stretch + 3] == [*of_a_stretch, "run", "capture"]
    places = {(len(c.ids) - 1) % stretch for c in growing}  # the first token is before any stretch
    assert 0 in places and len(places) > 1


@pytest.mark.parametrize("cap, calls", [(1, []), (2, ["run"]), (3, ["run", "capture", "play"])])
def test_a_fixed_cache_with_a_low_cap(cap, calls, tiny_policy):
    """One token needs no forward after the prompts', and two tokens no graph."""
    growing = sampled(tiny_policy, None, 0, max_new_tokens=cap)
    graphs = Tapes()
    assert_same(sampled(tiny_policy, graphs, 0, max_new_tokens=cap), growing)
    assert graphs.calls == calls


def test_a_stretch_ends_when_all_rows_have_ended(own_policy):
    """The host looks for that every 16 tokens."""
    own_policy.model.generation_config.eos_token_id = list(range(3, 10))  # ends most rows soon
    graphs = Tapes()
    completions = sampled(own_policy, graphs, 0, max_new_tokens=40)
    longest = max(len(c.ids) for c in completions)
    assert 1 < longest <= 16
    assert graphs.calls == ["run", "capture", *["play"] * 14]  # the first token comes from the prompts


def test_a_stretch_keeps_rows_that_have_ended(own_policy):
    """Whether the host looks before its end or not."""
    own_policy.model.generation_config.eos_token_id = [1, 5]  # ends some rows soon
    growing = sampled(own_policy, None, 1, max_new_tokens=40, temperature=1.5)
    fixed = sampled(own_policy, Tapes(), 1, max_new_tokens=40, temperature=1.5)
    assert_same(fixed, growing)
    lengths = [len(c.ids) for c in growing]
    assert min(lengths) < 16 < max(lengths)


@torch.inference_mode()
def test_the_stretches_of_a_long_answer(tiny_policy):
    """As many tokens as the cache has, from 64 to 256, up to the cap; columns in multiples of 16."""
    decoder = StretchDecoder(tiny_policy, Tapes(), 700, decoding.STRETCH)
    token_R1 = decoder.prefill([[3] * 10] * 2).argmax(1, keepdim=True)
    widths = []
    for _ in range(699):
        token_R1 = decoder(token_R1).argmax(1, keepdim=True)
        if decoder.can_drop:
            columns = decoder.cache.layers[0].keys.shape[2]
            widths.append(decoder.attention.shape[1])
            assert 0 <= columns - widths[-1] < 16 and columns % 16 == 0
            assert decoder.mask.shape == (2, 1, 1, columns)
    assert widths == [74, 148, 296, 552, 709]


# --------------------------------------------------------------------------------- the check at loading


def wrong_column(layer, keys, values, *_, **__):
    layer.keys[:, :, :1] = keys
    layer.values[:, :, :1] = values
    return layer.keys, layer.values


def number_of_the_host(decoder):
    """Right, if the step itself ran each time: a graph repeats the number."""
    column = decoder.attention.shape[1] - decoder.num_spare
    decoder.mask[..., column] = True
    decoder.logits_RV = decoder.forward(decoder.token_R1, decoder.mask, decoder.positions)
    decoder.positions.add_(1)
    decoder.column_1.add_(1)


WRONG = [  # faults of a fixed cache
    (FixedLayer, "update", wrong_column, "its distributions differ by"),
    (StretchDecoder, "step", number_of_the_host, "its distributions differ by"),
]


@pytest.mark.parametrize("owner, name, function, expected", WRONG)
def test_the_check_sees_a_fixed_cache_that_is_wrong(
    owner, name, function, expected, tiny_policy, monkeypatch
):
    monkeypatch.setattr(owner, name, function)
    with pytest.raises(ValueError, match=expected):
        check_stretches(tiny_policy, PROMPTS * 2, Tapes())


def test_the_check_decodes_two_stretches_and_drops_a_row(tiny_policy, monkeypatch):
    """No step may wait for the GPU, and one that would is never captured."""
    kept = []
    interfere(monkeypatch, StretchDecoder, "keep", lambda decoder, rows: kept.append(len(rows)))
    graphs = Tapes()
    check_stretches(tiny_policy, PROMPTS * 2, graphs)
    assert graphs.calls == ["refuse", "run", "refuse", "capture", "play", "refuse", "play"] * 2
    assert kept == [6, 5]  # from prompts to rows, and then without the first one

    def wait(step):
        raise RuntimeError("called a synchronizing CUDA operation")

    graphs = Tapes()
    graphs.run = wait
    with pytest.raises(RuntimeError, match="synchronizing"):
        check_stretches(tiny_policy, PROMPTS * 2, graphs)
    assert graphs.calls == ["refuse"]


def test_what_cannot_be_captured_is_sampled_with_a_growing_cache(monkeypatch):
    """And the reason is given. Running out of memory is not one."""
    monkeypatch.setattr(decoding, "Graphs", Tapes)
    check = MagicMock(side_effect=RuntimeError("its mask is odd\nhere"))
    monkeypatch.setattr(decoding, "check_stretches", check)
    assert graphs_for(ON_GPU, PROMPTS, 48) == (None, "its mask is odd")
    check.side_effect = RuntimeError("called a synchronizing CUDA operation")
    assert graphs_for(ON_GPU, PROMPTS, 48) == (None, "its layers wait for the GPU")
    check.side_effect = torch.OutOfMemoryError
    with pytest.raises(torch.OutOfMemoryError):
        graphs_for(ON_GPU, PROMPTS, 48)
    check.side_effect = None
    graphs, reason = graphs_for(ON_GPU, PROMPTS, 6)  # the model may have no positions for the check
    assert graphs is None and reason != ""
    graphs, reason = graphs_for(ON_GPU, PROMPTS, 7)
    assert type(graphs) is Tapes and reason == ""


def test_only_a_policy_that_samples_has_graphs(monkeypatch):
    """Copies, such as a reference, are not, unless they are checked, too."""
    monkeypatch.setattr(common, "graphs_for", lambda *_: ("graphs", ""))
    args = script_args("grpo")[1]
    policy = common.load_policy(args)
    sampler = policy.frozen_copy("bfloat16")
    assert policy.graphs == "graphs" and sampler.graphs is None
    common.prepare_sampling(sampler, args)
    assert sampler.graphs == "graphs"
