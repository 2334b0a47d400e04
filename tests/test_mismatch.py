"""When the sampler is not the trainer: routing replay, and statistics of it and of the weights that
correct for the difference. Those of routers: test_metrics.py. The weights: test_conformance.py and
test_main.py; what the sampler records, and replay in other architectures: test_architectures.py."""

import math
from itertools import chain
from types import SimpleNamespace

import pytest
import torch
from conftest import MORE, SCRIPTS, batch_of_ids, completes, interfere, metrics, script_args

import common
import rspo
from common import OldOutputs, old_policy, reference_logprobs, sample, token_logprobs
from plumbing.model import checkpoint_layers
from plumbing.metrics import add, correction_stats, summarize
from plumbing.routing import Routing


def halves(batch):
    """Two batches of one row each."""
    rows = [{name: tensor[i : i + 1] for name, tensor in vars(batch).items()} for i in (0, 1)]
    return [SimpleNamespace(**row, old=OldOutputs(row["old_logprobs_BT"])) for row in rows]


def test_statistics_of_the_mismatch_and_the_weights():
    """By hand, over two batches."""
    args = script_args("grpo", rollout_correction="token_tis", rollout_cap=1.0)[1]
    batch = SimpleNamespace(
        old_logprobs_BT=torch.tensor([[0.2, -0.4], [0.1, math.nan]]),
        sampler_logprobs_BT=torch.zeros(2, 2),
        mask_BT=torch.tensor([[True, True], [True, False]]),
        correction_weights=torch.tensor([[1, 0.5], [0, 9]]),
    )
    expected = {
        "sampler_kl": (math.exp(0.2) + math.exp(-0.4) + math.exp(0.1) - 3 + 0.1) / 3,
        "weight_zero_frac": 1 / 3,
        "weight_cap_frac": 1 / 3,
        "weight_mean": 1.5 / 3,
        "weight_effective_size": 1.5**2 / (3 * 1.25),
    }
    assert correction_stats(halves(batch), args) == pytest.approx(expected)
    batch.correction_weights = torch.tensor([[0.5], [1.0]])  # one per completion
    expected |= {"weight_zero_frac": 0, "weight_cap_frac": 1 / 2, "weight_mean": 1.5 / 2}
    expected["weight_effective_size"] = 1.5**2 / (2 * 1.25)
    assert correction_stats(halves(batch), args) == pytest.approx(expected)


# ----------------------------------------------------------------------------- routing replay


LENGTHS = [(3, 5), (6, 2), (1, 7), (3, 4)]  # of prompt and response


@pytest.fixture
def batch():
    """Four sequences, 18 response tokens."""
    ids = list(range(3, 17))
    return batch_of_ids([(ids[:prompt], ids[-response:]) for prompt, response in LENGTHS])


def others(experts):
    """The next ones, of eight."""
    return (experts + 1) % 8


def test_the_aux_loss_stays_live(own_policy, batch):
    """As do the router logits, which have no gradient. The first router reads the same tokens whatever
    is replayed; alone, it has the same aux loss."""
    own_policy.model.model.layers = own_policy.model.model.layers[:1]
    policy = own_policy.with_model(own_policy.model)
    live = token_logprobs(policy, batch, 1.0, router_logits=True)
    replay_BSLK = others(live.routers.choices_BSLK)
    replayed = token_logprobs(policy, batch, 1.0, replay=replay_BSLK, router_logits=True)
    assert not torch.equal(replayed.logprobs_BT, live.logprobs_BT)
    assert live.aux_loss.requires_grad and not live.routers.logits[0].requires_grad
    torch.testing.assert_close(replayed.routers.logits, live.routers.logits)
    torch.testing.assert_close(replayed.aux_loss, live.aux_loss)


def test_a_recomputation_leaves_what_the_forward_recorded(own_policy, batch, monkeypatch):
    """The logits' graph is that of the forward, which the aux loss needs."""
    recorded = Routing(own_policy.routers)
    monkeypatch.setattr(common, "Routing", lambda *_: recorded)
    checkpoint_layers(own_policy.model)
    outputs = token_logprobs(own_policy, batch, 1.0)
    before = [*recorded.used.items(), *recorded.logits.items()]
    calls = []
    own_policy.routers.modules[0].register_forward_hook(lambda *_: calls.append(None))
    outputs.logprobs_BT.sum().backward()
    assert calls
    after = [*recorded.used.items(), *recorded.logits.items()]
    assert all(old is new for (_, old), (_, new) in zip(before, after, strict=True))


def test_what_old_policy_update_and_reference_replay(tiny_policy, batch):
    """With r2 the old policy routes live, and the update replays its experts. With r3 both replay those
    of the sampler. A reference always routes live."""
    _, args = script_args("grpo", routing_replay="r2", num_minibatches=2)
    with torch.no_grad():
        live = token_logprobs(tiny_policy, batch, 1.0)
    old = old_policy(tiny_policy, batch, args)
    torch.testing.assert_close(old.logprobs_BT, live.logprobs_BT)
    real = batch.is_token_BS
    assert torch.equal(old.replay_BSLK[real], live.routers.choices_BSLK[real])
    own_BTLK = old.routers.experts_BTLK
    assert torch.equal(own_BTLK[batch.mask_BT], live.routers.experts_BTLK[batch.mask_BT])
    args.routing_replay = "r3"
    batch.sampler_experts_BSLK = experts = others(live.routers.choices_BSLK)
    old = old_policy(tiny_policy, batch, args)
    assert not torch.allclose(old.logprobs_BT, live.logprobs_BT, atol=1e-5)
    assert old.replay_BSLK is experts
    args.old_logprobs = "sampler"
    old = old_policy(None, batch, args)
    assert old.logprobs_BT is batch.sampler_logprobs_BT and old.replay_BSLK is experts
    torch.testing.assert_close(reference_logprobs(tiny_policy, batch, args), live.logprobs_BT)


