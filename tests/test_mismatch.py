"""When the sampler is not the trainer: each script's decoupled objective in float64, rounded weights,
and routing replay."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from conftest import MORE, SCRIPTS, run, script_args
from test_identities import CASES, data, loss_and_grad
from test_router import MODELS, batch_of
from test_sampler import problems_of
from transformers import LlamaConfig, LlamaForCausalLM

import common
import rspo
from common import Problem, collate, evaluate, load_policy, record_old_policy
from common import reference_logprobs, rollout_correction, rollout_weights, sample, token_logprobs
from plumbing.errors import UserError
from plumbing.metrics import correction_stats
from plumbing.models import checkpoint_layers
from plumbing.policy import Policy, fake_quantize
from plumbing.routing import Routing, find_experts, find_routers

RULES = ["token_tis", "sequence_tis", "sequence_mis", "geo_mask", "geo_filter", "icepop"]
ONE_RATIO = {"gspo", "gmpo", "rspo"}
F64 = torch.float64


# ------------------------------------------------------------------------- rollout correction
#
# The rules themselves are compared with their formulas in test_conformance.py.


def corrected(rule, old, mask, per_sequence=False, seed=0, spread=0.8):
    """A batch with its weights. Its sampler is some way off, NaN on padding: some tokens far, some
    completions near."""
    g = torch.Generator().manual_seed(100 + seed)
    gap = spread * torch.randn(old.shape, generator=g, dtype=F64)
    gap[::2] *= 0.1
    sampler = torch.where(mask, old - gap, torch.nan)
    batch = SimpleNamespace(old_logprobs_BT=old, sampler_logprobs_BT=sampler, mask_BT=mask)
    rollout_correction(batch, arguments(rule), per_sequence)
    return batch


def arguments(rule):
    flags = {"rollout_cap": 2.0, "rollout_mask_low": 0.9, "rollout_mask_high": 1.1}
    return SimpleNamespace(rollout_correction=rule, old_logprobs="trainer", **flags)


@pytest.mark.parametrize("rule", RULES)
def test_one_weight_per_completion_is_that_of_its_geometric_mean(rule):
    """Where an objective has one ratio per completion, rules for tokens are applied to exp(mean log
    rho), as if each token had it; the other rules have one weight anyway."""
    _, old, _, mask, _, _ = data(())
    batch = corrected(rule, old, mask, per_sequence=True)
    log_rho = torch.where(mask, old - batch.sampler_logprobs_BT, 0)
    mean_B1 = log_rho.sum(1, keepdim=True) / mask.sum(1, keepdim=True)
    equal = SimpleNamespace(**vars(batch) | {"sampler_logprobs_BT": old - mean_B1})
    rollout_correction(equal, arguments(rule))
    assert batch.correction_weights.shape == (12, 1)
    expected = equal.correction_weights.expand_as(mask)
    torch.testing.assert_close(batch.correction_weights.expand_as(mask)[mask], expected[mask])
    torch.testing.assert_close(batch.rollout_ratio_BT[mask].log(), log_rho[mask])
    one_each = rule in ("sequence_tis", "sequence_mis", "geo_filter")
    by_token = corrected(rule, old, mask).correction_weights
    assert by_token.shape == ((12, 1) if one_each else mask.shape)
    assert one_each == torch.allclose(by_token.expand_as(mask)[mask], expected[mask])


@pytest.mark.parametrize("case", CASES)
def test_a_factor_on_the_advantage_is_the_decoupled_objective(case):
    """Each token's term, or each completion's, has its weight outside of min and clip; grpo's KL has
    none. The objective is a sum of terms that are 0 where A is, so we weigh one at a time."""
    name, changes, wants = CASES[case]
    module, args = script_args(name, **changes)
    per_sequence = name in ONE_RATIO and getattr(args, "variant", "") != "gspo_token"
    lp, old, adv, mask, _, extra = data(wants)
    batch = corrected("geo_mask", old, mask, per_sequence)
    if name == "grpo" and args.kl_is_corrected:
        extra["rollout_ratio_BT"] = batch.rollout_ratio_BT
    if not per_sequence:
        adv = adv.expand_as(mask)

    def loss_of(advantages):
        return loss_and_grad(module, args, lp, old, advantages, mask, extra)

    rest, rest_grad = loss_of(torch.zeros_like(adv))  # the KL
    expected = rest
    expected_grad = rest_grad
    weights = batch.correction_weights
    for row, column in adv.nonzero().tolist():
        if per_sequence or mask[row, column]:
            alone = torch.zeros_like(adv)
            alone[row, column] = adv[row, column]
            term, term_grad = loss_of(alone)
            weight = weights[row, column]
            expected = expected + weight * (term - rest)
            expected_grad = expected_grad + weight * (term_grad - rest_grad)
    loss, grad = loss_of(weights * adv)
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-10, atol=1e-12)
    kept = weights.expand_as(mask)[mask]
    assert (kept == 0).any() and ((kept > 0) & (kept < 1)).any() and (kept > 1).any()


def test_without_a_correction_weights_are_exactly_1():
    _, old, adv, mask, _, _ = data(())
    batch = corrected("none", old, mask)
    assert torch.equal(batch.correction_weights * adv, adv) and (batch.rollout_ratio_BT == 1).all()


@pytest.mark.parametrize("truncated", [False, True])
def test_weighted_rewards_are_those_of_the_training_policy(truncated):
    """By enumeration over a vocabulary of five: E_mu[rho f] = E_old[f]; truncation makes it biased."""
    g = torch.Generator().manual_seed(0)
    old = torch.randn(5, generator=g, dtype=F64).log_softmax(0)
    mu = torch.randn(5, generator=g, dtype=F64).log_softmax(0)
    f = torch.randn(5, generator=g, dtype=F64)
    mask = torch.ones(5, 1, dtype=torch.bool)  # five completions of one token
    cap = 1.0 if truncated else 1e6
    weights, _ = rollout_weights(old[:, None], mu[:, None], mask, rule="token_tis", cap=cap)
    gap = ((mu.exp() * weights[:, 0] * f).sum() - (old.exp() * f).sum()).abs()
    assert gap > 0.01 if truncated else gap < 1e-12


def test_a_cap_is_compared_with_the_product_before_it_is_clamped():
    """e^25 is above a cap of 1e9, though e^20, to which the product is clamped, is not."""
    sampler = torch.tensor([[-12.5, -12.5], [-10.25, -10.25]])
    mask = torch.ones(2, 2, dtype=torch.bool)
    for rule, above in (("sequence_mis", 0.0), ("sequence_tis", 1e9)):
        weights, _ = rollout_weights(torch.zeros(2, 2), sampler, mask, rule=rule, cap=1e9)
        assert weights.tolist() == [[above], [pytest.approx(math.exp(20))]]


def test_statistics_of_the_mismatch_and_the_weights():
    """By hand; of nothing they are 0. Equal weights have the full effective size however small they
    are, and a small mismatch is no rounding noise in float32."""
    _, old, _, mask, _, _ = data(())
    batch = corrected("geo_mask", old, mask)
    args = arguments("geo_mask")
    stats = correction_stats(batch, args)
    log_rho = (old - batch.sampler_logprobs_BT)[mask].tolist()
    k3 = sum(math.exp(x) - 1 - x for x in log_rho) / len(log_rho)
    weights = batch.correction_weights.expand_as(mask)[mask].tolist()
    squares = sum(weight**2 for weight in weights)
    assert stats["sampler_kl"].item() == pytest.approx(k3)
    assert stats["weight_zero_frac"].item() == pytest.approx(weights.count(0) / len(weights))
    size = sum(weights) ** 2 / (len(weights) * squares)
    assert stats["weight_effective_size"].item() == pytest.approx(size)
    batch.correction_weights = torch.full((12, 1), 1e-7)
    assert correction_stats(batch, args)["weight_effective_size"].item() == pytest.approx(1)
    batch.mask_BT = torch.zeros_like(mask)
    assert all(value == 0 for value in correction_stats(batch, args).values())
    gap = 1e-4 * torch.randn(mask.shape, generator=torch.Generator().manual_seed(0))
    batch.mask_BT = mask
    batch.old_logprobs_BT = gap
    batch.sampler_logprobs_BT = torch.zeros_like(gap)
    expected = (gap[mask].double() ** 2 / 2).mean().item()
    assert correction_stats(batch, args)["sampler_kl"].item() == pytest.approx(expected, rel=1e-3)


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


@pytest.mark.parametrize("checkpointed", [False, True])
def test_replayed_experts_are_the_ones_that_compute(moe, checkpointed):
    """An expert has a gradient exactly if it is replayed; so has its row of the router, where gates are
    normalized over the active experts. The backward of gradient checkpointing routes the same."""
    if checkpointed:
        checkpoint_layers(moe.model)
    batch = batch_of()
    batch.replayed_experts_BSLK = other_experts(batch, moe.model)
    gradients(moe, token_logprobs(moe, batch, 1.0).logprobs_BT.sum())
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


def test_gate_weights_are_the_live_router_over_the_replayed_experts(moe):
    """Literally, for one router: softmax over all experts, taken at the replayed ones, and normalized
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
    normalizes = getattr(moe.model.config, "norm_topk_prob", True)
    for row in range(5):
        p = (hidden[row] @ router.weight.T).double().softmax(0)[indices[row]]
        expected = p / p.sum() if normalizes else p
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
    with torch.no_grad():
        choice = token_logprobs(policy, batch, 1.0, replay=False).routing_choices_BSLK
    for i, c in enumerate(completions):
        assert len(c.experts) == len(c.problem.prompt_ids) + len(c.ids) and (c.experts[-1] == -1).all()
        real = batch.attention_BS[i].bool()
        assert torch.equal(batch.replayed_experts_BSLK[i, real], c.experts)
        assert torch.equal(c.experts[:-1], choice[i, real][:-1])
        assert (batch.replayed_experts_BSLK[i, ~real] == -1).all()


