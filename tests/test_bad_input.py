"""What the user can fix ends with exit code 2 and one line on stderr, which names wrong flags. Models,
data, rewards and folders that cannot be used: test_models.py, test_data.py, test_rewards.py,
test_run_folder.py."""

import dataclasses
import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import OWN_LR, SMALL_ARGS, refused, run
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
    ("seed", torch.tensor(3), 3),
    ("lr", np.float32(0.5), 0.5),
    ("gradient_checkpointing", np.bool_(True), True),
    ("run_dir", Path("a/b"), "a/b"),
    ("chat_template_kwargs", {"enable_thinking": False}, {"enable_thinking": False}),
    ("dataset", reward, "test_bad_input:reward"),
    ("reward", reward, "test_bad_input:reward"),
    ("reward", Reward(), "test_bad_input:Reward"),
]


@pytest.mark.parametrize("name, value, expected", VALUES)
def test_settings_have_what_json_has(name, value, expected):
    args = grpo.Args(**{name: value})
    in_settings = args.settings()[name]
    assert (in_settings, type(in_settings)) == (expected, type(expected))
    assert json.loads(json.dumps(args.settings())) == dataclasses.replace(args).settings()


def test_values_from_python_are_in_their_range_and_among_the_choices():
    for flags, expected in (
        ({"lr": np.float32("nan")}, "--lr must be from 1e-09 to 1e+09, not nan"),
        ({"kl_coef": -1}, "--kl_coef must be from 0 to 1e+09, not -1"),
        ({"dtype": "float16"}, "--dtype must be float32 or bfloat16, not float16"),
    ):
        with pytest.raises(UserError) as error:
            grpo.Args(**flags)
        assert str(error.value) == expected


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


def test_types_may_be_text(tmp_path, monkeypatch):
    """In a file that begins with `from __future__ import annotations`."""
    source = "from __future__ import annotations\nfrom dataclasses import dataclass\nimport grpo\n"
    source += "@dataclass\nclass Args(grpo.Args):\n    top: int = grpo.flag(3, 'how many')\n"
    (tmp_path / "textual.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    args_class = importlib.import_module("textual").Args
    assert args_class().top == 3 and parse_args(args_class, ["--top", "4"]).top == 4


@dataclasses.dataclass
class OwnArgs(grpo.Args):
    layers: list[int] = dataclasses.field(default_factory=lambda: [1, 2])
    schedule: Callable = len
    tags: set | None = None
    count: int = -1
    level: Literal[1, 2] = flag(1, "a choice of numbers")
    scale: float = flag(1, "a default without a point")


def test_other_fields_of_a_subclass_are_left_alone(tmp_path):
    """They are no flags. A resumed run may have others."""
    own = {"layers": [3], "schedule": lambda: 0, "tags": {"a", "b"}, "count": -2}
    args = OwnArgs(**SMALL_ARGS, **own, lr=np.float32(0.1), run_dir=tmp_path / "run")
    assert {name: getattr(args, name) for name in own} == own
    grpo.main(args)
    flags = {"schedule": lambda: 1, "iterations": 2, "resume": True}
    grpo.main(dataclasses.replace(args, **flags))
    words = ["--resume", "--run_dir", str(args.folder), "--iterations", "3", "--scale", "0.5"]
    parsed = parse_args(OwnArgs, words)
    assert (parsed.level, parsed.scale, parsed.layers, parsed.lr) == (1, 0.5, [1, 2], args.lr)
    grpo.main(dataclasses.replace(parsed, scale=1))
    with pytest.raises(UserError, match="argument --level: invalid choice: 3"):
        parse_args(OwnArgs, ["--level", "3"])


def test_a_path_that_is_too_long_for_a_file(tmp_path):
    for name in ("model", "dataset", "eval_dataset", "reward"):
        flags = (f"--{name}", 300 * "x", "--run_dir", tmp_path)
        refused("grpo", *flags, expected=f"error: --{name} ")


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


def test_a_bug_has_a_traceback(tmp_path, reward_file):
    """Here one in a reward function."""
    with pytest.raises(ZeroDivisionError):
        run("grpo", "--reward", reward_file("return 1 / 0"), "--run_dir", tmp_path)


def test_prints_into_a_file_whose_encoding_lacks_a_character(tmp_path, monkeypatch):
    """As `> log.txt` on Windows."""
    path = tmp_path / "log.txt"
    monkeypatch.setattr(sys, "argv", ["grpo.py", "--run_dir", str(tmp_path)])
    with open(path, "w", encoding="cp1252") as file:
        monkeypatch.setattr(sys, "stdout", file)
        launch(lambda args: print("the answer is \u03c0"), grpo.Args)
    assert path.read_bytes() == b"the answer is \\u03c0\n"


class Unwritable:
    def write(self, text):
        raise OSError("nobody reads it")

    def flush(self):
        raise OSError("nobody reads it")


def closed_stream():
    file = open("/dev/null", "w")  # noqa: SIM115
    file.close()
    return file


STREAMS = {
    "a full disk": lambda: open("/dev/full", "w"),  # noqa: SIM115
    "closed by >&-": lambda: None,
    "closed": closed_stream,
    "without a file": Unwritable,
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
