"""Models that people bring: tiny random checkpoints of current architectures, with attention of all
kinds, with recurrent layers, with experts. In float32, on the tokenizer of the tiny MoE."""

import contextlib
import json

import pytest
import torch
from conftest import TINY_MOE, flags_it_has, run, script_args
from test_runs import untimed
from test_runs import weights as weights_of
from test_sampler import batch_of_ids
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
)
from transformers.cache_utils import Cache, DynamicSlidingWindowLayer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import common
import ppo
import rspo
from common import Problem, collate, load_policy, load_problems, sample, token_logprobs
from plumbing.args import UserError
from plumbing.policy import Policy
from plumbing.routing import find_experts

# Of these an architecture takes the fields that its config has.
SHAPE = dict(
    vocab_size=17,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=256,
    initializer_range=0.3,
    pad_token_id=0,
    eos_token_id=1,
    tie_word_embeddings=False,
    # experts
    num_experts=4,
    num_local_experts=4,
    n_routed_experts=4,
    moe_num_experts=4,
    num_experts_per_tok=2,
    num_experts_per_token=2,
    moe_topk=2,
    moe_k=2,
    moe_intermediate_size=16,
    first_k_dense_replace=1,
    num_dense_layers=1,
    n_group=2,
    topk_group=1,
    n_shared_experts=1,
    moe_num_shared_experts=1,
    shared_expert_intermediate_size=16,
    shared_intermediate_size=16,
    # attention with compressed keys and values
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_rope_head_dim=4,
    qk_nope_head_dim=4,
    v_head_dim=8,
    # recurrent layers
    mamba_d_state=8,
    mamba_n_heads=4,
    mamba_d_head=16,
    mamba_n_groups=1,
    mamba_d_conv=4,
    mamba_expand=2,
    mamba_chunk_size=16,
    linear_num_value_heads=4,
    linear_num_key_heads=2,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    linear_num_heads=4,
    linear_head_dim=8,
)
COMPRESSED = dict(num_key_value_heads=4, head_dim=4)
HYBRID = dict(layer_types=["linear_attention", "full_attention"] * 2)
CONVOLUTION = dict(layer_types=["conv", "full_attention"] * 2)
WINDOW = dict(sliding_window=8)
LOCAL = dict(layer_types=["sliding_attention", "full_attention"] * 2, **WINDOW)
GEMMA = dict(**LOCAL, final_logit_softcapping=1.0)  # which bends logits of this size
GEMMA4 = dict(**GEMMA, global_head_dim=8, hidden_size_per_layer_input=8, vocab_size_per_layer_input=17)
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
    "granitemoehybrid without experts": dict(
        layer_types=["mamba", "attention"] * 2, num_local_experts=0, num_experts_per_tok=0
    ),
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
    "granitemoehybrid": dict(layer_types=["mamba", "attention"] * 2, logits_scaling=8.0),
    "jamba": dict(
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        mamba_dt_rank=4,
    ),
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
}
ALL = DENSE | SOFTMAX | ONE_BY_ONE
NO_REPLAY = ("phimoe", "deepseek_v2")
USUAL = (
    "llama",
    "cohere2",
    "mamba2",
    "qwen3_5_moe_text",
    "gpt_oss",
    "minimax_m2",
)  # the others are slow


def some(names):
    return [name if name in USUAL else pytest.param(name, marks=pytest.mark.slow) for name in names]


def new_model(name):
    """Random, biases that select experts included."""
    config_class = CONFIG_MAPPING[name.split()[0]]
    fields = set(config_class().to_dict()) | set(config_class.attribute_map)
    shape = {key: value for key, value in SHAPE.items() if key in fields} | ALL[name]
    torch.manual_seed(0)
    shape = {key: value for key, value in shape.items() if value is not None}
    model = AutoModelForCausalLM.from_config(config_class(**shape, bos_token_id=None)).eval()
    for key, tensor in model.state_dict().items():
        if key.endswith(("correction_bias", "expert_bias")):
            tensor.normal_()
    model.generation_config.eos_token_id = [1, 5, 9]  # a random model soon samples one
    return model


