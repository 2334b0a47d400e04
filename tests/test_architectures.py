"""Tiny random models of current architectures: attention of all kinds, recurrent layers, experts. In
float32 if nothing else is said, on the tokenizer of the tiny MoE."""

import json

import pytest
import torch
from conftest import TINY_MOE, flags_it_has, run, script_args
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
)
from transformers.cache_utils import Cache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import common
import ppo
import rspo
from common import Problem, check_sampler, collate, load_policy, sample, token_logprobs
from plumbing.errors import UserError
from plumbing.models import checkpoint_layers, context_limits
from plumbing.policy import Policy, refresh_rollout_copy, rollout_copy
from plumbing.routing import find_experts, find_routers

# Of these an architecture takes the fields that its config has.
SHAPE = dict(vocab_size=17, hidden_size=32, intermediate_size=48, num_hidden_layers=4, head_dim=8)
SHAPE |= dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256)
SHAPE |= dict(initializer_range=0.3, pad_token_id=0, eos_token_id=1, tie_word_embeddings=False)
# experts
SHAPE |= dict(num_experts=4, num_local_experts=4, n_routed_experts=4, moe_num_experts=4)
SHAPE |= dict(num_experts_per_tok=2, num_experts_per_token=2, moe_topk=2, moe_k=2)
SHAPE |= dict(moe_intermediate_size=16, first_k_dense_replace=1, num_dense_layers=1, n_group=2)
SHAPE |= dict(topk_group=1, n_shared_experts=1, moe_num_shared_experts=1)
SHAPE |= dict(shared_expert_intermediate_size=16, shared_intermediate_size=16)
# attention with compressed keys and values
SHAPE |= dict(q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8)
# recurrent layers
SHAPE |= dict(mamba_d_state=8, mamba_n_heads=4, mamba_d_head=16, mamba_n_groups=1, mamba_d_conv=4)
SHAPE |= dict(mamba_expand=2, mamba_chunk_size=16, linear_num_value_heads=4, linear_num_key_heads=2)
SHAPE |= dict(linear_key_head_dim=8, linear_value_head_dim=8, linear_num_heads=4, linear_head_dim=8)
COMPRESSED = dict(num_key_value_heads=4, head_dim=4)
HYBRID = dict(layer_types=["linear_attention", "full_attention"] * 2)
CONVOLUTION = dict(layer_types=["conv", "full_attention"] * 2)
WINDOW = dict(sliding_window=8)
LOCAL = dict(layer_types=["sliding_attention", "full_attention"] * 2, **WINDOW)
GEMMA = dict(**LOCAL, final_logit_softcapping=1.0)  # which bends logits of this size
INPUTS = dict(hidden_size_per_layer_input=8, vocab_size_per_layer_input=17)  # of each layer
GEMMA3N = dict(**LOCAL, **INPUTS, laurel_rank=4, altup_num_inputs=2, num_kv_shared_layers=2)
GEMMA3N |= dict(activation_sparsity_pattern=[0.0] * 4)
GEMMA4 = dict(**GEMMA, **INPUTS, global_head_dim=8)
MAMBA = dict(layer_types=["mamba", "attention"] * 2)
JAMBA = dict(attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1)
GPT_NEO = dict(attention_types=[[["global", "local"], 2]], num_layers=4, window_size=8, num_heads=4)
LONG = dict(rope_type="longrope", short_factor=[1.0] * 4, long_factor=[4.0] * 4, rope_theta=10000.0)
DENSE = {
    "llama": {},
    "mistral": WINDOW,
    "qwen2": {},
    "qwen3": {},
    "olmo2": {},
    "olmo3": WINDOW,
    "phi3": {},
    "smollm3": {},
    "cohere": dict(logit_scale=0.3),
    "cohere2": WINDOW,
    "minicpm3": dict(num_key_value_heads=4, head_dim=None, dim_model_base=16),
    "gemma2": GEMMA,
    "gemma3_text": GEMMA,
    "gemma3n_text": GEMMA3N,
    "gemma4_text": GEMMA4,
    "granite": dict(logits_scaling=4.0),
    "hunyuan_v1_dense": {},
    "qwen3_5_text": HYBRID,
    "lfm2": dict(**CONVOLUTION, block_multiple_of=8),
    "falcon_h1": dict(mamba_d_ssm=64),
    "bamba": dict(attn_layer_indices=[1, 3]),
    "mamba": dict(state_size=8),
    "mamba2": dict(num_heads=8, head_dim=8, state_size=8, n_groups=2, chunk_size=16),
    "olmo_hybrid": {},
    "granitemoehybrid without experts": dict(**MAMBA, num_local_experts=0, num_experts_per_tok=0),
}
SOFTMAX = {  # experts are chosen by a softmax over all of them
    "qwen3_moe": {},
    "mixtral": {},
    "olmoe": {},
    "flex_olmo": {},
    "granitemoe": dict(logits_scaling=4.0),
    "phimoe": {},
    "deepseek_v2": dict(**COMPRESSED, topk_method="group_limited_greedy"),
    "gpt_oss": WINDOW,
    "hunyuan_v1_moe": {},
    "gemma4_text with experts": dict(**GEMMA4, enable_moe_block=True, top_k_experts=2),
    "qwen3_next": HYBRID,
    "qwen3_5_moe_text": HYBRID,
    "granitemoehybrid": dict(**MAMBA, logits_scaling=8.0),
    "jamba": dict(**JAMBA, mamba_dt_rank=4),
}
ONE_BY_ONE = {  # experts are scored one by one, or a bias selects them
    "deepseek_v3": COMPRESSED,
    "glm4_moe": {},
    "ernie4_5_moe": dict(moe_layer_start_index=1, moe_layer_end_index=3, moe_layer_interval=1),
    "minimax_m2": {},
    "afmoe": WINDOW,
    "lfm2_moe": CONVOLUTION,
    "kimi_linear": dict(**HYBRID, num_key_value_heads=4),
    "inkling2_text": {},  # its routers take topk(...).indices
    "hy_v4": {},
}
ALL = DENSE | SOFTMAX | ONE_BY_ONE
# These cannot tell from the positions where a packed sequence begins.
MIX = """gpt_oss afmoe inkling2_text qwen3_5_text qwen3_next qwen3_5_moe_text lfm2 lfm2_moe falcon_h1
bamba mamba mamba2 olmo_hybrid granitemoehybrid jamba kimi_linear""".split()
HAVE_FLOAT32 = ("ernie4_5_moe", "inkling2_text", "hy_v4", "hunyuan_v1_moe", "olmo_hybrid")
NO_REPLAY = ("phimoe", "deepseek_v2")
NO_AUX_LOSS = ("deepseek_v2", "hunyuan_v1_moe", "gemma4_text with experts")
USUAL = """llama qwen3 gemma3_text gemma3n_text cohere2 mamba2 qwen3_next qwen3_moe mixtral gpt_oss
deepseek_v3 falcon_h1""".split()  # the others are slow


