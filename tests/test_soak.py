"""A long run holds no more memory and no more open files in its last quarter than in its second."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT

ITERATIONS = 2000
FLAGS = """--device cpu --prompts_per_iteration 4 --group_size 4 --max_new_tokens 8
--num_minibatches 2 --num_held_out 8 --eval_every 50 --save_every 50""".split()


@pytest.mark.soak
def test_memory_and_open_files_do_not_grow(tmp_path):
    command = [sys.executable, "grpo.py", *FLAGS]
    command += ["--iterations", str(ITERATIONS), "--run_dir", str(tmp_path)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL)
    metrics = tmp_path / "metrics.jsonl"
    pages = {1: [], 2: [], 3: [], 4: []}  # of resident memory, by quarter of the run
    files = {1: [], 2: [], 3: [], 4: []}
    while process.poll() is None:
        done = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        if 0 < done < ITERATIONS:
            quarter = 1 + 4 * done // ITERATIONS
            pages[quarter].append(int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]))
            files[quarter].append(len(os.listdir(f"/proc/{process.pid}/fd")))
        time.sleep(0.5)
    assert process.returncode == 0
    assert max(pages[4]) <= 1.02 * max(pages[2])
    assert min(files[4]) <= min(files[2])  # the fewest: those that stay open
