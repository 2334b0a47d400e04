"""more/mismatch.py: the sampler's weights, routing replay, and statistics. What weights the rules give:
test_conformance.py. The gradients of a run: test_main.py. Replay in other architectures:
test_architectures.py."""

import math
from itertools import chain
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from conftest import batch_of_ids, checkpoint_of, completes, interfere, metrics, refused

import common
import rspo
from common import Routing, TokenOutputs, token_logprobs
from more import mismatch
from more.mismatch import ReplacedChoice, Replay, rollout_weights, sampler_flips
from more.mismatch import weight_stats
from plumbing.metrics import add, sampler_stats, summarize

# ----------------------------------------------------------------------------- sampler and weights


@pytest.mark.parametrize("rule", ["sequence_tis", "sequence_mis", "geo_mask", "geo_filter", "icepop"])
def test_a_weight_of_a_logprob_that_is_nan_is_nan(rule):
    """It must end the run, not become 0 or the cap. Other rows keep their weights."""
    sampler_BT = torch.zeros(2, 3)
    sampler_BT[0, 1] = torch.nan
    weights = rollout_weights(torch.zeros(2, 3), sampler_BT, torch.ones(2, 3), rule=rule)
    assert weights[0].isnan().any() and (weights[1] == 1).all()


def halves(batch):
    """Two batches of one row each."""
    rows = [{name: tensor[i : i + 1] for name, tensor in vars(batch).items()} for i in (0, 1)]
    return [SimpleNamespace(**row, old=TokenOutputs(row["old_logprobs_BT"])) for row in rows]


def test_statistics_of_the_mismatch_and_the_weights():
    """By hand, over two batches."""
    batch = SimpleNamespace(
        old_logprobs_BT=torch.tensor([[0.2, -0.4], [0.1, math.nan]]),
        sampler_logprobs_BT=torch.zeros(2, 2),
        mask_BT=torch.tensor([[True, True], [True, False]]),
        weights=torch.tensor([[1, 0.5], [0, 9]]),
    )
    kl = (math.exp(0.2) + math.exp(-0.4) + math.exp(0.1) - 3 + 0.1) / 3
    assert sampler_stats(halves(batch)) == pytest.approx({"sampler_kl": kl})
    expected = {
        "rollout/weight_zero_frac": 1 / 3,
        "rollout/weight_mean": 1.5 / 3,
        "rollout/weight_effective_size": 1.5**2 / (3 * 1.25),
    }
    assert weight_stats(halves(batch)) == pytest.approx(expected)
    batch.weights = torch.tensor([[0.5], [1.0]])  # one per completion: 0.5 twice
    expected |= {"rollout/weight_zero_frac": 0, "rollout/weight_mean": 2 / 3}
    expected["rollout/weight_effective_size"] = 2**2 / (3 * 1.5)
    assert weight_stats(halves(batch)) == pytest.approx(expected)


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
    routing = Routing(policy.routers)
    live = token_logprobs(policy, batch, 1.0, router_logits=True, routing=routing)
    replay = Replay(policy.routers, others(routing.choices()))
    replayed = token_logprobs(policy, batch, 1.0, router_logits=True, routing=replay)
    assert not torch.equal(replayed.logprobs_BT, live.logprobs_BT)
    assert live.aux_loss.requires_grad and not live.router_logits[0].requires_grad
    torch.testing.assert_close(replayed.router_logits, live.router_logits)
    torch.testing.assert_close(replayed.aux_loss, live.aux_loss)
    assert torch.equal(replayed.experts_BTLK, live.experts_BTLK)  # the routers' own choice