def some(names, usual=USUAL):
    return [name if name in usual else pytest.param(name, marks=pytest.mark.slow) for name in names]


def new_model(name, **changes):
    """Random, biases that select experts included."""
    config_class = CONFIG_MAPPING[name.split()[0]]
    fields = set(config_class().to_dict()) | set(config_class.attribute_map)
    shape = {key: value for key, value in SHAPE.items() if key in fields}
    shape = shape | ALL.get(name, {}) | changes
    torch.manual_seed(0)
    shape = {key: value for key, value in shape.items() if value is not None}
    model = AutoModelForCausalLM.from_config(config_class(**shape, bos_token_id=None)).eval()
    for key, tensor in model.state_dict().items():
        if key.endswith(("correction_bias", "expert_bias")):
            tensor.normal_()
    model.generation_config.eos_token_id = [1, 5, 9]  # a random model soon samples one
    return model


def save(model, folder):
    """The folder of a model, with the tokenizer of the tiny MoE."""
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY_MOE).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(request, tmp_path):
    """The model of the test's architecture in a folder of its own."""
    return save(new_model(request.param), tmp_path / "model")


def arguments(folder, **changes):
    return script_args("grpo", model=str(folder), device="cpu", **changes)[1]


PROMPTS = ([3, 8, 4, 9], [3, 4, 12, 8, 5, 7, 9], [10])
PROBLEMS = [Problem("", "", ids) for ids in PROMPTS]


