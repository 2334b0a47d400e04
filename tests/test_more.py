"""RLOO: the numbers in its header, and that its expected gradient is the true one. What it shares with
other scripts is tested with them."""

import itertools

import pytest
import torch
from conftest import script_args

F64 = torch.float64


def test_a_leave_one_out_baseline_is_not_divided_by_a_std():
    """The numbers in rloo.py's header: for the only right one of eight the std of the others is 0; the
    std of all eight makes it grpo's z-score times 8/7."""
    module, _ = script_args("more.rloo")
    grpo, _ = script_args("grpo")
    rewards_PG = torch.tensor([[1.0, 0, 0, 0, 0, 0, 0, 0]])
    differences_PG = module.compute_advantages(rewards_PG)
    others = torch.stack([torch.cat([rewards_PG[0, :i], rewards_PG[0, i + 1 :]]) for i in range(8)])
    scaled = differences_PG[0] / (others.std(1) + 1e-6)
    assert scaled[0] == pytest.approx(1e6) and scaled[1] == pytest.approx(-0.378, abs=1e-3)
    z_score = differences_PG / (rewards_PG.std() + 1e-6)
    torch.testing.assert_close(z_score, 8 / 7 * grpo.compute_advantages(rewards_PG))


# ------------------------------------------------- the expected gradient, by enumeration
#
# Tokens are EOS, a and b, and a completion has at most two of them: seven completions. A policy is a
# table of logits: what came before (nothing, a, b), next token.

COMPLETIONS = [(0,), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2)]
REWARDS = torch.tensor([1, 1, 0.5, 1, 1, 0, 1], dtype=F64)
LOGITS = torch.randn(3, 3, generator=torch.Generator().manual_seed(0), dtype=F64)


def logprobs_of(logits):
    """Log-probs of the tokens of all completions, (7, 2), and their mask."""
    table = logits.log_softmax(-1)
    logprobs_OT = torch.zeros(len(COMPLETIONS), 2, dtype=F64)
    mask_OT = torch.zeros(len(COMPLETIONS), 2, dtype=torch.bool)
    for i, tokens in enumerate(COMPLETIONS):
        before = [0, *tokens]
        for t, token in enumerate(tokens):
            logprobs_OT[i, t] = table[before[t], token]
            mask_OT[i, t] = True
    return logprobs_OT, mask_OT


def true_gradient():
    """Of E[R]."""
    logits = LOGITS.clone().requires_grad_()
    logprobs_OT, _ = logprobs_of(logits)
    value = (logprobs_OT.sum(1).exp() * REWARDS).sum()
    return torch.autograd.grad(value, logits)[0].flatten()


def expected_gradient(compute_advantages, policy_loss, G):
    """Of J, over all groups that the policy may sample: each group's rows, its advantages times the
    probability of the group, since J is linear in the advantages."""
    logits = LOGITS.clone().requires_grad_()
    groups = torch.tensor(list(itertools.product(range(len(COMPLETIONS)), repeat=G)))
    logprobs_OT, mask_OT = logprobs_of(logits)
    group_logprob = logprobs_OT.detach().sum(1)[groups].sum(1, keepdim=True)
    advantages = compute_advantages(REWARDS[groups]) * group_logprob.exp()
    rows = groups.flatten()
    logprobs_BT = logprobs_OT[rows]
    given = (logprobs_BT, logprobs_BT.detach(), advantages.view(-1, 1), mask_OT[rows])
    loss, _ = policy_loss(*given, num_sequences=G)
    return -torch.autograd.grad(loss, logits)[0].flatten()


@pytest.mark.parametrize("G", [2, 3])
def test_expected_gradient_of_rloo_is_the_true_one(G):
    """With the mean of all G as the baseline it is shorter."""
    module, _ = script_args("more.rloo")
    dr_grpo, _ = script_args("dr_grpo")
    truth = true_gradient()
    ours = expected_gradient(module.compute_advantages, module.policy_loss, G)
    torch.testing.assert_close(ours, truth, rtol=1e-10, atol=1e-13)
    mean_of_all = expected_gradient(dr_grpo.compute_advantages, module.policy_loss, G)
    torch.testing.assert_close(mean_of_all, truth * (G - 1) / G, rtol=1e-10, atol=1e-13)
