from types import SimpleNamespace

import pytest
from rl_loss_vectors import cases
from shapes import ppo_policy_loss  # in SkyRL: from its ppo_utils


def dr_grpo(logprobs, old_logprobs, advantages, mask, max_new_tokens):
    config = SimpleNamespace(eps_clip_low=0.2, eps_clip_high=0.2, max_seq_len=max_new_tokens)
    return ppo_policy_loss(logprobs, old_logprobs, advantages, config, loss_mask=mask)


@pytest.mark.parametrize("case", cases("dr_grpo", dr_grpo, dtype="float32"))
def test_dr_grpo(case):
    case.check()