@pytest.mark.parametrize("routing_replay, forwards", [("r2", 3), ("r3", 4)])
def test_run_replays_the_experts_before_the_update_and_in_it(
    routing_replay, forwards, tmp_path, monkeypatch
):
    """So the first ratio is 1. The sampler's experts, here made up, are replayed in the old policy's
    forward, too; the old policy's own are those of that forward."""
    replays = []
    calls = []

    def note_replay(replay, *_):
        used = torch.stack(list(replay.used.values()), dim=1)
        replays.append((used, replay.experts))

    def made_up(sampler, micro, args):
        experts = real(sampler, micro, args)
        return torch.tensor([6, 7], dtype=torch.int16).expand_as(experts)

    real = mismatch.sampler_experts
    monkeypatch.setattr(mismatch, "sampler_experts", made_up)
    interfere(monkeypatch, mismatch, "token_logprobs", lambda *_, **__: calls.append(None))
    interfere(monkeypatch, Replay, "__exit__", note_replay)
    flags = ("--routing_replay", routing_replay, "--lr", 0.01)
    completes("more.mismatch", *flags, "--run_dir", tmp_path)
    (line,) = metrics(tmp_path)
    assert line["losses/first_step_ratio_error_max"] == 0 and line["moe/expert_flip_frac"] > 0
    assert len(calls) == 2 * forwards
    assert all(torch.equal(used, given) for used, given in replays)
    if routing_replay == "r3":
        assert line["moe/sampler_flip_frac"] > 0.5
        assert all(
            (given == torch.tensor([6, 7])).all() for _, given in replays[1:]
        )  # after can_replay


def test_a_router_may_name_the_arguments_of_topk(tiny_policy):
    experts = torch.tensor([[[6, 7]], [[1, 0]]])  # (B * S, L, K)
    replay = Replay(tiny_policy.routers, experts)
    scores = torch.arange(16.0).view(2, 8)
    with ReplacedChoice(replay, 0):
        chosen = torch.topk(input=scores, k=2, dim=-1)
    assert torch.equal(chosen.indices, experts[:, 0])
    assert chosen.values.tolist() == [[6, 7], [9, 8]]


def test_a_copy_that_cannot_sample_is_refused(tmp_path, monkeypatch):
    """The policy is checked first."""
    fail = Mock(side_effect=ValueError("in int4"))
    interfere(monkeypatch, common, "check_sampler", fail, 2)
    expected = "--model tiny-moe: the sampler cannot run this architecture: ValueError in int4"
    refused("more.mismatch", "--run_dir", tmp_path, expected=expected)


def test_run_saves_no_sampler_that_is_refreshed_in_each_iteration(tmp_path):
    """One that may be stale is saved: test_resume.py."""
    completes("more.mismatch", "--rollout_refresh_every", 1, "--run_dir", tmp_path)
    saved = torch.load(checkpoint_of(tmp_path) / "trainer_state.pt")
    assert "sampler" not in saved["parts"]


def test_run_rspo_keeps_no_router_logits(tmp_path, monkeypatch):
    kept = []

    def at_log(run, steps, *_):
        kept.extend(micro.old.router_logits for micro in chain(*steps))

    interfere(monkeypatch, rspo.Run, "log", at_log)
    completes("rspo", "--run_dir", tmp_path)
    assert kept and not any(kept)


# ------------------------------------------------------------------------------------- statistics


def test_fraction_of_experts_that_the_sampler_did_not_share(tiny_policy, batch):
    """Against the old policy's choice, where a response token is predicted."""
    routing = Routing(tiny_policy.routers)
    with torch.no_grad():
        batch.old = token_logprobs(tiny_policy, batch, 1.0, routing=routing)
    batch.replayed = routing.choices().flip(-1).clone()  # in any order
    assert sampler_flips([batch])["moe/sampler_flip_frac"] == 0
    theirs_SLK = batch.replayed[: batch.tokens_BS.shape[1]]
    prompt, response = LENGTHS[0]
    for uncounted in (0, prompt + response - 1):  # a prompt's token, and what follows the last one
        theirs_SLK[uncounted] = others(theirs_SLK[uncounted])
    used = theirs_SLK[prompt - 1, 1]  # of the last layer, for the first token
    used[0] = next(expert for expert in range(8) if expert not in used)
    flips = sampler_flips([batch])["moe/sampler_flip_frac"].item()
    assert flips == pytest.approx(1 / 2 / 18, rel=1e-5)


def test_metrics_are_weighted_means_or_maxima():
    """Where no token counts, a key is absent, as is a mean over no token, which must not be NaN."""
    reports = {}
    for a, b, weight in ((1.0, -3.0, 1), (4.0, -5.0, 2), (9.0, 9.0, 0)):
        values = {"a": torch.tensor(a), "ratio_max": torch.tensor(b)}
        add(reports, "losses", values, weight)
    add(reports, "moe", {"a": torch.tensor(7.0), "whole/key": 2.0}, torch.tensor(0))
    add(reports, "losses", {"whole/key": 2.0}, 1)
    expected = {"losses/a": 3.0, "losses/ratio_max": -3.0, "whole/key": 2.0}
    assert summarize(reports) == expected
