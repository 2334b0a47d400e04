"""With --dtype bfloat16 a copy computes, and float32 masters make it learn. Which weights stay in
float32: test_architectures.py. That the copy follows the masters: test_main.py, which runs with copies.
Resumed runs: test_resume.py."""

import pytest
import torch
from conftest import MIXED, problems_of, script_args
from torch import nn

import ppo
from common import collate, old_policy, sample, token_logprobs
from plumbing.model import Policy, TrainedModel, working_copy


SHORT = script_args("grpo", max_new_tokens=12)[1]


def test_the_masters_never_compute(own_policy):
    """Neither in sampling, nor for old log-probs, values, and the update."""
    policy = Policy(own_policy.master, own_policy.tokenizer, "bfloat16")
    critic = TrainedModel(ppo.Critic(policy), "bfloat16")
    for master in (policy.master, critic.master):
        master.register_forward_pre_hook(lambda *_: pytest.fail("float32"))
    batch = collate(sample(policy, problems_of(policy, *MIXED), 4, SHORT), 3, SHORT)
    old_policy(policy, batch, SHORT)
    critic.model(batch)
    assert token_logprobs(policy, batch, 1.0).logprobs_BT.requires_grad


def test_a_critics_head_computes_in_float32(own_policy):
    """For hidden states of either precision, values are the literal ones, in float64, up to float32's
    rounding. In bfloat16 a value near 0.5 would be off by up to 0.002."""
    completions = sample(own_policy, problems_of(own_policy, *MIXED), 4, SHORT)
    batch = collate(completions, 3, SHORT)
    for dtype in ("float32", "bfloat16"):
        critic = TrainedModel(ppo.Critic(own_policy), dtype)
        head = critic.master.head.weight
        head.data = torch.randn(head.shape, generator=torch.Generator().manual_seed(0)) / head.shape[1]
        critic.refresh()
        outputs = []
        critic.model.body.register_forward_hook(lambda *args: outputs.append(args[2]))  # noqa: B023
        values_BT = critic.model(batch)
        hidden = outputs[0].last_hidden_state
        assert hidden.dtype == getattr(torch, dtype) and values_BT.dtype == torch.float32
        for i, c in enumerate(completions):
            first = len(c.problem.prompt_ids) - 1
            expected = hidden[i, first : first + len(c.ids)].double() @ head[0].double()
            assert (values_BT[i, : len(c.ids)] - expected).abs().max() < 1e-6
        values_BT.sum().backward()
        assert head.grad.dtype == torch.float32 and head.grad.any()


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
