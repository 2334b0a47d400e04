"""On a GPU every script learns and resumes, and CUDA graphs change nothing. Skipped without one; to run
it: -m slow."""

import itertools
import time

import pytest
import torch
from conftest import MIXED, MORE, SCRIPTS, metrics, problems_of, resume, run, save, script_args
from speed import save_model
from test_architectures import new_model

from common import load_policy, sample
from plumbing import decoding
from plumbing.decoding import Graphs, StretchDecoder

JOBS = [(name, dtype) for name in [*SCRIPTS, *MORE] for dtype in ("float32", "bfloat16")]
ITERATIONS = 12
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEFAULT = ("--dataset", "addition", "--num_held_out", 256)
pytestmark = [pytest.mark.slow, GPU]


@pytest.mark.parametrize("name, dtype", JOBS)
def test_run_learns_and_resumes_on_a_gpu(name, dtype, tmp_path):
    """The beginning of the default job, and one more iteration after a resume. In the first step of an
    iteration old log-probs and update have one forward."""
    flags = (*DEFAULT, "--iterations", ITERATIONS, "--device", "cuda", "--dtype", dtype)
    result = run(name, *flags, "--run_dir", tmp_path)
    assert result.returncode == 0, result.stderr
    assert f"{torch.cuda.get_device_name()}; sampling with" in result.stdout
    more = ITERATIONS + 1
    result = run(name, *resume(tmp_path, "--device", "cuda", "--iterations", more))
    assert result.returncode == 0, result.stderr
    lines = metrics(tmp_path)
    assert [line["iteration"] for line in lines] == [*range(1, more + 1)]
    assert lines[-1]["eval/accuracy"] >= 0.7  # 0.43 before training
    assert max(line.get("losses/first_step_ratio_error_max", 0) for line in lines) < 1e-3
    assert 0 < lines[-1]["charts/peak_memory_gib"] <= lines[-1]["charts/peak_reserved_gib"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_graphs_do_not_change_what_a_cache_on_a_gpu_gives(dtype, tmp_path):
    """Answers of up to 2,048 tokens are those of a growing cache, with nearly the same log-probs.
    Prints both times. (A dense model, since an MoE in float32 cannot be captured.)"""
    sizes = dict(hidden_size=256, head_dim=64, max_position_embeddings=4096, initializer_range=0.05)
    model = save(new_model("llama", **sizes, vocab_size=512), tmp_path / "model")
    cap = {"max_new_tokens": 2048, "model": str(model), "dtype": dtype}
    _, args = script_args("grpo", device="cuda", **cap)
    policy = load_policy(args)
    assert policy.graphs is not None
    policy.model.generation_config.eos_token_id = [1]  # one token in 512
    results = []
    for graphs in (policy.graphs, None):
        policy.graphs = graphs
        start = time.perf_counter()
        noise = torch.Generator().manual_seed(0)
        results.append(sample(policy, problems_of(policy, *MIXED), 16, args, noise))
        print(f"{dtype}, {'with' if graphs else 'without'} graphs: {time.perf_counter() - start:.2f} s")
    assert len({len(c.ids) for c in results[0]}) > 10
    num_equal = sum(c.ids == other.ids for c, other in zip(*results, strict=True))
    print(f"{dtype}: {num_equal} of {len(results[0])} completions are equal")
    assert dtype == "bfloat16" or num_equal >= 0.9 * len(results[0])  # kernels differ in rounding
    for c, other in zip(*results, strict=True):  # in bfloat16 up to the first token that differs
        pairs = zip(c.ids, other.ids, c.logprobs, other.logprobs, strict=False)
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
        gaps = [abs(logprob - other_logprob) for _, _, logprob, other_logprob in same]
        assert max(gaps) < (1e-4 if dtype == "float32" else 0.2)


def add_one(x, error=None):
    """A step that may fail."""

    def step():
        x.add_(1)
        if error is not None:
            raise error

    return step


def test_graphs_that_follow_each_other():
    """In one pool, as the stretches of a rollout: each is destroyed before the next one is captured."""
    graphs = Graphs()
    x = torch.zeros(2, device="cuda")
    for number in range(1, 4):
        step = add_one(x)
        graphs.run(step)
        replay = graphs.capture(step)
        replay()
        assert x.tolist() == [2 * number] * 2
        del replay
    torch.cuda.empty_cache()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), torch.OutOfMemoryError(), KeyError()])
def test_an_exception_ends_a_capture(error):
    """And is the one that is raised. Afterwards the GPU, its random numbers and captures work."""
    graphs = Graphs()
    x = torch.zeros(2, device="cuda")
    with pytest.raises(type(error)):
        graphs.capture(add_one(x, error))
    assert not torch.cuda.is_current_stream_capturing()
    torch.rand(2, device="cuda")
    torch.cuda.empty_cache()
    graphs.capture(add_one(x))()
    assert x.tolist() == [1, 1]


def test_little_memory_is_freed_before_a_capture(monkeypatch):
    """torch cannot do that during one."""
    graphs = Graphs()
    x = torch.zeros(2, device="cuda")
    torch.empty(2**24, device="cuda")  # freed at once, but torch keeps the memory
    reserved = torch.cuda.memory_reserved()
    graphs.capture(add_one(x))
    assert torch.cuda.memory_reserved() >= reserved
    monkeypatch.setattr(decoding, "LITTLE_MEMORY", 2**60)
    graphs.capture(add_one(x))
    assert torch.cuda.memory_reserved() < reserved


def test_waiting_is_refused():
    """Only inside, and after an exception as before it."""
    x = torch.zeros(2, device="cuda")
    graphs = Graphs()
    with pytest.raises(RuntimeError, match="synchronizing"), graphs.refuse_to_wait():
        x.tolist()
    x.tolist()


def test_no_step_of_a_large_rollout_waits(tmp_path, monkeypatch):
    """The check at loading sees six rows, and kernels may be chosen by size."""
    save_model("qwen", tmp_path)
    sizes = {"prompts_per_iteration": 32, "group_size": 8, "max_new_tokens": 256}
    _, args = script_args("grpo", device="cuda", dtype="bfloat16", model=str(tmp_path), **sizes)
    policy = load_policy(args)
    assert policy.graphs is not None, policy.why_no_graphs
    original = StretchDecoder.__call__

    def step(decoder, token_R1):
        with decoder.graphs.refuse_to_wait():
            return original(decoder, token_R1)

    monkeypatch.setattr(StretchDecoder, "__call__", step)
    completions = sample(policy, problems_of(policy, *MIXED), 51, args)
    assert len(completions) == 255
