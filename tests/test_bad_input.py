"""Wrong flags end with exit code 2 and one line on stderr that names them. Models, data, rewards and
folders that cannot be used: test_models.py, test_data.py, test_rewards.py, test_run_folder.py."""

import dataclasses
from pathlib import Path

import pytest
from conftest import OWN_LR, metrics, refused, run

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


def test_run_one_prompt_and_one_token(tmp_path):
    """A single token has no variance that a critic could explain."""
    flags = "--prompts_per_iteration 1 --num_minibatches 1 --max_new_tokens 1 --iterations 1".split()
    result = run("ppo", *flags, "--run_dir", tmp_path)
    assert result.returncode == 0, result.stderr
    assert "losses/explained_variance" not in metrics(tmp_path)[0]


BFLOAT16 = ("--dtype", "bfloat16")
ADVICE = [  # flags, how the lines begin that ppo.py prints on stderr
    ((), []),
    (
        ("--model", "mine"),
        ["warning: --lr 0.0002 suits", "warning: --critic_lr 0.002", "note: float32"],
    ),
    (("--model", "mine", *BFLOAT16, *OWN_LR, "--critic_lr", 1e-5), []),
]


@pytest.mark.parametrize("flags, expected", ADVICE)
def test_advice_on_rates_and_precision_for_your_own_model(flags, expected, monkeypatch, tmp_path):
    """float32 is slow on a GPU only."""
    monkeypatch.setattr(ppo, "main", lambda args: None)
    for device in ("cuda", "cpu"):
        monkeypatch.setattr(ppo.Args, "torch_device", device)
        lines = run("ppo", *flags, "--run_dir", tmp_path).stderr.splitlines()
        if device == "cpu":
            expected = [start for start in expected if "float32" not in start]
        assert len(lines) == len(expected)
        assert all(line.startswith(start) for line, start in zip(lines, expected, strict=True))
