"""A run that is killed at any moment and resumed has the same metrics and, bit for bit, the same
weights and optimizer state. A run that ends by a signal or NaN says so, and can go on."""

import math
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from conftest import SUMS, checkpoint_of, flags_it_has, interfere, metrics
from conftest import read_lines, resume, run, started
from safetensors.torch import load_file

import grpo
import ppo
from more import mismatch
from plumbing.run import Run

FLAGS = """--prompts_per_iteration 8 --group_size 4 --max_new_tokens 16 --num_minibatches 2
--eval_every 2 --iterations 5 --save_every 1 --num_held_out 8""".split()


def flags_of(name, folder, *more):
    own = ["--prompts_per_iteration", "32"] if name in ("ppo", "more.reinforce") else []
    own += ["--dataset", str(SUMS), "--run_dir", str(folder), *map(str, more)]
    return [*flags_it_has(name, FLAGS), *own]


def iterations(folder):
    return [line["iteration"] for line in metrics(folder)]


def logs_and_checkpoint(folder):
    """Without times."""
    logs = [read_lines(folder / name) for name in ("samples.jsonl", "evaluations.jsonl")]
    for line in metrics(folder):
        logs.append({key: line[key] for key in line if not key.endswith(("_seconds", "_per_second"))})
    checkpoint = checkpoint_of(folder)
    saved = torch.load(checkpoint / "trainer_state.pt", weights_only=True)
    del saved["logs"], saved["settings"]
    return logs, [load_file(checkpoint / "model.safetensors"), saved]


def check(name, tmp_path, *more):
    """The run in parts/, which was killed, is resumed and ends like one that was not. Its folder alone
    says how it goes on."""
    whole = tmp_path / "whole"
    parts = tmp_path / "parts"
    assert run(name, *flags_of(name, whole, *more)).returncode == 0
    assert run(name, *resume(parts)).returncode == 0
    assert iterations(parts) == [1, 2, 3, 4, 5]
    logs, checkpoint = logs_and_checkpoint(parts)
    expected_logs, expected_checkpoint = logs_and_checkpoint(whole)
    assert logs == expected_logs
    torch.testing.assert_close(checkpoint, expected_checkpoint, rtol=0, atol=0)


class Killed(BaseException):
    """Stands for the end of the process: nothing in a run catches it."""


def kill(*_, **__):
    raise Killed


def kill_in_a_removal(path, **_):
    if "checkpoint-" in str(path):  # not checkpoint.tmp, which is unfinished
        next(Path(path).glob("*.safetensors")).unlink()
        kill()


def run_until(moments, name, *flags):
    """Starts a run that is killed before the first of these calls, resumes it until the next, ..."""
    for i, moment in enumerate(moments):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
            interfere(patch, *moment)
            run(name, *flags, *(["--resume"] if i > 0 else []))


def test_killed_at_every_kind_of_moment(tmp_path):
    """With a critic in the checkpoint."""
    moments = [
        (torch, "save", kill, 1),  # of checkpoint 0
        (ppo, "sample", kill, 1),
        (Path, "rename", kill, 2),  # of a checkpoint
        (Run, "save", kill, 2),  # after a line
        (shutil, "rmtree", kill_in_a_removal, 1),
    ]
    run_until(moments, "ppo", *flags_of("ppo", tmp_path / "parts"))
    check("ppo", tmp_path)


def test_killed_with_masters_a_sampler_and_a_reference_in_the_checkpoint(tmp_path):
    """float32 weights, a stale sampler, a new reference."""
    more = ("--dtype", "bfloat16", "--rollout_refresh_every", 2, "--ref_reset_every", 2)
    name = "more.mismatch"
    moments = [(Run, "save", kill, 3), (mismatch, "sample", kill, 3)]  # in iterations 2 and 4
    run_until(moments, name, *flags_of(name, tmp_path / "parts", *more))
    check(name, tmp_path, *more)


def test_kill_9_loses_only_what_came_after_the_last_checkpoint(tmp_path):
    """By kill -9, wherever it is after two lines of its log. A checkpoint has a running baseline."""
    log = tmp_path / "parts" / "metrics.jsonl"
    with started("more.reinforce", *flags_of("more.reinforce", tmp_path / "parts")) as process:
        while process.poll() is None and not (log.exists() and log.read_text().count("\n") >= 2):
            time.sleep(0.01)
        process.kill()
    assert process.returncode == -9, process.stderr.read()
    check("more.reinforce", tmp_path)


# ------------------------------------------------------------------- signals, errors, and a break


def test_run_a_signal_ends_the_run_after_a_checkpoint(tmp_path, monkeypatch):
    """The iteration is finished and saved, and the run goes on from there. The next signal goes to the
    handler that was there before."""
    next_handlers = []

    def interrupt(*_):
        signal.raise_signal(signal.SIGINT)
        next_handlers.append(signal.getsignal(signal.SIGINT))

    interfere(monkeypatch, grpo, "sample", interrupt, 2)
    result = run("grpo", *flags_of("grpo", tmp_path, "--save_every", 0, "--iterations", 3))
    assert next_handlers == [signal.default_int_handler]
    assert (result.returncode, result.stderr) == (130, "stopped\n")
    lines = result.stdout.splitlines()
    assert lines.count("stopping after this iteration") == 1
    assert lines[-1] == f"saved; to continue: --resume --run_dir {tmp_path}"
    assert checkpoint_of(tmp_path).name == "checkpoint-000002"
    monkeypatch.undo()
    assert run("grpo", *resume(tmp_path, "--iterations", 4)).returncode == 0
    assert iterations(tmp_path) == [1, 2, 3, 4]


def test_ctrl_c_saves_a_run_whose_messages_nobody_reads(tmp_path):
    """Ctrl-C also ends tee, to which the run prints."""
    flags = flags_of("grpo", tmp_path, "--save_every", 0, "--iterations", 999)
    log = tmp_path / "metrics.jsonl"
    with started("grpo", *flags) as process:
        process.stdout.close()
        process.stderr.close()
        while process.poll() is None and not (log.exists() and log.read_text().count("\n") >= 2):
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
    assert process.returncode == 130
    assert checkpoint_of(tmp_path).name == f"checkpoint-{len(metrics(tmp_path)):06d}"


def test_ctrl_c_outside_of_an_iteration_ends_the_run_at_once(tmp_path, monkeypatch):
    interfere(monkeypatch, grpo, "evaluate", lambda *_, **__: signal.raise_signal(signal.SIGINT))
    result = run("grpo", *flags_of("grpo", tmp_path))
    assert (result.returncode, result.stderr) == (130, "stopped\n")


def test_run_a_loss_that_is_not_finite_ends_the_run_before_the_step(tmp_path, monkeypatch):
    def spoil(logprobs, old_logprobs, advantages, *_, **__):
        advantages.fill_(math.nan)

    steps = []
    interfere(monkeypatch, torch.optim.AdamW, "step", lambda *_: steps.append(None))
    interfere(monkeypatch, grpo, "policy_loss", spoil, 4)  # of the second iteration's second step
    result = run("grpo", *flags_of("grpo", tmp_path))
    assert result.returncode == 2 and len(steps) == 3
    (line,) = result.stderr.splitlines()
    assert line.startswith("grpo.py: error: iteration 2: loss is not finite; a new run from the last")
    assert checkpoint_of(tmp_path).name == "checkpoint-000001"
