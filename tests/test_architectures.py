"""Tiny random models of current architectures, with attention of all kinds, recurrent layers and
experts: sampler, training forward, replay, precision, and the check at loading."""

from typing import NamedTuple

import pytest
import torch
from conftest import batch_of_ids, refused, save, script_args
from test_decoding import Tapes
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import ppo
import rspo
from common import Problem, Routing, collate, load_policy, sample, token_logprobs
from more.mismatch import Replay, can_replay, refresh_sampler
from plumbing.decoding import check_stretches
from plumbing.model import Policy, TrainedModel, checkpoint_layers
from plumbing.routing import find_experts

# An architecture takes the fields that its config has.
# fmt: off
SHAPE = {
    "vocab_size": 17, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "head_dim": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "initializer_range": 0.3, "pad_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": False,
    "sliding_window": 8, "logit_scale": 0.3, "logits_scaling": 4.0,
    "final_logit_softcapping": 1.0,  # which bends logits of this size
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 17, "global_head_dim": 8,
    # experts
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "moe_topk": 2, "moe_k": 2, "n_group": 2, "topk_group": 1,
    "moe_intermediate_size": 16, "first_k_dense_replace": 1, "num_dense_layers": 1,
    "n_shared_experts": 1, "moe_num_shared_experts": 1, "shared_expert_intermediate_size": 16,
    # recurrent layers
    "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "num_heads": 8, "state_size": 8, "n_groups": 2, "chunk_size": 16,
}
# fmt: on
LOCAL = {"layer_types": ["sliding_attention", "full_attention"] * 2}
LINEAR = {"layer_types": ["linear_attention", "full_attention"] * 2}
GEMMA3N = dict(laurel_rank=4, altup_num_inputs=2, num_kv_shared_layers=2)
GEMMA4 = dict(enable_moe_block=True, top_k_experts=2)
RANKS = dict(q_lora_rank=16, kv_lora_rank=16, num_key_value_heads=4)  # of compressed keys and values
HEADS = dict(qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8, head_dim=4)
ERNIE = dict(moe_layer_start_index=1, moe_layer_end_index=3, moe_layer_interval=1)


class Row(NamedTuple):
    routers: str = "none"
    config: dict = {}  # what it needs in addition to SHAPE
    has_float32: bool = False  # in a bfloat16 model
    has_aux_loss: bool = True
    can_replay: bool = True
    can_be_fixed: bool = True  # the sampler's cache, which CUDA graphs need


SOFTMAX = "softmax"  # over all experts
SCORES = "scores"  # of each expert alone, or a bias selects experts
ARCHITECTURES = {
    "llama": Row(),
    "qwen3": Row(),
    "opt": Row(config=dict(word_embed_proj_dim=32, ffn_dim=48)),  # its head calls another module
    "gemma3_text": Row(config=LOCAL, can_be_fixed=False),
    "gemma3n_text": Row(
        config=LOCAL | GEMMA3N | {"activation_sparsity_pattern": [0.0] * 4}, can_be_fixed=False
    ),
    "cohere2": Row(can_be_fixed=False),
    "olmo_hybrid": Row(has_float32=True, can_be_fixed=False),
    "qwen3_next": Row(SOFTMAX, LINEAR, can_be_fixed=False),
    "qwen3_moe": Row(SOFTMAX, dict(num_experts=200, num_local_experts=200)),  # int8 ends at 127
    "mixtral": Row(SOFTMAX, can_be_fixed=False),
    # In decoding, transformers would make a loss of router logits, and fail.
    "gpt_oss": Row(SOFTMAX, {"output_router_logits": True}, can_be_fixed=False),
    "deepseek_v3": Row(SCORES, RANKS | HEADS),
}
SLOW = {
    "gemma4_text": Row(SOFTMAX, LOCAL | GEMMA4, has_aux_loss=False, can_be_fixed=False),
    "phimoe": Row(SOFTMAX, can_replay=False, can_be_fixed=False),
    "hunyuan_v1_moe": Row(SOFTMAX, has_float32=True, has_aux_loss=False),
    "ernie4_5_moe": Row(SCORES, ERNIE, has_float32=True),
    "inkling2_text": Row(SCORES, has_float32=True, can_be_fixed=False),
    "hy_v4": Row(SCORES, dict(q_lora_rank=16, kv_lora_rank=16), has_float32=True, can_be_fixed=False),
}
DENSE = "qwen2 olmo2 smollm3 cohere granite hunyuan_v1_dense"
SLOW |= dict.fromkeys(DENSE.split(), Row())
SLOW |= dict.fromkeys("mistral olmo3 phi3 gemma2".split(), Row(can_be_fixed=False))
SLOW |= dict.fromkeys("olmoe flex_olmo granitemoe".split(), Row(SOFTMAX))
SLOW |= dict.fromkeys("glm4_moe minimax_m2".split(), Row(SCORES))
SLOW["afmoe"] = Row(SCORES, can_be_fixed=False)
ARCHITECTURES |= SLOW


