"""Models that people bring: with chat templates, several EOS ids and settings of their own; folders
that cannot be used; what a checkpoint holds."""

import copy
import json
import math

import pytest
import torch
import transformers
from conftest import TINY_MOE, path_of, run, script_args
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, GptOssConfig, LlamaConfig
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3MoeConfig
from transformers.integrations import mxfp4

import ppo
from common import check_logprobs, collate, load_policy, load_problems, sample, token_logprobs
from more import vapo
from plumbing.errors import UserError
from plumbing.models import load_model, logits_of
from plumbing.policy import Policy

QUESTIONS = [
    f"Ann has {a} apples and buys {'many, ' * (a % 4)}{b}. How many?" for a in range(12) for b in "379"
]
SHAPE = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4)
SHAPE |= dict(num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.3, head_dim=8)
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
FAMILIES = {"llama": lambda **k: LlamaConfig(**SHAPE, **k)}
FAMILIES["qwen3_moe"] = lambda **k: Qwen3MoeConfig(**SHAPE, **MOE, **k)
CHAT = """{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""


def new_model(config):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def bpe_tokenizer(**special):
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    names = ["<|end|>", "<|user|>", "<|system|>", "<|assistant|>", "<|endoftext|>"]
    options = dict(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=names, **options)
    raw.train_from_iterator(QUESTIONS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|end|>", **special)


@pytest.fixture(params=FAMILIES)
def family(request, tmp_path):
    """(name, model folder, JSON lines). Many EOS ids, no pad, two chat templates, hostile generation
    defaults."""
    tokenizer = bpe_tokenizer(chat_template={"default": CHAT, "tool_use": "{{ tools }}" + CHAT})
    ids = dict(vocab_size=len(tokenizer), bos_token_id=None, eos_token_id=0)
    model = new_model(FAMILIES[request.param](**ids))
    # Random models rarely stop: with a twelfth of the vocabulary for EOS, they sometimes do.
    model.generation_config.eos_token_id = list(range(0, len(tokenizer), 12))
    model.generation_config.update(top_k=1, temperature=0.01, do_sample=True)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rows = [{"question": q, "answer": f"Let's see. #### {i}"} for i, q in enumerate(QUESTIONS)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return request.param, tmp_path / "model", tmp_path / "data.jsonl"


def arguments(model, data, **changes):
    changes |= {"model": str(model), "dataset": str(data), "device": "cpu", "num_held_out": 8}
    return script_args("grpo", **changes)[1]


def generator():
    return torch.Generator().manual_seed(0)


SMALL = """--prompts_per_iteration 4 --group_size 4 --max_new_tokens 12 --num_minibatches 2
--lr 1e-3""".split()


def test_run_a_chat_model(family, tmp_path, reward_file):
    """From a JSON-lines file, through a tokenizer with two chat templates. The run is stopped and
    resumed; its checkpoint opens with plain transformers, and answers greedily what the script's last
    evaluation did."""
    kind, folder, data = family
    # A random model never finds the answer: the parity of its length is a reward that it can learn.
    reward = reward_file('return (1.0, "correct") if len(text) % 2 == 0 else (0.0, "wrong")')
    flags = (*SMALL, "--model", folder, "--dataset", data, "--reward", reward)
    for count in (1, 2):
        options = (
            "--iterations",
            count,
            "--num_held_out",
            8,
            "--resume",
            "--run_dir",
            tmp_path / "run",
        )
        result = run("grpo", *flags, *options)
        assert result.returncode == 0, result.stderr
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert line["iteration"] == 2
    assert line["losses/first_step_ratio_error_max"] < 1e-4 and line["charts/grad_norm"] > 0
    assert ("moe/load_max" in line) == (kind != "llama")

    (checkpoint,) = (tmp_path / "run").glob("checkpoint-*")
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    assert set(tokenizer.chat_template) == {"default", "tool_use"}
    args = arguments(folder, data, max_new_tokens=12)
    policy = Policy(model, tokenizer)
    assert policy.weights_hash != load_policy(args).weights_hash
    completions = sample(policy, load_problems(args, policy)[1], 1, args, greedy=True)
    for c in completions:
        prompt = torch.tensor([c.problem.prompt_ids])
        options = dict(max_new_tokens=12, do_sample=False, pad_token_id=0)
        theirs = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
        assert theirs[0, prompt.shape[1] :].tolist() == c.ids
    mean = sum(len(c.ids) for c in completions) / len(completions)
    assert line["eval/response_len_mean"] == pytest.approx(mean)


def test_a_hash_tells_weights_apart(tiny_model):
    model = copy.deepcopy(tiny_model[0])
    before = Policy(model, None).weights_hash
    assert Policy(copy.deepcopy(model), None, "bfloat16", "int4").weights_hash == before
    with torch.no_grad():
        model.model.norm.weight[3] *= 1 + 1e-6
    assert Policy(model, None).weights_hash != before


def test_a_copy_of_a_model_whose_forward_a_trainer_has_replaced_scores_with_its_own_weights(tiny_model):
    """The function that trainers put in its place calls the forward of the model it was made for."""
    model = copy.deepcopy(tiny_model[0])
    replaced = model.forward
    model.forward = lambda *inputs, **named: replaced(*inputs, **named)
    hidden = torch.randn(3, model.config.hidden_size, generator=generator())
    expected = logits_of(tiny_model[0], hidden)
    assert torch.equal(logits_of(copy.deepcopy(model), hidden), expected)


def test_gradient_checkpointing_saves_memory(family):
    """A copy of the model (the reference) has its own layers."""
    args = arguments(*family[1:], max_new_tokens=8)
    policy = load_policy(args)
    problems = load_problems(args, policy)[0].take(4)
    batch = collate(sample(policy, problems, 2, args, generator()), args)
    args.gradient_checkpointing = True
    saving = load_policy(args)
    saved = []
    for p in (policy, saving):
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x, log=sizes: (log.append(x.numel()), x)[1], lambda x: x
        ):
            outputs = token_logprobs(p, batch, 1.0)
        saved.append(sum(sizes))
    assert saved[1] < 0.7 * saved[0]
    reference = saving.frozen_copy()
    with torch.no_grad():
        for weight in saving.parameters():
            weight.add_(0.1)
    again = token_logprobs(reference, batch, 1.0)
    torch.testing.assert_close(again.logprobs_BT, outputs.logprobs_BT)


GPT_OSS = dict(vocab_size=17, hidden_size=64, intermediate_size=64, num_hidden_layers=2, head_dim=8)
GPT_OSS |= dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128)
GPT_OSS |= dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=16)
GPT_OSS |= dict(initializer_range=0.3, pad_token_id=0, bos_token_id=None, eos_token_id=1)


@pytest.mark.parametrize("name", ["grpo", "rspo"])
def test_run_an_architecture_that_mixes_packed_sequences(name, tmp_path, tiny_model, monkeypatch):
    """gpt-oss cannot tell from the positions where a sequence begins: each sequence gets a row, also in
    the reference; then the log-probs of sampler and update agree."""
    folder = tmp_path / "model"
    new_model(GptOssConfig(**GPT_OSS)).save_pretrained(folder)
    tiny_model[1].save_pretrained(folder)
    args = script_args("grpo", device="cpu", model=str(folder))[1]
    policy = load_policy(args)
    check_logprobs(policy, [[3, 4, 5, 6], [5]], args)
    assert policy.one_sequence_per_row and policy.frozen_copy().one_sequence_per_row
    flags = ("--model", folder, "--run_dir", tmp_path / "run", "--iterations", 2)
    result = run(name, *SMALL, *flags, held_out=8)
    assert result.returncode == 0, result.stderr
    for line in (tmp_path / "run" / "metrics.jsonl").open():
        metrics = json.loads(line)
        assert abs(metrics["rollout/sampler_kl"]) < 1e-6
        assert metrics["losses/first_step_ratio_error_max"] == 0
    # Packed nevertheless, the log-probs differ, and the test would notice.
    always_packed = property(lambda self: False, lambda self, value: None)
    monkeypatch.setattr(Policy, "one_sequence_per_row", always_packed, raising=False)
    with pytest.raises(UserError, match="differ by"):
        check_logprobs(policy, [[3, 4, 5, 6], [5]], args)


@pytest.mark.parametrize("script", [ppo, vapo])
def test_the_critic_packs_like_the_policy(script, tmp_path, monkeypatch):
    """Also if only the check in load_problems finds that it must not."""

    class Reached(Exception):
        pass

    def load_and_find(args, policy):
        policy.one_sequence_per_row = True
        return load_problems(args, policy)

    def trained_model(critic, dtype):
        assert critic.one_sequence_per_row
        raise Reached

    monkeypatch.setattr(script, "load_problems", load_and_find)
    monkeypatch.setattr(script, "TrainedModel", trained_model)
    args = script_args(script.__name__, device="cpu", run_dir=str(tmp_path / "run"))[1]
    with pytest.raises(Reached):
        script.main(args)


@pytest.mark.parametrize("given, expected", [(None, [1]), ("2", [])])
def test_the_tiny_model_runs_on_one_thread(given, expected, monkeypatch):
    """Unless OMP_NUM_THREADS is set: its operators are too small for more."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    counts = []
    monkeypatch.setattr(torch, "set_num_threads", counts.append)
    load_model(script_args("grpo", device="cpu")[1])
    assert counts == expected


