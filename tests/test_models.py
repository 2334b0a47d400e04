"""Other models than the tiny MoE: four architectures with a byte-level BPE tokenizer that is trained
here."""

import copy
import json

import pytest
import torch
from conftest import run, script_args
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import ppo
from common import check_logprobs, collate, load_policy, load_problems, sample
from common import token_logprobs
from more import vapo
from plumbing.args import UserError
from plumbing.models import load_model, logits_of
from plumbing.policy import Policy
from plumbing.routing import read_routers

QUESTIONS = [
    f"Ann has {a} apples and buys {'many, ' * (a % 4)}{b}. How many?" for a in range(12) for b in "379"
]
SHAPE = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4)
SHAPE |= dict(num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.3)
MOE = dict(num_experts_per_tok=2)
FAMILIES = {
    "llama": lambda **k: LlamaForCausalLM(LlamaConfig(**SHAPE, **k)),
    "qwen3_moe": lambda **k: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SHAPE, **MOE, **k, num_experts=4, moe_intermediate_size=16, head_dim=8)
    ),
    "mixtral": lambda **k: MixtralForCausalLM(MixtralConfig(**SHAPE, **MOE, **k, num_local_experts=4)),
    "olmoe": lambda **k: OlmoeForCausalLM(OlmoeConfig(**SHAPE, **MOE, **k, num_experts=4)),
}
CHAT = """{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""


def bpe_tokenizer(**special):
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    names = ["<|end|>", "<|user|>", "<|system|>", "<|assistant|>", "<|endoftext|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=names, initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator(QUESTIONS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|end|>", **special)


@pytest.fixture(scope="session", params=FAMILIES)
def family(request, tmp_path_factory):
    """(name, model folder, JSON lines). Many EOS ids, no pad, a template, hostile generation
    defaults."""
    folder = tmp_path_factory.mktemp(request.param)
    tokenizer = bpe_tokenizer(chat_template=CHAT)
    torch.manual_seed(0)
    model = FAMILIES[request.param](vocab_size=len(tokenizer), bos_token_id=None, eos_token_id=0)
    # Random models rarely stop: with a twelfth of the vocabulary for EOS, they sometimes do.
    model.generation_config.eos_token_id = list(range(0, len(tokenizer), 12))
    model.generation_config.update(top_k=1, temperature=0.01, do_sample=True)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    with open(folder / "data.jsonl", "w") as file:
        for i, question in enumerate(QUESTIONS):
            print(json.dumps({"question": question, "answer": f"Let's see. #### {i}"}), file=file)
    return request.param, folder / "model", folder / "data.jsonl"


def arguments(name, model, data, **changes):
    changes |= {"model": str(model), "dataset": str(data), "device": "cpu", "num_held_out": 8}
    changes |= {"rollout_batch_size": 1000}  # prompts of different lengths are sampled together
    return script_args(name, **changes)[1]


def test_sampler_and_training_forward_agree(family):
    """14, on each architecture, float32, prompts of mixed length, temperature not 1: below 1e-4."""
    args = arguments("grpo", *family[1:], max_new_tokens=16, temperature=0.8)
    policy = load_policy(args)
    problems = load_problems(args, policy)[0].take(10)
    assert len({len(p.prompt_ids) for p in problems}) > 2
    completions = sample(policy, problems, 4, args, torch.Generator().manual_seed(0))
    assert len({len(c.ids) for c in completions}) > 3 and 0 < sum(c.truncated for c in completions) < 40
    batch = collate(completions, args)
    with torch.no_grad():
        gap = token_logprobs(policy, batch, 0.8).logprobs_BT - batch.sampler_logprobs_BT
    assert gap[batch.mask_BT].abs().max() < 1e-4


def test_what_is_found_out_about_a_model_is_not_stored_on_it(tiny_model):
    """But in the policy. What transformers itself stores in a first forward was there before."""
    policy = Policy(copy.deepcopy(tiny_model[0]), tiny_model[1])
    policy.model(torch.tensor([[3]]), output_router_logits=True)
    _, args = script_args("grpo", device="cpu")
    before = [set(vars(module)) for module in policy.model.modules()]
    check_logprobs(policy, [[3, 4], [5]], args)
    assert read_routers(policy.model).no_replay == "" and not policy.one_sequence_per_row
    assert [set(vars(module)) for module in policy.model.modules()] == before


def test_a_copy_of_a_model_whose_forward_a_trainer_has_replaced_scores_with_its_own_weights(tiny_model):
    """The function that trainers put in its place calls the forward of the model it was made for."""
    model = copy.deepcopy(tiny_model[0])
    replaced = model.forward
    model.forward = lambda *inputs, **named: replaced(*inputs, **named)
    hidden = torch.randn(3, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    expected = logits_of(tiny_model[0], hidden)
    assert torch.equal(logits_of(copy.deepcopy(model), hidden), expected)


SMALL = """--iterations 2 --prompts_per_iteration 4 --group_size 4 --max_new_tokens 12
--num_minibatches 2""".split()


@pytest.mark.parametrize("name", ["grpo", "gspo", "rspo"])
def test_run_scripts_run_on_any_architecture(name, family, tmp_path, reward_file):
    """A run from a JSON-lines file; its checkpoint opens with plain transformers, and answers greedily
    what the script's last evaluation did."""
    kind, folder, data = family
    # A random model never finds the answer: the parity of its length is a reward that it can learn.
    reward = reward_file('return (1.0, "correct") if len(text) % 2 == 0 else (0.0, "wrong")')
    flags = (*SMALL, "--lr", 1e-3, "--model", folder, "--dataset", data, "--reward", reward)
    result = run(name, *flags, "--run_dir", tmp_path, held_out=8)
    if name == "rspo" and kind == "llama":
        assert result.returncode == 2 and "gmpo.py" in result.stderr
        return
    assert result.returncode == 0, result.stderr
    line = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert line["losses/first_step_ratio_error_max"] < 1e-4 and line["charts/grad_norm"] > 0
    assert ("moe/router_entropy" in line) == (kind != "llama")

    (checkpoint,) = tmp_path.glob("checkpoint-*")
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    before = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert any(not torch.equal(before[key], value) for key, value in model.state_dict().items())
    args = arguments(name, folder, data, max_new_tokens=12)
    policy = Policy(model, tokenizer)
    completions = sample(policy, load_problems(args, policy)[1], 1, args, greedy=True)
    for c in completions:
        prompt = torch.tensor([c.problem.prompt_ids])
        options = dict(max_new_tokens=12, do_sample=False, pad_token_id=0)
        theirs = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
        assert theirs[0, prompt.shape[1] :].tolist() == c.ids
    mean = sum(len(c.ids) for c in completions) / len(completions)
    assert line["eval/response_len_mean"] == pytest.approx(mean)