@pytest.fixture
def folder(request, tmp_path):
    """The model of the test's architecture in a folder of its own, with the tiny MoE's tokenizer."""
    new_model(request.param).save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(TINY_MOE).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def arguments(folder, **changes):
    return script_args("grpo", model=str(folder), device="cpu", **changes)[1]


@pytest.mark.parametrize(
    "name, folder", [(name, name) for name in ALL], indirect=["folder"], ids=[*ALL]
)
def test_the_check_at_loading_passes(name, folder):
    """And sampler and training forward agree on prompts and answers of different lengths, whose rows
    leave; and the routers are read for what they are."""
    policy = load_policy(arguments(folder))
    args = arguments(folder, max_new_tokens=16, temperature=0.9)
    problems = [Problem("", "", ids) for ids in policy.tokenizer(["1+1=", "12+345=", "7"]).input_ids]
    completions = sample(policy, problems, 4, args, torch.Generator().manual_seed(0))
    assert len({len(c.ids) for c in completions}) > 3
    batch = collate(completions, args)
    outputs = token_logprobs(policy, batch, 0.9)
    gap_BT = outputs.logprobs_BT - batch.sampler_logprobs_BT
    assert gap_BT[batch.mask_BT].abs().max() < 1e-4
    assert (policy.routers.num_experts > 0) == (name not in DENSE)
    assert (policy.routers.no_softmax == "") == (name in SOFTMAX)
    if name not in DENSE:
        assert (policy.routers.no_replay == "") == (name not in NO_REPLAY)
    assert (outputs.aux_loss > 0) == policy.routers.are_balanced
    if policy.routers.are_balanced:
        assert hasattr(policy.model, "router_aux_loss_coef") and name in SOFTMAX


# ------------------------------------------------------------------------------------------ experts


MOES = SOFTMAX | ONE_BY_ONE


@pytest.fixture
def moe(request):
    return Policy(new_model(request.param), tokenizer=None)


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


def one_sequence():
    """So that the packed tokens are those of the sequence."""
    return batch_of_ids([([3, 4], [8, 11, 5, 6, 10, 7])])


@pytest.mark.parametrize("moe", MOES, indirect=True)
def test_experts_that_are_logged_are_those_that_computed(moe):
    """In every token and layer, and not the largest logits; in the sampler too."""
    batch = one_sequence()
    outputs, given = given_to_experts(moe, batch)
    L = outputs.experts_BTLK.shape[2]
    assert len(given) == L > 0
    for layer, (indices, _) in enumerate(given):
        assert torch.equal(outputs.routing_choices_BSLK[0, :, layer], indices.int())
        assert torch.equal(outputs.experts_BTLK[0, :, layer], indices[1:-1].sort().values)
    args = script_args("grpo", device="cpu", max_new_tokens=6, rollout_dtype="float32")[1]
    moe.tokenizer = AutoTokenizer.from_pretrained(TINY_MOE)
    moe.one_sequence_per_row = True
    problems = [Problem("", "", [3, 4]), Problem("", "", [5, 6, 7])]
    sampled = collate(sample(moe, problems, 2, args, torch.Generator().manual_seed(0)), args)
    choices_BSLK = token_logprobs(moe, sampled, 1.0).routing_choices_BSLK
    known_BS = sampled.attention_BS.bool()
    is_last = sampled.sampler_experts_BSLK[..., 0, 0] == -1
    known_BS &= ~is_last
    assert known_BS.sum() > 8
    assert torch.equal(sampled.sampler_experts_BSLK[known_BS], choices_BSLK[known_BS])


@pytest.mark.parametrize("moe", sorted(MOES.keys() - set(NO_REPLAY)), indirect=True)
def test_replayed_experts_are_those_that_compute(moe):
    """Other experts than the routers' own, which stay known; the weights are the live router's."""
    batch = one_sequence()
    own, live = given_to_experts(moe, batch)
    E = moe.routers.num_experts
    batch.replayed_experts_BSLK = (own.routing_choices_BSLK + 1) % E
    outputs, given = given_to_experts(moe, batch)
    for layer, (indices, weights) in enumerate(given):
        assert torch.equal(indices.int(), batch.replayed_experts_BSLK[0, :, layer])
        assert (weights > 0).all()
    assert torch.equal(outputs.routing_choices_BSLK[..., :1, :], own.routing_choices_BSLK[..., :1, :])
    assert not torch.equal(outputs.logprobs_BT, own.logprobs_BT)
    outputs.logprobs_BT.sum().backward()
    batch.replayed_experts_BSLK = own.routing_choices_BSLK
    assert torch.equal(token_logprobs(moe, batch, 1.0).logprobs_BT, own.logprobs_BT)


