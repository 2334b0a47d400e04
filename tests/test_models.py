"""Models that people bring: with chat templates, or quantized; and folders that cannot be used."""

import copy
import json
import math

import pytest
import torch
from conftest import OWN_LR, checkpoint_of, completes, metrics, refused, save, script_args
from safetensors.torch import load_file, save_file
from test_architectures import new_model, one_sequence
from transformers import AutoTokenizer
from transformers.integrations import mxfp4

from common import UserError, load_policy, load_problems, token_logprobs
from plumbing.model import Policy

CONFIG = "config.json"
WEIGHTS = "model.safetensors"


def change_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


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


def test_gradient_checkpointing_saves_memory():
    outputs = []
    saved = []

    def note(tensor):
        saved[-1] += tensor.numel()
        return tensor

    for is_on in (False, True):
        policy = load_policy(script_args("grpo", gradient_checkpointing=is_on)[1])
        saved.append(0)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            outputs.append(token_logprobs(policy, one_sequence(), 1.0).logprobs_BT)
    assert saved[1] < 0.7 * saved[0]
    torch.testing.assert_close(*outputs)


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


@pytest.mark.parametrize("flag", ["dtype", "rollout_dtype"])
def test_the_check_at_loading_runs_the_copy_in_bfloat16(flag, tiny_policy):
    def fail(*_):
        raise RuntimeError("no kernel for BFloat16")

    master = copy.deepcopy(tiny_policy.master)
    policy = Policy(master, tiny_policy.tokenizer, **{flag: "bfloat16"})
    copied = policy.model if flag == "dtype" else policy.rollout_policy.model
    copied.base_model.register_forward_pre_hook(fail)
    with pytest.raises(UserError, match="--model .*no kernel"):
        load_problems(script_args("grpo", **{flag: "bfloat16"})[1], policy)


# ------------------------------------------------------------------------- folders that are refused


def add_a_layer(folder):
    change_json(folder / CONFIG, num_hidden_layers=3, layer_types=None)


def spoil_a_weight(folder):
    weights = load_file(folder / WEIGHTS)
    weights["model.norm.weight"].fill_(math.nan)
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


def pickle_weights(folder):
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


def add_code(folder):
    """It would leave a file behind if it were run."""
    classes = {"AutoModelForCausalLM": "mine.M", "AutoConfig": "mine.C"}
    change_json(folder / CONFIG, model_type="mine", auto_map=classes)
    (folder / "mine.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")


def remove_tokenizer(folder):
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()


def make_a_run(folder):
    checkpoint = folder / "checkpoint-000020"
    checkpoint.mkdir()
    (folder / CONFIG).rename(checkpoint / CONFIG)


def set_eos(folder, ids):
    change_json(folder / CONFIG, eos_token_id=None)
    change_json(folder / "generation_config.json", eos_token_id=ids)
    change_json(folder / "tokenizer_config.json", eos_token=None)


BAD_MODELS = {  # {what is wrong: (a function that spoils a good folder, expected words)}
    "adapter": (lambda f: (f / "adapter_config.json").write_text("{}"), "is an adapter: merge it"),
    "no tokenizer": (remove_tokenizer, "no tokenizer"),
    "pickled weights": (pickle_weights, "cannot be used"),
    "code": (add_code, "cannot be used"),
    "more layers": (add_a_layer, "do not fit its config"),
    "no EOS": (lambda f: set_eos(f, None), "no EOS"),  # every completion would be truncated
    "run": (make_a_run, "model is a run: pass its checkpoint-000020"),
    "EOS in nested lists": (lambda f: set_eos(f, [[1]]), "EOS ids must be integers"),
    "NaN": (spoil_a_weight, "differ from the training forward's by nan"),
}


@pytest.mark.parametrize("how", BAD_MODELS)
def test_a_model_that_cannot_be_used_is_refused(how, tiny_model, tmp_path):
    """Without running code from its folder."""
    folder = save(tiny_model[0], tmp_path / "model")
    spoil, expected = BAD_MODELS[how]
    spoil(folder)
    refused("grpo", "--model", folder, "--run_dir", tmp_path / "run", expected=expected)
    assert not (folder / "ran").exists()
