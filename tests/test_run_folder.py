"""Run folders: one that is in use, damaged or has other settings is refused in one line and stays as it
is. Scripts that are called from Python."""

import errno
import json
import os
import re
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from conftest import SMALL_ARGS, SUMS, checkpoint_of, completes, interfere, metrics, read_lines
from conftest import refused, resume, run, write_lines
from filelock import FileLock

import grpo
from common import UserError
from plumbing.errors import one_line
from plumbing.data import ProblemStream
from plumbing.folder import LOGS

WEIGHTS = "model.safetensors"
STATE = "trainer_state.pt"
CHECKPOINT = "checkpoint-000001"


def settings_of(folder):
    return json.loads((folder / "settings.json").read_text())


def content(folder):
    """{path in the folder: content, or None for a folder or a link to nothing}"""
    paths = folder.rglob("*")
    return {path.relative_to(folder): path.read_bytes() if path.is_file() else None for path in paths}


@pytest.fixture(scope="session")
def run_of_one_iteration(tmp_path_factory):
    """Its folder, which tests copy."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    completes("grpo", "--run_dir", folder)
    return folder


@pytest.fixture
def folder(run_of_one_iteration, tmp_path):
    """The folder of a run of one iteration, which the test may change."""
    return shutil.copytree(run_of_one_iteration, tmp_path / "run")


CODE = {"code": os.getpid}  # which loading would import
DAMAGE = {
    "missing": lambda path, content: None,
    "empty": lambda path, content: path.write_bytes(b""),
    "changed": lambda path, content: path.write_bytes(b"\0" + content[1:]),
    "cut": lambda path, content: path.write_bytes(content[: len(content) // 2]),
    "with code": lambda path, content: torch.save(torch.load(BytesIO(content)) | CODE, path),
    "a folder": lambda path, content: path.mkdir(),
    "a link to nothing": lambda path, content: path.symlink_to("nowhere"),
}
DAMAGED = [
    ("settings.json", "cut"),
    ("metrics.jsonl", "missing"),
    ("samples.jsonl", "changed"),
    ("evaluations.jsonl", "empty"),
    ("lock", "a folder"),
    (f"{CHECKPOINT}/{WEIGHTS}", "cut"),
    (f"{CHECKPOINT}/{STATE}", "with code"),
    (CHECKPOINT, "a link to nothing"),
]


@pytest.mark.parametrize("name, how", DAMAGED)
def test_a_damaged_run_is_refused_and_stays_as_it_is(name, how, folder):
    """Also what a log has after the checkpoint, if another log cannot be continued."""
    with open(folder / "samples.jsonl", "a") as file:
        file.write("{}\n")
    path = folder / name
    old = b"" if path.is_dir() else path.read_bytes()
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    DAMAGE[how](path, old)
    before = content(folder)
    refused("grpo", *resume(folder, "--iterations", 2), expected=name.partition("/")[0])
    assert content(folder) == before


SETTINGS = [  # what settings.json holds (changes of the run's own, or other text), and the message
    ("{}", "does not hold a run's settings: it names no script"),
    ({"problems_hash": ""}, "have different prompts or gold answers"),
    ({"model_hash": ""}, "--model tiny-moe has different weights than when the run started"),
    ({"lr": 1e-3}, "has lr 0.0002, not 0.001"),  # the optimizer in the checkpoint has the old one
    ({"lr": [1]}, "settings.json cannot be used: TypeError"),
    ({"reward": None}, "has reward , not None"),
    ({"routing_replay": "r3"}, "has --routing_replay, which grpo.py does not have"),
]


def test_a_script_has_to_pass_its_optimizer(tiny_policy, tmp_path):
    """Else it would not be saved, and bfloat16 copies would stay as they are."""
    with pytest.raises(AssertionError, match="pass it the optimizer"):
        grpo.Run(grpo.Args(run_dir=str(tmp_path)), tiny_policy, ProblemStream([], 1))


@pytest.mark.parametrize("text, expected", SETTINGS)
def test_a_resume_with_other_settings_is_refused(text, expected, folder):
    """Nothing else is taken for a run's own."""
    if isinstance(text, dict):
        text = json.dumps(settings_of(folder) | text)
    (folder / "settings.json").write_text(text)
    before = content(folder)
    refused("grpo", *resume(folder, "--iterations", 2), expected=expected)
    assert content(folder) == before


@pytest.mark.parametrize("name", [*LOGS, "settings.json", "checkpoint-000000", "checkpoint-000007"])
def test_a_new_run_replaces_nothing_of_the_users(name, tmp_path):
    for how in ("a folder", "a link to nothing", "cut"):
        path = tmp_path / how / name
        path.parent.mkdir()
        DAMAGE[how](path, 2 * b'{"mine": 1}\n')
        before = content(path.parent)
        refused("grpo", "--run_dir", path.parent, expected=name)
        assert content(path.parent) == before


