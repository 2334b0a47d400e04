"""When the sampler is not the trainer: rounded weights, each script's decoupled objective in float64,
and routing replay."""

import copy
import functools
import json
import math
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from conftest import MORE, SCRIPTS, run, script_args
from rl_loss_vectors import reference
from test_identities import CASES, data, literal_objective, loss_and_grad
from test_router import MODELS, batch_of
from test_sampler import problems_of
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
)

import common
import rspo
from common import OldScores, Problem, collate, evaluate, load_policy, sample, score, score_old
from common import token_logprobs, verify
from plumbing import UserError, rollout_correction
from plumbing.correction import mismatch_stats, rollout_weights, weight_stats
from plumbing.models import checkpoint_layers
from plumbing.policy import Policy, fake_quantize, refresh_rollout_copy, rollout_copy
from plumbing.routing import Routing, find_experts, find_routers

RULES = ["token_tis", "sequence_tis", "sequence_mis", "geo_mask", "geo_filter", "icepop"]
ONE_RATIO = {"gspo", "gmpo", "rspo"}


# ------------------------------------------------------------------------- rollout correction


def corrected(rule, old, batch, one_ratio=False):
    flags = {"rollout_cap": 2.0, "rollout_mask_low": 0.9, "rollout_mask_high": 1.1}
    args = SimpleNamespace(rollout_correction=rule, old_logprobs="trainer", **flags)
    return rollout_correction(OldScores(old, None), batch, args, one_ratio)


def literal_weight(rule, log_rho, one_ratio):
    """Weights of the tokens of a completion, from the list of its log rho."""
    mean = math.exp(sum(log_rho) / len(log_rho))
    product = math.exp(sum(log_rho))
    rho = [mean] * len(log_rho) if one_ratio else [math.exp(x) for x in log_rho]
    if rule == "token_tis":
        return [min(r, 2.0) for r in rho]
    if rule == "sequence_tis":
        return [min(product, 2.0) for _ in rho]
    if rule == "sequence_mis":
        return [product if product <= 2.0 else 0.0 for _ in rho]
    if rule == "geo_mask":
        return [min(r, 2.0) if 0.9 <= mean <= 1.1 else 0.0 for r in rho]
    if rule == "geo_filter":
        return [1.0 if 0.9 <= mean <= 1.1 else 0.0 for _ in rho]
    return [r if 0.5 <= r <= 5 else 0.0 for r in rho]


def sampled_by_another(old, mask, seed, spread=0.8):
    """A batch whose sampler is some way off, NaN on padding: some tokens far, some completions near."""
    g = torch.Generator().manual_seed(100 + seed)
    gap = spread * torch.randn(old.shape, generator=g, dtype=torch.float64)
    gap[::2] *= 0.1
    sampler = torch.where(mask, old - gap, torch.nan)
    return SimpleNamespace(sampler_logprobs_BT=sampler, mask_BT=mask, sampler_experts_BSLK=None)


