"""What the user can fix ends with exit code 2 and one line on stderr, which names wrong flags. Models,
data, rewards and folders that cannot be used: test_models.py, test_data.py, test_rewards.py,
test_run_folder.py."""

import dataclasses
import importlib
import io
import json
import sys
from pathlib import Path
from typing import Literal
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import MORE, OWN_LR, SCRIPTS, SMALL_ARGS, fields_of, refused, run, script_args

import grpo
import ppo
from common import UserError, flag
from plumbing.args import allowed_in, launch, parse_args

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


WRONG = [  # a flag, a value of the wrong type, and what the message says about it
    ("lr", "1e-6", "must be float, not '1e-6'"),
    ("lr", np.float32("nan"), "must be float, not np.float32(nan)"),
    ("group_size", 2.5, "must be int, not 2.5"),
    ("group_size", True, "must be int, not True"),
    ("lr", torch.tensor(True), "must be float, not tensor(True)"),
    ("gradient_checkpointing", "False", "must be bool, not 'False'"),
    ("dataset", [{"question": "1+1="}] * 10_000, "must be str, not [{'question': '1+1='}, {"),
    ("dtype", np.array(["float32", "bfloat16"]), "must be float32 or bfloat16, not array("),
    ("reward", 3, "must be str or Callable, not 3"),
    ("chat_template_kwargs", {"tools": {1}}, "must be dict, not {'tools': {1}}"),
]


@pytest.mark.parametrize("name, value, expected", WRONG)
def test_values_of_the_wrong_type_are_refused(name, value, expected):
    with pytest.raises(UserError) as error:
        grpo.Args(**{name: value})
    message = str(error.value)
    assert message.startswith(f"--{name} {expected}") and len(message) < 250


MEANT = [  # a flag, a value of a different type, and what is meant
    ("seed", torch.tensor(3), 3),
    ("group_size", 4.0, 4),
    ("lr", 1, 1.0),
    ("lr", np.float64(0.5), 0.5),
    ("gradient_checkpointing", np.bool_(True), True),
    ("run_dir", Path("a/b"), "a/b"),
    ("chat_template_kwargs", {"enable_thinking": False}, {"enable_thinking": False}),
    ("reward", reward, "test_bad_input:reward"),
    ("reward", Reward(), "test_bad_input:Reward"),
]


@pytest.mark.parametrize("name, value, expected", MEANT)
def test_values_of_other_types_are_what_they_mean(name, value, expected):
    args = grpo.Args(**{name: value})
    in_settings = args.settings()[name]
    assert (in_settings, type(in_settings)) == (expected, type(expected))
    assert getattr(args, name) in (value if callable(value) else expected, expected)
    assert json.loads(json.dumps(args.settings())) == dataclasses.replace(args).settings()


@pytest.mark.parametrize("name", [*SCRIPTS, *MORE])
def test_a_wrong_type_of_every_flag_is_refused(name, tmp_path):
    """In Python, in the settings of a run that is resumed, and, unless it is text, as a flag. What grpo
    has, too, is tried with grpo."""
    args = script_args(name)[1]
    settings = args.settings()
    for field in dataclasses.fields(args):
        own = field.name
        if name != "grpo" and own in fields_of("grpo"):
            continue
        if allowed_in(field)[0] is not str:
            refused(name, f"--{own}=[7]", "--run_dir", tmp_path / "new", expected=f"argument --{own}")
        with pytest.raises(UserError, match=f"^--{own} must be "):
            script_args(name, **{own: [7]})
        (tmp_path / "settings.json").write_text(json.dumps(settings | {own: [7]}))
        expected = f"{tmp_path}/settings.json does not hold a run's settings: --{own} must be "
        refused(name, "--resume", "--run_dir", tmp_path, expected=expected)


def test_advice_for_your_own_model_on_a_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(ppo, "main", lambda args: None)
    monkeypatch.setattr(ppo.Args, "torch_device", "cuda")
    flags = ("--model", "mine", "--run_dir", tmp_path)
    starts = ["warning: --max_new_tokens 48 suits", "warning: --lr 0.0002 suits"]
    starts += ["warning: --critic_lr 0.002 suits", "note: float32 is slow"]
    lines = run("ppo", *flags).stderr.splitlines()
    assert [line[: len(start)] for line, start in zip(lines, starts, strict=True)] == starts
    own = ("--max_new_tokens", 512, "--dtype", "bfloat16")
    assert run("ppo", *flags, *own, *OWN_LR, "--critic_lr", 1e-5).stderr == ""
    assert run("ppo", *flags, *own, "--iterations", 0).stderr == ""  # no rate matters


def test_types_may_be_text(tmp_path, monkeypatch):
    """In a file that begins with `from __future__ import annotations`."""
    source = "from __future__ import annotations\nfrom dataclasses import dataclass\nimport grpo\n"
    source += "@dataclass\nclass Args(grpo.Args):\n    top: int = grpo.flag(3, 'how many')\n"
    (tmp_path / "textual.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    args_class = importlib.import_module("textual").Args
    assert args_class().top == 3 and parse_args(args_class, ["--top", "4"]).top == 4
    with pytest.raises(UserError, match="--top must be int, not 'x'"):
        args_class(top="x")


@dataclasses.dataclass
class OwnArgs(grpo.Args):
    layers: list[int] = dataclasses.field(default_factory=lambda: [1, 2])
    plots: Path = flag(Path("plots"), "not a type of flags")
    mixed: int | float = flag(0.5, "neither one")
    count: int = -1
    level: Literal[1, 2] = flag(1, "a choice of numbers")


def test_other_fields_of_a_subclass_are_left_alone(tmp_path):
    """Also when a run is resumed. They are no flags, except a choice of numbers."""
    own = {"layers": [3], "plots": tmp_path, "mixed": 2.5, "count": -2}
    args = OwnArgs(**SMALL_ARGS, **own, run_dir=tmp_path / "run")
    assert {name: getattr(args, name) for name in own} == own
    grpo.main(args)
    grpo.main(dataclasses.replace(args, iterations=2, resume=True))
    parsed = parse_args(OwnArgs, ["--resume", "--run_dir", str(args.folder), "--level", "2"])
    assert (parsed.level, parsed.layers, parsed.iterations) == (2, [1, 2], 2)
    with pytest.raises(UserError, match="--level must be 1 or 2, not 1.5"):
        OwnArgs(level=1.5)


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
    file = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(file, encoding="cp1252"))
    monkeypatch.setattr(sys, "argv", ["grpo.py", "--run_dir", str(tmp_path)])
    launch(lambda args: print("the answer is \u03c0"), grpo.Args)
    assert file.getvalue() == b"the answer is \\u03c0\n"
