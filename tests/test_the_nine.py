"""The claims and the computed numbers of study/the_nine.md, in float64."""

import importlib
import math

import pytest
import torch
from conftest import ROOT

import gmpo
import grpo
from more import rloo

F64 = torch.float64
PAGE = (ROOT / "study" / "the_nine.md").read_text()


def weights_of(name, r_BT, A_B1, mask_BT, **keywords):
    """dJ / d log pi of each token, by autograd; the old log-probs are 0."""
    script = importlib.import_module(name)
    logprobs_BT = r_BT.log().requires_grad_()
    loss, _ = script.policy_loss(logprobs_BT, 0 * r_BT, A_B1, mask_BT, **keywords)
    return torch.autograd.grad(-loss, logprobs_BT)[0]


def test_a_token_that_is_sampled_pushes_all_others():
    """d(A log pi_y) / dz_v = A (1[v = y] - pi_v): A < 0 raises all others, in proportion to pi."""
    z = torch.tensor([2.0, 1.0, 0.0, -1.0], dtype=F64, requires_grad=True)
    for A in (1.0, -1.0):
        (push,) = torch.autograd.grad(A * z.log_softmax(0)[1], z)
        expected = A * (torch.tensor([0.0, 1, 0, 0], dtype=F64) - z.detach().softmax(0))
        torch.testing.assert_close(push, expected)
        assert ((push > 0) == torch.tensor([A < 0, A > 0, A < 0, A < 0])).all()


def test_sapo_keeps_tokens_whose_ratio_has_fallen():
    """The slope f' at r = 0, where some sources say that it is 0; it is only so for a large r."""
    ones = torch.ones(1, 1, dtype=F64)
    for A, expected in ((1.0, "0.786"), (-1.0, "0.768")):
        r = 1e-8 * ones
        slope = (weights_of("sapo", r, A * ones, ones) / (r * A)).item()
        assert f"{slope:.3f}" == expected and expected in PAGE
        assert weights_of("sapo", 30 * ones, A * ones, ones).abs().item() < 1e-9


def test_what_compounds():
    """A clip bounds one rollout's step: after n of them the bounds differ by (1.28/1.2)^n. A token clip
    bounds each factor of a product, and gspo the mean of its logs."""
    factors = [(1.28 / 1.2) ** n for n in (20, 50, 100)]
    assert " ".join(f"{factor:.3g}" for factor in factors) == "3.64 25.2 635"
    assert "3.64, 25.2 and 635" in PAGE
    rollouts = [math.log(0.1 / 0.01) / math.log(bound) for bound in (1.2, 1.28)]
    assert [f"{n:.1f}" for n in rollouts] == ["12.6", "9.3"]
    assert "12.6 rollouts at the bound; at 1.28, 9.3" in " ".join(PAGE.split())
    assert 1e81 < 1.2**1024 < 2e81 and "1.2^1024 is about 10^81" in PAGE
    product = (1 + 4e-4) ** 10_000
    assert f"{product:.1f}" == "54.6" and "(1 + 4e-4)^10000 = 54.6" in PAGE


def test_gspo_does_not_shrink_a_shift_that_all_tokens_share():
    """It shrinks the mean of independent log-ratios, like 1 / sqrt(|o|). And the toy example that says
    of three ratios that they are all about 1.02 or 1.03: the third is 1, and is not clipped."""
    for length in (1, 10, 1000):
        r = torch.full((1, length), 1.1, dtype=F64)
        A = torch.ones(1, 1, dtype=F64)
        assert (weights_of("gspo", r, A, torch.ones_like(r)) == 0).all()  # clipped
    steps = [[1, 1, -1, 1, -1, 1], [1, -1, 1, -1, 1, 0], [-1, 1, -1, 1, 0, 0]]
    log_r = torch.tensor(steps, dtype=F64) / 10
    mask = torch.arange(6) < torch.tensor([[6], [5], [4]])
    s = (log_r.sum(1) / mask.sum(1)).exp()
    assert [f"{x:.3f}" for x in s.tolist()] == ["1.034", "1.020", "1.000"]
    assert "1.034, 1.020 and 1.000" in PAGE


def test_gspo_token_with_advantages_of_tokens():
    """sg[s_i] pi / sg[pi] weighs each token by its A; sg[s_i] s_i / sg[s_i] by the mean of all A."""
    r = torch.tensor([[1.1, 0.9, 1.2]], dtype=F64)
    A = torch.tensor([[1.0, -2.0, 3.0]], dtype=F64)
    wide = {"clip_eps_low": 0.5, "clip_eps_high": 0.5}
    s = r.log().mean().exp()
    ours = weights_of("gspo", r, A, torch.ones_like(r), variant="gspo_token", **wide)
    torch.testing.assert_close(ours, s * A / 3)
    logprobs = r.log().requires_grad_()
    s = logprobs.mean().exp()
    printed = (s.detach() * s / s.detach() * A).mean()
    (slope,) = torch.autograd.grad(printed, logprobs)
    torch.testing.assert_close(slope, (s * A.mean() / 3).expand(1, 3))