@pytest.mark.parametrize("moe", sorted(SOFTMAX.keys() - {"phimoe"}), indirect=True)
def test_the_router_shift_is_that_of_the_routers_own_probabilities(moe):
    """rspo's p against the weights that the experts are given: with a softmax before or after the top-K
    both have the same proportions. (phimoe weighs its two experts in a way of its own.)"""
    outputs, given = given_to_experts(moe, one_sequence())
    for layer, (indices, weights) in enumerate(given):
        experts_BTLK = indices[None, 1:-1, None]
        (logp,) = rspo.expert_logprobs(outputs.router_logits[layer : layer + 1], experts_BTLK)
        difference = weights[1:-1].log() - logp[:, 0]
        assert (difference - difference[:, :1]).abs().max() < 1e-4


# ------------------------------------------------------------------------------------- whole runs

SMALL = """--prompts_per_iteration 4 --group_size 4 --max_new_tokens 12 --num_minibatches 2
--num_held_out 8 --eval_every 0 --lr 1e-3""".split()


@pytest.mark.parametrize("folder", some(ALL), indirect=True)
def test_run_three_iterations(folder, sums, tmp_path, reward_file):
    """Weights change, rows leave at different lengths, sampler and update agree to the end; and the
    run that is stopped and resumed is the same to the bit."""
    reward = reward_file('return (1.0, "correct") if len(text) % 2 == 0 else (0.0, "wrong")')
    flags = (*SMALL, "--model", folder, "--dataset", sums, "--reward", reward)
    for name, count in (("whole", 3), ("parts", 1), ("parts", 3)):
        result = run("grpo", *flags, "--run_dir", tmp_path / name, "--iterations", count, "--resume")
        assert result.returncode == 0, result.stderr
    lines = untimed(tmp_path / "whole")
    assert len(lines) == 3
    for line in lines:
        assert line["losses/first_step_ratio_error_max"] < 1e-4
        assert abs(line["rollout/sampler_kl"]) < 1e-7
        assert line["rollout/response_len_mean"] < line["rollout/response_len_max"] <= 12
    assert sum(line["charts/grad_norm"] for line in lines) > 0.01
    assert untimed(tmp_path / "parts")[1:] == lines[1:]
    before = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    after, again = weights_of(tmp_path / "whole"), weights_of(tmp_path / "parts")
    assert all(torch.equal(after[key], again[key]) for key in after)
    assert sum(not torch.equal(before[key], after[key]) for key in before) > len(before) / 2


@pytest.mark.parametrize("folder", ["qwen3_5_moe_text", "mamba2"], indirect=True)
def test_run_ppo_with_a_hybrid(folder, sums, tmp_path, reward_file):
    """A critic with recurrent layers, in bfloat16, with layers that are computed again."""
    reward = reward_file('return (1.0, "correct") if len(text) % 2 == 0 else (0.0, "wrong")')
    flags = [*flags_it_has("ppo", SMALL), "--gradient_checkpointing", "--dtype", "bfloat16"]
    flags += ["--model", folder, "--dataset", sums, "--reward", reward, "--iterations", 2]
    result = run("ppo", *flags, "--run_dir", tmp_path / "run")
    assert result.returncode == 0, result.stderr
    assert untimed(tmp_path / "run")[1]["losses/first_step_ratio_error_max"] == 0


