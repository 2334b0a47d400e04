"""Run folders: one that is in use, damaged or has other settings is refused in one line and stays as it
is. Scripts that are called from Python."""

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from conftest import SMALL, SUMS, checkpoint_of, completes, metrics, read_lines, refused, resume
from conftest import run, write_lines
from filelock import FileLock
from safetensors.torch import load_file, save_file

import grpo
import sapo

WEIGHTS = "model.safetensors"
STATE = "trainer_state.pt"
CHECKPOINT = "checkpoint-000001"


def settings_of(folder):
    return json.loads((folder / "settings.json").read_text())


def content(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


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


def test_a_damaged_checkpoint_is_refused(folder):
    """The folder stays as it was, settings.json included."""
    checkpoint = checkpoint_of(folder)

    def refuses():
        before = content(folder)
        flags = ("--iterations", 2, "--save_every", 3)
        refused("grpo", *resume(folder, *flags), expected=f"--resume: {checkpoint} cannot be read")
        assert content(folder) == before

    state = torch.load(checkpoint / STATE)
    torch.save(state | {"code": os.getpid}, checkpoint / STATE)  # which loading would import
    refuses()
    torch.save(state, checkpoint / STATE)
    weights = load_file(checkpoint / WEIGHTS)
    del weights["model.layers.0.self_attn.q_proj.weight"]  # transformers would use random numbers
    save_file(weights, checkpoint / WEIGHTS, metadata={"format": "pt"})
    refuses()


DAMAGE = {
    "missing": lambda path, content: None,
    "empty": lambda path, content: path.write_bytes(b""),
    "cut": lambda path, content: path.write_bytes(content[: len(content) // 2]),
    "a folder": lambda path, content: path.mkdir(),
    "a link to nothing": lambda path, content: path.symlink_to("nowhere"),
}
FILES = ["settings.json", "metrics.jsonl", "samples.jsonl", "evaluations.jsonl", "lock"]
FILES += [f"{CHECKPOINT}/{name}" for name in ("config.json", WEIGHTS, STATE, "tokenizer.json")]
FILES += [CHECKPOINT]
NOT_READ = {"lock", f"{CHECKPOINT}/tokenizer.json"}  # a resumed run has the tokenizer of --model


@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("name", FILES)
def test_run_with_a_damaged_file(name, how, run_of_one_iteration, tmp_path):
    """A run is resumed from what is whole, or refused in a line; nothing is lost then, nor replaced."""
    folder = shutil.copytree(run_of_one_iteration, tmp_path / "run")
    path = folder / name
    old = b"" if path.is_dir() else path.read_bytes()
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    DAMAGE[how](path, old)
    before = content(folder)
    result = run("grpo", *resume(folder, "--iterations", 2))
    if name in NOT_READ and result.returncode == 0:
        assert [line["iteration"] for line in metrics(folder)] == [1, 2]
    else:
        (line,) = result.stderr.splitlines()
        assert result.returncode == 2 and "grpo.py: error: --" in line or str(path) in line
        assert content(folder) == before
    if name != "lock" and how != "missing":
        before = content(folder)
        refused("grpo", "--run_dir", folder)
        assert content(folder) == before


def test_a_folder_that_holds_a_run_is_refused(folder, monkeypatch):
    """Without --resume; with it, only if script and flags are the same, and no other process uses it.
    All but the last is checked before a model is loaded, and the folder stays as it is."""
    with FileLock(folder / "lock"):
        refused("grpo", *resume(folder, "--iterations", 2), expected="another process uses it")
    monkeypatch.setattr(grpo, "load_policy", lambda args: pytest.fail("loaded"))
    before = content(folder)
    expected = (
        f"--run_dir {folder} already has metrics.jsonl: a new run needs an empty folder; --resume"
    )
    refused("grpo", "--run_dir", folder, expected=expected)
    refused("grpo", *resume(folder, "--lr", 1e-3), expected="has lr 0.0002, not 0.001")
    refused("grpo", *resume(folder, "--seed", 2), expected="has seed 1, not 2")
    refused("sapo", *resume(folder), expected="has script grpo, not sapo")
    assert content(folder) == before
    shutil.rmtree(checkpoint_of(folder))
    refused("grpo", *resume(folder), expected="already has")  # a log that nothing can continue


def test_run_a_resumed_run_keeps_its_flags_except_those_given_again(folder, tmp_path):
    """Folder and data may have moved, but other data are refused. Copies of a checkpoint are kept."""
    moved = folder.rename(tmp_path / "moved")
    kept = {"checkpoint-best-2", "checkpoint-9", "checkpoint-999999.bak"}
    for name in kept:
        (moved / name).mkdir()
    rows = read_lines(SUMS)
    data = write_lines(tmp_path / "data.jsonl", rows)
    flags = f"--iterations 2 --dataset {data} --eval_every 1 --save_every 2 --device cpu"
    flags += " --micro_batch_size 3 --rollout_batch_size 4 --gradient_checkpointing"
    completes("grpo", *resume(moved, *flags.split()))
    completes("grpo", *resume(moved, "--iterations", 3))
    assert "nothing left to do: 3 iterations are done" in completes("grpo", *resume(moved))
    assert [line["iteration"] for line in metrics(moved)] == [1, 2, 3]
    settings = settings_of(moved)
    assert settings["micro_batch_size"] == 3 and settings["gradient_checkpointing"]
    assert {path.name for path in moved.glob("checkpoint-*")} == kept | {"checkpoint-000003"}
    rows[0]["answer"] = "7"
    write_lines(data, rows)
    expected = "has different prompts or gold answers"
    refused("grpo", *resume(moved, "--iterations", 4), expected=expected)


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
        assert settings_of(folder)["script"] == module.__name__ and len(metrics(folder)) == 1
