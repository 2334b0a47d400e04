"""Run folders, checkpoints and streams: a folder that is in use, damaged or has other settings is
refused in one line and stays as it is; a full disk loses nothing."""

import io
import json
import os
import resource
import shutil
import subprocess
import sys

import pytest
import torch
import transformers
from conftest import ROOT, TINY_MOE, run, run_process, script_args
from safetensors.torch import load_file, save_file
from test_bad_input import SMALL, completes, refused

import common
import grpo
import plumbing.settings
from plumbing.args import UserError, launch
from plumbing.run import Run
from plumbing.settings import settings_of, versions_of


def iterations(folder):
    return [json.loads(line)["iteration"] for line in (folder / "metrics.jsonl").open()]


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


@pytest.fixture
def resume(folder, sums):
    """The flags that continue the run."""
    return ("--dataset", sums, "--run_dir", folder, "--resume")


# --------------------------------------------------------------------------------------- checkpoints


class Trap:
    """A pickle that would leave a file behind if it were loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


STATE = "trainer_state.pt"
WEIGHTS = "model.safetensors"


def flip_a_bit(path, at):
    content = bytearray(path.read_bytes())
    content[at if at < 0 else len(content) // 2] ^= 1
    path.write_bytes(content)


def append(path):
    with open(path, "a") as file:
        file.write(" ")


def move_iteration(checkpoint):
    """A state as it was once, with what is now "iteration" inside another entry."""
    saved = torch.load(checkpoint / STATE, weights_only=True)
    saved["state"] = {"iteration": saved.pop("iteration")}
    torch.save(saved, checkpoint / STATE)


def double_weights(checkpoint):
    doubled = {key: 2 * tensor for key, tensor in load_file(checkpoint / WEIGHTS).items()}
    save_file(doubled, checkpoint / WEIGHTS, metadata={"format": "pt"})


def replace_by_file(checkpoint):
    shutil.rmtree(checkpoint)
    checkpoint.write_text("")


DAMAGE = {  # {what is wrong: how a checkpoint becomes such a one}
    "truncated state": lambda checkpoint: os.truncate(checkpoint / STATE, 100),
    "no state": lambda checkpoint: (checkpoint / STATE).unlink(),
    "text for state": lambda checkpoint: (checkpoint / STATE).write_text("hello"),
    "code in the state": lambda checkpoint: torch.save(Trap(checkpoint / "ran"), checkpoint / STATE),
    "another state": lambda checkpoint: torch.save({"epoch": 3}, checkpoint / STATE),
    "an old state": move_iteration,
    "a flipped bit in the state": lambda checkpoint: flip_a_bit(checkpoint / STATE, 0),
    "a flipped bit in the weights": lambda checkpoint: flip_a_bit(checkpoint / WEIGHTS, -9),
    "truncated weights": lambda checkpoint: os.truncate(checkpoint / WEIGHTS, 1000),
    "no weights": lambda checkpoint: (checkpoint / WEIGHTS).unlink(),
    "other weights": double_weights,
    "no config": lambda checkpoint: (checkpoint / "config.json").unlink(),
    "another config": lambda checkpoint: append(checkpoint / "config.json"),
    "another tokenizer": lambda checkpoint: append(checkpoint / "tokenizer.json"),
    "other end tokens": lambda checkpoint: append(checkpoint / "generation_config.json"),
    "one more file": lambda checkpoint: append(checkpoint / "more.json"),
    "a file": replace_by_file,
}


@pytest.mark.parametrize("how", DAMAGE)
def test_damaged_checkpoints(how, folder, resume):
    (checkpoint,) = folder.glob("checkpoint-*")
    DAMAGE[how](checkpoint)
    before = (folder / "metrics.jsonl").read_bytes()
    expected = f"--resume: {checkpoint} cannot be read"
    refused("grpo", *resume, "--iterations", 2, expected=expected)
    assert (folder / "metrics.jsonl").read_bytes() == before and not (checkpoint / "ran").exists()


def test_run_a_copy_that_the_user_keeps(folder, resume):
    """checkpoint-best-2 is not the newest checkpoint, and nobody deletes it."""
    (checkpoint,) = folder.glob("checkpoint-*")
    kept = {"checkpoint-best-2", "checkpoint-9", "checkpoint-999999.bak", "checkpoint-0000099"}
    for name in kept:
        shutil.copytree(checkpoint, folder / name)
        (folder / name / "config.json").write_text("mine")
    completes(*resume, "--iterations", 2)
    assert {path.name for path in folder.glob("checkpoint-*")} == kept | {"checkpoint-000002"}


def test_run_a_full_disk(folder, resume):
    """A file-size limit stands in for the full disk: the checkpoint cannot be written, its predecessor
    stays, and the run goes on from there."""
    (checkpoint,) = folder.glob("checkpoint-*")
    before = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, limit[1]))  # the weights have 0.9 MB
    try:
        result = run("grpo", *SMALL, *resume, "--iterations", 2, held_out=8)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert "cannot be written; the checkpoint before it is whole: SafetensorError" in result.stderr
    assert list(folder.glob("checkpoint-*[0-9]")) == [checkpoint]
    assert {path.name: path.read_bytes() for path in checkpoint.iterdir()} == before
    completes(*resume, "--iterations", 2)
    assert iterations(folder) == [1, 2]


# ------------------------------------------------------------------------------ settings and metrics


def test_a_used_run_folder(folder, resume, monkeypatch):
    """Refused without --resume; with it, only for the same script and the same settings, which are
    compared before anything is loaded."""
    for name in ("check_logprobs", "read_dataset"):
        monkeypatch.setattr(common, name, lambda *args: pytest.fail("loaded"))
    refused("grpo", "--run_dir", folder, expected="holds a run")
    refused("grpo", *resume, "--lr", 1e-3, expected="has lr 0.0002, not 0.001")
    refused("sapo", *resume, expected="has script grpo, not sapo")
    path = folder / "settings.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps(settings | {"warmup": 5}))
    refused("grpo", *resume, expected="has warmup 5, not None")
    del settings["dtype"]
    path.write_text(json.dumps(settings))
    refused("grpo", *resume, expected="has dtype None, not float32")
    path.write_text("{no json}")
    refused("grpo", *resume, expected=(f"--run_dir {folder} cannot be", "JSONDecodeError"))
    path.unlink()
    refused("grpo", *resume, expected=(f"--run_dir {folder} cannot be", "settings.json"))


def test_run_resume_under_other_versions(folder, resume):
    """They are recorded when a run starts; a run that is resumed under others warns of each."""
    path = folder / "settings.json"
    settings = json.loads(path.read_text())
    assert settings["versions"] == versions_of(grpo.Args())
    assert "warning" not in completes(*resume)
    settings["versions"] |= {"torch": "1.0", "commit": "abc"}
    path.write_text(json.dumps(settings))
    lines = [line for line in completes(*resume).splitlines() if "warning" in line]
    assert [line.split("started under ")[1].split()[:2] for line in lines] == [
        ["commit", "abc,"],
        ["torch", "1.0,"],
    ]
    assert json.loads(path.read_text()) == settings


def test_versions_and_commits(tmp_path, monkeypatch):
    """The commit that was loaded is noted in the hub's cache; what is a file or a folder has none."""
    command = ["git", "rev-parse", "HEAD"]
    commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    expected = {"torch": torch.__version__, "transformers": transformers.__version__}
    versions = versions_of(grpo.Args())
    assert versions.pop("commit", "").removesuffix("-dirty") == commit and versions == expected
    monkeypatch.setattr(plumbing.settings, "HF_HUB_CACHE", tmp_path)
    monkeypatch.chdir(tmp_path)
    for folder, commit in (("models--org--name", "1a2b"), ("datasets--sums", "3c4d")):
        (tmp_path / folder / "refs").mkdir(parents=True)
        (tmp_path / folder / "refs" / "main").write_text(commit)
    versions = versions_of(grpo.Args(model="org/name", dataset="sums"))
    assert (versions["model's revision"], versions["dataset's revision"]) == ("1a2b", "3c4d")
    (tmp_path / "sums").mkdir()
    assert "dataset's revision" not in versions_of(grpo.Args(model="mine", dataset="sums"))


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl"])
def test_run_a_line_that_was_cut_after_a_brace(name, folder, resume):
    with open(folder / name, "a") as file:
        file.write('{"iteration": 2, "prompt": "f{x}')
    completes(*resume, "--iterations", 2)
    for line in (folder / name).read_text().splitlines():
        json.loads(line)


