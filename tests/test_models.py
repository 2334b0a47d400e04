"""Models that people bring: with chat templates, or quantized; and folders that cannot be used."""

import copy
import json
import math
import shutil
import types
from unittest.mock import Mock

import huggingface_hub
import pytest
import torch
from conftest import OWN_LR, TINY_MOE, checkpoint_of, completes, metrics, problems_of, refused, save
from conftest import script_args
from safetensors.torch import load_file, save_file
from test_architectures import new_model, one_sequence
from transformers import AutoTokenizer
from transformers.integrations import mxfp4

import common
import plumbing.model
from common import UserError, load_policy, sample, token_logprobs
from plumbing.model import Policy

CONFIG = "config.json"
WEIGHTS = "model.safetensors"


def change_json(path, **changes):
    old = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(old | changes))


OLD = ["4.57.6", "5.20.2"]


@pytest.mark.parametrize("version", [*OLD, "5.21.0", "5.100.1.dev0", "6.0"])
def test_an_old_transformers_is_refused_before_a_model_is_loaded(version, monkeypatch):
    monkeypatch.setattr("transformers.__version__", version)
    monkeypatch.setattr("plumbing.model.load_weights", Mock(side_effect=UserError("loaded")))
    expected = f"transformers {version} is too old, 5.21 or newer is" if version in OLD else "loaded"
    with pytest.raises(UserError, match=expected):
        load_policy(script_args("grpo")[1])


def test_the_cache_has_the_name_that_forward_knows(tiny_model):
    """In transformers 5.24, forward takes and returns `cache`."""
    model, tokenizer = tiny_model

    class Renamed(type(model)):
        def forward(self, input_ids, cache=None, **options):
            assert "past_key_values" not in options
            output = super().forward(input_ids, past_key_values=cache, **options)
            return types.SimpleNamespace(logits=output.logits, cache=output.past_key_values)

    renamed = copy.deepcopy(model)
    renamed.__class__ = Renamed
    policies = [Policy(model, tokenizer), Policy(renamed, tokenizer)]
    assert [policy.cache_name for policy in policies] == ["past_key_values", "cache"]
    args = script_args("grpo", max_new_tokens=8)[1]
    problems = problems_of(policies[0], "12+34=", "5=")
    first, second = (sample(policy, problems, 2, args, torch.manual_seed(0)) for policy in policies)
    assert [c.ids for c in first] == [c.ids for c in second]