# ------------------------------------------------------------------------------------ one test each


@pytest.mark.parametrize("folder", some(ALL), indirect=True)
def test_an_architecture(folder, request):
    """It passes the check; sampler and training forward agree on answers of different lengths, whose
    rows leave; packed or not, a sequence has the same log-probs; its routers are read as what they
    are; weights get finite gradients."""
    name = request.node.callspec.params["folder"]
    args = arguments(folder, max_new_tokens=16, temperature=0.9)
    policy = load_policy(args)
    check_sampler(policy, PROBLEMS, args)
    assert policy.one_sequence_per_row == (name.split()[0] in MIX)
    completions = sample(policy, PROBLEMS, 4, args, torch.Generator().manual_seed(0))
    assert len({len(c.ids) for c in completions}) > 2
    batch = collate(completions, args)
    outputs = token_logprobs(policy, batch, 0.9)
    gap_BT = outputs.logprobs_BT - batch.sampler_logprobs_BT
    assert gap_BT[batch.mask_BT].abs().max() < 1e-4
    for row in range(3):
        alone = token_logprobs(policy, batch[row : row + 1], 0.9).logprobs_BT
        torch.testing.assert_close(alone, outputs.logprobs_BT[row : row + 1], atol=1e-4, rtol=0)
    assert (policy.routers.num_experts > 0) == (name not in DENSE)
    assert policy.routers.can_replay == (name not in DENSE and name not in NO_REPLAY)
    assert policy.routers.has_softmax == (name in SOFTMAX)
    assert policy.routers.are_balanced == (name in SOFTMAX and name not in NO_AUX_LOSS)
    assert (outputs.aux_loss > 0) == policy.routers.are_balanced
    (outputs.logprobs_BT.sum() + outputs.aux_loss).backward()
    gradients = [weight.grad for weight in policy.parameters() if weight.grad is not None]
    assert len(gradients) > 0.8 * len(list(policy.parameters()))
    assert all(gradient.isfinite().all() for gradient in gradients)


# ------------------------------------------------------------------------------------------ experts

MOES = SOFTMAX | ONE_BY_ONE


@pytest.fixture
def moe(request):
    return Policy(new_model(request.param), AutoTokenizer.from_pretrained(TINY_MOE))


def one_sequence(policy):
    """So that the packed tokens are those of the sequence."""
    args = script_args("grpo", device="cpu")[1]
    completion = common.Completion(Problem("", "", [3, 4]), [8, 11, 5, 6, 10, 7], [0.0] * 6)
    return collate([completion], args)


def given_to_experts(policy, batch):
    """(the result of the training forward, [(indices, weights)] that the experts of each layer were
    given), by torch's own hooks."""
    given = []
    hooks = [
        module.register_forward_pre_hook(lambda module, inputs: given.append(inputs[1:3]))
        for module in find_experts(policy.model)
    ]
    outputs = token_logprobs(policy, batch, 1.0)
    for hook in hooks:
        hook.remove()
    return outputs, given


@pytest.mark.parametrize("moe", some(MOES), indirect=True)
def test_experts_that_are_recorded_are_those_that_compute(moe):
    """In every token and layer, and not the largest logits; in the sampler too. rspo's p has the
    proportions of the weights that the experts are given."""
    batch = one_sequence(moe)
    outputs, given = given_to_experts(moe, batch)
    assert len(given) == outputs.experts_BTLK.shape[2] > 0
    for layer, (indices, weights) in enumerate(given):
        assert torch.equal(outputs.routing_choices_BSLK[0, :, layer], indices.short())
        assert torch.equal(outputs.experts_BTLK[0, :, layer], indices[1:-1].sort().values.short())
        if moe.routers.has_softmax and moe.routers.can_replay:
            logits = outputs.router_logits[layer : layer + 1]
            (logp,) = rspo.expert_logprobs(logits, indices[None, 1:-1, None])
            difference = weights[1:-1].log() - logp[:, 0]
            assert (difference - difference[:, :1]).abs().max() < 1e-4
    args = script_args("grpo", device="cpu", max_new_tokens=6, routing_replay="r3")[1]
    moe.one_sequence_per_row = True
    sampled = collate(sample(moe, PROBLEMS, 2, args, torch.Generator().manual_seed(0)), args)
    choices_BSLK = token_logprobs(moe, sampled, 1.0, replay=False).routing_choices_BSLK
    is_known_BS = sampled.attention_BS.bool() & (sampled.replayed_experts_BSLK[..., 0, 0] >= 0)
    assert is_known_BS.sum() > 8
    assert torch.equal(sampled.replayed_experts_BSLK[is_known_BS], choices_BSLK[is_known_BS])


