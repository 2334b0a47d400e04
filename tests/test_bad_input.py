"""Mistakes of a user in flags and models: each ends with exit code 2 and one line on stderr that names
it, without a traceback. Data: test_data.py; rewards: test_rewards.py; folders: test_run_folder.py."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import flags_it_has, path_of, run

import grpo
import ppo
from plumbing.args import resolve_device

SMALL = """--prompts_per_iteration 4 --group_size 4 --max_new_tokens 8 --num_minibatches 2
--iterations 1""".split()
OWN_LR = ("--lr", "1e-6")  # with --model; without it there is a warning, a second line


def refused(name, *flags, expected):
    """Runs a script, which must end with 2 and one line that contains the expected words."""
    own = OWN_LR if "--model" in flags else ()
    result = run(name, *flags_it_has(name, SMALL), *own, *flags, held_out=8)
    assert result.returncode == 2, (result.stdout, result.stderr)
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"{path_of(name).name}: error: ") and expected in line, line
    assert result.stdout == "" or result.stdout.startswith("problems: ")


def completes(*flags):
    """Runs grpo.py, which must succeed; what it prints on stderr."""
    result = run("grpo", *SMALL, *flags, held_out=8)
    assert result.returncode == 0, result.stderr
    return result.stderr


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


def test_memory_is_pinned_by_the_gpu_of_the_run(monkeypatch):
    """That of the current one, which would otherwise be the first."""
    current = []
    monkeypatch.setattr(torch, "zeros", lambda *size, device: SimpleNamespace(item=lambda: 0.0))
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert resolve_device("cuda:1") == "cuda:1" and current == [torch.device("cuda:1")]
