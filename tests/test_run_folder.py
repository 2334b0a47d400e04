"""Run folders: one that is in use, damaged or has other settings is refused in one line and stays as it
is. Scripts that are called from Python."""

import json
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from conftest import SMALL, SUMS, checkpoint_of, completes, metrics, read_lines, refused, resume
from conftest import write_lines
from filelock import FileLock
from safetensors.torch import load_file, save_file

import grpo
import sapo
from common import UserError
from plumbing.args import launch

WEIGHTS = "model.safetensors"


def iterations(folder):
    return [line["iteration"] for line in metrics(folder)]


def settings_of(folder):
    return json.loads((folder / "settings.json").read_text())


def content(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run of one iteration."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    completes("grpo", "--run_dir", folder)
    return folder


@pytest.fixture
def folder(finished, tmp_path):
    """A copy of it."""
    return shutil.copytree(finished, tmp_path / "run")


# --------------------------------------------------------------------------------------- checkpoints


def drop_a_weight(checkpoint):
    weights = load_file(checkpoint / WEIGHTS)
    del weights["model.layers.0.self_attn.q_proj.weight"]
    save_file(weights, checkpoint / WEIGHTS, metadata={"format": "pt"})


def add_a_function(checkpoint):
    path = checkpoint / "trainer_state.pt"
    torch.save(torch.load(path) | {"more": os.getpid}, path)


DAMAGE = {  # {what is wrong: a function that damages a checkpoint}
    "code in the state": add_a_function,  # which loading would import
    "a missing weight": drop_a_weight,  # transformers would use random numbers
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_checkpoint_is_refused(how, folder):
    """The folder stays as it was, settings.json included."""
    checkpoint = checkpoint_of(folder)
    DAMAGE[how](checkpoint)
    before = content(folder)
    flags = ("--iterations", 2, "--save_every", 3)
    refused("grpo", *resume(folder, *flags), expected=f"--resume: {checkpoint} cannot be read")
    assert content(folder) == before


def test_run_copies_of_a_checkpoint_are_kept(folder):
    kept = {"checkpoint-best-2", "checkpoint-9", "checkpoint-999999.bak"}
    for name in kept:
        (folder / name).mkdir()
    completes("grpo", *resume(folder, "--iterations", 2))
    assert {path.name for path in folder.glob("checkpoint-*")} == kept | {"checkpoint-000002"}


# ---------------------------------------------------------------------------------- one folder, one run


def test_a_folder_that_holds_a_run_is_refused(folder, monkeypatch):
    """Without --resume; with it, only if script and flags are the same. That is checked before a model
    is loaded, and the folder stays as it is."""
    monkeypatch.setattr(grpo, "load_policy", lambda args: pytest.fail("loaded"))
    before = content(folder)
    expected = f"--run_dir {folder} holds a run: --resume continues"
    refused("grpo", "--run_dir", folder, expected=expected)
    refused("grpo", *resume(folder, "--lr", 1e-3), expected="has lr 0.0002, not 0.001")
    refused("grpo", *resume(folder, "--seed", 2), expected="has seed 1, not 2")
    refused("sapo", *resume(folder), expected="has script grpo, not sapo")
    assert content(folder) == before
    shutil.rmtree(checkpoint_of(folder))
    refused("grpo", *resume(folder), expected="holds a run")  # a log that nothing can continue


def test_a_folder_that_another_process_uses_is_refused(folder):
    with FileLock(folder / "lock"):
        refused("grpo", *resume(folder, "--iterations", 2), expected="/lock' could not be acquired")


def test_other_data_than_when_the_run_started_are_refused(folder, tmp_path):
    """A moved file is fine."""
    rows = read_lines(SUMS)
    moved = write_lines(tmp_path / "moved.jsonl", rows)
    completes("grpo", *resume(folder, "--iterations", 2, "--dataset", moved))
    rows[0]["answer"] = "7"
    flags = ("--iterations", 3, "--dataset", write_lines(tmp_path / "other.jsonl", rows))
    refused("grpo", *resume(folder, *flags), expected="has different prompts or gold answers")


def test_run_a_resumed_run_keeps_its_flags_except_those_given_again(folder, tmp_path):
    """The folder may have moved."""
    flags = "--iterations 2 --eval_every 1 --save_every 2 --device cpu --micro_batch_size 3"
    flags += " --rollout_batch_size 4 --gradient_checkpointing"
    moved = folder.rename(tmp_path / "moved")
    completes("grpo", *resume(moved, *flags.split()))
    completes("grpo", *resume(moved, "--iterations", 3))
    assert iterations(moved) == [1, 2, 3]
    settings = settings_of(moved)
    assert settings["micro_batch_size"] == 3 and settings["gradient_checkpointing"]


def test_user_errors_and_lack_of_memory_are_one_line_but_a_bug_has_a_traceback(
    monkeypatch, capsys, tmp_path
):
    monkeypatch.setattr(sys, "argv", ["grpo.py", "--run_dir", str(tmp_path)])

    def printed(error):
        def main(args):
            raise error

        with pytest.raises(SystemExit) as stop:
            launch(main, grpo.Args)
        assert stop.value.code == 2
        return capsys.readouterr().err

    assert printed(UserError("--flag is\nwrong")) == "grpo.py: error: --flag is wrong\n"
    cpu = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
    for error in (torch.OutOfMemoryError("CUDA out of memory.\nTried ..."), RuntimeError(cpu)):
        (line,) = printed(error).splitlines()
        assert "--micro_batch_size" in line and "--gradient_checkpointing" in line
    with pytest.raises(ZeroDivisionError):
        printed(ZeroDivisionError())


# --------------------------------------------------------------------------------- called from Python


def test_args_keep_what_was_given_and_resolve_it_when_asked(tmp_path, monkeypatch):
    """A folder is named after the file that defines the Args."""
    monkeypatch.chdir(tmp_path)
    args = grpo.Args()
    assert args.device == args.run_dir == ""
    assert args.torch_device in ("cpu", "cuda")
    assert args.folder == tmp_path / "runs" / "grpo-seed1"
    assert replace(args, seed=2).folder == tmp_path / "runs" / "grpo-seed2"


def test_two_scripts_run_in_threads_of_one_process(tmp_path, monkeypatch):
    """Each has its folder, even though the reward function changes the working folder. Signal handlers
    are for the main thread only."""
    reward = tmp_path / "changes_folder.py"
    reward.write_text("import os\ndef f(text):\n    os.chdir('/')\n    return 0\n")
    numbers = {name[2:]: int(value) for name, value in zip(SMALL[::2], SMALL[1::2], strict=True)}
    numbers |= {"dataset": str(SUMS), "num_held_out": 8, "reward": f"{reward}:f"}
    for module in (grpo, sapo):
        monkeypatch.chdir(tmp_path)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(module.main, module.Args(**numbers)).result()
        folder = tmp_path / "runs" / f"{module.__name__}-seed1"
        assert settings_of(folder)["script"] == module.__name__
        assert iterations(folder) == [1]