def test_run_resume_before_the_first_checkpoint(folder, resume):
    """Settings are compared if an iteration was logged; one that crashed leaves nothing in the way."""
    (checkpoint,) = folder.glob("checkpoint-*")
    shutil.rmtree(checkpoint)
    before = (folder / "metrics.jsonl").read_bytes()
    refused("grpo", *resume, "--lr", 1e-3, expected="has lr 0.0002, not 0.001")
    assert (folder / "metrics.jsonl").read_bytes() == before
    completes(*resume)
    assert iterations(folder) == [1]
    shutil.rmtree(checkpoint)
    (folder / "metrics.jsonl").write_text("")
    completes(*resume, "--lr", 1e-3)


def test_run_that_fails_before_its_first_checkpoint_can_be_started_again(tmp_path, sums):
    """Its metrics do not stand in the way, and are replaced by those of the new run."""
    flags = ("--dataset", sums, "--iterations", 3, "--num_minibatches", 1, "--run_dir", tmp_path)
    assert "not finite" in run("grpo", *SMALL, *flags, "--lr", 1e9, held_out=8).stderr
    assert iterations(tmp_path) and not list(tmp_path.glob("checkpoint-*"))
    completes(*flags)
    assert iterations(tmp_path) == [1, 2, 3]
    assert json.loads((tmp_path / "settings.json").read_text())["lr"] == 2e-4