def test_run_a_dense_model_with_several_chat_templates(tmp_path):
    """The last checkpoint has the tokenizer files that were loaded, byte for byte, since other versions
    of transformers may not read what this one writes. Nothing is logged about experts."""
    model = save(new_model("llama"), tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.chat_template = {"default": template, "tool_use": "{{ tools }}" + template}
    tokenizer.save_pretrained(model)
    (model / "special_tokens_map.json").write_text("{}")
    change_json(model / "tokenizer_config.json", comment="of an older version")
    flags = ["--model", model, *OWN_LR, "--iterations", 2, "--save_every", 1]
    completes("grpo", *flags, "--run_dir", tmp_path / "run")
    assert not any(key.startswith("moe/") for key in metrics(tmp_path / "run")[1])
    own = {"config.json", "generation_config.json", WEIGHTS}
    files = [path for path in model.rglob("*") if path.is_file() and path.name not in own]
    assert len(files) == 5
    for path in files:
        saved = checkpoint_of(tmp_path / "run") / path.relative_to(model)
        assert saved.read_bytes() == path.read_bytes(), path


def test_the_hash_of_a_model_is_that_of_its_bits(own_policy):
    before = own_policy.hash()
    weight = next(own_policy.parameters())
    assert own_policy.frozen_copy().hash() == before
    with torch.no_grad():
        weight[:2] = weight[[1, 0]]  # two rows of the embedding
        exchanged = own_policy.hash()
        weight[0] = torch.nextafter(weight[0], torch.tensor(1.0))
    assert len({before, exchanged, own_policy.hash()}) == 3


def numbers_kept(is_on):
    """How many numbers a forward pass keeps for the backward pass."""
    policy = load_policy(script_args("grpo", gradient_checkpointing=is_on)[1])
    sizes = []
    note = lambda tensor: sizes.append(tensor.numel())  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        token_logprobs(policy, one_sequence(), 1.0)
    return sum(sizes)


def test_gradient_checkpointing_saves_memory():
    """That the results are the same: test_architectures.py."""
    assert 0 < numbers_kept(True) < 0.7 * numbers_kept(False)


def test_weights_in_mxfp4_are_dequantized_where_there_are_kernels_for_them(tmp_path, monkeypatch):
    """Here transformers takes this machine for a GPU. Its layers for such weights pass no gradient."""
    save(new_model("gpt_oss", hidden_size=64, intermediate_size=64), tmp_path)
    weights = load_file(tmp_path / WEIGHTS)
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        E, inputs, outputs = weights.pop(name).shape
        shape = (E, outputs, inputs // 32)
        weights[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16)).to(torch.uint8)
        weights[f"{name}_scales"] = torch.full(shape, 124, dtype=torch.uint8)
    save_file(weights, tmp_path / WEIGHTS, metadata={"format": "pt"})
    change_json(tmp_path / CONFIG, quantization_config={"quant_method": "mxfp4"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    model = load_policy(script_args("grpo", model=str(tmp_path))[1]).model
    assert not any(isinstance(module, mxfp4.Mxfp4GptOssExperts) for module in model.modules())
    assert all(w.dtype == torch.float32 and w.requires_grad for w in model.parameters())
    assert model.model.layers[0].mlp.experts.down_proj.abs().max() == 6 * 2 ** (124 - 127)
    assert not hasattr(model.config, "quantization_config")  # a checkpoint is an ordinary folder


def test_the_check_at_loading_runs_the_copy_in_bfloat16(own_policy, monkeypatch):
    def fail(*_):
        raise RuntimeError("no kernel for BFloat16")

    policy = Policy(own_policy.master, own_policy.tokenizer, "bfloat16")
    policy.model.base_model.register_forward_pre_hook(fail)
    monkeypatch.setattr(common, "load_unchecked", lambda args: policy)
    with pytest.raises(UserError, match="--model .*no kernel"):
        load_policy(script_args("grpo", dtype="bfloat16")[1])


def test_a_cached_model_is_loaded_from_its_folder_if_the_hub_does_not_answer(tmp_path, monkeypatch):
    """The loaders, given its name, would ask again and again. A model that is not cached is refused."""
    cache = tmp_path / "models--me--tiny"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("a" * 40)
    shutil.copytree(TINY_MOE, cache / "snapshots" / ("a" * 40))
    model_info = Mock(side_effect=ConnectionError("no network"))
    monkeypatch.setattr(huggingface_hub, "model_info", model_info)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    load_weights = Mock(wraps=plumbing.model.load_weights)
    monkeypatch.setattr(plumbing.model, "load_weights", load_weights)
    load_policy(script_args("grpo", model="me/tiny")[1])
    assert load_weights.call_args[0] == (str(cache / "snapshots" / ("a" * 40)),)
    assert model_info.call_count == 1
    with pytest.raises(UserError, match="me/other is not a folder, .*ConnectionError no network"):
        load_policy(script_args("grpo", model="me/other")[1])


# ------------------------------------------------------------------------- folders that are refused


def eos(ids):
    """Changes that name them in one file alone."""
    files = {CONFIG: {"eos_token_id": None}, "generation_config.json": {"eos_token_id": ids}}
    return files | {"tokenizer_config.json": {"eos_token": None}}


CODE = {"AutoModelForCausalLM": "mine.M", "AutoConfig": "mine.C"}  # in a file mine.py
BAD_FILES = {  # {what is wrong: (changes of JSON files, expected words)}
    "adapter": ({"adapter_config.json": {}}, "is an adapter: merge it"),
    "no tokenizer": ({"tokenizer.json": None, "tokenizer_config.json": None}, "no tokenizer"),
    "code": ({CONFIG: {"model_type": "mine", "auto_map": CODE}}, "cannot be used"),
    "more layers": ({CONFIG: {"num_hidden_layers": 3, "layer_types": None}}, "do not fit its config"),
    "no EOS": (eos(None), "no EOS"),  # every completion would be truncated
    "EOS in nested lists": (eos([[1]]), "EOS ids must be integers"),
}


@pytest.mark.parametrize("how", BAD_FILES)
def test_a_model_that_cannot_be_used_is_refused(how, tiny_model, tmp_path):
    """Without running code from its folder, which would leave a file behind."""
    folder = save(tiny_model[0], tmp_path / "model")
    (folder / "mine.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    files, expected = BAD_FILES[how]
    for name, changes in files.items():
        if changes is None:
            (folder / name).unlink()
        else:
            change_json(folder / name, **changes)
    refused("grpo", "--model", folder, "--run_dir", tmp_path / "run", expected=expected)
    assert not (folder / "ran").exists()


def test_a_run_is_refused_with_the_name_of_its_checkpoint(tiny_model, tmp_path):
    """But a model may have checkpoints of an engine beside it: TRL's have six digits, too, from step
    100,000 on."""
    (tmp_path / "checkpoint-100000").mkdir()
    expected = f"{tmp_path.name} is a run: pass its checkpoint-100000"
    refused("grpo", "--model", tmp_path, "--run_dir", tmp_path / "run", expected=expected)
    load_policy(script_args("grpo", model=str(save(tiny_model[0], tmp_path)))[1])


def test_weights_that_are_nan_or_pickled_are_refused(tiny_model, tmp_path):
    folder = save(tiny_model[0], tmp_path / "model")
    flags = ("--model", folder, "--run_dir", tmp_path / "run")
    weights = load_file(folder / WEIGHTS)
    torch.save(weights, folder / "pytorch_model.bin")
    weights["model.norm.weight"].fill_(math.nan)
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    refused("grpo", *flags, expected="differ from the training forward's by nan")
    (folder / WEIGHTS).unlink()
    refused("grpo", *flags, expected="cannot be used")
