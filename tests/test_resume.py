"""Killed with SIGKILL at any moment and resumed: the same metrics and, bit for bit, the same weights
and the same state of the optimizer."""

import json
import os
import random
import signal
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, flags_it_has, run
from safetensors.torch import load_file

import grpo

FLAGS = """--prompts_per_iteration 8 --group_size 4 --max_new_tokens 32 --num_minibatches 2
--eval_every 2 --iterations 5 --save_every 1 --num_held_out 8""".split()
TIMES = {"charts/tokens_per_second", "charts/rollout_seconds", "charts/update_seconds"}

# Runs the script once for each argument 'what:n', in a forked child that kills itself the n-th time it
# comes to `what`, and, for 'end', until it ends. Forked, since the imports take longer than the run.
HARNESS = """
import importlib, os, pathlib, shutil, signal, sys
name, points, sys.argv = sys.argv[1], sys.argv[2].split(","), [f"{sys.argv[1]}.py", *sys.argv[3:]]
import torch
from plumbing.args import launch
from plumbing.run import Run
script = importlib.import_module(name)

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def arm(what, n):
    count = [0]
    def due():
        count[0] += 1
        return count[0] == n
    owner, attribute = {"step": (torch.optim.AdamW, "step"), "save": (torch, "save"),
        "log": (Run, "log"), "rename": (pathlib.Path, "rename"),
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
        launch(script.main, script.Args)
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    died = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    if died != (point != "end") or (point == "end" and status):
        sys.exit(f"{point}: {status}")
"""


def flags_of(name, folder, sums, *more):
    own = ["--prompts_per_iteration", "32"] if name == "ppo" else []
    own += ["--dataset", str(sums), "--run_dir", str(folder), *map(str, more)]
    return [*flags_it_has(name, FLAGS), *own]


def run_and_kill(name, points, flags):
    command = [sys.executable, "-c", HARNESS, name, ",".join(points), *flags, "--resume"]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
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


def check(name, points, tmp_path, sums, *more):
    whole, parts = (flags_of(name, tmp_path / part, sums, *more) for part in ("whole", "parts"))
    assert run(name, *whole).returncode == 0
    run_and_kill(name, [*points, "end"], parts)
    assert outcome(tmp_path / "parts") == outcome(tmp_path / "whole")


EVERYWHERE = "replace:1 step:1 save:1 rename:2 log:2 remove:1 sample:1 replace:2".split()


# ppo has more to save than any other, a critic and its optimizer.
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("grpo", "dapo", "rspo")]


@pytest.mark.parametrize("name", ["ppo", *SLOW])
def test_killed_at_every_kind_of_moment(name, tmp_path, sums):
    """Before the settings are there, before the first checkpoint, inside one, between writing and
    renaming it, half-way through a line of metrics, while the old checkpoint is removed, in a rollout,
    between the two files that a resumed run cuts; and at random steps."""
    rng = random.Random(name)
    check(name, [*EVERYWHERE, *(f"step:{rng.randint(1, 2)}" for _ in range(2))], tmp_path, sums)
    assert len((tmp_path / "parts" / "metrics.jsonl").read_text().splitlines()) == 5


def test_run_a_signal_ends_the_run_after_a_checkpoint(tmp_path, sums, monkeypatch):
    """SIGTERM in a rollout: the iteration is finished and saved, and the run can go on. What it prints
    is in test_more.py."""
    original = grpo.sample
    rollouts = []

    def sample(*args):
        rollouts.append(None)
        if len(rollouts) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*args)

    monkeypatch.setattr(grpo, "sample", sample)
    flags = flags_of("grpo", tmp_path, sums, "--save_every", 0)
    result = run("grpo", *flags)
    assert result.returncode == 130 and "to resume: " in result.stderr
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-000002"]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    assert run("grpo", *flags, "--resume").returncode == 0
    assert len(rollouts) == 5


def test_run_a_signal_in_the_last_save(tmp_path, sums, monkeypatch):
    """The results are there, and are printed; message and exit code both say that it was stopped."""
    original = torch.save

    def save(*args):
        original(*args)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(torch, "save", save)
    flags = flags_of("grpo", tmp_path, sums, "--save_every", 0)
    result = run("grpo", *flags)
    assert result.returncode == 130 and "to resume: " in result.stderr
    assert "the trained model: " in result.stdout
    monkeypatch.undo()
    assert "the trained model: " in run("grpo", *flags, "--resume").stdout


def test_run_a_loss_that_is_not_finite_ends_the_run(tmp_path, monkeypatch):
    """Before the optimizer step: it names iteration and tensor; the last checkpoint has finite
    weights."""
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


def test_run_collapse_is_reported_once(tmp_path, reward_file):
    """A run whose groups all have equal rewards says so after ten such iterations."""
    reward = reward_file('return 0.5, "wrong"')
    small = ("--prompts_per_iteration", 2, "--max_new_tokens", 4)
    flags = [*FLAGS, *small, "--save_every", 0, "--eval_every", 0, "--reward", reward]
    result = run("grpo", *flags, "--iterations", 13, "--run_dir", tmp_path / "run")
    assert collapses(result) == ["collapse: for 10 iterations no group had two different rewards"]
    result = run("grpo", *flags, "--iterations", 9, "--run_dir", tmp_path / "short")
    assert collapses(result) == []


def test_run_nothing_collapses_without_groups(tmp_path, reward_file):
    """ppo has one completion per prompt, and so no share of uniform groups."""
    reward = reward_file('return 0.5, "wrong"')
    small = ("--prompts_per_iteration", 4, "--max_new_tokens", 4)
    flags = [*flags_it_has("ppo", FLAGS), *small, "--reward", reward]
    flags += ["--save_every", 0, "--eval_every", 0, "--run_dir", tmp_path / "run"]
    assert collapses(run("ppo", *flags, "--iterations", 13)) == []
