"""Mistakes of a user in flags and models: each ends with exit code 2 and one line on stderr that names
it, without a traceback. Data: test_data.py; rewards: test_rewards.py; folders: test_run_folder.py."""

import json
from pathlib import Path

import pytest
from conftest import OWN_LR, completes, refused, run

import grpo
import ppo

FLAGS = [row.strip().split(" | ") for row in (Path(__file__).parent / "bad_flags.txt").open()]


@pytest.mark.parametrize("name, flags, expected", FLAGS, ids=lambda x: x if x[:1] == "-" else "")
def test_flags(name, flags, expected, tmp_path):
    own = () if "--run_dir" in flags else ("--run_dir", tmp_path / "run")
    refused(name, *own, *flags.split(), expected=expected)


def test_run_one_prompt_and_one_token(tmp_path):
    """A single token has no variance that a critic could explain."""
    flags = "--prompts_per_iteration 1 --num_minibatches 1 --max_new_tokens 1 --iterations 1".split()
    result = run("ppo", *flags, "--run_dir", tmp_path, held_out=8)
    assert result.returncode == 0 and "Warning" not in result.stderr, result.stderr
    metrics = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert "losses/explained_variance" not in metrics


def test_warnings_about_rates_that_do_not_suit_an_own_model(monkeypatch, tmp_path):
    monkeypatch.setattr(grpo, "main", lambda args: None)
    monkeypatch.setattr(ppo, "main", lambda args: None)
    folder = ("--run_dir", tmp_path)
    own = (*folder, "--model", "mine")
    assert completes(*own).startswith("warning: --lr 0.0002 suits tiny-moe")
    assert completes(*own, *OWN_LR) == completes(*folder) == ""
    assert "warning: --critic_lr 0.002 suits tiny-moe" in run("ppo", *own, *OWN_LR).stderr