def test_gradient_checkpointing_changes_memory_only(family):
    """Same log-probs, same gradients, the router's and its aux loss's too; sampling works; a copy of
    the model (the reference) has its own layers."""
    args = arguments("grpo", *family[1:], max_new_tokens=8)
    policy = load_policy(args)
    problems = load_problems(args, policy)[0].take(4)
    batch = collate(sample(policy, problems, 2, args, torch.Generator().manual_seed(0)), args)
    args.gradient_checkpointing = True
    saving = load_policy(args)
    gradients, saved = [], []
    for p in (policy, saving):
        bytes_saved = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x, log=bytes_saved: (log.append(x.numel()), x)[1], lambda x: x
        ):
            outputs = token_logprobs(p, batch, 1.0)
        (outputs.logprobs_BT.sum() + 0.1 * outputs.aux_loss).backward()
        gradients.append({key: weight.grad for key, weight in p.model.named_parameters()})
        saved.append(sum(bytes_saved))
    for key, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][key], gradient, atol=1e-6, rtol=1e-4)
    assert saved[1] < 0.7 * saved[0]

    reference = saving.frozen_copy()
    with torch.no_grad():
        for weight in saving.parameters():
            weight.add_(0.1)
        moved = token_logprobs(saving, batch, 1.0).logprobs_BT
        torch.testing.assert_close(
            token_logprobs(reference, batch, 1.0).logprobs_BT,
            token_logprobs(policy, batch, 1.0).logprobs_BT,
        )
    assert (moved - outputs.logprobs_BT).abs().max() > 1e-2


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"], indirect=True)
@pytest.mark.parametrize("special", [{}, {"pad_token": "<|end|>"}, {"pad_token": "<|endoftext|>"}])
def test_pad_tokens_do_not_matter(special, family, tmp_path):
    """None at all, shared with EOS, or one of its own: the same completions and log-probs."""
    _, folder, data = family
    results = []
    other = bpe_tokenizer(chat_template=CHAT, **special)
    args = arguments("grpo", folder, data, max_new_tokens=8)
    model, own = load_model(args)
    for tokenizer in (other, own):
        policy = Policy(model, tokenizer)
        problems = load_problems(args, policy)[0].take(4)
        results.append(sample(policy, problems, 4, args, torch.Generator().manual_seed(0)))
        assert collate(results[-1], args).mask_BT.sum(1).tolist() == [len(c.ids) for c in results[-1]]
    assert results[0] == results[1]


