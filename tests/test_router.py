"""Router logits, the aux loss, expert statistics, and rspo on other architectures than the tiny Qwen3
MoE."""

import pytest
import torch
from test_sampler import batch_of_ids
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from common import token_logprobs
from plumbing.metrics import Meter, router_stats
from plumbing.policy import Policy

SHAPE = dict(
    vocab_size=40,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
MODELS = {
    "mixtral": lambda: MixtralForCausalLM(
        MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2)
    ),
    "olmoe": lambda: OlmoeForCausalLM(OlmoeConfig(**SHAPE, num_experts=6, num_experts_per_tok=3)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **SHAPE, head_dim=8, moe_intermediate_size=16, num_experts=8, num_experts_per_tok=2
        )
    ),
}


def batch_of(seed=0):
    g = torch.Generator().manual_seed(seed)
    rows = []
    for prompt, length in ((3, 5), (6, 2), (1, 7), (3, 4)):
        ids = torch.randint(3, 40, (prompt + length,), generator=g).tolist()
        rows.append((ids[:prompt], ids[prompt:]))
    return batch_of_ids(rows)


@pytest.fixture(params=MODELS)
def moe(request):
    torch.manual_seed(0)
    return Policy(MODELS[request.param]().eval(), tokenizer=None)


def test_router_logits_are_raw_logits_at_the_predicting_position(moe):
    """Rows do not sum to 1, and the row of token t is what the router says of token t - 1."""
    batch = batch_of()
    outputs = token_logprobs(moe, batch, 1.0)
    K = moe.model.config.num_experts_per_tok
    assert len(outputs.router_logits) == 3 and outputs.experts_BTLK.shape == (4, 7, 3, K)
    assert any((layer.sum(-1) - 1).abs().max() > 1e-2 for layer in outputs.router_logits)
    # Its prompt of 1 and its response of 7, without padding.
    alone = moe.model(batch.tokens_BS[2:3, 5:], output_router_logits=True)
    for layer, reference in zip(outputs.router_logits, alone.router_logits, strict=True):
        torch.testing.assert_close(layer[2], reference[:-1].float(), atol=1e-5, rtol=1e-4)
        assert torch.equal(
            layer[2].topk(K).indices.sort().values, reference[:-1].topk(K).indices.sort().values
        )


def test_aux_loss_is_that_of_transformers_and_reaches_the_router(moe):
    batch = batch_of()
    outputs = token_logprobs(moe, batch, 1.0)
    positions = (batch.attention_BS.cumsum(1) - 1).clamp(min=0)
    inputs = dict(attention_mask=batch.attention_BS, position_ids=positions, output_router_logits=True)
    torch.testing.assert_close(outputs.aux_loss, moe.model(batch.tokens_BS, **inputs).aux_loss.float())
    moe.model.zero_grad()
    outputs.aux_loss.backward()
    routers = [p for name, p in moe.model.named_parameters() if "gate" in name and "proj" not in name]
    assert len(routers) == 3 and all(p.grad.abs().sum() > 0 for p in routers)


def test_the_aux_loss_does_not_add_up_over_micro_batches(moe):
    """As the scripts' comment says: it is a product of two means."""
    batch = batch_of()

    def gradient(*parts):
        moe.model.zero_grad()
        for rows in parts:
            (token_logprobs(moe, batch[rows], 1.0).aux_loss * len(batch[rows]) / 4).backward()
        return torch.cat([p.grad.flatten() for p in moe.parameters() if p.grad is not None])

    whole = gradient(slice(0, 4))
    parts = gradient(slice(0, 2), slice(2, 4))
    assert (parts - whole).norm() > 0.02 * whole.norm()


def test_router_stats_by_hand(moe):
    """Flips and load over response tokens only, against counting."""
    batch = batch_of()
    with torch.no_grad():
        outputs = token_logprobs(moe, batch, 1.0)
    old = outputs.experts_BTLK.clone()
    old[0, 0, 1, 0] = -1  # a change in one of three layers of one of 18 tokens
    old[:, :, 2][~batch.mask_BT] = -1  # padding must not count
    stats = router_stats(outputs, old, batch.mask_BT)
    assert stats["expert_flip_frac"].item() == pytest.approx(1 / 3 / 18, rel=1e-5)
    shares = []
    tokens = batch.mask_BT.nonzero().tolist()
    for layer in range(3):
        chosen = [e for b, t in tokens for e in outputs.experts_BTLK[b, t, layer].tolist()]
        shares += [chosen.count(e) / len(chosen) for e in set(chosen)]
    assert stats["load_max"].item() == pytest.approx(max(shares), rel=1e-6)


def test_a_dense_model_has_no_router():
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()
    batch = batch_of()
    outputs = token_logprobs(Policy(model, tokenizer=None), batch, 1.0)
    assert outputs.aux_loss == 0 and outputs.router_logits == ()
    assert outputs.experts_BTLK.shape == (4, 7, 0, 0)
    assert router_stats(outputs, outputs.experts_BTLK, batch.mask_BT) == {}


def test_meter_weighs_and_keeps_extremes():
    """Where no token counts, a key is absent, as is a mean over no token, which must not be NaN."""
    meter = Meter()
    for a, b, weight in ((1.0, -3.0, 1), (4.0, -5.0, 2), (9.0, 9.0, 0)):
        values = {"a": torch.tensor(a), "ratio_max": torch.tensor(b)}
        meter.add("losses", values, weight)
    meter.add("moe", {"a": torch.tensor(7.0), "whole/key": 2.0}, torch.tensor(0))
    meter.add("losses", {"whole/key": 2.0}, 1)
    expected = {"losses/a": 3.0, "losses/ratio_max": -3.0, "whole/key": 2.0}
    assert meter.means() == expected


@pytest.mark.parametrize("E", [128, 129])
def test_numbers_of_experts_fit_their_integers(E):
    """The last two, too: 128 and 129 are around the end of int8."""
    sizes = dict(head_dim=8, moe_intermediate_size=16, num_experts=E, num_experts_per_tok=2)
    policy = Policy(Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **sizes)).eval(), tokenizer=None)
    assert policy.routers.can_replay
    batch = batch_of()
    outputs = token_logprobs(policy, batch, 1.0)
    for layer, logits in enumerate(outputs.router_logits):
        expected = logits.topk(2).indices.sort().values
        assert (outputs.experts_BTLK[:, :, layer] == expected)[batch.mask_BT].all()
    batch.replayed_experts_BSLK = torch.full_like(outputs.routing_choices_BSLK, E - 1)
    batch.replayed_experts_BSLK[..., 0] = E - 2
    active_BTLK = batch.active_experts(token_logprobs(policy, batch, 1.0).experts_BTLK)
    assert (active_BTLK == torch.tensor([E - 2, E - 1])).all()