def test_a_run_that_logged_nothing_may_be_started_again(tmp_path, monkeypatch):
    """With other flags, too; or resumed, with its own."""
    with monkeypatch.context() as patch:
        patch.setattr(grpo, "evaluate", Mock(side_effect=UserError("a reward function that fails")))
        for group_size in (8, 2):
            refused("grpo", "--run_dir", tmp_path, "--group_size", group_size, expected="that fails")
    shutil.rmtree(tmp_path / "checkpoint-000000")  # as if the program had ended before
    assert run("grpo", *resume(tmp_path)).returncode == 0
    assert settings_of(tmp_path)["group_size"] == 2 and len(metrics(tmp_path)) == 1


def test_run_resumed_under_other_versions_says_so(folder):
    settings = settings_of(folder)
    old = settings["versions"] | {"torch": "2.12.0"}
    (folder / "settings.json").write_text(json.dumps(settings | {"versions": old}))
    printed = completes("grpo", *resume(folder, "--iterations", 2))
    (line,) = (line for line in printed.splitlines() if line.startswith("note: "))
    assert "'torch': '2.12.0'" in line and torch.__version__ in line
    assert settings_of(folder)["versions"] == old


# ----------------------------------------------------------------------------------------- full disks


def test_settings_on_a_full_disk_are_one_line(tmp_path):
    (tmp_path / "settings.json.tmp").symlink_to("/dev/full")
    expected = f"--run_dir {tmp_path} cannot be written: OSError [Errno 28]"
    refused("grpo", "--run_dir", tmp_path, expected=expected)


JOBS = [
    ("grpo", "--iterations 0"),
    ("grpo", "--save_every 0"),
    ("more.mismatch", "--iterations 2 --save_every 1 --ref_reset_every 2"),
    ("ppo", "--iterations 2 --save_every 1 --dtype bfloat16"),
]


@pytest.mark.parametrize("name, flags", JOBS)
def test_a_disk_that_is_too_small_is_refused_at_the_start(name, flags, tmp_path, monkeypatch):
    """The line names what the same run writes elsewhere at its peak, when a new checkpoint is complete
    and the last one is still there. Headers, tokenizer and logs, of a few KB each, are not counted."""
    peaks = []
    folder = tmp_path / "run"

    def measure(*_):
        peaks.append(sum(len(part) for part in content(folder).values() if part))

    with monkeypatch.context() as patch:
        interfere(patch, Path, "rename", measure)
        completes(name, *flags.split(), "--eval_every", 0, "--run_dir", folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1e5))
    line = refused(name, *flags.split(), "--run_dir", tmp_path / "new", expected="has 0.0001 GB")
    assert not (tmp_path / "new").exists()
    (needed,) = re.findall(r"checkpoints need (\S+) GB", line)
    assert 0.9 * max(peaks) < 1e9 * float(needed) <= max(peaks)