def new_model(name, **changes):
    """A random model, with random biases for experts, too."""
    config_class = CONFIG_MAPPING[name]
    fields = set(config_class().to_dict()) | set(config_class.attribute_map)
    shape = {key: value for key, value in SHAPE.items() if key in fields}
    shape |= ARCHITECTURES.get(name, Row()).config | changes
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_class(**shape, bos_token_id=None)).eval()
    for key, tensor in model.state_dict().items():
        if key.endswith(("correction_bias", "expert_bias")):
            tensor.normal_()
    model.generation_config.eos_token_id = [1, 5, 9]  # a random model soon samples one
    return model


def arguments(folder, **changes):
    return script_args("grpo", model=str(folder), **changes)[1]


PROMPTS = ([3, 8, 4, 9], [3, 4, 12, 8, 5, 7, 9], [10])
PROBLEMS = [Problem("", "", ids) for ids in PROMPTS]


# ------------------------------------------------------------------------------------ one test each

ALL = [pytest.param(name, marks=pytest.mark.slow if name in SLOW else []) for name in ARCHITECTURES]


@pytest.mark.parametrize("name", ALL)
def test_an_architecture_works(name, tmp_path):
    """It passes the check at loading, and the checks below."""
    row = ARCHITECTURES[name]
    folder = save(new_model(name), tmp_path / "model")
    args = arguments(folder, max_new_tokens=16, temperature=0.9)
    policy = load_policy(args)
    check_sampler_and_training_forward(policy, args)
    check_fixed_cache(policy, row.can_be_fixed)
    routers = policy.routers
    assert routers.has_softmax == (row.routers == SOFTMAX)
    assert routers.are_balanced == (row.routers == SOFTMAX and row.has_aux_loss)
    assert can_replay(policy) == (row.routers != "none" and row.can_replay)
    if can_replay(policy):
        check_replay(policy)
    check_bfloat16(folder, row.has_float32)


def check_sampler_and_training_forward(policy, args):
    """They agree on log-probs of answers of different lengths. Gradients are finite."""
    completions = sample(policy, PROBLEMS, 4, args, torch.Generator().manual_seed(0))
    assert len({len(c.ids) for c in completions}) > 2
    batch = collate(completions, PROMPTS[0][0], args)
    outputs = token_logprobs(policy, batch, args.temperature)
    gap_BT = outputs.logprobs_BT - batch.sampler_logprobs_BT
    assert gap_BT[batch.mask_BT].abs().max() < 1e-4
    assert (outputs.aux_loss > 0) == policy.routers.are_balanced
    (outputs.logprobs_BT.sum() + outputs.aux_loss).backward()
    gradients = [weight.grad for weight in policy.parameters() if weight.grad is not None]
    assert len(gradients) > 0.8 * len(list(policy.parameters()))
    assert all(gradient.isfinite().all() for gradient in gradients)


def check_fixed_cache(policy, can_be_fixed):
    """On a GPU, the sampler's steps would be CUDA graphs."""
    if can_be_fixed:
        check_stretches(policy, PROMPTS * 2, Tapes())
    else:
        with pytest.raises(ValueError, match="its (attention is not sdpa|cache does not keep all)"):
            check_stretches(policy, PROMPTS * 2, Tapes())


def given_to_experts(policy, batch, routing):
    """(the training forward's result, [(indices, weights)] that each layer's experts were given)"""
    given = []
    hooks = []
    for module in find_experts(policy.model):
        note = lambda module, inputs: given.append(inputs[1:3])  # noqa: E731
        hooks.append(module.register_forward_pre_hook(note))
    outputs = token_logprobs(policy, batch, 1.0, routing=routing, router_logits=True)
    for hook in hooks:
        hook.remove()
    return outputs, given


def gradients_of(policy, outputs):
    policy.model.zero_grad()
    outputs.logprobs_BT.sum().backward()
    return [0 if weight.grad is None else weight.grad for weight in policy.parameters()]


def one_sequence():
    return batch_of_ids([(PROMPTS[0], [8, 11, 5, 6, 10, 7])])


