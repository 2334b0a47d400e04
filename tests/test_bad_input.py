"""Mistakes of a user in flags and models: each ends with exit code 2 and one line on stderr that names
it, without a traceback. Data: test_data.py; rewards: test_rewards.py; folders: test_run_folder.py."""

import json
import math
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import flags_it_has, path_of, run
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

import grpo
import plumbing.args
import plumbing.models
import ppo

SMALL = """--prompts_per_iteration 4 --group_size 4 --max_new_tokens 8 --num_minibatches 2
--iterations 1""".split()
OWN_LR = ("--lr", "1e-6")  # with --model; without it there is a warning, a second line


def refused(name, *flags, expected):
    """Runs a script, which must end with 2 and one line that contains the expected words."""
    own = OWN_LR if "--model" in flags else ()
    result = run(name, *flags_it_has(name, SMALL), *own, *flags, held_out=8)
    assert result.returncode == 2, (result.stdout, result.stderr)
    lines = result.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith(f"{path_of(name).name}: error: "), result.stderr
    for words in [expected] if isinstance(expected, str) else expected:
        assert words in lines[0], lines[0]
    assert result.stdout == "" or result.stdout.startswith("problems: ")


def completes(*flags):
    """Runs grpo.py, which must succeed; what it prints on stderr."""
    result = run("grpo", *SMALL, *flags, held_out=8)
    assert result.returncode == 0, result.stderr
    return result.stderr


# --------------------------------------------------------------------------------------------- flags


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


def test_warnings_about_flags_that_do_not_suit_an_own_model(monkeypatch, tmp_path):
    monkeypatch.setattr(grpo, "main", lambda args: None)
    monkeypatch.setattr(ppo, "main", lambda args: None)
    folder = ("--run_dir", tmp_path)
    own = (*folder, "--model", "mine")
    assert completes(*own).startswith("warning: --lr 0.0002 suits tiny-moe")
    assert completes(*own, *OWN_LR) == completes(*folder) == ""
    assert "warning: --critic_lr 0.002 suits tiny-moe" in run("ppo", *own, *OWN_LR).stderr
    monkeypatch.setattr(plumbing.args, "resolve_device", lambda name: "cuda:1")
    assert "faster: --dtype bfloat16" in completes(*own, *OWN_LR)
    assert completes(*own, *OWN_LR, "--dtype", "bfloat16") == completes(*folder) == ""


def test_memory_is_pinned_by_the_gpu_of_the_run(monkeypatch):
    """That of the current one, which would otherwise be the first."""
    current = []
    on_gpu = SimpleNamespace(device=torch.device("cuda:1"), item=lambda: 0.0)
    monkeypatch.setattr(torch, "zeros", lambda *size, device: on_gpu)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert plumbing.args.resolve_device("cuda:1") == "cuda:1" and current == [on_gpu.device]


# -------------------------------------------------------------------------------------------- models


CONFIG = "config.json"
WEIGHTS = "model.safetensors"
QUERY = "model.layers.0.self_attn.q_proj.weight"
SEVENTH = "model.layers.7.self_attn.q_proj.weight"


@pytest.fixture
def model_folder(tmp_path, tiny_model):
    """A copy of the base model."""
    for part in tiny_model:
        part.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def change_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_layers(folder, count):
    change_json(folder / CONFIG, num_hidden_layers=count, layer_types=None)


def replace_model(folder, config):
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def pickle_weights(folder):
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


def add_code(folder):
    """Code that would leave a file behind if it were run."""
    classes = {"AutoModelForCausalLM": "mine.M", "AutoConfig": "mine.C"}
    change_json(folder / CONFIG, model_type="mine", auto_map=classes)
    (folder / "mine.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")


def remove_eos(folder):
    change_json(folder / CONFIG, eos_token_id=None)
    change_json(folder / "generation_config.json", eos_token_id=None)
    change_json(folder / "tokenizer_config.json", eos_token=None)


FOUR_TOKENS = LlamaConfig(vocab_size=4, hidden_size=16, intermediate_size=16, num_attention_heads=2)
BAD_MODELS = {  # {what is wrong: (how a good folder becomes such a one, expected)}
    "no config": (lambda folder: (folder / CONFIG).unlink(), "cannot be used"),
    "no JSON": (lambda folder: (folder / CONFIG).write_text("{"), "cannot be used"),
    "unknown": (lambda folder: change_json(folder / CONFIG, model_type="perceptron"), "cannot be used"),
    "encoder": (lambda folder: (folder / CONFIG).write_text('{"model_type": "vit"}'), "cannot be used"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), "cannot be used"),
    "truncated weights": (lambda folder: os.truncate(folder / WEIGHTS, 1000), "cannot be used"),
    "pickled weights": (pickle_weights, "cannot be used"),
    "code": (add_code, "cannot be used"),
    "more layers": (lambda folder: change_layers(folder, 3), "do not fit its config"),
    "fewer layers": (lambda folder: change_layers(folder, 1), "do not fit its config"),
    "too few embeddings": (lambda folder: replace_model(folder, FOUR_TOKENS), "4 embeddings"),
    "no EOS": (remove_eos, "EOS"),  # every completion would be truncated
}


@pytest.mark.parametrize("how", BAD_MODELS)
def test_model_folders(how, model_folder, tmp_path):
    spoil, expected = BAD_MODELS[how]
    spoil(model_folder)
    flags = ("--run_dir", tmp_path / "run", "--model", model_folder)
    refused("grpo", *flags, expected=("--model", expected))
    assert not (model_folder / "ran").exists()


# transformers would go on with random weights where these do not fit, and mutes its warning.
BAD_WEIGHTS = {
    "another shape": (
        lambda weights: weights.update({QUERY: weights[QUERY].repeat(2, 1)}),
        "cannot be used",
    ),
    "one is missing": (lambda weights: weights.pop(QUERY), "do not fit its config"),
    "one too many": (
        lambda weights: weights.update({SEVENTH: weights[QUERY].clone()}),
        "do not fit its config",
    ),
    "NaN": (lambda weights: weights["model.norm.weight"].fill_(math.nan), "differ by nan"),
}


@pytest.mark.parametrize("how", BAD_WEIGHTS)
def test_weights(how, model_folder, tmp_path):
    change, expected = BAD_WEIGHTS[how]
    weights = load_file(model_folder / WEIGHTS)
    change(weights)
    save_file(weights, model_folder / WEIGHTS, metadata={"format": "pt"})
    flags = ("--run_dir", tmp_path / "run", "--model", model_folder)
    refused("grpo", *flags, expected=("--model", expected))


def test_a_copied_script_without_the_base_model(tmp_path, monkeypatch):
    monkeypatch.setattr(plumbing.models, "TINY_MOE", tmp_path / "tiny_moe")
    refused("grpo", "--run_dir", tmp_path / "run", expected=("--model tiny-moe", "tiny_moe does not"))


def test_run_a_prompt_that_just_fits_the_positions(tmp_path, tiny_model):
    config = GPT2Config(vocab_size=17, n_embd=16, n_layer=1, n_head=2, n_positions=12, eos_token_id=1)
    replace_model(tmp_path / "gpt2", config)
    tiny_model[1].save_pretrained(tmp_path / "gpt2")
    flags = ("--run_dir", tmp_path / "run", "--model", tmp_path / "gpt2", *OWN_LR, "--max_new_tokens")
    refused("grpo", *flags, 5, expected="with a prompt of 8 tokens, the model's limit of 12")
    completes(*flags, 4)
