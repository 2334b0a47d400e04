"""Every script learns on a GPU, and resumes there. Skipped without one; to run it: -m slow."""

import pytest
import torch
from conftest import MORE, SCRIPTS, flags_it_has, metrics, run
from safetensors.torch import load_file

DEVICE = "cuda"
JOBS = [(name, dtype) for name in [*SCRIPTS, *MORE] for dtype in ("float32", "bfloat16")]
DEFAULT = ("--dataset", "addition", "--num_held_out", 256)
SMALL = "--prompts_per_iteration 16 --max_new_tokens 24 --num_minibatches 4 --eval_every 0".split()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("name, dtype", JOBS)
def test_run_learns_on_a_gpu(name, dtype, tmp_path):
    """The default job. In the first step of an iteration old log-probs and update have one forward."""
    result = run(name, *DEFAULT, "--device", DEVICE, "--dtype", dtype, "--run_dir", tmp_path)
    assert result.returncode == 0, result.stderr
    lines = metrics(tmp_path)
    assert lines[-1]["eval/accuracy"] >= 0.9
    assert max(line["losses/first_step_ratio_error_max"] for line in lines) < 1e-3
    assert lines[-1]["charts/peak_memory_gib"] > 0


def weights_after(name, dtype, folder, *jobs):
    """The weights, as one vector, after runs with these flags in one folder."""
    for flags in jobs:
        words = [*SMALL, "--device", DEVICE, "--dtype", dtype, "--run_dir", folder, *flags.split()]
        result = run(name, *flags_it_has(name, words[:8]), *words[8:])
        assert result.returncode == 0, result.stderr
    (path,) = folder.glob("checkpoint-*/model.safetensors")
    return torch.cat([weight.flatten().double() for weight in load_file(path).values()])


@pytest.mark.parametrize("name, dtype", JOBS)
def test_run_resumes_on_a_gpu(name, dtype, tmp_path):
    """Up to the order of sums, which is not fixed there: the error is small beside what one iteration
    changes."""
    own = " --pretraining_iterations 1" if name == "more.vapo" else ""
    parts = tmp_path / "parts"
    two = weights_after(name, dtype, parts, f"--iterations 2{own}")
    three = weights_after(name, dtype, parts, "--iterations 3 --resume")
    whole = weights_after(name, dtype, tmp_path / "whole", f"--iterations 3{own}")
    assert (three - two).norm() > 0
    assert (three - whole).norm() < 0.1 * (three - two).norm()
