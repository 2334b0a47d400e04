"""With --dtype bfloat16 a copy computes, and float32 masters make it learn. Which weights stay in
float32: test_architectures.py. Resumed runs: test_resume.py."""

import pytest
import torch
from conftest import MIXED, problems_of, script_args
from torch import nn

import ppo
from common import collate, critic_values, record_old_policy, sample, token_logprobs
from plumbing.model import Policy, TrainedModel, working_copy


def settings(**changes):
    return script_args("grpo", max_new_tokens=12, **changes)[1]


def rollout(policy, args):
    noise = torch.Generator().manual_seed(0)
    return collate(sample(policy, problems_of(policy, *MIXED), 4, args, noise), args)


def test_the_masters_never_compute(own_policy):
    """Neither in sampling, nor for old log-probs, values, and the update."""
    policy = Policy(own_policy.master, own_policy.tokenizer, "bfloat16")
    critic = TrainedModel(ppo.Critic(policy), "bfloat16")
    for master in (policy.master, critic.master):
        master.register_forward_pre_hook(lambda *_: pytest.fail("float32"))
    args = settings()
    batch = rollout(policy, args)
    record_old_policy(policy, batch, args)
    critic_values(critic, batch, args)
    assert token_logprobs(policy, batch, 1.0).logprobs_BT.requires_grad


def test_small_updates_add_up_in_the_master_and_the_copy_follows():
    """In bfloat16 alone, a weight that moves by 1e-4 of its size would stay where it is."""
    master = nn.Linear(8, 8, bias=False)
    nn.init.uniform_(master.weight, 0.5, 2.0)
    start = master.weight.detach().bfloat16()
    with torch.no_grad():
        master.weight.copy_(start)
    assert torch.equal(start + 1e-4 * start, start)
    trained = TrainedModel(master, "bfloat16")
    optimizer = torch.optim.SGD(trained.parameters(), lr=1e-4)
    for _ in range(100):
        (-trained.model.weight * start).sum().backward()  # the gradient is -start: up by 1e-4 of it
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(trained.model.weight, master.weight.bfloat16())
    torch.testing.assert_close(master.weight, 1.01 * start.float(), rtol=1e-5, atol=0)
    assert ((trained.model.weight.float() / start.float() - 1.01).abs() < 2**-8).all()


def test_micro_batches_add_up_in_float32(own_policy):
    """To the bit; in bfloat16 a sum of many would stop growing. The copy keeps no gradients, and a
    frozen weight gets none."""
    master = own_policy.master
    batch = rollout(own_policy, settings())
    batches = (batch[range(12)], batch[range(12, len(batch))])
    master.model.norm.weight.requires_grad_(False)
    policy = own_policy.with_model(working_copy(master, "bfloat16"))

    def loss_of(batch):
        outputs = token_logprobs(policy, batch, 0.7)
        return (outputs.logprobs_BT * torch.linspace(-1, 1, len(batch))[:, None]).sum()

    weights = [weight for weight in policy.model.parameters() if weight.requires_grad]
    first, second = (torch.autograd.grad(loss_of(batch), weights) for batch in batches)
    for batch in batches:
        loss_of(batch).backward()
    seen = [weight.grad for weight in master.parameters() if weight.grad is not None]
    assert len(seen) == len(list(master.parameters())) - 1
    assert all(weight.grad is None for weight in policy.model.parameters())
    for gradient, a, b in zip(seen, first, second, strict=True):
        assert a.dtype == torch.bfloat16 and gradient.dtype == torch.float32
        assert torch.equal(gradient, a.float() + b.float())
