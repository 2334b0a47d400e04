from pathlib import Path
from types import SimpleNamespace

import pytest
from rl_loss_vectors import cases
from shapes import agg_loss, compute_policy_loss_vanilla  # in verl: from verl.trainer.ppo.core_algos

KNOWN = Path(__file__).parent / "xfails_verl.txt"


def dapo(logprobs, old_logprobs, advantages, mask, clip_eps_low, clip_eps_high):
    config = SimpleNamespace(clip_ratio_low=clip_eps_low, clip_ratio_high=clip_eps_high)
    return compute_policy_loss_vanilla(old_logprobs, logprobs, advantages, mask, "token-mean", config)


def reduced(terms, mask, num_sequences=None):
    return agg_loss(terms, mask, "seq-mean-token-mean", global_batch_size=num_sequences)


@pytest.mark.parametrize("case", cases("dapo", dapo, KNOWN))
def test_dapo(case):
    case.check()


@pytest.mark.parametrize("case", cases("grpo", reduced, KNOWN, way="reduction"))
def test_sequence_mean(case):
    case.check()