READS = [
    ({}, False),
    ({"routing_replay": "r2"}, False),
    ({"routing_replay": "r3", "old_logprobs": "sampler"}, True),
    ({"rollout_dtype": "int4"}, False),
]


@pytest.mark.parametrize("flags, reads", READS)
def test_experts_are_recorded_only_if_an_update_reads_them(flags, reads, tiny_policy, monkeypatch):
    """No evaluation does."""
    _, args = script_args("grpo", device="cpu", max_new_tokens=4, **flags)
    problems = problems_of(tiny_policy, "57+308=")
    noise = torch.Generator().manual_seed(0)
    assert (sample(tiny_policy, problems, 2, args, noise)[0].experts is not None) == reads

    def grade(completions):
        assert all(c.experts is None for c in completions)
        return [c._replace(verdict="wrong") for c in completions]

    evaluate(tiny_policy, problems, grade, args, sampled=True)


def choice_of(experts_BSLK, batch):
    """Sorted, at the tokens that predict the response."""
    T = batch.mask_BT.shape[1]
    return experts_BSLK[:, -T - 1 : -1].sort().values


@pytest.mark.parametrize("replay", ["none", "r2", "r3"])
@pytest.mark.parametrize("old_logprobs", ["trainer", "sampler"])
def test_old_and_reference_logprobs(moe, old_logprobs, replay):
    """Those of a reference route live, whatever the flags. The old policy's replay with r3, and with r2
    make the update replay."""
    flags = {"old_logprobs": old_logprobs, "routing_replay": replay, "micro_batch_size": 2}
    _, args = script_args("grpo", device="cpu", num_minibatches=2, **flags)
    batch = batch_of()
    experts = other_experts(batch, moe.model) if replay == "r3" else None
    batch.replayed_experts_BSLK = experts
    with torch.no_grad():
        live = token_logprobs(moe, batch, args.temperature, replay=False)
    torch.testing.assert_close(reference_logprobs(moe, batch, args), live.logprobs_BT)
    record_old_policy(moe, batch, args)
    if old_logprobs == "sampler":
        assert batch.old_logprobs_BT is batch.sampler_logprobs_BT and batch.old_experts_BTLK is None
        assert batch.replayed_experts_BSLK is experts
        return
    is_live = torch.allclose(batch.old_logprobs_BT, live.logprobs_BT, atol=1e-5)
    assert is_live == (replay != "r3")
    if replay == "r2":
        real = batch.attention_BS.bool()
        own = live.routing_choices_BSLK
        assert torch.equal(batch.replayed_experts_BSLK[real], own[real])
        assert torch.equal(batch.old_experts_BTLK[batch.mask_BT], live.experts_BTLK[batch.mask_BT])
    else:
        assert batch.replayed_experts_BSLK is experts


