"""What the user can fix ends with exit code 2 and one line on stderr, which names wrong flags. Models,
data, rewards and folders that cannot be used: test_models.py, test_data.py, test_rewards.py,
test_run_folder.py."""

from __future__ import annotations  # the types of OwnArgs, below, are text

import dataclasses
import io
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Literal
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import OWN_LR, refused, run
from tqdm import tqdm

import grpo
import ppo
from common import UserError, flag
from plumbing.args import launch, parse_args

FLAGS = [row.strip().split(" | ") for row in (Path(__file__).parent / "bad_flags.txt").open()]


@pytest.mark.parametrize("name, flags, expected", FLAGS, ids=lambda x: x if x[:1] == "-" else "")
def test_wrong_flags_are_refused(name, flags, expected, tmp_path):
    own = () if "--run_dir" in flags else ("--run_dir", tmp_path / "run")
    refused(name, *own, *flags.split(), expected=expected)


def reward(text):
    return 0


class Reward:
    def __call__(self, text):
        return 0


VALUES = [  # a flag, a value that Python may give it, and what settings.json has
    ("lr", np.float32(0.5), 0.5),
    ("run_dir", Path("a/b"), "a/b"),
    ("dataset", "rows.jsonl", str(Path("rows.jsonl").absolute())),  # a resume finds it from anywhere
    ("eval_dataset", "rows.py:f", str(Path("rows.py:f").absolute())),
    ("reward", None, None),
    ("reward", reward, "test_bad_input:reward"),
    ("reward", Reward(), "test_bad_input:Reward"),
]


@pytest.mark.parametrize("name, value, expected", VALUES)
def test_settings_are_json(name, value, expected):
    args = grpo.Args(**{name: value})
    in_settings = args.settings()[name]
    assert (in_settings, type(in_settings)) == (expected, type(expected))
    assert json.loads(json.dumps(args.settings())) == dataclasses.replace(args).settings()


def test_values_from_python_are_among_the_choices():
    with pytest.raises(UserError, match="--dtype must be float32 or bfloat16, not float16"):
        grpo.Args(dtype="float16")


def test_advice_for_your_own_model_on_a_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(ppo, "main", lambda args: None)
    monkeypatch.setattr(ppo.Args, "torch_device", "cuda")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    flags = ("--model", "mine", "--run_dir", tmp_path)
    starts = ["warning: --max_new_tokens 48 suits", "warning: --lr 0.0002 suits"]
    starts += ["warning: --critic_lr 0.002 suits", "note: float32 is slow"]
    lines = run("ppo", *flags).stderr.splitlines()
    assert [line[: len(start)] for line, start in zip(lines, starts, strict=True)] == starts
    own = ("--max_new_tokens", 512, "--dtype", "bfloat16")
    assert run("ppo", *flags, *own, *OWN_LR, "--critic_lr", 1e-5).stderr == ""
    assert run("ppo", *flags, *own, "--iterations", 0).stderr == ""  # no rate matters
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    (line,) = run("ppo", *flags, *own, "--iterations", 0).stderr.splitlines()
    assert line == "note: this GPU only emulates bfloat16, which is slow"


@dataclasses.dataclass
class OwnArgs(grpo.Args):
    layers: list[int] = dataclasses.field(default_factory=lambda: [1, 2])
    level: Literal[1, 2] = flag(1, "a choice of numbers")


def test_a_subclass_may_add_flags_and_other_fields():
    args = parse_args(OwnArgs, ["--level", "2"])
    assert args.level == args.settings()["level"] == 2
    assert args.layers == [1, 2] and "layers" not in args.settings()
    with pytest.raises(UserError, match="argument --level: invalid choice: 3"):
        parse_args(OwnArgs, ["--level", "3"])


FULL = "--gradient_checkpointing, --micro_batch_tokens, --rollout_batch_size, --dtype"
CPU = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
ERRORS = [
    (UserError("--flag is\nwrong"), "grpo.py: error: --flag is wrong"),
    (torch.OutOfMemoryError("CUDA out of memory.\nTried ..."), FULL),
    (RuntimeError(CPU), FULL),
]


@pytest.mark.parametrize("error, expected", ERRORS)
def test_errors_of_users_and_lack_of_memory_are_one_line(error, expected, monkeypatch, tmp_path):
    monkeypatch.setattr(grpo, "main", Mock(side_effect=error))
    refused("grpo", "--run_dir", tmp_path, expected=expected)


def test_a_character_that_the_output_lacks_is_printed_as_its_code(tmp_path, monkeypatch):
    """As `> log.txt` on Windows."""
    path = tmp_path / "log.txt"
    monkeypatch.setattr(sys, "argv", ["grpo.py", "--run_dir", str(tmp_path)])
    with open(path, "w", encoding="cp1252") as file:
        monkeypatch.setattr(sys, "stdout", file)
        launch(lambda args: print("the answer is \u03c0"), grpo.Args)
    assert path.read_bytes() == b"the answer is \\u03c0\n"


def fail(*_):
    raise OSError("nobody reads it")


def closed_stream():
    stream = io.StringIO()
    stream.close()
    return stream


STREAMS = {
    "a full disk": lambda: open("/dev/full", "w"),  # noqa: SIM115
    "closed by >&-": lambda: None,
    "closed": closed_stream,
    "without a file": lambda: SimpleNamespace(write=fail, flush=fail),
}


@pytest.mark.parametrize("kind", STREAMS)
def test_what_cannot_be_printed_is_dropped(kind, tmp_path, monkeypatch):
    """A caller's own streams come back, with nothing left in their buffers."""

    def main(args):
        print("lost", end="", flush=True)
        tqdm.write("lost")
        raise UserError("lost")

    monkeypatch.setattr(sys, "argv", ["grpo.py", "--run_dir", str(tmp_path)])
    streams = [STREAMS[kind]() for _ in range(2)]
    monkeypatch.setattr(sys, "stdout", streams[0])
    monkeypatch.setattr(sys, "stderr", streams[1])
    with pytest.raises(SystemExit) as exit:
        launch(main, grpo.Args)
    assert exit.value.code == 2 and [sys.stdout, sys.stderr] == streams
    if kind == "a full disk":
        for stream in streams:
            stream.close()


def test_a_stream_that_is_no_file_gets_what_is_printed(tmp_path, monkeypatch):
    """A notebook's, for example, though it also names a file, the terminal's."""
    texts = []
    stream = SimpleNamespace(write=texts.append, flush=lambda: None, fileno=lambda: 1)
    monkeypatch.setattr(sys, "argv", ["grpo.py", "--run_dir", str(tmp_path)])
    monkeypatch.setattr(sys, "stdout", stream)
    launch(lambda args: print("shown"), grpo.Args)
    assert "".join(texts) == "shown\n"


def test_only_what_cannot_be_printed_is_dropped(tmp_path, monkeypatch):
    """Here a pipe is full for a while."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)

    def main(args):
        for _ in range(100):
            print(1000 * "x")
        assert os.read(reading, 2**20)
        print("read")

    monkeypatch.setattr(sys, "argv", ["grpo.py", "--run_dir", str(tmp_path)])
    with open(writing, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        launch(main, grpo.Args)
    with open(reading) as stream:
        assert stream.read().endswith("read\n")
