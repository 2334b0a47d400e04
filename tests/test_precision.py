"""With --dtype bfloat16 a copy computes, and float32 masters make it learn. Which weights stay in
float32: test_architectures.py. That the copy follows the masters: test_main.py, which runs with copies.
Resumed runs: test_resume.py."""

import pytest
import torch
from conftest import MIXED, problems_of, script_args
from torch import nn

import ppo
from common import collate, sample, token_logprobs
from plumbing.model import Policy, TrainedModel, working_copy


def test_the_masters_never_compute(own_policy):
    """Neither in sampling, nor for log-probs and values."""
    policy = Policy(own_policy.master, own_policy.tokenizer, "bfloat16")
    critic = TrainedModel(ppo.Critic(policy), "bfloat16")
    for master in (policy.master, critic.master):
        master.register_forward_pre_hook(lambda *_: pytest.fail("float32"))
    args = script_args("grpo", max_new_tokens=12)[1]
    batch = collate(sample(policy, problems_of(policy, *MIXED), 4, args), 3, args)
    assert critic.model(batch).dtype == torch.float32  # a head in bfloat16 has steps of 0.002 near 0.5
    assert token_logprobs(policy, batch, 1.0).logprobs_BT.requires_grad


def test_gradients_of_micro_batches_add_up_in_float32():
    """To the bit; in bfloat16 a sum of many would stop growing. The copy keeps no gradients, and a
    frozen weight gets none."""
    master = nn.Linear(8, 8)
    master.bias.requires_grad_(False)
    model = working_copy(master, "bfloat16")
    expected = torch.zeros(8, 8)
    for x in torch.randn(5, 8, generator=torch.Generator().manual_seed(0)).bfloat16():
        (gradient,) = torch.autograd.grad(model(x).square().sum(), model.weight)
        expected += gradient
        model(x).square().sum().backward()
    assert gradient.dtype == torch.bfloat16
    assert torch.equal(master.weight.grad, expected)
    assert model.weight.grad is None and master.bias.grad is None
