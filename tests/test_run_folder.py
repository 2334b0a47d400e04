"""Run folders, checkpoints and streams: a folder that is in use, damaged or has other settings is
refused in one line and stays as it is; a full disk loses nothing."""

import json
import os
import shutil
import sys

import pytest
import torch
from conftest import completes, metrics, refused

import grpo
from common import UserError
from plumbing.args import launch

STATE = "trainer_state.pt"


def iterations(folder):
    return [line["iteration"] for line in metrics(folder)]


def settings_of(folder):
    return json.loads((folder / "settings.json").read_text())


def content(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory, sums):
    """The folder of a run of one iteration."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    completes("--dataset", sums, "--run_dir", folder)
    return folder


@pytest.fixture
def folder(finished, tmp_path):
    """A copy of it."""
    return shutil.copytree(finished, tmp_path / "run")


def resume(folder, *flags):
    return ("--resume", "--run_dir", folder, *flags)


# --------------------------------------------------------------------------------------- checkpoints


class Trap:
    """A pickle that would leave a file behind if it were loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


DAMAGE = {  # {what is wrong: how a checkpoint becomes such a one}
    "truncated state": lambda checkpoint: os.truncate(checkpoint / STATE, 100),
    "code in the state": lambda checkpoint: torch.save(Trap(checkpoint / "ran"), checkpoint / STATE),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_damaged_checkpoints(how, folder):
    (checkpoint,) = folder.glob("checkpoint-*")
    DAMAGE[how](checkpoint)
    before = metrics(folder)
    expected = f"--resume: {checkpoint} cannot be read"
    refused("grpo", *resume(folder, "--iterations", 2), expected=expected)
    assert metrics(folder) == before and not (checkpoint / "ran").exists()


def test_run_files_and_copies_of_the_user(folder):
    """A file in a checkpoint does no harm; copies are not the newest checkpoint, and nobody deletes
    them."""
    (checkpoint,) = folder.glob("checkpoint-*")
    (checkpoint / ".DS_Store").write_text("mine")
    kept = {"checkpoint-best-2", "checkpoint-9", "checkpoint-999999.bak"}
    for name in kept:
        shutil.copytree(checkpoint, folder / name)
        (folder / name / "config.json").write_text("mine")
    completes(*resume(folder, "--iterations", 2))
    assert {path.name for path in folder.glob("checkpoint-*")} == kept | {"checkpoint-000002"}


# ---------------------------------------------------------------------------------- one folder, one run


def test_a_used_run_folder(folder, monkeypatch):
    """Refused without --resume; with it, only for the same script and flags. It is compared before a
    model is loaded, and stays as it is."""
    monkeypatch.setattr(grpo, "load_policy", lambda args: pytest.fail("loaded"))
    before = content(folder)
    expected = f"--run_dir {folder} holds a run: --resume continues"
    refused("grpo", "--run_dir", folder, expected=expected)
    refused("grpo", *resume(folder, "--lr", 1e-3), expected="has lr 0.0002, not 0.001")
    refused("grpo", *resume(folder, "--seed", 2), expected="has seed 1, not 2")
    refused("sapo", *resume(folder), expected="has script grpo, not sapo")
    assert content(folder) == before
    (checkpoint,) = folder.glob("checkpoint-*")
    shutil.rmtree(checkpoint)
    refused("grpo", *resume(folder), expected="holds a run")  # a log that nothing can continue


def test_run_what_may_change(folder, tmp_path):
    """Also the place of the folder. What is given once stays."""
    assert {"torch", "transformers"} <= set(settings_of(folder)["versions"])
    flags = "--iterations 2 --eval_every 1 --save_every 2 --device cpu --micro_batch_size 3"
    flags += " --rollout_batch_size 4 --gradient_checkpointing"
    moved = folder.rename(tmp_path / "moved")
    completes(*resume(moved, *flags.split()))
    completes(*resume(moved, "--iterations", 3))
    assert iterations(moved) == [1, 2, 3]
    settings = settings_of(moved)
    assert settings["micro_batch_size"] == 3 and settings["gradient_checkpointing"]


def test_what_is_one_line(monkeypatch, capsys, tmp_path):
    """A UserError with its cause, and memory that is not there; a bug keeps its traceback."""
    monkeypatch.setattr(sys, "argv", ["grpo.py", "--run_dir", str(tmp_path)])

    def printed(error, cause):
        def main(args):
            raise error from cause

        with pytest.raises(SystemExit) as stop:
            launch(main, grpo.Args)
        assert stop.value.code == 2
        return capsys.readouterr().err

    line = printed(UserError("--flag is\nwrong"), None)
    assert line == "grpo.py: error: --flag is wrong\n"
    cpu = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
    for error in (torch.OutOfMemoryError("CUDA out of memory.\nTried ..."), RuntimeError(cpu)):
        line = printed(error, None)
        for flag in "--micro_batch_size --rollout_batch_size --gradient_checkpointing --dtype".split():
            assert flag in line
        assert len(line.splitlines()) == 1
    with pytest.raises(ZeroDivisionError):
        printed(ZeroDivisionError(), None)