def test_weights_in_mxfp4_are_dequantized_where_there_are_kernels_for_them(tmp_path, monkeypatch):
    """As on a GPU, for which transformers takes this machine: its layers for such weights pass no
    gradient."""
    model = new_model(GptOssConfig(**GPT_OSS))
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(TINY_MOE).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        E, inputs, outputs = weights.pop(name).shape
        shape = (E, outputs, inputs // 32)
        blocks = torch.randint(0, 256, (*shape, 16), generator=generator())
        weights[f"{name}_blocks"] = blocks.to(torch.uint8)
        weights[f"{name}_scales"] = torch.full(shape, 124, dtype=torch.uint8)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    change_json(tmp_path / "config.json", quantization_config={"quant_method": "mxfp4"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    model, _ = load_model(script_args("grpo", device="cpu", model=str(tmp_path))[1])
    assert not any(isinstance(module, mxfp4.Mxfp4GptOssExperts) for module in model.modules())
    assert {(weight.dtype, weight.requires_grad) for weight in model.parameters()} == {
        (torch.float32, True)
    }
    assert model.model.layers[0].mlp.experts.down_proj.abs().max() == 6 * 2 ** (124 - 127)
    assert not hasattr(model.config, "quantization_config")  # a checkpoint is an ordinary folder


# ------------------------------------------------------------------------- folders that are refused

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
QUERY = "model.layers.0.self_attn.q_proj.weight"


def change_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_layers(folder, count):
    change_json(folder / CONFIG, num_hidden_layers=count, layer_types=None)


def change_weights(folder, change):
    weights = load_file(folder / WEIGHTS)
    change(weights)
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


def set_eos(folder, ids, tokens=None):
    change_json(folder / CONFIG, eos_token_id=None)
    change_json(folder / "generation_config.json", eos_token_id=ids)
    change_json(folder / "tokenizer_config.json", eos_token=tokens)


FOUR_TOKENS = LlamaConfig(vocab_size=4, hidden_size=16, intermediate_size=16, num_attention_heads=2)
BAD_MODELS = {  # {what is wrong: (how a good folder becomes such a one, expected)}
    "no config": (lambda f: (f / CONFIG).unlink(), "cannot be used"),
    "encoder": (lambda f: (f / CONFIG).write_text('{"model_type": "vit"}'), "ViTConfig"),
    "adapter": (lambda f: (f / "adapter_config.json").write_text("{}"), "is an adapter: merge it"),
    "no tokenizer": (remove_tokenizer, "no tokenizer"),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), "cannot be used"),
    "pickled weights": (pickle_weights, "cannot be used"),
    "quantized": (
        lambda f: change_json(f / CONFIG, quantization_config={"quant_method": "gptq"}),
        "GPTQ",
    ),
    "code": (add_code, "cannot be used"),
    "more layers": (lambda f: change_layers(f, 3), "do not fit its config"),
    "fewer layers": (lambda f: change_layers(f, 1), "do not fit its config"),
    "few embeddings": (lambda f: new_model(FOUR_TOKENS).save_pretrained(f), "4 embeddings"),
    "no EOS": (lambda f: set_eos(f, None), "EOS"),  # every completion would be truncated
    "EOS as text": (lambda f: set_eos(f, ["</s>"]), "EOS ids must be integers"),
    # transformers would go on with random weights where these do not fit, and mutes its warning.
    "another shape": (
        lambda f: change_weights(f, lambda w: w.update({QUERY: w[QUERY].repeat(2, 1)})),
        "cannot be used",
    ),
    "NaN": (
        lambda f: change_weights(f, lambda w: w["model.norm.weight"].fill_(math.nan)),
        "differ by nan",
    ),
}


def refused(model, folder, expected):
    """Runs grpo.py, which must end with 2 and one line that contains the expected words."""
    result = run("grpo", "--model", model, "--run_dir", folder, "--lr", 1e-6, held_out=8)
    (line,) = result.stderr.splitlines()
    assert result.returncode == 2 and line.startswith(f"{path_of('grpo').name}: error: --model")
    assert expected in line and len(line) < 450 and "iteration" not in result.stdout, line


@pytest.mark.parametrize("how", BAD_MODELS)
def test_model_folders(how, tiny_model, tmp_path):
    folder = tmp_path / "model"
    for part in tiny_model:
        part.save_pretrained(folder)
    spoil, expected = BAD_MODELS[how]
    spoil(folder)
    refused(folder, tmp_path / "run", expected)
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("name", ["nobody/nothing", "/nowhere/at/all", "./here"])
def test_neither_a_folder_nor_on_the_hub(name, tmp_path, monkeypatch):
    """The hub is asked once: its library would try again for a minute, and print each attempt."""
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda *_: 1 / 0)
    refused(name, tmp_path, "is no folder")


def test_run_a_prompt_that_just_fits_the_positions(tmp_path, tiny_model):
    new_model(
        Qwen3Config(**{**SHAPE, "vocab_size": 17, "max_position_embeddings": 12})
    ).save_pretrained(tmp_path / "model")
    tiny_model[1].save_pretrained(tmp_path / "model")
    flags = (*SMALL, "--iterations", 1, "--run_dir", tmp_path / "run", "--model", tmp_path / "model")
    result = run("grpo", *flags, "--max_new_tokens", 5, held_out=8)
    assert (
        result.returncode == 2 and "model's limit of 12 (first: row 1 with 8 tokens)" in result.stderr
    )
    assert run("grpo", *flags, "--max_new_tokens", 4, held_out=8).returncode == 0