def test_rspo_as_printed_amplifies_wrong_answers():
    """The product to the power sgn(A): 1 / gamma where A < 0."""
    r = torch.ones(1, 4, dtype=F64)
    gamma = 0.9 * r
    for A in (1.0, -1.0):
        inputs = r, A * r[:, :1], r
        damped = weights_of("rspo", *inputs, router_shift_BT=gamma, shift="damped")
        literal = weights_of("rspo", *inputs, router_shift_BT=gamma, shift="literal")
        torch.testing.assert_close(damped, A * 0.9 * r / 4)
        torch.testing.assert_close(literal, A * 0.9**A * r / 4)


def test_a_ratio_of_whole_outputs_is_clipped_where_no_token_is():
    """R1's report prints min and clip at 0.2 of pi(o) / pi_old(o): 25 tokens at 1.01 are outside."""
    r = torch.full((1, 25), 1.01, dtype=F64)
    A = torch.ones(1, 1, dtype=F64)
    assert (weights_of("grpo", r, A, torch.ones_like(r)) > 0).all()
    assert f"{r.prod().item():.2f}" == "1.28" and "1.01^25 = 1.28" in PAGE


def test_a_geometric_mean_is_not_smaller_in_a_signed_total():
    """|J_gmpo| <= |J_grpo| holds for each completion, not for the sum: here grpo's is 0."""
    log_r = torch.tensor([[0.2, -0.2], [0.0, 0.0]], dtype=F64)
    balance = math.cosh(0.2)  # the arithmetic mean of the first completion's ratios
    A = torch.tensor([[1.0], [-balance]], dtype=F64)
    ones = torch.ones_like(log_r)
    arithmetic, _ = grpo.policy_loss(log_r, 0 * log_r, A, ones, clip_eps_low=9, clip_eps_high=9)
    geometric, _ = gmpo.policy_loss(log_r, 0 * log_r, A, ones)
    assert abs(arithmetic) < 1e-12 < 0.005 < abs(geometric)


def test_k3_needs_samples_of_the_policy():
    """E[k3] is KL(pi || ref) under pi, not under pi_old; with x upside down it is not that either."""
    noise = torch.Generator().manual_seed(0)
    pi, old, ref = torch.randn(3, 5, generator=noise, dtype=F64).log_softmax(1)
    x = (ref - pi).exp()
    k3 = x - x.log() - 1
    upside_down = 1 / x + x.log() - 1
    kl = (pi.exp() * (pi - ref)).sum()
    assert (pi.exp() * k3).sum() == pytest.approx(kl.item(), rel=1e-12)
    assert abs((old.exp() * k3).sum() - kl) > 0.05
    assert abs((pi.exp() * upside_down).sum() - kl) > 0.05
    # What ppo.py and the others log as approx_kl is the KL that TRPO bounds.
    r = (pi - old).exp()
    trpo = (old.exp() * (old - pi)).sum()
    assert (old.exp() * (r - 1 - r.log())).sum() == pytest.approx(trpo.item(), rel=1e-12)


def test_the_best_baseline():
    """E[R |s|^2] / E[|s|^2], s the gradient of log pi: the variance of (R - b) s is smallest there, and
    E[R] comes close. By enumeration over five answers."""
    z = torch.tensor([1.5, 0.5, 0.0, -0.5, -1.0], dtype=F64)
    R = torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0], dtype=F64)
    p = z.softmax(0)
    s = torch.eye(5, dtype=F64) - p  # row a: the gradient of log pi(a)
    square = (s**2).sum(1)

    def variance(b):
        g = (R - b)[:, None] * s
        return ((p * (g**2).sum(1)).sum() - (p @ g).square().sum()).item()

    best = ((p * R * square).sum() / (p * square).sum()).item()
    value = (p * R).sum().item()
    assert variance(best) < min(variance(best - 0.01), variance(best + 0.01))
    assert variance(best) < variance(value) < variance(0.0)


@pytest.mark.parametrize("G", [2, 3])
def test_expected_gradient_of_rloo_is_the_true_one(G):
    """By enumeration of all groups of three one-token answers. With the mean of all G it is shorter."""
    logits = torch.tensor([0.5, 0.0, -1.0], dtype=F64, requires_grad=True)
    R = torch.tensor([0.0, 1.0, 0.5], dtype=F64)
    groups = torch.cartesian_prod(*[torch.arange(3)] * G)

    def gradient(name):
        logprobs = logits.log_softmax(0)[groups]
        chance = logprobs.detach().sum(1, keepdim=True).exp()
        A = importlib.import_module(name).compute_advantages(R[groups]) * chance
        ones = torch.ones(logprobs.numel(), 1)
        loss, _ = rloo.policy_loss(logprobs.view(-1, 1), None, A.view(-1, 1), ones, num_sequences=G)
        return torch.autograd.grad(-loss, logits)[0]

    (truth,) = torch.autograd.grad((logits.softmax(0) * R).sum(), logits)
    torch.testing.assert_close(gradient("more.rloo"), truth)
    torch.testing.assert_close(gradient("dr_grpo"), truth * (G - 1) / G)