def test_a_dense_model_has_no_experts_to_replay_or_to_note(tiny_model, tmp_path):
    config = dict(vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
    dense = LlamaForCausalLM(LlamaConfig(**config, intermediate_size=32))
    for part in (dense, tiny_model[1]):
        part.save_pretrained(tmp_path)
    _, args = script_args("grpo", model=str(tmp_path), device="cpu", routing_replay="r2")
    with pytest.raises(UserError, match="--routing_replay .*: it is dense"):
        load_policy(args)
    _, args = script_args("grpo", model=str(tmp_path), device="cpu", rollout_dtype="int8")
    completions = sample(load_policy(args).sampler(1), [Problem("", "", [3, 4])], 2, args)
    assert completions[0].experts is None


def test_routing_gives_back_what_was_there(moe):
    """After an error, too: no hook stays on a router or on experts."""
    modules = [*find_experts(moe.model), *find_routers(moe.model)]

    def hooks():  # transformers has some of its own
        return [(list(m._forward_pre_hooks), list(m._forward_hooks)) for m in modules]

    before = hooks()
    replayed = torch.zeros(1, 3, 2, dtype=torch.int16)
    with pytest.raises(ZeroDivisionError), Routing(moe.model, replayed):
        assert all(now != then for now, then in zip(hooks(), before, strict=True))
        raise ZeroDivisionError
    assert Routing.active is None and hooks() == before


# --------------------------------------------------------------------------------- whole runs

SMALL = "--prompts_per_iteration 6 --max_new_tokens 16 --eval_every 0 --iterations 2".split()


def small(name):
    """With groups, and two optimizer steps, where a script has them."""
    flags = [*SMALL]
    if name not in ("ppo", "more.reinforce"):
        flags += ["--group_size", 4]
    if name not in ("more.reinforce", "more.rloo"):
        flags += ["--num_minibatches", 2]
    if name == "more.vapo":
        flags += ["--pretraining_iterations", 1]
    return flags


PAIRS = [(name, replay) for name in (*SCRIPTS, *MORE) for replay in ("r2", "r3")]
QUICK = [("ppo", "r2"), ("grpo", "r3"), ("gspo", "r3"), ("more.rloo", "r2")]
SLOW = [pytest.param(*pair, marks=pytest.mark.slow) for pair in PAIRS if pair not in QUICK]


@pytest.mark.parametrize("name, replay", QUICK + SLOW)
def test_runs_with_all_of_it(name, replay, tmp_path, reward_file):
    # The model is a poor one, but it can learn to make its answers even in length.
    parity = reward_file('return (1.0, "correct") if len(text) % 2 == 0 else (0.0, "wrong")')
    flags = "--rollout_dtype int4 --rollout_correction geo_mask --kl_coef 0.04 --kl_is_corrected"
    flags = flags.split() if name == "grpo" else flags.split()[:4]
    flags += ["--routing_replay", replay, "--reward", parity, "--run_dir", tmp_path]
    result = run(name, *small(name), *flags, held_out=4)
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        assert line["losses/first_step_ratio_error_max"] == 0, "old and current replay the same"
        assert line["rollout/sampler_kl"] > 1e-4
        assert 0 < line["rollout/weight_effective_size"] <= 1


def test_active_experts_are_the_replayed_ones_where_they_are_known(moe):
    batch = batch_of()
    own_BTLK = token_logprobs(moe, batch, 1.0).experts_BTLK
    assert batch.active_experts(own_BTLK) is own_BTLK
    experts = other_experts(batch, moe.model)
    experts[:, 3:, 1] = -1  # of one layer, at later tokens
    batch.replayed_experts_BSLK = experts
    active_BTLK = batch.active_experts(own_BTLK)
    T = batch.mask_BT.shape[1]
    for b, t in batch.mask_BT.nonzero().tolist():
        for layer in range(3):
            replayed = experts[b, t - T - 1, layer].sort().values  # at the token before
            expected = own_BTLK[b, t, layer] if -1 in replayed else replayed
            assert torch.equal(active_BTLK[b, t, layer], expected.to(active_BTLK.dtype))


def test_run_rspo_measures_gamma_on_the_experts_that_were_active(tmp_path, monkeypatch):
    """7: with r3 on those that are replayed, before the update and in it; here the last two."""
    micros = []
    measured = []

    def sample_and_make_up(*inputs):
        experts = torch.tensor([7, 6])
        return [c._replace(experts=experts.expand_as(c.experts)) for c in sample(*inputs)]

    def spied_logprobs(policy, micro, *inputs, **keywords):
        micros.append(micro)
        return token_logprobs(policy, micro, *inputs, **keywords)

    def expert_logprobs(router_logits, experts_BTLK):
        measured.append(experts_BTLK[micros[-1].mask_BT])
        return original(router_logits, experts_BTLK)

    original = rspo.expert_logprobs
    monkeypatch.setattr(rspo, "sample", sample_and_make_up)
    monkeypatch.setattr(rspo, "expert_logprobs", expert_logprobs)
    for module in (common, rspo):
        monkeypatch.setattr(module, "token_logprobs", spied_logprobs)
    flags = "--iterations 1 --routing_replay r3 --run_dir".split()
    result = run("rspo", *small("rspo"), *flags, tmp_path, held_out=4)
    assert result.returncode == 0, result.stderr
    assert len(measured) == 4  # two micro-batches, twice
    assert all((experts == torch.tensor([6, 7])).all() for experts in measured)


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
        for name in ("weight_zero_frac", "weight_effective_size", "sampler_kl"):
            assert row[f"rollout/{name}"] == 0
        assert row["losses/policy_loss"] == 0
        assert not row.keys() & {"losses/entropy", "losses/ratio_max"}


STALE = "--rollout_refresh_every 3 --routing_replay r3 --rollout_correction token_tis".split()


def metrics_of(folder):
    """The lines of metrics.jsonl without times and evaluations."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {key: row[key] for key in row if "second" not in key and "eval/" not in key} for row in rows
    ]


def test_run_a_sampler_that_is_stale(tmp_path):
    """It has the weights of iterations 1, 1, 1, 4, 4 and 4, also in a run that was stopped in between:
    the copy is in the checkpoint. What measures a mismatch measures the staleness."""
    lines = []
    for folder, stops in (("whole", [6]), ("stopped", [5, 6])):
        for stop in stops:
            more = ("--iterations", stop, "--run_dir", tmp_path / folder, "--resume", "--lr", 2e-3)
            result = run("grpo", *small("grpo"), *STALE, *more, held_out=4)
            assert result.returncode == 0, result.stderr
        lines.append(metrics_of(tmp_path / folder))
    assert lines[0] == lines[1]
    assert all(row["losses/first_step_ratio_error_max"] == 0 for row in lines[0])
    kl = [row["rollout/sampler_kl"] for row in lines[0]]
    assert max(kl[0], kl[3]) < min(kl[1], kl[2], kl[4], kl[5]) / 10