@pytest.mark.parametrize("moe", some(sorted(MOES.keys() - set(NO_REPLAY))), indirect=True)
def test_replayed_experts_are_those_that_compute(moe):
    """Other experts than the routers' own, which stay known, with the live router's weights, whose
    gradient reaches the logits of the replayed experts. The routers' own experts change nothing, to the
    bit. Layers that are computed again replay as well."""
    batch = one_sequence(moe)
    own, _ = given_to_experts(moe, batch)
    own.logprobs_BT.sum().backward()
    own_gradients = [weight.grad for weight in moe.parameters()]
    moe.model.zero_grad()
    batch.replayed_experts_BSLK = own.routing_choices_BSLK
    for _ in range(2):
        again = token_logprobs(moe, batch, 1.0)
        assert torch.equal(again.logprobs_BT, own.logprobs_BT)
        again.logprobs_BT.sum().backward()
        for weight, gradient in zip(moe.parameters(), own_gradients, strict=True):
            assert (weight.grad is None) == (gradient is None)
            assert gradient is None or torch.equal(weight.grad, gradient)
        moe.model.zero_grad()
        checkpoint_layers(moe.model)  # for the second time, and for what follows
    E = moe.routers.num_experts
    batch.replayed_experts_BSLK = (own.routing_choices_BSLK + 1) % E
    batch.replayed_experts_BSLK[:, 1:] = batch.replayed_experts_BSLK[:, :1]  # the same for each token
    outputs, given = given_to_experts(moe, batch)
    for layer, (indices, weights) in enumerate(given):
        assert torch.equal(indices.short(), batch.replayed_experts_BSLK[0, :, layer])
        assert (weights > 0).all()
    assert torch.equal(outputs.routing_choices_BSLK[..., :1, :], own.routing_choices_BSLK[..., :1, :])
    assert not torch.equal(outputs.logprobs_BT, own.logprobs_BT)
    assert not any(module._forward_pre_hooks for module in moe.model.modules())
    outputs.logprobs_BT.sum().backward()
    for layer, router in enumerate(find_routers(moe.model)):
        replayed = batch.replayed_experts_BSLK[0, 0, layer].long()
        (weight,) = [w for w in router.parameters() if w.dim() == 2 and len(w) == E]
        assert (weight.grad[replayed].abs().sum(1) > 0).all()


# --------------------------------------------------------------------------------------- bfloat16


@pytest.mark.parametrize("folder", some(ALL, [*USUAL, *HAVE_FLOAT32]), indirect=True)
def test_in_bfloat16_a_model_is_the_one_that_transformers_serves(folder, request):
    """To the bit: routers that stay in float32 choose the same experts. Rollout copies too. (Of
    falcon_h1, transformers rounds a buffer; buffers of ours are in float32.)"""
    name = request.node.callspec.params["folder"]
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    policy = load_policy(arguments(folder, dtype="bfloat16"))
    copies = [rollout_copy(policy.master, "bfloat16", kind) for kind in ("bfloat16", "same", "int4")]
    for model in copies:
        refresh_rollout_copy(model, policy.master, "bfloat16")
    tokens = torch.tensor([[3, 8, 4, 9, 11, 5]])
    dtypes = {key: weight.dtype for key, weight in theirs.named_parameters()}
    for model in (policy.model, *copies):
        assert {key: weight.dtype for key, weight in model.named_parameters()} == dtypes
        with torch.no_grad():
            assert name == "falcon_h1" or torch.equal(model(tokens).logits, theirs(tokens).logits)
    kept = {key for key, dtype in dtypes.items() if dtype == torch.float32}
    assert bool(kept) == (name in HAVE_FLOAT32)
    rounded = rollout_copy(policy.master, "bfloat16", "int4")
    refresh_rollout_copy(rounded, policy.master, "int4")
    for key, weight in rounded.named_parameters():
        assert key not in kept or torch.equal(weight, policy.master.state_dict()[key])