def settings_changes(args, path, content, run_folder):
    """Whether the settings change if a file gets this content."""
    before = settings_of(args, "grpo", run_folder)
    path.write_text(content)
    return settings_of(args, "grpo", run_folder) != before


@pytest.mark.parametrize("model", ["tiny-moe", "a folder"])
def test_a_model_that_has_changed(model, tmp_path, monkeypatch):
    """With another number of active experts, chat template or EOS a resumed run would be another one.
    Its weights are in the checkpoint, and its README does not matter."""
    folder = shutil.copytree(TINY_MOE, tmp_path / "model")
    if model == "tiny-moe":
        monkeypatch.setattr(plumbing.settings, "TINY_MOE", folder)
    args = script_args("grpo", model=model if model == "tiny-moe" else str(folder))[1]
    for name in ("README.md", WEIGHTS, "more.py"):
        assert not settings_changes(args, folder / name, "another", tmp_path / "run")
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert settings_changes(args, folder / name, "another", tmp_path / "run")
    for name in ("chat_template.jinja", "merges.txt", "tokenizer.model"):
        assert settings_changes(args, folder / name, "another", tmp_path / "run")


def test_a_dataset_that_has_changed(tmp_path):
    """Training and held-out problems would mix. All files of a folder count, with their names, except
    hidden ones and those of the run itself."""
    data = tmp_path / "data.jsonl"
    data.write_text("one")
    args = script_args("grpo", dataset=str(data))[1]
    assert settings_changes(args, data, "another", tmp_path / "run")
    folder = tmp_path / "data"
    run_folder = folder / "run"
    for path in (folder / "more", run_folder):
        path.mkdir(parents=True)
    for path in (folder / "train.csv", folder / "more" / "train.csv"):
        path.write_text("one")
    args = script_args("grpo", dataset=str(folder))[1]
    names = {name for name in settings_of(args, "grpo", run_folder) if name.startswith("dataset's")}
    assert names == {"dataset's train.csv", "dataset's more/train.csv"}
    for name in (".index", "run/metrics.jsonl"):
        assert not settings_changes(args, folder / name, "another", run_folder)
    for name in ("more/train.csv", "more/test.csv"):
        assert settings_changes(args, folder / name, "another", run_folder)


# ------------------------------------------------------------------------------ processes and streams


def test_run_a_second_process(tmp_path, sums):
    """Refused while the first one runs; not after it has died."""
    flags = ("--dataset", sums, "--run_dir", tmp_path)
    code = f"import filelock; lock = filelock.FileLock({str(tmp_path / 'lock')!r}); lock.acquire()"
    command = [sys.executable, "-c", f"{code}; print('locked', flush=True); input()"]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        other.stdout.readline()
        refused("grpo", *flags, expected="another process uses it")
    finally:
        other.kill()
        other.wait()
    completes(*flags)


def test_run_metrics_that_cannot_be_written(tmp_path, sums, monkeypatch):
    def log(self, *args):
        (self.folder / "metrics.jsonl").unlink(missing_ok=True)
        (self.folder / "metrics.jsonl").mkdir()
        return original(self, *args)

    original = Run.log
    monkeypatch.setattr(Run, "log", log)
    result = run("grpo", *SMALL, "--dataset", sums, "--run_dir", tmp_path / "run", held_out=8)
    assert result.returncode == 2 and "cannot be written; the last checkpoint is whole" in result.stderr


def test_run_ends_with_2_as_a_process():
    result = run_process("sapo", "--group_size", 1)
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith("sapo.py: error: --group_size must be at least 2")
    assert len(result.stderr.splitlines()) == 1


def test_only_a_user_error_is_one_line(monkeypatch, capsys):
    """The cause goes into the line; anything else than a UserError keeps its traceback."""
    monkeypatch.setattr(sys, "argv", ["grpo.py"])
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="utf-8"))

    def refuse(args):
        raise UserError("--flag is\nwrong") from ValueError("because\nof this")

    def fail(args):
        raise ValueError("a bug")

    with pytest.raises(SystemExit) as stop:
        launch(refuse, grpo.Args)
    assert stop.value.code == 2
    assert capsys.readouterr().err == "grpo.py: error: --flag is wrong: ValueError because of this\n"
    with pytest.raises(ValueError, match="a bug"):
        launch(fail, grpo.Args)


def test_a_prompt_that_the_terminal_cannot_show(monkeypatch):
    """An ASCII terminal gets the letter's code."""
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "argv", ["grpo.py"])
    launch(lambda args: print("Wie groß?"), grpo.Args)
    terminal.flush()
    assert terminal.buffer.getvalue() == b"Wie gro\\xdf?\n"