def check_replay(policy):
    """The experts that are recorded are those that compute. If they are replayed, nothing changes, to
    the bit, even with gradient checkpointing. If different ones are replayed, they compute with the
    live router's weights, whose gradient reaches the logits; the routers' own choice stays known."""
    batch = one_sequence()
    routing = Routing(policy.routers)
    own, given = given_to_experts(policy, batch, routing)
    choices = routing.choices()
    assert len(given) == own.experts_BTLK.shape[2] > 0
    for layer, (indices, _) in enumerate(given):
        assert torch.equal(choices[:, layer], indices.short())
        assert torch.equal(own.experts_BTLK[0, :, layer], indices[3:-1].sort().values.short())
    own_gradients = gradients_of(policy, own)
    for _ in range(2):
        again = token_logprobs(policy, batch, 1.0, routing=Replay(policy.routers, choices))
        assert torch.equal(again.logprobs_BT, own.logprobs_BT)
        for gradient, expected in zip(gradients_of(policy, again), own_gradients, strict=True):
            assert torch.equal(torch.as_tensor(gradient), torch.as_tensor(expected))
        checkpoint_layers(policy.model)  # for the second time, and below
    # Different experts, the same for each token
    num_experts = policy.routers.num_experts
    others = ((choices[:1] + 1) % num_experts).expand_as(choices)
    replay = Replay(policy.routers, others)
    outputs, given = given_to_experts(policy, batch, replay)
    assert not torch.equal(outputs.logprobs_BT, own.logprobs_BT)
    assert torch.equal(replay.choices()[:, 0], choices[:, 0])
    assert not any(module._forward_pre_hooks for module in policy.model.modules())
    gradients_of(policy, outputs)
    for layer, (indices, weights) in enumerate(given):
        replayed = others[:, layer]
        assert torch.equal(indices.short(), replayed) and (weights > 0).all()
        if policy.routers.has_softmax:
            logits = outputs.router_logits[layer : layer + 1]
            (logp,) = rspo.expert_logprobs(logits, indices[None, 3:-1, None])
            difference = weights[3:-1].log() - logp[:, 0]  # their sum may be normalized
            assert (difference - difference[:, :1]).abs().max() < 1e-4
        router = policy.routers.modules[layer]
        (matrix,) = [w for w in router.parameters() if w.dim() == 2 and len(w) == num_experts]
        assert (matrix.grad[replayed[0].long()].abs().sum(1) > 0).all()


def check_bfloat16(folder, has_float32):
    """Policy and frozen copy are the model that transformers serves, to the bit, so routers that stay
    in float32 choose the same experts. The critic has the same dtypes."""
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    policy = load_policy(arguments(folder, dtype="bfloat16"))
    in_float32 = Policy(policy.master, None)
    sampler = in_float32.frozen_copy("bfloat16")
    refresh_sampler(sampler, in_float32, is_int4=False)
    tokens = torch.tensor([[3, 8, 4, 9, 11, 5]])
    dtypes = {key: weight.dtype for key, weight in theirs.named_parameters()}
    for model in (policy.model, sampler.model):
        with torch.no_grad():
            assert torch.equal(model(tokens).logits, theirs(tokens).logits)
        assert {key: weight.dtype for key, weight in model.named_parameters()} == dtypes
    critic = TrainedModel(ppo.Critic(policy), "bfloat16").model
    bodies = zip(critic.body.parameters(), theirs.base_model.parameters(), strict=True)
    assert all(weight.dtype == its.dtype for weight, its in bodies)
    kept = {key for key, dtype in dtypes.items() if dtype == torch.float32}
    assert bool(kept) == has_float32


REPLAY = ("--routing_replay", "r2")
UNABLE = [  # script, architecture, flags, expected words
    ("more.mismatch", "llama", REPLAY, "it is dense, or its routers"),
    ("more.mismatch", "phimoe", REPLAY, "it is dense, or its routers"),
    ("rspo", "ernie4_5_moe", (), "no experts chosen by a softmax: use gmpo.py"),
    ("grpo", "mamba", (), "no cache that allows rows to be copied and removed"),
    ("grpo", "mamba2", (), "the sampler cannot run this architecture"),
]


@pytest.mark.parametrize("name, architecture, flags, expected", UNABLE)
def test_a_script_refuses_an_architecture_that_it_cannot_use(
    name, architecture, flags, expected, tmp_path
):
    folder = save(new_model(architecture), tmp_path / "model")
    refused(name, "--model", folder, *flags, "--run_dir", tmp_path / "run", expected=expected)