# -------------------------------------------------------------------------------------- whole runs

SMALL = """--prompts_per_iteration 4 --group_size 4 --max_new_tokens 12 --num_minibatches 2
--num_held_out 8 --eval_every 0 --lr 1e-3 --critic_lr 1e-3""".split()


@pytest.fixture
def job(sums, reward_file):
    """A reward that a random model can learn: the parity of an answer's length."""
    reward = reward_file('return (1.0, "correct") if len(text) % 2 == 0 else (0.0, "wrong")')
    return [*SMALL, "--dataset", str(sums), "--reward", reward]


def logged(folder):
    """The lines of metrics.jsonl, without times."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    return [{k: v for k, v in line.items() if "second" not in k} for line in lines]


def weights_of(folder):
    (checkpoint,) = folder.glob("checkpoint-*")
    return load_file(checkpoint / "model.safetensors")


@pytest.mark.parametrize("folder", some(ALL, ["mamba2", "gpt_oss", "deepseek_v3"]), indirect=True)
def test_run_three_iterations(folder, job, tmp_path):
    """Weights change, sampler and update agree to the end; and the run that is stopped and resumed is
    the same to the bit."""
    flags = [*flags_it_has("grpo", job), "--model", folder]
    for name, count in (("whole", 3), ("parts", 1), ("parts", 3)):
        result = run("grpo", *flags, "--run_dir", tmp_path / name, "--iterations", count, "--resume")
        assert result.returncode == 0, result.stderr
    lines = logged(tmp_path / "whole")
    assert len(lines) == 3
    for line in lines:
        assert line["losses/first_step_ratio_error_max"] < 1e-4
        assert abs(line["rollout/sampler_kl"]) < 1e-7
    assert sum(line["charts/grad_norm"] for line in lines) > 0.01
    assert logged(tmp_path / "parts")[1:] == lines[1:]
    before = load_file(folder / "model.safetensors")
    after, again = weights_of(tmp_path / "whole"), weights_of(tmp_path / "parts")
    assert all(torch.equal(after[key], again[key]) for key in after)
    assert sum(not torch.equal(before[key], after[key]) for key in after) > len(after) / 2


@pytest.mark.parametrize("folder", ["ernie4_5_moe", "mamba2", "qwen3_next"], indirect=True)
def test_run_ppo_in_bfloat16(folder, job, tmp_path):
    """A critic with weights in float32 or without gradient, or with recurrent layers; layers that are
    computed again."""
    flags = [*flags_it_has("ppo", job), "--dtype", "bfloat16", "--gradient_checkpointing"]
    result = run("ppo", *flags, "--model", folder, "--iterations", 2, "--run_dir", tmp_path / "run")
    assert result.returncode == 0, result.stderr
    assert logged(tmp_path / "run")[1]["losses/first_step_ratio_error_max"] == 0


@pytest.mark.parametrize("folder", some(ALL, ["mixtral", "llama", "ernie4_5_moe"]), indirect=True)
def test_run_rspo_only_where_experts_are_chosen_by_a_softmax(folder, job, tmp_path, request):
    name = request.node.callspec.params["folder"]
    flags = [*flags_it_has("rspo", job), "--model", folder, "--iterations", 2]
    result = run("rspo", *flags, "--run_dir", tmp_path / "run")
    if name not in SOFTMAX:
        (line,) = result.stderr.splitlines()
        assert result.returncode == 2 and "softmax" in line and "gmpo.py" in line
        return
    assert result.returncode == 0, result.stderr
    for line in logged(tmp_path / "run"):
        assert 0.5 < line["moe/router_shift"] < 1  # the routers have moved


def test_the_language_model_of_one_that_also_sees(tmp_path):
    """Its config has another for text; ppo's critic has the size of that one."""
    text = {key: value for key, value in SHAPE.items() if key in Gemma3TextConfig().to_dict()} | LOCAL
    vision = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    vision |= dict(image_size=28, patch_size=14)
    config = Gemma3Config(text_config=text, vision_config=vision, image_token_index=15)
    torch.manual_seed(0)
    policy = load_policy(arguments(save(Gemma3ForConditionalGeneration(config), tmp_path)))
    assert ppo.Critic(policy)(one_sequence(policy)).shape == (1, 7)


