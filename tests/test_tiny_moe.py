"""The base model that is shipped, the script that made it, and the second one, of benchmarks/."""

import re
import sys

import pytest
from conftest import ROOT, TINY_MOE, script_args

from common import evaluate, load_model, load_problems
from harness import file_hash
from tiny_moe import train
from verifier import verify

sys.path.append(str(ROOT / "benchmarks"))
import long_addition


def command(module, monkeypatch, *words):
    """What the script does from a command line."""
    monkeypatch.setattr(sys, "argv", [module.__file__, *map(str, words)])
    module.main()


def loaded(model, **changes):
    """(model, tokenizer, training problems, held-out problems, arguments), as in a run."""
    _, args = script_args("grpo", device="cpu", model=str(model), **changes)
    parts = load_model(args)
    return *parts, *load_problems(args, *parts), args


def test_the_shipped_weights_are_those_of_the_readme():
    """With others, no number in the tables could be had again."""
    (digest,) = re.findall(r"\b[0-9a-f]{64}\b", (TINY_MOE / "README.md").read_text())
    assert file_hash(TINY_MOE / "model.safetensors") == digest


def test_the_script_makes_such_a_model(tmp_path, monkeypatch):
    """After two steps already: the same architecture and tokenizer, and no held-out problem learned."""
    learned = []
    original = train.demonstration

    def demonstration(prompt, *args):
        learned.append(prompt)
        return original(prompt, *args)

    monkeypatch.setattr(train, "demonstration", demonstration)
    command(train, monkeypatch, tmp_path, "--steps", 2)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_text() == (TINY_MOE / name).read_text()
    _, _, problems, held_out, _ = loaded(tmp_path)
    assert len(learned) == 2 * 64 and set(learned) <= {problem.prompt for problem in problems}
    assert len(held_out) == 256


def test_the_second_job_is_made_by_its_script(tmp_path, monkeypatch):
    command(long_addition, monkeypatch, tmp_path, "--steps", 2, "--batch_size", 4)
    dataset = tmp_path / "problems.jsonl"
    model, _, problems, _, _ = loaded(tmp_path / "model", dataset=str(dataset))
    assert model.config.num_hidden_layers == 4 and model.config.num_experts == 16
    assert len(problems) == 20_000


@pytest.mark.slow
def test_trained_again_the_base_model_is_as_good(tmp_path, monkeypatch):
    """Not the same to the bit: processors round differently."""
    command(train, monkeypatch, tmp_path)
    accuracies = []
    for folder in (TINY_MOE, tmp_path):
        model, tokenizer, _, held_out, args = loaded(folder)
        results = evaluate(model, tokenizer, held_out, args, verify)
        accuracies.append(results["greedy"]["accuracy"])
    assert accuracies[1] == pytest.approx(accuracies[0], abs=0.1)
