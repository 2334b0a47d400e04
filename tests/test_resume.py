"""Killed with SIGKILL at any moment and resumed: the same metrics and, bit for bit, the same weights
and the same state of the optimizer."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch
from conftest import ROOT, SCRIPTS, run
from safetensors.torch import load_file

FLAGS = """--prompts_per_iteration 8 --group_size 4 --max_new_tokens 32 --num_minibatches 2
--eval_every 2 --iterations 5 --save_every 1 --num_held_out 8""".split()
TIMES = {"charts/tokens_per_second", "charts/rollout_seconds", "charts/update_seconds"}

# Runs the script once for each argument 'what:n', in a forked child that kills itself the n-th time it
# comes to `what`, and, for 'end', until it ends. Forked, since the imports take longer than the run.
HARNESS = """
import importlib, os, pathlib, shutil, signal, sys
name, points, sys.argv = sys.argv[1], sys.argv[2].split(","), [f"{sys.argv[1]}.py", *sys.argv[3:]]
import torch, harness
script = importlib.import_module(name)

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def arm(what, n):
    count = [0]
    def due():
        count[0] += 1
        return count[0] == n
    owner, attribute = {"step": (torch.optim.AdamW, "step"), "save": (torch, "save"),
        "log": (harness.Run, "log"), "rename": (pathlib.Path, "rename"),
        "replace": (pathlib.Path, "replace"), "remove": (shutil, "rmtree"),
        "sample": (script, "sample")}[what]
    original = getattr(owner, attribute)
    def deadly(*args, **keywords):
        if what == "remove" and "checkpoint-" not in str(args[0]) or not due():
            return original(*args, **keywords)
        if what == "save":  # in the middle of the file
            args[1].write_bytes(b"PK" + bytes(1000))
        if what == "remove":  # in the middle of the folder
            next(pathlib.Path(args[0]).glob("*.safetensors")).unlink()
        if what == "log":  # in the middle of the line
            with open(args[0].folder / "metrics.jsonl", "a") as file:
                file.write('{"iteration": 2, "rollout/acc')
        die()
    setattr(owner, attribute, deadly)

for point in points:
    pid = os.fork()
    if pid == 0:
        if point != "end":
            arm(point.split(":")[0], int(point.split(":")[1]))
        harness.launch(script.main, script.Args)
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    died = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    if died != (point != "end") or (point == "end" and status):
        sys.exit(f"{point}: {status}")
"""


def harness(name, points, folder, *flags):
    own = ("--prompts_per_iteration", "32", "--group_size", "1") if name == "ppo" else ()
    command = [
        sys.executable,
        "-c",
        HARNESS,
        name,
        ",".join(points),
        *FLAGS,
        *own,
        *flags,
        "--run_dir",
        str(folder),
    ]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    result = subprocess.run([*command, "--resume"], cwd=ROOT, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]


def as_lists(part):
    """A state_dict with its tensors as lists, which == compares bit for bit."""
    if isinstance(part, dict):
        return {key: as_lists(value) for key, value in part.items()}
    return part.tolist() if isinstance(part, torch.Tensor) else part


def outcome(folder):
    """(metrics, samples, weights, optimizer and other models) of a run."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    samples = (folder / "samples.jsonl").read_text()
    (checkpoint,) = folder.glob("checkpoint-*")
    lines = [{key: value for key, value in line.items() if key not in TIMES} for line in lines]
    saved = torch.load(checkpoint / "trainer_state.pt", weights_only=True)
    weights = load_file(checkpoint / "model.safetensors")
    return lines, samples, as_lists(weights), as_lists(saved["parts"])


def check(name, points, tmp_path, *flags, iterations=5):
    flags = (*flags, "--iterations", str(iterations))
    harness(name, ["end"], tmp_path / "whole", *flags)
    harness(name, [*points, "end"], tmp_path / "parts", *flags)
    whole, parts = outcome(tmp_path / "whole"), outcome(tmp_path / "parts")
    assert [line["iteration"] for line in parts[0]] == list(range(1, iterations + 1))
    assert parts == whole


EVERYWHERE = "replace:1 step:1 save:1 rename:2 log:2 remove:1 sample:1 replace:2".split()


# ppo has more to save than any other, a critic and its optimizer.
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("grpo", "dapo", "rspo")]


