"""Models that people bring: with chat templates, in low precision, with a forward of somebody else's;
folders that cannot be used."""

import json
import math

import pytest
import torch
from conftest import metrics, refused, run, save, script_args
from safetensors.torch import load_file, save_file
from test_architectures import new_model, one_sequence
from transformers import AutoTokenizer
from transformers.integrations import mxfp4

from common import load_policy, token_logprobs


def test_run_a_dense_model_with_several_chat_templates(tmp_path, sums):
    """Its checkpoints hold a folder of templates; the first one is removed when the second is there."""
    folder = save(new_model("llama"), tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.chat_template = {"default": template, "tool_use": "{{ tools }}" + template}
    tokenizer.save_pretrained(folder)
    flags = "--prompts_per_iteration 4 --group_size 4 --max_new_tokens 12 --iterations 2 --save_every 1"
    flags = [*flags.split(), "--model", folder, "--dataset", sums, "--run_dir", tmp_path / "run"]
    result = run("grpo", *flags, held_out=8)
    assert result.returncode == 0, result.stderr
    assert not any(key.startswith("moe/router") for key in metrics(tmp_path / "run")[1])
    (checkpoint,) = (tmp_path / "run").glob("checkpoint-*")
    assert set(AutoTokenizer.from_pretrained(checkpoint).chat_template) == {"default", "tool_use"}


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
    """As on a GPU, for which transformers takes this machine: its layers for such weights pass no
    gradient."""
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


# ------------------------------------------------------------------------- folders that are refused

CONFIG = "config.json"
WEIGHTS = "model.safetensors"


def change_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


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
    """Code that would leave a file behind if it were run."""
    classes = {"AutoModelForCausalLM": "mine.M", "AutoConfig": "mine.C"}
    change_json(folder / CONFIG, model_type="mine", auto_map=classes)
    (folder / "mine.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")


def remove_tokenizer(folder):
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()


def set_eos(folder, ids):
    change_json(folder / CONFIG, eos_token_id=None)
    change_json(folder / "generation_config.json", eos_token_id=ids)
    change_json(folder / "tokenizer_config.json", eos_token=None)


BAD_MODELS = {  # {what is wrong: (how a good folder becomes such a one, expected)}
    "encoder": (lambda f: (f / CONFIG).write_text('{"model_type": "vit"}'), "ViTConfig"),
    "adapter": (lambda f: (f / "adapter_config.json").write_text("{}"), "is an adapter: merge it"),
    "no tokenizer": (remove_tokenizer, "no tokenizer"),
    "pickled weights": (pickle_weights, "cannot be used"),
    "code": (add_code, "cannot be used"),
    "more layers": (add_a_layer, "do not fit its config"),
    "no EOS": (lambda f: set_eos(f, None), "EOS"),  # every completion would be truncated
    "EOS as text": (lambda f: set_eos(f, ["</s>"]), "EOS ids must be integers"),
    "NaN": (spoil_a_weight, "differ from the training forward's by nan"),
}


@pytest.mark.parametrize("how", BAD_MODELS)
def test_model_folders(how, tiny_model, tmp_path, sums):
    folder = tmp_path / "model"
    for part in tiny_model:
        part.save_pretrained(folder)
    spoil, expected = BAD_MODELS[how]
    spoil(folder)
    flags = ("--model", folder, "--dataset", sums, "--run_dir", tmp_path / "run")
    refused("grpo", *flags, expected=expected)
    assert not (folder / "ran").exists()