def test_old_policy_and_reference_compute_only_what_is_read(tiny_policy, batch, monkeypatch):
    """With a large vocabulary, entropies would take a quarter of the update."""
    seen = []

    def token_logprobs(*inputs, **keywords):
        seen.append(original(*inputs, **keywords))
        return seen[-1]

    original = common.token_logprobs
    monkeypatch.setattr(common, "token_logprobs", token_logprobs)
    _, args = script_args("grpo")
    old_policy(tiny_policy, batch, args)
    reference_logprobs(tiny_policy, batch, args)
    assert [outputs.entropy_BT for outputs in seen] == [None, None]
    assert [outputs.aux_loss for outputs in seen] == [None, None]
    assert [outputs.routers.logits for outputs in seen] == [None, None]


def sample_and_make_up(*inputs):
    """The experts are the last two of eight."""
    completions = []
    for c in sample(*inputs):
        made_up = torch.tensor([6, 7]).expand_as(c.experts)
        completions.append(c._replace(experts=torch.where(c.experts < 0, -1, made_up)))
    return completions


@pytest.mark.parametrize("name", [*SCRIPTS, *MORE])
def test_run_r3_replays_the_samplers_experts_before_the_update_and_in_it(
    name, tmp_path, monkeypatch, reward_file
):
    """So the first ratio is 1, though the routers would choose other experts."""
    script, args = script_args(name)
    monkeypatch.setattr(script, "sample", sample_and_make_up)
    flags = ["--iterations", 1 + getattr(args, "pretraining_iterations", 0)]
    flags += ["--reward", reward_file("return len(text) > 7")]  # so that dapo finds mixed groups
    completes(name, *flags, "--routing_replay", "r3", "--run_dir", tmp_path)
    line = metrics(tmp_path)[-1]
    assert line["losses/first_step_ratio_error_max"] == 0 and line["moe/sampler_flip_frac"] > 0.5


def test_run_r3_lets_rspo_measure_the_replayed_experts(tmp_path, monkeypatch):
    """Of the old policy's router logits, it keeps theirs alone."""
    measured = []
    kept = []

    def at_scores(router_logits, experts_BTLK):
        measured.extend(experts_BTLK[:, 0].flatten().tolist())  # the first token is no padding

    def at_log(run, steps, *_):
        kept.extend(micro.old.routers.logits for micro in chain(*steps))

    monkeypatch.setattr(rspo, "sample", sample_and_make_up)
    interfere(monkeypatch, rspo, "expert_logprobs", at_scores)
    interfere(monkeypatch, rspo.Run, "log", at_log)
    completes("rspo", "--routing_replay", "r3", "--run_dir", tmp_path)
    assert set(measured) == {6, 7} and not any(kept)


# ------------------------------------------------------------------------------------- statistics


def test_fraction_of_experts_that_the_sampler_did_not_share(tiny_policy, batch):
    """Against the old policy's choice, for response tokens whose experts the sampler has recorded."""
    _, args = script_args("grpo", routing_replay="r3")
    own = token_logprobs(tiny_policy, batch, 1.0)
    replay_BSLK = own.routers.choices_BSLK.flip(-1).clone()  # in any order
    batch.old = OldOutputs(own.logprobs_BT.detach(), own.routers, replay_BSLK)
    assert correction_stats([batch], args)["moe/sampler_flip_frac"] == 0
    prompt, response = LENGTHS[0]
    theirs_SLK = replay_BSLK[0]
    for uncounted in (0, prompt + response - 1):  # a prompt's token, and what follows the last one
        theirs_SLK[uncounted] = others(theirs_SLK[uncounted])
    theirs_SLK[prompt] = -1  # not recorded
    used = theirs_SLK[prompt - 1, 1]  # of the last layer, for the first token
    used[0] = next(expert for expert in range(8) if expert not in used)
    stats = correction_stats([batch], args)
    assert stats["moe/sampler_flip_frac"].item() == pytest.approx(1 / 2 / 18, rel=1e-5)


def test_means_weigh_and_keep_extremes():
    """Where no token counts, a key is absent, as is a mean over no token, which must not be NaN."""
    reports = {}
    for a, b, weight in ((1.0, -3.0, 1), (4.0, -5.0, 2), (9.0, 9.0, 0)):
        values = {"a": torch.tensor(a), "ratio_max": torch.tensor(b)}
        add(reports, "losses", values, weight)
    add(reports, "moe", {"a": torch.tensor(7.0), "whole/key": 2.0}, torch.tensor(0))
    add(reports, "losses", {"whole/key": 2.0}, 1)
    expected = {"losses/a": 3.0, "losses/ratio_max": -3.0, "whole/key": 2.0}
    assert summarize(reports) == expected