def literal_weights(rule, old, batch, lengths, one_ratio):
    weights = torch.ones_like(old)
    for i, n in enumerate(lengths):
        log_rho = (old - batch.sampler_logprobs_BT)[i, :n].tolist()
        weights[i, :n] = torch.tensor(literal_weight(rule, log_rho, one_ratio), dtype=old.dtype)
    return weights


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("one_ratio", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_weights_and_their_statistics(rule, one_ratio, seed):
    _, old, _, mask, lengths, _ = data((), seed)
    batch = sampled_by_another(old, mask, seed)
    correction = corrected(rule, old, batch, one_ratio)
    is_one = one_ratio or rule in ("sequence_tis", "sequence_mis", "geo_filter")
    assert correction.weights.shape[1] == (1 if is_one else old.shape[1])
    weights = correction.weights.expand_as(old)[mask]
    expected = literal_weights(rule, old, batch, lengths, one_ratio)[mask]
    torch.testing.assert_close(weights, expected, rtol=1e-12, atol=1e-12)
    assert correction.stats["weight_mean"] == pytest.approx(expected.mean().item())
    zeros = (expected == 0).double().mean().item()
    assert correction.stats["weight_zero_frac"].item() == pytest.approx(zeros)
    size = expected.sum() ** 2 / (len(expected) * (expected**2).sum())
    assert correction.stats["weight_effective_size"] == pytest.approx(size.item())
    torch.testing.assert_close(correction.rho_NT[mask].log(), (old - batch.sampler_logprobs_BT)[mask])


def test_the_data_reaches_every_region():
    """Weights at the cap, below it and of 0, in each rule that has them."""
    for rule in RULES:
        for one_ratio in (False, True):
            kinds = set()
            for seed in range(3):
                _, old, _, mask, lengths, _ = data((), seed)
                batch = sampled_by_another(old, mask, seed)
                weights = literal_weights(rule, old, batch, lengths, one_ratio)[mask]
                kinds |= {"cap" if w == 2 else "zero" if w == 0 else "inside" for w in weights.tolist()}
            assert "inside" in kinds
            masks = ("sequence_mis", "geo_mask", "geo_filter", "icepop")
            assert ("zero" in kinds) == (rule in masks)
            if not one_ratio and rule == "token_tis" or rule == "sequence_tis":
                assert "cap" in kinds


def weighted(name, one_ratio, weights):
    """Functions of reference.py that make an objective the decoupled one: each term has the weight of
    its token, or of its completion, outside of min and clip; grpo's KL has none."""

    def clipped_term(b, i, t, plain=reference.clipped_term):
        return weights[i, t] * plain(b, i, t)

    def each(b, term, plain=reference.each):
        return plain(b, lambda i, t: weights[i, t] * term(i, t))

    def completion_mean(b, term, plain=reference.completion_mean):
        return plain(b, lambda i: weights[i, 0] * term(i))

    if name in ("ppo", "grpo", "dr_grpo", "dapo", "more.vapo"):
        return {"clipped_term": clipped_term}
    return {"completion_mean": completion_mean} if one_ratio else {"each": each}


@pytest.mark.parametrize("case", CASES)
def test_a_factor_on_the_advantage_is_the_decoupled_objective(case):
    """Value and gradient equal the literal loops, which have w outside of min and clip. The rule gives
    weights of 0, at the cap and in between."""
    name, changes, wants = CASES[case]
    module, args = script_args(name, **changes)
    one_ratio = name in ONE_RATIO and getattr(args, "variant", "") != "gspo_token"
    for seed in range(3):
        lp, old, adv, mask, lengths, extra = data(wants, seed)
        batch = sampled_by_another(old, mask, seed)
        correction = corrected("geo_mask", old, batch, one_ratio)
        weights = literal_weights("geo_mask", old, batch, lengths, one_ratio)
        if name == "grpo" and args.kl_is_corrected:
            extra["rollout_ratio_BT"] = correction.rho_NT
        with mock.patch.multiple(reference, **weighted(name, one_ratio, weights)):
            literal = -literal_objective(name, args, lp, old, adv, mask, extra)
        (literal_grad,) = torch.autograd.grad(literal, lp)
        loss, grad = loss_and_grad(module, args, lp, old, correction.weights * adv, mask, extra)
        torch.testing.assert_close(loss, literal.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(grad, literal_grad, rtol=1e-10, atol=1e-13)


def test_without_a_correction_weights_are_exactly_1():
    _, old, adv, mask, _, _ = data(())
    correction = corrected("none", old, sampled_by_another(old, mask, 0))
    assert torch.equal(correction.weights * adv, adv) and (correction.rho_NT == 1).all()
    assert all(name.startswith("sampler_") for name in correction.stats)


@pytest.mark.parametrize("truncated", [False, True])
def test_weighted_rewards_are_those_of_the_training_policy(truncated):
    """By enumeration over a vocabulary of five: E_mu[rho f] = E_old[f]; truncation makes it biased."""
    g = torch.Generator().manual_seed(0)
    old = torch.randn(5, generator=g, dtype=torch.float64).log_softmax(0)
    mu = torch.randn(5, generator=g, dtype=torch.float64).log_softmax(0)
    f = torch.randn(5, generator=g, dtype=torch.float64)
    mask = torch.ones(5, 1, dtype=torch.bool)  # five completions of one token
    cap = 1.0 if truncated else 1e6
    weights, _ = rollout_weights(old[:, None], mu[:, None], mask, rule="token_tis", cap=cap)
    gap = ((mu.exp() * weights[:, 0] * f).sum() - (old.exp() * f).sum()).abs()
    assert gap > 0.01 if truncated else gap < 1e-12


def test_weights_that_are_very_small_or_very_large():
    """Equal weights have the full effective size however small they are. And e^25 is above a cap of
    1e9, though e^20, to which the product is clamped, is not."""
    sampler = torch.full((4, 40), 0.4)
    mask = torch.ones(4, 40, dtype=torch.bool)
    weights, _ = rollout_weights(torch.zeros(4, 40), sampler, mask, rule="sequence_tis")
    assert weights.max() < 1e-6
    assert weight_stats(weights, mask)["weight_effective_size"].item() == pytest.approx(1)
    sampler = torch.tensor([[-12.5, -12.5], [-10.25, -10.25]])
    mask = torch.ones(2, 2, dtype=torch.bool)
    for rule, above in (("sequence_mis", 0.0), ("sequence_tis", 1e9)):
        weights, _ = rollout_weights(torch.zeros(2, 2), sampler, mask, rule=rule, cap=1e9)
        assert weights.tolist() == [[above], [pytest.approx(math.exp(20))]]


def test_mismatch_statistics():
    """By hand; of nothing they are 0, and of a small mismatch no rounding noise in float32."""
    _, old, _, mask, lengths, _ = data(())
    batch = sampled_by_another(old, mask, 0)
    logratios = [(old - batch.sampler_logprobs_BT)[i, :n].tolist() for i, n in enumerate(lengths)]
    tokens = [x for row in logratios for x in row]
    stats = mismatch_stats(old, None, batch)
    k3 = sum(math.exp(x) - 1 - x for x in tokens) / len(tokens)
    assert stats["sampler_kl"].item() == pytest.approx(k3)
    assert stats["sampler_logratio_max"].item() == pytest.approx(max(map(abs, tokens)))
    ratios = [math.exp(sum(row)) for row in logratios]
    assert stats["sampler_sequence_ratio_min"].item() == pytest.approx(min(ratios))
    assert stats["sampler_sequence_ratio_max"].item() == pytest.approx(max(ratios))
    mirrored = SimpleNamespace(**vars(batch) | {"sampler_logprobs_BT": old})
    mirrored_stats = mismatch_stats(batch.sampler_logprobs_BT, None, mirrored)
    assert mirrored_stats["sampler_logratio_max"] == stats["sampler_logratio_max"]
    # What dapo's filter has masked has no ratio: without completions 2 to 11, and without any.
    batch.mask_BT = mask & (torch.arange(12)[:, None] < 2)
    stats = mismatch_stats(old, None, batch)
    found = [stats["sampler_sequence_ratio_min"], stats["sampler_sequence_ratio_max"]]
    assert found == pytest.approx(sorted(ratios[:2])) and 1 not in found
    batch.mask_BT = torch.zeros_like(mask)
    for rule in RULES:
        stats = corrected(rule, old, batch).stats
        assert stats.pop("sampler_sequence_ratio_min") == -stats.pop("sampler_sequence_ratio_max")
        assert len(stats) == 5 and all(value == 0 for value in stats.values())
    batch.mask_BT = mask
    gap = 1e-4 * torch.randn(mask.shape, generator=torch.Generator().manual_seed(0))
    batch.sampler_logprobs_BT = torch.zeros_like(gap)
    expected = (gap[mask].double() ** 2 / 2).mean().item()
    found = mismatch_stats(gap, None, batch)["sampler_kl"].item()
    assert found == pytest.approx(expected, rel=1e-3)


# -------------------------------------------------------------- rollouts in another precision


@pytest.mark.parametrize("bits", [8, 4])
def test_rounding_is_symmetric_and_per_output_channel(bits):
    weight = torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(0)) * torch.rand(3, 5, 1)
    weight[0, 0] = 0
    result = fake_quantize(weight, bits)
    top = 2 ** (bits - 1) - 1
    for row, source in zip(result.flatten(0, 1), weight.flatten(0, 1), strict=True):
        scale = source.abs().max().item() / top
        levels = (row / (scale or 1)).tolist()
        assert all(abs(level - round(level)) < 1e-4 and abs(level) < top + 0.5 for level in levels)
        assert (row - source).abs().max() <= scale / 2 * 1.0001
    assert torch.equal(fake_quantize(-weight, bits), -result)


def test_what_is_rounded_and_when(tiny_model):
    """Matrices, the experts' too; not embeddings, routers and norms. The copy changes
    when it is refreshed, and only then; the trained weights never."""
    master = copy.deepcopy(tiny_model[0])
    sampler = rollout_copy(master, master, "int4")
    before = copy.deepcopy(master.state_dict())
    refresh_rollout_copy(sampler, master, "int4")
    for (name, weight), kept in zip(sampler.named_parameters(), master.parameters(), strict=True):
        is_kept = weight.dim() == 1 or "embed" in name or name.endswith("mlp.gate.weight")
        assert torch.equal(weight, kept) == is_kept, name
        if not is_kept:
            assert torch.equal(weight, fake_quantize(kept, 4)), name
    assert all(torch.equal(before[key], value) for key, value in master.state_dict().items())
    policy = Policy(master, tiny_model[1])
    assert policy.sampler_at(1) is policy
    half = rollout_copy(master, master, "bfloat16")
    refresh_rollout_copy(half, master, "bfloat16")
    pairs = list(zip(half.parameters(), master.parameters(), strict=True))
    assert all(torch.equal(weight, kept.bfloat16()) for weight, kept in pairs)
    assert half.model.rotary_emb.inv_freq.dtype == torch.float32


# ----------------------------------------------------------------------------- routing replay


@pytest.fixture(params=MODELS)
def moe(request):
    torch.manual_seed(0)
    return Policy(MODELS[request.param]().eval(), tokenizer=None)


def gradients(policy, loss):
    policy.model.zero_grad()
    loss.backward()
    return [weight.grad.clone() for weight in policy.parameters()]


def other_experts(batch, model):
    """Random experts, different ones, for each real token; never the last one of a layer."""
    E = len(model.model.layers[0].mlp.gate.weight) - 1
    L, K = len(find_routers(model)), model.config.num_experts_per_tok
    g = torch.Generator().manual_seed(3)
    return torch.rand(*batch.tokens_BS.shape, L, E, generator=g).topk(K).indices


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_forward_that_replays_its_own_experts_changes_nothing(moe, checkpointed):
    """To the bit, log-probs and gradients; with layers that are computed again too."""
    if checkpointed:
        checkpoint_layers(moe.model)
    batch = batch_of()
    live = token_logprobs(moe, batch, 0.7)
    live_gradients = gradients(moe, live.logprobs_BT.sum())
    batch.replayed_experts_BSLK = live.routing_choices_BSLK
    again = token_logprobs(moe, batch, 0.7)
    assert torch.equal(again.logprobs_BT, live.logprobs_BT)
    for a, b in zip(gradients(moe, again.logprobs_BT.sum()), live_gradients, strict=True):
        assert torch.equal(a, b)
    assert all("forward" not in router.__dict__ for router in find_routers(moe.model)), "left behind"


def test_replayed_experts_are_the_ones_that_compute(moe):
    """An expert has a gradient exactly if it is replayed; so has its row of the router, where gates are
    normalised over the active experts. With checkpointing all is the same."""
    batch = batch_of()
    batch.replayed_experts_BSLK = other_experts(batch, moe.model)
    outputs = token_logprobs(moe, batch, 1.0)
    plain = gradients(moe, outputs.logprobs_BT.sum())
    assert not torch.equal(
        outputs.logprobs_BT, token_logprobs(moe, batch, 1.0, replay=False).logprobs_BT
    )
    used = batch.replayed_experts_BSLK[batch.attention_BS.bool()]
    for layer, block in enumerate(moe.model.model.layers):
        expected = set(used[:, layer].flatten().tolist())
        assert len(expected) == len(block.mlp.gate.weight) - 1
        touched = [block.mlp.experts.down_proj.grad.abs().sum((1, 2)) > 0]
        if getattr(moe.model.config, "norm_topk_prob", True):
            # Up to rounding: in the softmax the other logits cancel.
            rows = block.mlp.gate.weight.grad.abs().sum(1)
            touched.append(rows > 1e-4 * rows.max())
        for is_touched in touched:
            assert set(is_touched.nonzero()[:, 0].tolist()) == expected
    saving = copy.deepcopy(moe)
    checkpoint_layers(saving.model)
    again = token_logprobs(saving, batch, 1.0)
    torch.testing.assert_close(again.logprobs_BT, outputs.logprobs_BT, rtol=0, atol=0)
    for a, b in zip(gradients(saving, again.logprobs_BT.sum()), plain, strict=True):
        assert torch.equal(a, b)


def test_gate_weights_are_the_live_router_over_the_replayed_experts(moe):
    """Literally, for one router: softmax over all experts, taken at the replayed ones, and normalised
    if the model does that; its gradient reaches the logits of the replayed experts."""
    router = find_routers(moe.model)[1]
    hidden = torch.randn(5, moe.model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    K = moe.model.config.num_experts_per_tok
    E = len(router.weight)
    experts = torch.stack([torch.randperm(E)[:K] for _ in range(5)])
    experts[4] = -1  # not known: the router's own choice
    replayed = experts[:, None].expand(5, len(find_routers(moe.model)), K)
    with Routing(moe.model, replayed) as routing:
        _, scores, indices = router(hidden)
    own = (hidden @ router.weight.T).topk(K).indices
    assert torch.equal(indices[:4], experts[:4]) and torch.equal(indices[4], own[4])
    assert torch.equal(routing.own[1], own.int())
    normalises = getattr(moe.model.config, "norm_topk_prob", True)
    for row in range(5):
        p = (hidden[row] @ router.weight.T).double().softmax(0)[indices[row]]
        expected = p / p.sum() if normalises else p
        torch.testing.assert_close(scores[row].double(), expected, rtol=1e-4, atol=1e-6)
    (gradient,) = torch.autograd.grad(scores[0, 0], router.weight)
    assert (gradient[indices[0]].abs().sum(1) > 0).all()


def test_the_reference_and_the_aux_loss_stay_live(moe):
    batch = batch_of()
    live = token_logprobs(moe, batch, 1.0)
    batch.replayed_experts_BSLK = other_experts(batch, moe.model)
    reference_outputs = token_logprobs(moe, batch, 1.0, replay=False)
    assert torch.equal(reference_outputs.logprobs_BT, live.logprobs_BT)
    # The first router reads the same tokens whatever is replayed; alone, it has the same aux loss.
    replayed = token_logprobs(moe, batch, 1.0)
    torch.testing.assert_close(replayed.router_logits[0], live.router_logits[0])
    assert not torch.equal(replayed.router_logits[2], live.router_logits[2])
    moe.model.model.layers = moe.model.model.layers[:1]
    batch.replayed_experts_BSLK = batch.replayed_experts_BSLK[:, :, :1]
    replayed = token_logprobs(moe, batch, 1.0)
    live = token_logprobs(moe, batch, 1.0, replay=False)
    assert not torch.equal(replayed.logprobs_BT, live.logprobs_BT)
    torch.testing.assert_close(replayed.aux_loss, live.aux_loss)


@pytest.mark.parametrize("rollout_batch_size, compact_every", [(0, 1), (4, 1), (0, 7)])
def test_the_sampler_notes_what_the_training_forward_would_choose(
    tiny_model, rollout_batch_size, compact_every, monkeypatch
):
    """R3 = R2 where the sampler routes as the trainer: prompts of different lengths, rows that leave
    the batch, every position but the last token's, in the order of the top-k."""
    policy = Policy(*tiny_model)
    flags = {"routing_replay": "r3", "rollout_batch_size": rollout_batch_size}
    _, args = script_args("grpo", device="cpu", **flags)
    problems = problems_of(policy, "57+308=", "12+34=", "999+99=", "5=")
    noise = torch.Generator().manual_seed(0)
    monkeypatch.setitem(common.COMPACT_EVERY, "cpu", compact_every)
    completions = sample(policy, problems, 4, args, noise)
    assert len({len(c.ids) for c in completions}) > 3
    batch = collate(completions, args)
    assert batch.replayed_experts_BSLK is batch.sampler_experts_BSLK
    batch.replayed_experts_BSLK = None
    with torch.no_grad():
        choice = token_logprobs(policy, batch, 1.0).routing_choices_BSLK
    for i, c in enumerate(completions):
        assert len(c.experts) == len(c.problem.prompt_ids) + len(c.ids) and (c.experts[-1] == -1).all()
        real = batch.attention_BS[i].bool()
        assert torch.equal(batch.sampler_experts_BSLK[i, real], c.experts)
        assert torch.equal(c.experts[:-1], choice[i, real][:-1])
        assert (batch.sampler_experts_BSLK[i, ~real] == -1).all()
    stats = mismatch_stats(batch.sampler_logprobs_BT, choice_of(choice, batch), batch)
    assert stats["sampler_expert_diff_frac"] == 0
    batch.sampler_experts_BSLK[:, :, 0] = -1
    stats = mismatch_stats(batch.sampler_logprobs_BT, choice_of(choice, batch), batch)
    assert stats["sampler_expert_diff_frac"].item() == pytest.approx(1 / 2)


@pytest.mark.parametrize(
    "flags, reads",
    [
        ({}, False),
        ({"routing_replay": "r2"}, False),
        ({"routing_replay": "r3"}, True),
        ({"routing_replay": "r3", "old_logprobs": "sampler"}, True),
        ({"rollout_dtype": "int4"}, True),
        ({"rollout_refresh_every": 2}, True),
        ({"rollout_dtype": "int4", "old_logprobs": "sampler"}, False),
    ],
)
def test_experts_are_recorded_only_if_an_update_reads_them(flags, reads, tiny_model, monkeypatch):
    """Replayed, or compared with the trainer's; no evaluation reads them."""
    policy = Policy(*tiny_model)
    _, args = script_args("grpo", device="cpu", **flags)
    problems = problems_of(policy, "57+308=")
    recorded = []

    def sample_batch(*inputs, record_experts, **keywords):
        recorded.append(record_experts)
        return original(*inputs, record_experts=record_experts, **keywords)

    original = common.sample_batch
    monkeypatch.setattr(common, "sample_batch", sample_batch)
    sample(policy, problems, 2, args, torch.Generator().manual_seed(0))
    evaluate(policy, problems, verify, args, sampled=True)
    assert recorded == [reads, False, False]


def choice_of(experts_BSLK, batch):
    """Sorted, at the tokens that predict the response."""
    T = batch.mask_BT.shape[1]
    return experts_BSLK[:, -T - 1 : -1].sort().values


@pytest.mark.parametrize("replay", ["none", "r2", "r3"])
@pytest.mark.parametrize("old_logprobs", ["trainer", "sampler"])
def test_a_score_is_that_of_its_policy_and_leaves_the_batch_alone(moe, old_logprobs, replay):
    """A reference's, whatever the flags; score_old's takes them, and with r2 makes the batch replay."""
    flags = {"old_logprobs": old_logprobs, "routing_replay": replay, "micro_batch_size": 2}
    _, args = script_args("grpo", device="cpu", **flags)
    batch = batch_of()
    experts = other_experts(batch, moe.model) if replay == "r3" else None
    batch.replayed_experts_BSLK = experts
    minibatches = batch.minibatches(2)
    live_BT = token_logprobs(moe, batch, args.temperature, replay=False).logprobs_BT
    found = score(moe, batch, minibatches, args)
    torch.testing.assert_close(found, live_BT)
    assert batch.replayed_experts_BSLK is experts
    old = score_old(moe, batch, minibatches, args)
    if old_logprobs == "sampler":
        assert old.logprobs_NT is batch.sampler_logprobs_BT and old.experts_NTLK is None
        assert batch.replayed_experts_BSLK is experts
    else:
        is_live = torch.allclose(old.logprobs_NT, live_BT, atol=1e-5)
        assert is_live == (replay != "r3")
        assert (batch.replayed_experts_BSLK is experts) == (replay != "r2")


def test_a_dense_model_has_no_experts_to_replay_or_to_note(tiny_model, tmp_path):
    config = dict(vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
    dense = LlamaForCausalLM(LlamaConfig(**config, intermediate_size=32))
    for part in (dense, tiny_model[1]):
        part.save_pretrained(tmp_path)
    _, args = script_args("grpo", model=str(tmp_path), device="cpu", routing_replay="r2")
    with pytest.raises(UserError, match="--routing_replay .*: it is dense"):
        load_policy(args)
    args.routing_replay = "none"
    args.rollout_dtype = "int8"
    problem = Problem("", "", [3, 4])
    completions = sample(load_policy(args), [problem], 2, args, torch.Generator().manual_seed(0))
    assert completions[0].experts is None
    args.rollout_refresh_every = 2
    sampler = load_policy(args).sampler_at(1)
    completions = sample(sampler, [problem], 2, args, torch.Generator().manual_seed(0))
    assert completions[0].experts is None


def test_routing_gives_back_what_was_there(moe):
    """Also a forward that somebody else has set on the experts, and after an error; one that is not
    enabled touches nothing."""
    plain, other, _ = find_experts(moe.model)
    outside = functools.partial(other.forward)
    other.forward = outside
    with Routing(moe.model, enabled=False):
        assert "forward" not in plain.__dict__ and other.forward is outside and Routing.active is None
    with pytest.raises(ZeroDivisionError), Routing(moe.model) as routing:
        assert "forward" in plain.__dict__ and other.forward is not outside
        with Routing(moe.model, enabled=False):
            assert "forward" in plain.__dict__ and Routing.active is routing
        assert "forward" in plain.__dict__ and Routing.active is routing
        raise ZeroDivisionError
    assert "forward" not in plain.__dict__ and other.forward is outside and Routing.active is None


# --------------------------------------------------------------------------------- whole runs

SMALL = "--prompts_per_iteration 6 --max_new_tokens 16 --eval_every 0 --iterations 2".split()


def small(name):
    """With groups, and two optimizer steps, where a script has them."""
    flags = [*SMALL]
    if name not in ("ppo", "more.reinforce"):
        flags += ["--group_size", 4]
    if name not in ("more.reinforce", "more.rloo"):
        flags += ["--num_minibatches", 2]
    return flags


PAIRS = [(name, replay) for name in [*SCRIPTS, *MORE] for replay in ("r2", "r3")]
QUICK = [("ppo", "r2"), ("grpo", "r3"), ("gspo", "r3"), ("more.rloo", "r2")]
SLOW = [pytest.param(*pair, marks=pytest.mark.slow) for pair in PAIRS if pair not in QUICK]


@pytest.mark.parametrize("name, replay", QUICK + SLOW)
def test_runs_with_all_of_it(name, replay, tmp_path, reward_file):
    # The model is a poor one, but it can learn to make its answers even in length.
    parity = reward_file('return (1.0, "correct") if len(text) % 2 == 0 else (0.0, "wrong")')
    flags = "--rollout_dtype int4 --rollout_correction geo_mask --kl_coef 0.04 --kl_is_corrected True"
    flags = flags.split() if name == "grpo" else flags.split()[:4]
    flags += ["--routing_replay", replay, "--reward", parity, "--run_dir", tmp_path]
    result = run(name, *small(name), *flags, held_out=4)
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        assert line["losses/first_step_ratio_error_max"] == 0, "old and current replay the same"
        assert line["rollout/sampler_kl"] > 1e-4 and line["rollout/sampler_expert_diff_frac"] > 0
        assert 0 < line["rollout/weight_effective_size"] <= 1


def literal_gamma(before, after, replayed_LK, b, t):
    """Of one token: over the experts that were replayed, in a layer where these are not known over the
    router's own choice under the old policy."""
    L, K = replayed_LK.shape
    shift = 0.0
    for layer in range(L):
        log_p_old = before.router_logits[layer][b, t].double().log_softmax(0)
        log_p = after.router_logits[layer][b, t].double().log_softmax(0)
        experts = replayed_LK[layer].tolist()
        if -1 in experts:
            experts = log_p_old.topk(K).indices.tolist()
        shift += sum(abs(log_p[e] - log_p_old[e]).item() for e in experts) / (L * K)
    return math.exp(-shift)


def test_run_rspo_measures_gamma_on_the_experts_that_were_active(tmp_path, monkeypatch):
    """With r3 on those that are replayed, before the update and in it. These are made up here, and not
    known in one layer of every third token."""
    calls = {"old": [], "update": [], "gamma": []}
    g = torch.Generator().manual_seed(0)

    def spy(module, name, kind, take):
        original = getattr(module, name)

        def function(*inputs, **keywords):
            result = original(*inputs, **keywords)
            calls[kind].append(take(result, inputs, keywords))
            return result

        monkeypatch.setattr(module, name, function)

    def sample_and_make_up(*inputs):
        completions = sample(*inputs)
        for kind in calls:
            calls[kind].clear()
        made_up = []
        for c in completions:
            experts = torch.rand(*c.experts.shape[:2], 8, generator=g).topk(2).indices.int()
            experts[::3, 1] = -1
            made_up.append(c._replace(experts=experts))
        return made_up

    monkeypatch.setattr(rspo, "sample", sample_and_make_up)
    spy(common, "token_logprobs", "old", lambda outputs, inputs, _: (outputs, inputs[1]))
    spy(rspo, "token_logprobs", "update", lambda outputs, inputs, _: outputs)
    spy(rspo, "policy_loss", "gamma", lambda _, inputs, keywords: keywords["router_shift_BT"])
    flags = "--iterations 1 --routing_replay r3 --lr 0.01 --run_dir".split()
    result = run("rspo", *small("rspo"), *flags, tmp_path, held_out=4)
    assert result.returncode == 0, result.stderr
    gammas = {"replayed": [], "own": [], "rspo's": []}
    for (before, batch), after, gamma_BT in zip(*calls.values(), strict=True):
        T = batch.mask_BT.shape[1]
        for b, t in batch.mask_BT.nonzero().tolist():
            replayed_LK = batch.replayed_experts_BSLK[b, t - T - 1]
            gammas["replayed"].append(literal_gamma(before, after, replayed_LK, b, t))
            unknown_LK = torch.full_like(replayed_LK, -1)
            gammas["own"].append(literal_gamma(before, after, unknown_LK, b, t))
            gammas["rspo's"].append(gamma_BT[b, t].item())
    assert gammas["rspo's"] == pytest.approx(gammas["replayed"], rel=1e-4)
    assert len(calls["gamma"]) == 2
    far = sum(abs(a - b) > 1e-2 for a, b in zip(gammas["replayed"], gammas["own"], strict=True))
    assert far > 50, "the test can tell"


def test_run_in_which_nothing_is_in_the_mask(tmp_path, reward_file):
    """All completions are cut off, some of them count as right, and dapo's filter masks them all."""
    reward = reward_file('return (1.0, "correct") if "#" in text else (0.0, "wrong")')
    flags = "--overlong filter --rollout_dtype int4 --rollout_correction token_tis --max_new_tokens 4"
    flags = (*small("dapo"), *flags.split(), "--reward", reward, "--run_dir", tmp_path)
    result = run("dapo", *flags, held_out=4)
    assert result.returncode == 0, result.stderr
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 2
    for line in lines:
        row = json.loads(line, parse_constant=pytest.fail)  # NaN is not JSON
        assert row["rollout/groups_kept"] > 0
        for name in ("weight_mean", "weight_zero_frac", "weight_effective_size", "sampler_kl"):
            assert row[f"rollout/{name}"] == 0
        assert row["losses/policy_loss"] == 0
        absent = "losses/entropy losses/logratio_spread losses/ratio_max losses/ratio_min moe/load_max"
        absent += " losses/sequence_ratio_max"
        absent += " rollout/sampler_sequence_ratio_min rollout/sampler_sequence_ratio_max"
        assert not row.keys() & set(absent.split())


STALE = "--rollout_refresh_every 3 --routing_replay r3 --rollout_correction token_tis".split()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_run_a_sampler_that_is_stale(dtype, tmp_path):
    """It has the weights of iterations 1, 1, 1 and 4, also in a run that was stopped in between: the
    copy is in the checkpoint. What measures a mismatch measures the staleness."""
    lines = []
    for folder, stops in (("whole", [5]), ("stopped", [2, 5])):
        for stop in stops:
            more = ("--iterations", stop, "--dtype", dtype, "--run_dir", tmp_path / folder, "--resume")
            result = run("grpo", *small("grpo"), *STALE, *more, "--lr", 2e-3, held_out=4)
            assert result.returncode == 0, result.stderr
        text = (tmp_path / folder / "metrics.jsonl").read_text()
        rows = [json.loads(line) for line in text.splitlines()]
        kept = [{key: row[key] for key in row if "second" not in key} for row in rows]
        lines.append([{key: row[key] for key in row if "eval/" not in key} for row in kept])
    assert lines[0] == lines[1]
    assert all(row["losses/first_step_ratio_error_max"] == 0 for row in lines[0])
    kl = [row["rollout/sampler_kl"] for row in lines[0]]
    assert max(kl[0], kl[3]) < min(kl[1], kl[2], kl[4]) / 10
    differ = [row["rollout/sampler_expert_diff_frac"] for row in lines[0]]
    assert differ[2] > differ[1] > differ[0]
    refused = run("grpo", *small("grpo"), *STALE, *more, "--rollout_refresh_every", 2, held_out=4)
    assert "has rollout_refresh_every 3, not 2" in refused.stderr


@pytest.mark.parametrize("name", ["ppo", "gspo", "cispo", "more.rloo"])
def test_run_ratios_straight_from_the_sampler(name, tmp_path, monkeypatch):
    """No forward is made for the old log-probs, and what needs it is not logged; critic and reference
    have theirs."""
    script_args(name)  # imported before: its update's forwards are not counted
    passes = []
    original = common.token_logprobs

    def token_logprobs(policy, *args, **keywords):
        passes.append(policy)
        return original(policy, *args, **keywords)

    monkeypatch.setattr(common, "token_logprobs", token_logprobs)
    lines = {}
    counts = {}
    for who in ("trainer", "sampler"):
        passes.clear()
        flags = ("--old_logprobs", who, "--rollout_dtype", "int8", "--run_dir", tmp_path / who)
        result = run(name, *small(name), *flags, held_out=4)
        assert result.returncode == 0, result.stderr
        text = (tmp_path / who / "metrics.jsonl").read_text()
        lines[who] = json.loads(text.splitlines()[0])
        counts[who] = len(passes) - 1  # of the check of the model
    assert counts["trainer"] > 0
    assert counts["sampler"] == (counts["trainer"] / 2 if name == "ppo" else 0)
    missing = {key for key in lines["trainer"] if key not in lines["sampler"]}
    assert missing == {
        "losses/first_step_ratio_error_max",
        "moe/expert_flip_frac",
        "rollout/sampler_kl",
        "rollout/sampler_logratio_max",
        "rollout/sampler_sequence_ratio_min",
        "rollout/sampler_sequence_ratio_max",
        "rollout/sampler_expert_diff_frac",
    }
    assert lines["sampler"]["losses/approx_kl"] > lines["trainer"]["losses/approx_kl"]


def test_run_a_copy_in_the_same_precision_changes_nothing(tmp_path):
    """But for the sampler's log-probs, which may be rounded in another way."""
    kept = []
    for i, flags in enumerate(([], ["--rollout_dtype", "float32"])):
        folder = tmp_path / str(i)
        result = run("grpo", *small("grpo"), *flags, "--run_dir", folder, held_out=4)
        assert result.returncode == 0, result.stderr
        kept.append([json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()])
    for off, on in zip(*kept, strict=True):
        for key, value in off.items():
            assert on[key] == value or "second" in key or "sampler" in key, key
        assert on["rollout/sampler_kl"] < 1e-8
        assert on["rollout/sampler_expert_diff_frac"] == 0
