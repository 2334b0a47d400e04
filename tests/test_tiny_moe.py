"""The base model, and the script that made it."""

import hashlib
import re
import sys

import pytest
from conftest import TINY_MOE, script_args

from common import evaluate, load_grader, load_policy, load_problems
from tiny_moe import train


def test_the_weights_have_the_hash_in_the_readme():
    """With different ones, no number in the tables could be reproduced."""
    (digest,) = re.findall(r"\b[0-9a-f]{64}\b", (TINY_MOE / "README.md").read_text())
    weights = (TINY_MOE / "model.safetensors").read_bytes()
    assert hashlib.sha256(weights).hexdigest() == digest


def test_the_script_makes_the_same_architecture_and_tokenizer_without_held_out_problems(
    tmp_path, monkeypatch
):
    learned = []
    original = train.demonstration

    def demonstration(prompt, *args):
        learned.append(prompt)
        return original(prompt, *args)

    monkeypatch.setattr(train, "demonstration", demonstration)
    monkeypatch.setattr(train, "STEPS", 2)
    monkeypatch.setattr(sys, "argv", [train.__file__, str(tmp_path)])
    train.main()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_text() == (TINY_MOE / name).read_text()
    _, args = script_args("grpo")
    _, held_out = load_problems(args, load_policy(args))
    assert len(learned) == 2 * 64
    assert not set(learned) & {problem.prompt for problem in held_out}


@pytest.mark.slow
def test_trained_again_the_base_model_is_as_good(tmp_path, monkeypatch):
    """Not equal to the bit, since processors round differently."""
    monkeypatch.setattr(sys, "argv", [train.__file__, str(tmp_path)])
    train.main()
    accuracies = []
    for folder in (TINY_MOE, tmp_path):
        _, args = script_args("grpo", model=str(folder))
        policy = load_policy(args)
        _, held_out = load_problems(args, policy)
        results = evaluate(policy, held_out, load_grader(args), args)
        accuracies.append(results["greedy"]["accuracy"])
    assert accuracies[1] == pytest.approx(accuracies[0], abs=0.1)