# ------------------------------------------------------------------------------- the check at loading


def check(folder, **changes):
    args = arguments(folder, **changes)
    check_sampler(load_policy(args), PROBLEMS, args)


@pytest.mark.parametrize("folder", ["llama", "qwen3_next"], indirect=True)
@pytest.mark.parametrize("eos", [[1], [*range(17)]])
def test_the_check_sees_rows_that_leave_wrongly(eos, folder, monkeypatch):
    """On every device, and if the model's first token is an EOS: a cache that keeps the first rows,
    whichever were to stay."""
    original = Cache.reorder_cache

    def reorder_cache(self, rows):
        is_longer = len(rows) > len(rows.unique())  # from prompts to groups
        original(self, rows if is_longer else torch.arange(len(rows)))

    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    monkeypatch.setitem(common.COMPACT_EVERY, "cpu", 16)
    check(folder)
    monkeypatch.setattr(Cache, "reorder_cache", reorder_cache)
    with pytest.raises(UserError, match="log-probs of the same tokens differ"):
        check(folder)


@pytest.mark.parametrize("folder", ["gpt_oss"], indirect=True)
def test_a_config_that_always_asks_for_router_logits(folder):
    """In decoding, transformers would make a loss of them, and fail."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"output_router_logits": True}))
    check(folder)


@pytest.mark.parametrize("name, changes", [("olmo3", WINDOW), ("gpt_neo", GPT_NEO), ("llama", {})])
def test_the_check_knows_the_length_of_a_window(name, changes):
    assert context_limits(new_model(name, **changes)) == ([8] if changes else [])


LAYERS = {"full_attention": LONG | {"original_max_position_embeddings": 16}}
LAYERS["sliding_attention"] = {"rope_type": "default", "rope_theta": 10000.0}


@pytest.mark.parametrize(
    "name, changes",
    [
        ("phi3", dict(original_max_position_embeddings=16, rope_parameters=LONG)),
        ("gemma3_text", dict(rope_parameters=LAYERS, sliding_window=200)),
    ],
)
def test_rotations_that_change_with_the_length_are_refused_where_the_run_could_reach_them(
    name, changes, tmp_path
):
    """The sampler's cache keeps the keys of shorter sequences as they were rotated."""
    folder = save(new_model(name, **changes), tmp_path)
    check(folder, max_new_tokens=8)
    with pytest.raises(UserError, match="after prompts of up to 14 tokens"):
        check(folder, max_new_tokens=12)


UNABLE = {
    "bart": {},  # a decoder of an encoder-decoder family: it takes no position_ids
    "xlstm": {},
    "recurrent_gemma": {},  # no cache that transformers knows
    "kimi_linear": dict(layer_types=["linear_attention"] * 4, num_key_value_heads=4),
    "qwen3_moe": dict(num_experts_per_tok=9),  # of four
}


@pytest.mark.parametrize("name", UNABLE)
def test_an_architecture_that_the_sampler_cannot_run_is_one_line(name, job, tmp_path):
    folder = save(new_model(name, **UNABLE[name]), tmp_path / "model")
    flags = [*flags_it_has("grpo", job), "--model", folder, "--run_dir", tmp_path / "run"]
    result = run("grpo", *flags)
    (line,) = result.stderr.splitlines()
    assert result.returncode == 2 and "architecture" in line and "Error" in line and len(line) < 400
