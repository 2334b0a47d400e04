"""The script that made the base model."""

import sys

import pytest
from conftest import TINY_MOE, interfere, script_args

from common import evaluate, load_grader, load_policy, load_problems
from tiny_moe import train


@pytest.mark.slow
def test_trained_again_the_base_model_is_as_good(tmp_path, monkeypatch):
    """Not equal to the bit, since processors round differently. It has not seen a held-out problem."""
    learned = set()
    interfere(monkeypatch, train, "demonstration", lambda prompt, *_: learned.add(prompt))
    monkeypatch.setattr(sys, "argv", [train.__file__, str(tmp_path)])
    train.main()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_text() == (TINY_MOE / name).read_text()
    accuracies = []
    for folder in (TINY_MOE, tmp_path):
        _, args = script_args("grpo", model=str(folder))
        policy = load_policy(args)
        grade = load_grader(args)
        _, held_out = load_problems(args, policy, grade)
        assert learned and not learned & {problem.prompt for problem in held_out}
        results = evaluate(policy, held_out, grade, args)
        accuracies.append(results["greedy"]["accuracy"])
    assert accuracies[1] == pytest.approx(accuracies[0], abs=0.1)