def test_a_log_on_a_full_disk_is_one_line(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"

    def fill(*_, **__):
        path.unlink()
        path.symlink_to("/dev/full")

    interfere(monkeypatch, grpo, "sample", fill)
    refused("grpo", "--run_dir", tmp_path, expected=f"{path} cannot be written: OSError [Errno 28]")


def test_an_error_that_follows_one_of_the_disk_is_told_by_that():
    """torch says only "unexpected pos" then."""
    with pytest.raises(UserError, match="^it failed: OSError full$"), one_line("it failed"):
        try:
            raise OSError("full")
        finally:
            raise RuntimeError("unexpected pos")


WRITES = [(os, "fsync", 3), (Path, "rename", 1)]


@pytest.mark.parametrize("write", WRITES)
def test_run_keeps_the_old_checkpoint_until_the_new_one_is_on_disk(write, folder, monkeypatch):
    owner, name, number = write
    before = content(folder / CHECKPOINT)
    with monkeypatch.context() as patch:
        interfere(patch, owner, name, Mock(side_effect=OSError(errno.ENOSPC, "full")), number)
        expected = "checkpoint-000002 cannot be written; existing checkpoints are intact: OSError"
        refused("grpo", *resume(folder, "--iterations", 2), expected=expected)
    assert content(folder / CHECKPOINT) == before
    assert [path.name for path in folder.glob("checkpoint*")] == [CHECKPOINT]  # no checkpoint.tmp


# -----------------------------------------------------------------------------------------------------


def test_a_folder_that_holds_a_run_is_refused(folder, monkeypatch):
    """Without --resume; with it, only if script and flags are the same, and no other process uses it.
    All but the last is checked before a model is loaded, and the folder stays as it is."""
    with FileLock(folder / "lock"):
        refused("grpo", *resume(folder, "--iterations", 2), expected="another process uses it")
    (folder / "lock").unlink()
    before = content(folder)
    with pytest.raises(UserError, match="a new run needs an empty folder; --resume"):
        grpo.main(grpo.Args(**SMALL_ARGS, run_dir=folder))
    monkeypatch.setattr(grpo, "load_policy", lambda args: pytest.fail("loaded"))
    refused("grpo", "--run_dir", folder, expected="a new run needs an empty folder; --resume")
    refused("grpo", *resume(folder, "--lr", 1e-3), expected="has lr 0.0002, not 0.001")
    refused("sapo", *resume(folder), expected="has script grpo, not sapo")
    assert content(folder) == before
    shutil.rmtree(checkpoint_of(folder))
    refused("grpo", *resume(folder), expected="already has")  # a log that nothing can continue


def test_a_run_finished_by_another_process_before_the_lock_is_kept(
    run_of_one_iteration, tmp_path, monkeypatch
):
    """The folder was checked before: it was empty then."""
    folder = tmp_path / "run"

    def run_elsewhere(*_, **__):
        shutil.copytree(run_of_one_iteration, folder, dirs_exist_ok=True)

    interfere(monkeypatch, FileLock, "acquire", run_elsewhere)
    refused("grpo", "--run_dir", folder, expected="a new run needs an empty folder; --resume")
    assert content(folder) == content(run_of_one_iteration)


def test_run_a_resumed_run_keeps_its_flags_except_those_given_again(folder, tmp_path):
    """Folder and data may have moved, but other data are refused. Copies of a checkpoint are kept."""
    moved = folder.rename(tmp_path / "moved")
    kept = {"checkpoint-best-2", "checkpoint-9", "checkpoint-999999.bak"}
    for name in kept:
        (moved / name).mkdir()
    rows = read_lines(SUMS)
    data = write_lines(tmp_path / "data.jsonl", rows)
    flags = f"--iterations 2 --dataset {data} --eval_every 1 --save_every 2 --device cpu"
    flags += " --micro_batch_tokens 60 --rollout_batch_size 4 --gradient_checkpointing"
    completes("grpo", *resume(moved, *flags.split()))
    completes("grpo", *resume(moved, "--iterations", 3))
    assert [line["iteration"] for line in metrics(moved)] == [1, 2, 3]
    settings = settings_of(moved)
    assert settings["micro_batch_tokens"] == 60 and settings["gradient_checkpointing"]
    assert {path.name for path in moved.glob("checkpoint-*")} == kept | {"checkpoint-000003"}
    rows[0]["answer"] = "7"
    write_lines(data, rows)
    expected = "have different prompts or gold answers"
    refused("grpo", *resume(moved, "--iterations", 4), expected=expected)


# --------------------------------------------------------------------------------- called from Python


def test_args_keep_what_was_given_and_resolve_it_when_asked(tmp_path, monkeypatch):
    """A folder is named after the file that defines the Args."""
    monkeypatch.chdir(tmp_path)
    args = grpo.Args()
    assert args.device == args.run_dir == ""
    assert grpo.Args(device="cpu:0").torch_device == "cpu"
    assert args.folder == tmp_path / "runs" / "grpo-seed1"
    assert replace(args, seed=2).folder == tmp_path / "runs" / "grpo-seed2"


def test_the_lock_is_free_after_a_run(folder, monkeypatch):
    """One that was stopped, and one that goes on after an error. A Python session keeps tracebacks, and
    so the locks of runs that failed."""
    args = grpo.Args(**SMALL_ARGS | {"iterations": 3}, run_dir=folder, resume=True)
    others = FileLock(folder / "lock", timeout=0)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt) as stopped:
        interfere(patch, grpo, "sample", lambda *_, **__: signal.raise_signal(signal.SIGINT), 1)
        grpo.main(args)
    with others:
        assert stopped.traceback and checkpoint_of(folder).name == "checkpoint-000002"
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError) as failed:
        patch.setattr(grpo, "sample", Mock(side_effect=ZeroDivisionError))
        grpo.main(args)
    grpo.main(args)
    with others:
        assert failed.traceback and checkpoint_of(folder).name == "checkpoint-000003"


def test_a_script_runs_in_a_thread(tmp_path, monkeypatch):
    """In its own folder, even though the reward function changes the working folder. Signal handlers
    are for the main thread only."""
    reward = tmp_path / "changes_folder.py"
    reward.write_text("import os\ndef f(text):\n    os.chdir('/')\n    return 0\n")
    monkeypatch.chdir(tmp_path)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(grpo.main, grpo.Args(**SMALL_ARGS, reward=f"{reward}:f")).result()
    assert len(metrics(tmp_path / "runs" / "grpo-seed1")) == 1
