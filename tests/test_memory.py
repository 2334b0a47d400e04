"""What plumbing/memory.py computes, against what a run allocates, counted by torch's profiler."""

import inspect
from types import SimpleNamespace

import pytest
import torch
import transformers
from conftest import script_args
from test_sampler import batch_of_ids
from torch.profiler import ProfilerActivity, profile

from common import Problem, sample, token_logprobs
from plumbing import memory, plan_memory
from plumbing.data import ProblemStream
from plumbing.memory import memory_parts, memory_peak
from plumbing.models import checkpoint_layers, load_model
from plumbing.policy import Policy

PROMPT = 24
CAP = 56
SIZES = dict(vocab_size=3000, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2)


def dense():
    config = dict(SIZES, hidden_size=256, intermediate_size=1024)
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**config))


def moe():
    config = dict(SIZES, hidden_size=192, moe_intermediate_size=128, head_dim=64)
    config |= dict(num_experts=16, num_experts_per_tok=4, tie_word_embeddings=True)
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**config))


def settings(dtype, **changes):
    flags = {"dtype": dtype, "max_new_tokens": CAP, "rollout_batch_size": 16, "micro_batch_size": 8}
    flags |= {"gradient_checkpointing": False, "temperature": 1.0, "device": "cpu", "model": "it"}
    flags |= {"rollout_dtype": "same", "has_rollout_copy": False, "reads_sampler_experts": False}
    flags |= {"head_dtype": "same"}
    return SimpleNamespace(**(flags | changes))


