"""Every script learns on a GPU, and resumes there. Skipped without one; to run it: -m slow."""

import pytest
import torch
from conftest import MORE, SCRIPTS, metrics, resume, run

JOBS = [(name, dtype) for name in [*SCRIPTS, *MORE] for dtype in ("float32", "bfloat16")]
ITERATIONS = 12
DEFAULT = ("--dataset", "addition", "--num_held_out", 256)


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name, dtype", JOBS)
def test_run_learns_and_resumes_on_a_gpu(name, dtype, tmp_path):
    """The beginning of the default job, and one more iteration after a resume. In the first step of an
    iteration old log-probs and update have one forward."""
    flags = (*DEFAULT, "--iterations", ITERATIONS, "--device", "cuda", "--dtype", dtype)
    result = run(name, *flags, "--run_dir", tmp_path)
    assert result.returncode == 0, result.stderr
    more = ITERATIONS + 1
    result = run(name, *resume(tmp_path, "--device", "cuda", "--iterations", more))
    assert result.returncode == 0, result.stderr
    lines = metrics(tmp_path)
    assert [line["iteration"] for line in lines] == [*range(1, more + 1)]
    assert lines[-1]["eval/accuracy"] >= 0.7  # 0.43 before training
    assert max(line["losses/first_step_ratio_error_max"] for line in lines) < 1e-3
    assert lines[-1]["charts/peak_memory_gib"] > 0