@pytest.mark.parametrize("name", ["ppo", *SLOW])
def test_killed_at_every_kind_of_moment(name, tmp_path):
    """Before the settings are there, before the first checkpoint, inside one, between writing and
    renaming it, half-way through a line of metrics, while the old checkpoint is removed, in a rollout,
    between the two files that a resumed run cuts; and at random steps."""
    rng = random.Random(name)
    check(name, [*EVERYWHERE, *(f"step:{rng.randint(1, 2)}" for _ in range(2))], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_killed_at_random_moments(name, tmp_path):
    """All nine, ten times each, by the clock."""
    harness(name, ["end"], tmp_path / "whole")
    rng, folder = random.Random(name), tmp_path / "parts"
    own = ("--prompts_per_iteration", "32", "--group_size", "1") if name == "ppo" else ()
    command = [sys.executable, f"{name}.py", *FLAGS, *own, "--run_dir", str(folder), "--resume"]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    for _ in range(10):
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=-3, stderr=-3)
        time.sleep(rng.uniform(4, 8))
        process.send_signal(signal.SIGKILL)
        process.wait()
    harness(name, ["end"], folder)
    assert outcome(folder) == outcome(tmp_path / "whole")


def test_a_signal_ends_the_run_after_a_checkpoint(tmp_path):
    """SIGTERM: the iteration is finished and saved, the command to go on is printed, and it works."""
    flags = [*FLAGS, "--iterations", "500", "--run_dir", str(tmp_path / "run")]
    command = [sys.executable, "grpo.py", *flags]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=-3, stderr=-1, text=True)
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not metrics.exists() or metrics.stat().st_size == 0:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 130 and "Traceback" not in error
    (line,) = (line for line in error.replace("\r", "\n").splitlines() if "to resume: " in line)
    expected = f"python grpo.py {' '.join(flags)} --resume"
    assert line.split("to resume: ")[1].strip() == expected
    (checkpoint,) = (tmp_path / "run").glob("checkpoint-*")
    done = int(checkpoint.name.split("-")[1])
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == done
    flags = [*FLAGS, "--iterations", done + 1, "--run_dir", tmp_path / "run", "--resume"]
    assert run("grpo", *flags).returncode == 0


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path, monkeypatch):
    """Before the optimizer step: it names iteration and tensor; the last checkpoint has finite
    weights."""
    import grpo

    original, calls = grpo.policy_loss, []

    def policy_loss(*args, **keywords):
        loss, stats = original(*args, **keywords)
        calls.append(1)
        return (loss * float("nan") if len(calls) == 4 else loss), stats  # in the second iteration

    monkeypatch.setattr(grpo, "policy_loss", policy_loss)
    result = run("grpo", *FLAGS, "--run_dir", tmp_path)
    assert result.returncode == 2 and "iteration 2: loss is not finite" in result.stderr
    (checkpoint,) = tmp_path.glob("checkpoint-*")
    assert checkpoint.name == "checkpoint-000001"
    assert all(w.isfinite().all() for w in load_file(checkpoint / "model.safetensors").values())


def collapses(result):
    assert result.returncode == 0, result.stderr
    return [x for x in (result.stdout + result.stderr).splitlines() if x.startswith("collapse")]


def test_collapse_is_reported_once(tmp_path, reward_file):
    """A run whose groups all have equal rewards says so after ten such iterations."""
    reward = reward_file('return 0.5, "wrong"')
    flags = [*FLAGS, "--save_every", 0, "--eval_every", 0, "--reward", reward]
    result = run("grpo", *flags, "--iterations", 13, "--run_dir", tmp_path / "run")
    assert collapses(result) == ["collapse: for 10 iterations no group had two different rewards"]
    result = run("grpo", *flags, "--iterations", 9, "--run_dir", tmp_path / "short")
    assert collapses(result) == []


def test_nothing_collapses_without_groups(tmp_path, reward_file):
    """ppo has one completion per prompt, and so no share of uniform groups."""
    reward = reward_file('return 0.5, "wrong"')
    flags = [*FLAGS, "--prompts_per_iteration", 32, "--group_size", 1, "--reward", reward]
    flags += ["--save_every", 0, "--eval_every", 0, "--run_dir", tmp_path / "run"]
    assert collapses(run("ppo", *flags, "--iterations", 13)) == []