def peak_bytes(work):
    """The most bytes that `work` has allocated at one time, beyond those that were there before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    allocated = 0
    peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        allocated += event.nbytes()
        peak = max(peak, allocated)
    return peak


@pytest.fixture(params=[dense, moe], ids=["dense", "moe"])
def master(request):
    torch.manual_seed(0)
    model = request.param().eval()
    model.generation_config.eos_token_id = model.config.vocab_size - 1  # hardly ever sampled
    return model


def batch_of(count):
    """Sequences of 80 tokens and one of 72, so that the attention has a mask."""
    lengths = [CAP - 8] + [CAP] * (count - 1)
    return batch_of_ids([([1] * PROMPT, [2] * length) for length in lengths])


KINDS = [(kind, "float32") for kind in ("plain", "checkpointing", "logits in chunks")]
BFLOAT16 = [(kind, "bfloat16") for kind, _ in KINDS]  # takes a minute without bfloat16 instructions


@pytest.mark.parametrize(
    "kind, dtype", KINDS + [pytest.param(*pair, marks=pytest.mark.slow) for pair in BFLOAT16]
)
def test_update(master, kind, dtype, monkeypatch):
    """More than MAX_LOGITS logits are computed in chunks, and so never need more memory than these."""
    default = inspect.signature(token_logprobs).parameters["max_logits"].default
    assert default == memory.MAX_LOGITS
    max_logits = 400_000 if kind == "logits in chunks" else default
    monkeypatch.setattr(memory, "MAX_LOGITS", max_logits)
    args = settings(dtype, gradient_checkpointing=kind == "checkpointing")
    if args.gradient_checkpointing:
        checkpoint_layers(master)
    policy = Policy(master, None, dtype)
    batch = batch_of(args.micro_batch_size)

    def update():
        outputs = token_logprobs(policy, batch, args.temperature, max_logits=max_logits)
        (outputs.logprobs_BT.sum() + outputs.aux_loss).backward()

    update()  # from here on the gradients exist
    counted = peak_bytes(update)
    assert memory_parts(master, args, PROMPT)["update"] == pytest.approx(counted, rel=0.15)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rollout(master, dtype):
    args = settings(dtype)
    tokenizer = SimpleNamespace(eos_token_id=None, batch_decode=lambda ids, **_: [""] * len(ids))
    policy = Policy(master, tokenizer, dtype)
    problems = [Problem("", "", [1] * PROMPT)] * (args.rollout_batch_size // 4)
    generator = torch.Generator().manual_seed(0)
    counted = peak_bytes(lambda: sample(policy, problems, 4, args, generator))
    assert memory_parts(master, args, PROMPT)["rollout"] == pytest.approx(counted, rel=0.15)


def tensor_bytes(tensors):
    return sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_rollout_copy(master, dtype):
    """Its weights, and its cache if that is wider than the policy's."""
    none = memory_parts(master, settings(dtype), PROMPT)
    for rollout_dtype in ("float32", "bfloat16"):
        flags = settings(dtype, rollout_dtype=rollout_dtype, has_rollout_copy=True)
        parts = memory_parts(master, flags, PROMPT)
        sampler = Policy(master, None, dtype, rollout_dtype).sampler_at(1)
        assert parts["rollout copy"] == tensor_bytes(sampler.parameters())
        assert parts["rollout"] >= none["rollout"]
        assert memory_peak(parts) >= memory_peak(none) + parts["rollout copy"]
    assert none["rollout copy"] == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_stays(master, dtype):
    """Weights, masters, gradients and moments of a policy and a critic, and a reference."""
    policy = Policy(master, None, dtype)
    reference = policy.frozen_copy()
    optimizer = torch.optim.AdamW(policy.parameters(), fused=True)
    outputs = token_logprobs(policy, batch_of(2), 1.0)
    (outputs.logprobs_BT.sum() + outputs.aux_loss).backward()
    optimizer.step()
    parts = memory_parts(master, settings(dtype), PROMPT, num_references=1)
    weights = tensor_bytes(policy.model.parameters())
    assert parts["weights"] == weights + tensor_bytes(reference.model.parameters())
    assert parts["masters"] == (0 if dtype == "float32" else tensor_bytes(master.parameters()))
    assert parts["gradients"] == tensor_bytes(weight.grad for weight in master.parameters())
    moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert parts["moments"] == tensor_bytes(moments)
    # A critic is a second policy, with a head of its own of a few numbers.
    with_critic = memory_parts(master, settings(dtype), PROMPT, num_critics=1, num_references=1)
    assert with_critic["moments"] == 2 * parts["moments"]
    assert with_critic["weights"] - parts["weights"] == weights


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_it_is_said_before_the_run_and_what_does_not_fit_warns(name, master, monkeypatch, capsys):
    """It goes on all the same. What counts is the memory that is free."""
    flags = {"prompts_per_iteration": 24, "num_minibatches": 1, "kl_coef": 0.1}
    if name == "grpo":
        flags |= {"prompts_per_iteration": 3, "group_size": 8}
    _, args = script_args(name, device="cpu", max_new_tokens=CAP, rollout_batch_size=16, **flags)
    problems = [Problem("", "", [1] * PROMPT), Problem("", "", [1])]
    stream = ProblemStream(problems[:1], 1)
    assert 2**30 < memory.free_memory("cpu") < 2**50
    args = plan_memory(args, Policy(master, None), stream, problems[1:])
    assert args.micro_batch_size == 24  # 24 x 80 tokens are less than 16,384
    output = capsys.readouterr()
    needed = memory_parts(master, args, PROMPT, num_critics=int(name == "ppo"), num_references=1)
    for part, count in needed.items():
        assert count == 0 or f"{part} {count / 2**20:,.1f}" in output.out
    assert f"at most {memory_peak(needed) / 2**20:,.1f}, free" in output.out and output.err == ""
    monkeypatch.setattr(memory, "free_memory", lambda device: memory_peak(needed))
    plan_memory(args, Policy(master, None), stream, problems[1:])
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(memory, "free_memory", lambda device: memory_peak(needed) - 1)
    plan_memory(args, Policy(master, None), stream, problems[1:])
    assert "smaller --micro_batch_size (now 24)" in capsys.readouterr().err


def test_memory_is_estimated_before_weights_move(monkeypatch, capsys):
    """The warning comes before the device refuses them."""
    monkeypatch.setattr(memory, "free_memory", lambda device: 2**20)
    args = script_args("grpo", device="nowhere")[1]
    with pytest.raises(RuntimeError, match="nowhere"):
        load_model(args)
    assert "nowhere has 0.0 free; less: --dtype bfloat16" in capsys.readouterr().err


def test_free_memory_of_a_gpu(monkeypatch):
    """What is free, and what the run has taken already; not what others have."""
    monkeypatch.setattr(torch.cuda, "cudart", lambda: "a GPU")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5 * 2**30, 80 * 2**30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2**30)
    assert memory.free_memory("cuda:1") == 6 * 2**30