@pytest.mark.parametrize("folder", some(SOFTMAX), indirect=True)
def test_run_rspo_where_experts_are_chosen_by_a_softmax(folder, sums, tmp_path, reward_file):
    reward = reward_file('return (1.0, "correct") if len(text) % 2 == 0 else (0.0, "wrong")')
    flags = (*SMALL, "--model", folder, "--dataset", sums, "--reward", reward, "--iterations", 2)
    result = run("rspo", *flags, "--run_dir", tmp_path / "run")
    assert result.returncode == 0, result.stderr
    for line in untimed(tmp_path / "run"):
        assert 0.5 < line["moe/router_shift"] < 1  # the routers have moved


def test_the_language_model_of_one_that_also_sees(tmp_path):
    """Its config has another for text; ppo's critic has the size of that one."""
    text = {key: value for key, value in SHAPE.items() if key in Gemma3TextConfig().to_dict()} | LOCAL
    vision = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    vision |= dict(image_size=28, patch_size=14)
    config = Gemma3Config(text_config=text, vision_config=vision, image_token_index=15)
    torch.manual_seed(0)
    Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(TINY_MOE).save_pretrained(tmp_path)
    policy = load_policy(arguments(tmp_path))
    assert ppo.Critic(policy)(one_sequence()).shape == (1, 7)


REASONS = {"llama": "it is dense", "ernie4_5_moe": "a bias", "deepseek_v3": "one by one"}


@pytest.mark.parametrize("folder", REASONS, indirect=True)
def test_rspo_says_why_its_gamma_is_not_defined(folder, tmp_path, request):
    result = run("rspo", "--model", folder, "--run_dir", tmp_path / "run")
    assert result.returncode == 2 and result.stderr.count("error") == 1
    (line,) = [line for line in result.stderr.splitlines() if "error" in line]
    assert REASONS[request.node.callspec.params["folder"]] in line and "gmpo.py" in line


# ------------------------------------------------------------------------------- the check at loading


@pytest.mark.parametrize("folder", ["llama", "qwen3_5_text"], indirect=True)
def test_the_check_sees_rows_that_leave_wrongly(folder, monkeypatch):
    """On every device: a cache that keeps the first rows, whichever were to stay."""
    original = Cache.reorder_cache

    def reorder_cache(self, rows):
        is_longer = len(rows) > len(rows.unique())  # from prompts to groups
        original(self, rows if is_longer else torch.arange(len(rows)))

    monkeypatch.setitem(common.COMPACT_EVERY, "cpu", 16)
    load_policy(arguments(folder))
    monkeypatch.setattr(Cache, "reorder_cache", reorder_cache)
    with pytest.raises(UserError, match="log-probs of the same tokens differ"):
        load_policy(arguments(folder))


@pytest.mark.parametrize("folder", ["gpt_oss"], indirect=True)
def test_a_config_that_always_asks_for_router_logits(folder):
    """In decoding, transformers would make a loss of them, and fail."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"output_router_logits": True}))
    assert load_policy(arguments(folder)).routers.are_balanced


@pytest.mark.parametrize("folder", ["olmo3"], indirect=True)
@pytest.mark.parametrize("max_new_tokens, is_passed", [(2, False), (12, True)])
def test_the_check_goes_beyond_a_window_if_the_run_could(
    max_new_tokens, is_passed, folder, sums, monkeypatch
):
    """Prompts have up to six tokens, the window 16. A cache that forgets two tokens early is only seen
    beyond it."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"sliding_window": 16}))
    original = DynamicSlidingWindowLayer.__init__

    def __init__(self, sliding_window, **named):
        original(self, sliding_window=sliding_window - 2, **named)

    monkeypatch.setattr(DynamicSlidingWindowLayer, "__init__", __init__)
    args = arguments(folder, dataset=str(sums), num_held_out=8, max_new_tokens=max_new_tokens)
    policy = load_policy(args)
    with pytest.raises(UserError, match="differ") if is_passed else contextlib.nullcontext():
        load_problems(args, policy)
    monkeypatch.undo()
    load_problems(args, policy)


def test_an_error_of_our_own_shows_its_traceback(tmp_path, monkeypatch):
    def token_logprobs(*inputs, **named):
        raise ZeroDivisionError("a mistake of ours")

    monkeypatch.setattr(common, "token_logprobs", token_logprobs)
    with pytest.raises(ZeroDivisionError):
        run("grpo", "--run_dir", tmp_path)