def test_chat_template_system_prompt_and_instruction(family):
    kind, folder, data = family
    args = arguments("grpo", folder, data, system_prompt="Be brief.", instruction="After ####.")
    policy = load_policy(args)
    problem_stream, held_out = load_problems(args, policy)
    texts = {
        f"<|system|>Be brief.<|end|><|user|>{q}\nAfter ####.<|end|><|assistant|>" for q in QUESTIONS
    }
    problems = problem_stream.problems + held_out
    assert {p.prompt for p in problems} == texts
    assert all(policy.tokenizer.decode(p.prompt_ids) == p.prompt for p in problems)
    policy.tokenizer.chat_template = None
    args.system_prompt = args.instruction = ""
    problem_stream, held_out = load_problems(args, policy)
    problems = problem_stream.problems + held_out
    assert {p.prompt for p in problems} == set(QUESTIONS)
    assert all(policy.tokenizer.decode(p.prompt_ids) == p.prompt for p in problems)


def gpt_oss():
    shape = dict(vocab_size=17, hidden_size=32, intermediate_size=32, num_hidden_layers=2, head_dim=8)
    shape |= dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128)
    shape |= dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=16)
    ids = dict(pad_token_id=0, bos_token_id=None, eos_token_id=1)
    torch.manual_seed(0)
    return GptOssForCausalLM(GptOssConfig(**shape, **ids)).eval()


@pytest.mark.parametrize("name", ["grpo", "rspo"])
def test_run_an_architecture_that_mixes_packed_sequences(name, tmp_path, tiny_model, monkeypatch):
    """gpt-oss cannot tell from the positions where a sequence begins: each sequence gets a row, also in
    the reference; then the log-probs of sampler and update agree."""
    folder = tmp_path / "model"
    gpt_oss().save_pretrained(folder)
    tiny_model[1].save_pretrained(folder)
    args = script_args("grpo", device="cpu", model=str(folder))[1]
    policy = load_policy(args)
    assert policy.one_sequence_per_row and policy.frozen_copy().one_sequence_per_row
    flags = ("--model", folder, "--run_dir", tmp_path / "run", "--lr", 1e-3)
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
        check_logprobs(policy, [[3, 4], [5]], args)


@pytest.mark.parametrize("script", [ppo, vapo])
def test_the_critic_packs_like_the_policy(script, tmp_path, monkeypatch):
    """Also if only the check beyond the model's window, in load_problems, finds that it must not."""

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
