"""What the user can fix ends with exit code 2 and one line on stderr, which names wrong flags. Models,
data, rewards and folders that cannot be used: test_models.py, test_data.py, test_rewards.py,
test_run_folder.py."""

import dataclasses
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from conftest import OWN_LR, refused, run

import grpo
import ppo
from common import UserError
from plumbing.args import parse_args

FLAGS = [row.strip().split(" | ") for row in (Path(__file__).parent / "bad_flags.txt").open()]


@pytest.mark.parametrize("name, flags, expected", FLAGS, ids=lambda x: x if x[:1] == "-" else "")
def test_wrong_flags_are_refused(name, flags, expected, tmp_path):
    own = () if "--run_dir" in flags else ("--run_dir", tmp_path / "run")
    refused(name, *own, *flags.split(), expected=expected)


def test_args_made_in_python_are_checked():
    for make in (grpo.Args, lambda **wrong: dataclasses.replace(grpo.Args(), **wrong)):
        with pytest.raises(UserError, match="--lr "):
            make(lr=-1.0)


def test_a_switch_may_have_a_value():
    for words, expected in (([], True), (["True"], True), (["false"], False)):
        args = parse_args(grpo.Args, ["--gradient_checkpointing", *words])
        assert args.gradient_checkpointing is expected
    with pytest.raises(UserError, match="--gradient_checkpointing"):
        parse_args(grpo.Args, ["--gradient_checkpointing", "7"])


def test_advice_on_rates_and_precision_for_your_own_model_on_a_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(ppo, "main", lambda args: None)
    monkeypatch.setattr(ppo.Args, "torch_device", "cuda")
    flags = ("--model", "mine", "--run_dir", tmp_path)
    lines = run("ppo", *flags).stderr.splitlines()
    starts = ["warning: --lr 0.0002 suits", "warning: --critic_lr 0.002 suits", "note: float32 is slow"]
    assert [line[: len(start)] for line, start in zip(lines, starts, strict=True)] == starts
    assert run("ppo", *flags, *OWN_LR, "--critic_lr", 1e-5, "--dtype", "bfloat16").stderr == ""


FULL = "--micro_batch_size, --rollout_batch_size, --gradient_checkpointing, --dtype"
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
