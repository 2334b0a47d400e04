"""The identities that pin each objective down with numbers worked out by hand; all in float64."""

import math

import pytest
import torch
from conftest import SCRIPTS, keywords_of, script_args

F64 = torch.float64


def tensor(x):
    return torch.tensor(x, dtype=F64)


def gradient(name, lp, old, adv, mask, changes=None, **extra):
    """dJ/dlp = -d(loss)/dlp, and J; the normaliser is that of the rows given. `adv` is (B, 1) or
    (B, T)."""
    module, args = script_args(name, **(changes or {}))
    lp = lp.detach().clone().requires_grad_()
    loss, _ = module.policy_loss(lp, old, adv, mask, **keywords_of(module.policy_loss, args, **extra))
    loss.backward()
    return -lp.grad, -loss.item()


def on_policy():
    mask = tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 0, 0]])
    lp = -torch.arange(1, 17, dtype=F64).view(4, 4) / 7
    return lp, lp.clone(), tensor([[1.5], [-0.5], [0.25], [-2.0]]), mask


VARIANTS = {
    "grpo": {},
    "gspo": {},
    "gspo_token": {"variant": "gspo_token"},
    "gmpo": {},
    "rspo": {},
    "sapo": {},
    "dapo": {},
    "cispo": {},
    "dr_grpo": {},
    "ppo": {},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_first_step_gradient(variant):
    """1: with lp_old = lp every member of the family is a policy gradient with the same weights."""
    name = variant.split("_token")[0]
    lp, old, adv, mask = on_policy()
    lengths, N = mask.sum(1, keepdim=True), 4
    per_sequence = adv / (N * lengths) * mask
    expected = {
        "dapo": adv / 10 * mask,
        "cispo": adv / 10 * mask,
        "dr_grpo": adv / (N * 48) * mask,
    }
    if name == "ppo":
        adv = torch.arange(16, dtype=F64).view(4, 4) - 7
        expected["ppo"] = adv / 10 * mask
    grad, _ = gradient(name, lp, old, adv, mask, changes=VARIANTS[variant])
    torch.testing.assert_close(grad, expected.get(name, per_sequence), rtol=1e-12, atol=1e-15)
    assert (grad[mask == 0] == 0).all()


def test_group_advantages():
    """2: with and without the std; groups do not mix."""
    rewards = tensor([[1, 0, 0, 0], [3, 3, 3, 7]])
    for name in set(SCRIPTS) - {"ppo"}:
        module, _ = script_args(name)
        A = module.compute_advantages(rewards)
        expected = [[1.5, -0.5, -0.5, -0.5], [-0.5, -0.5, -0.5, 1.5]]
        if name == "dr_grpo":
            expected = [[0.75, -0.25, -0.25, -0.25], [-1, -1, -1, 3]]
        torch.testing.assert_close(A, tensor(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", sorted(set(SCRIPTS) - {"ppo"}))
def test_equal_rewards_give_exactly_zero(name, dtype):
    """2: the float32 mean of seven times 0.1 is not 0.1, and that must not become an advantage."""
    module, _ = script_args(name)
    rewards = torch.full((2, 7), 0.1, dtype=dtype)
    rewards[1, 3] = 0.2
    A = module.compute_advantages(rewards)
    assert (A[0] == 0).all() and (A[1] != 0).all()


CLIP_TABLE = [(-10, 0.5, -8, 0), (-10, 1.5, -15, -15), (10, 1.5, 12, 0), (10, 0.5, 5, 5)]


@pytest.mark.parametrize("A, r, value, slope", CLIP_TABLE)
@pytest.mark.parametrize("name", ["ppo", "grpo", "dr_grpo", "dapo", "gspo"])
def test_clip_table(name, A, r, value, slope):
    """3: one token, eps 0.2: the pessimistic side of the clip under either sign."""
    scale = 1 / 48 if name == "dr_grpo" else 1
    changes = {"clip_eps_low": 0.2, "clip_eps_high": 0.2}
    grad, J = gradient(
        name, tensor([[math.log(r)]]), tensor([[0.0]]), tensor([[A]]), tensor([[1]]), changes
    )
    assert J == pytest.approx(value * scale, rel=1e-12)
    assert grad.item() == pytest.approx(slope * scale, rel=1e-12)


def test_gspo_token():
    """4: the sequence ratio by hand; gspo_token is gspo for a shared A, and weighs each token by its
    own A."""
    lp = tensor([[0.1, -0.1, 0.2]])
    old = torch.zeros(1, 3, dtype=F64)
    mask = torch.ones(1, 3, dtype=F64)
    wide = {"clip_eps_low": 0.5, "clip_eps_high": 0.5}
    s = 1.0689391
    grad, J = gradient("gspo", lp, old, tensor([[2.0]]), mask, changes=wide)
    assert J == pytest.approx(2 * s, abs=1e-7)
    token_grad, token_J = gradient(
        "gspo", lp, old, tensor([[2.0]]), mask, changes={**wide, "variant": "gspo_token"}
    )
    assert token_J == pytest.approx(J, rel=1e-12)
    torch.testing.assert_close(token_grad, grad, rtol=1e-12, atol=0)
    A = tensor([[1.0, -2.0, 3.0]])
    grad, _ = gradient("gspo", lp, old, A, mask, changes={**wide, "variant": "gspo_token"})
    torch.testing.assert_close(grad, s * A / 3, rtol=1e-7, atol=0)


def test_sapo_gate():
    """5: f'(1) = 1 for every tau, f'(2) at tau 1 by hand, and f(1) = 2 / tau."""
    for A, tau in ((1.0, 1.0), (-1.0, 1.05)):
        for r in (0.2, 1.0, 2.0):
            grad, J = gradient(
                "sapo", tensor([[math.log(r)]]), tensor([[0.0]]), tensor([[A]]), tensor([[1]])
            )
            slope = 1 / math.cosh(tau * (r - 1) / 2) ** 2
            assert grad.item() == pytest.approx(slope * r * A, rel=1e-12)
            if r == 1:
                assert slope == 1 and J == pytest.approx(A * 2 / tau, rel=1e-12)
            if r == 2 and A == 1:
                assert slope == pytest.approx(0.7864477, abs=1e-7)


def test_gmpo_without_clip_is_gspo_without_clip():
    """6"""
    lp, old, adv, mask = on_policy()
    lp = lp + torch.sin(torch.arange(16, dtype=F64)).view(4, 4)
    a = gradient("gmpo", lp, old, adv, mask, changes={"log_ratio_clip": 100.0})
    b = gradient("gspo", lp, old, adv, mask, changes={"clip_eps_low": 1e6, "clip_eps_high": 1e6})
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-15)


def test_gmpo_is_below_the_arithmetic_mean_and_tames_an_outlier():
    """6: |A| GM <= |A| AM per response with the same clip; one token at log r = 10 of 100 weighs e^0.1,
    not e^10."""
    g = torch.Generator().manual_seed(0)
    wide = {"clip_eps_low": 1 - math.exp(-0.4), "clip_eps_high": math.exp(0.4) - 1}
    zero = torch.zeros(1, 8, dtype=F64)
    mask = torch.ones(1, 8)
    for A in (1.0, -1.0):
        for _ in range(20):
            log_r = torch.randn(1, 8, generator=g, dtype=F64)
            _, gm = gradient("gmpo", log_r, zero, tensor([[A]]), mask)
            _, am = gradient("grpo", log_r, zero, tensor([[A]]), mask, changes=wide)
            assert abs(gm) <= abs(am) + 1e-12
    log_r = torch.zeros(1, 100, dtype=F64)
    mask = torch.ones(1, 100)
    log_r[0, 7] = 10.0
    gmpo, _ = gradient("gmpo", log_r, torch.zeros(1, 100, dtype=F64), tensor([[-1.0]]), mask)
    grpo, _ = gradient("grpo", log_r, torch.zeros(1, 100, dtype=F64), tensor([[-1.0]]), mask)
    assert gmpo[0, 7].item() == pytest.approx(-math.exp(0.1) / 100, rel=1e-12)
    assert grpo[0, 7].item() == pytest.approx(-math.exp(10) / 100, rel=1e-12)


def test_gmpo_clip_of_the_whole_product():
    """The counter-example of the paper: the sum of the log-ratios is clipped, on the side that A asks
    for, and then divided by |o|. Where it binds, the whole completion has no gradient."""
    log_r = tensor([[0.3, 0.3, 0.3]])
    old = torch.zeros(1, 3, dtype=F64)
    mask = torch.ones(1, 3)
    changes = {"clip_level": "sequence", "log_ratio_clip": 0.4}
    grad, J = gradient("gmpo", log_r, old, tensor([[1.0]]), mask, changes)
    assert J == pytest.approx(math.exp(0.4 / 3), rel=1e-12) and (grad == 0).all()
    grad, J = gradient("gmpo", log_r, old, tensor([[-1.0]]), mask, changes)
    assert J == pytest.approx(-math.exp(0.9 / 3), rel=1e-12)
    torch.testing.assert_close(grad, torch.full_like(grad, -math.exp(0.3) / 3), rtol=1e-12, atol=0)
    # The mirror image, and a sum inside the range: 0.3 is less than 0.4, though their mean is the same.
    grad, J = gradient("gmpo", -log_r, old, tensor([[-1.0]]), mask, changes)
    assert J == pytest.approx(-math.exp(-0.4 / 3), rel=1e-12) and (grad == 0).all()
    grad, J = gradient("gmpo", log_r[:, :1], old[:, :1], tensor([[1.0]]), mask[:, :1], changes)
    assert J == pytest.approx(math.exp(0.3), rel=1e-12) and grad.item() == pytest.approx(math.exp(0.3))


def test_rspo_against_gmpo():
    """7: gamma = 1 is gmpo; gamma = c scales damped by c and literal by c^sgn(A); the floor holds."""
    lp, old, adv, mask = on_policy()
    lp = lp + torch.sin(torch.arange(16, dtype=F64)).view(4, 4) / 2
    base_grad, base_J = gradient("gmpo", lp, old, adv, mask)
    for shift in ("damped", "literal", "before_clip"):
        for gamma in (None, torch.ones(4, 4, dtype=F64)):
            grad, J = gradient(
                "rspo", lp, old, adv, mask, changes={"shift": shift}, router_shift_BT=gamma
            )
            assert J == pytest.approx(base_J, rel=1e-12)
            torch.testing.assert_close(grad, base_grad, rtol=1e-12, atol=1e-15)
    for gamma, c in ((0.9, 0.9), (0.3, 0.8)):  # 0.3 is below the floor
        gamma = torch.full((4, 4), gamma, dtype=F64)
        damped, _ = gradient("rspo", lp, old, adv, mask, router_shift_BT=gamma)
        literal, _ = gradient(
            "rspo", lp, old, adv, mask, changes={"shift": "literal"}, router_shift_BT=gamma
        )
        torch.testing.assert_close(damped, base_grad * c, rtol=1e-12, atol=1e-15)
        torch.testing.assert_close(literal, base_grad * c ** adv.sign(), rtol=1e-12, atol=1e-15)


def test_router_shift_by_hand():
    """7: two layers, K = 2, layer 1 from (.5, .25) to (.4, .3); a constant on all logits changes
    nothing."""
    import rspo

    old = tensor([0.5, 0.25, 0.15, 0.10]).log(), tensor([0.1, 0.2, 0.3, 0.4]).log()
    new = tensor([0.4, 0.3, 0.2, 0.1]).log(), tensor([0.1, 0.2, 0.3, 0.4]).log()
    old, new = (tuple(layer.view(1, 1, 4) for layer in layers) for layers in (old, new))
    experts = torch.tensor([[0, 1], [2, 3]]).view(1, 1, 2, 2)  # active under the old policy
    old_scores = rspo.expert_logprobs(old, experts)
    gamma = rspo.router_shift(rspo.expert_logprobs(new, experts), old_scores)
    assert gamma.item() == pytest.approx(0.903602, abs=1e-6)
    shifted = tuple(layer + 3.7 for layer in new)
    torch.testing.assert_close(
        rspo.router_shift(rspo.expert_logprobs(shifted, experts), old_scores), gamma
    )
    assert rspo.router_shift(old_scores, old_scores).item() == 1.0


def test_no_gradient_through_the_router_shift():
    """7"""
    lp, old, adv, mask = on_policy()
    gamma = torch.full((4, 4), 0.9, dtype=F64, requires_grad=True)
    module, args = script_args("rspo")
    lp = lp.requires_grad_()
    keywords = keywords_of(module.policy_loss, args, router_shift_BT=gamma)
    module.policy_loss(lp, old, adv, mask, **keywords)[0].backward()
    assert gamma.grad is None and lp.grad.abs().sum() > 0


def test_cispo():
    """8: the weight is capped at the cap itself, the token keeps its gradient; the PPO mask gives
    dapo's gradient."""
    lp, old, adv, mask = on_policy()
    lp = lp + 1.5 * torch.sin(torch.arange(16, dtype=F64)).view(4, 4)
    grad, _ = gradient("cispo", lp, old, adv, mask, changes={"is_weight_cap": 2.0})
    weight = (lp - old).exp().clamp(max=2.0)
    torch.testing.assert_close(grad, weight * adv / 10 * mask, rtol=1e-12, atol=1e-15)
    bounds = {"clip_eps_low": 0.2, "clip_eps_high": 0.28}
    masked, _ = gradient("cispo", lp, old, adv, mask, changes={"ppo_mask": True, **bounds})
    dapo, _ = gradient("dapo", lp, old, adv, mask, changes=bounds)
    torch.testing.assert_close(masked, dapo, rtol=1e-12, atol=1e-15)
    assert ((dapo == 0) & (mask == 1)).any()


def test_normalisers_agree_for_equal_lengths():
    """9"""
    g = torch.Generator().manual_seed(1)
    old = -torch.rand(6, 5, generator=g, dtype=F64)
    mask = torch.ones(6, 5)
    adv = torch.randn(6, 1, generator=g, dtype=F64)
    lp = old + 0.4 * torch.randn(6, 5, generator=g, dtype=F64)
    same = {"clip_eps_low": 0.2, "clip_eps_high": 0.2}
    _, grpo = gradient("grpo", lp, old, adv, mask, same)
    _, dapo = gradient("dapo", lp, old, adv, mask, same)
    _, dr = gradient("dr_grpo", lp, old, adv, mask, same)
    assert dapo == pytest.approx(grpo, rel=1e-12) and dr == pytest.approx(grpo * 5 / 48, rel=1e-12)


def test_soft_overlong_punishment():
    """10: what is cut off has 20 tokens too."""
    module, _ = script_args("dapo")
    lengths = torch.tensor([3, 12, 16, 20])
    penalty = module.overlong_penalty(lengths, max_new_tokens=20, overlong_cache=8)
    assert penalty.tolist() == [0, 0, -0.5, -1]


def test_gae_by_hand():
    """11: three lambdas; garbage in padding changes nothing; rows do not mix."""
    import ppo

    rewards, values, mask = tensor([[0, 0, 1.0]]), tensor([[0.5, 0.6, 0.7]]), tensor([[1, 1, 1]])
    A, returns = ppo.compute_gae(rewards, values, mask, 1.0, 0.95)
    torch.testing.assert_close(A, tensor([[0.46575, 0.385, 0.3]]))
    torch.testing.assert_close(returns, tensor([[0.96575, 0.985, 1.0]]))
    torch.testing.assert_close(ppo.compute_gae(rewards, values, mask, 1.0, 1.0)[0], 1 - values)
    torch.testing.assert_close(
        ppo.compute_gae(rewards, values, mask, 1.0, 0.0)[0], tensor([[0.1, 0.1, 0.3]])
    )
    bad = float("nan")
    padding = ((rewards, bad), (values, bad), (mask, 0))
    wide = [torch.cat([x, tensor([[y, y]])], dim=1) for x, y in padding]
    rows = [
        torch.cat([x, torch.rand(1, 5, dtype=F64) if i < 2 else torch.ones(1, 5)])
        for i, x in enumerate(wide)
    ]
    A2, returns2 = ppo.compute_gae(*rows, 1.0, 0.95)
    torch.testing.assert_close(A2[:1, :3], A)
    torch.testing.assert_close(returns2[:1, :3], returns)
    assert (A2[0, 3:] == 0).all() and (returns2[0, 3:] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gae_skips_holes(dtype):
    """11: tool output inside a completion, and prompt padding before it: the same, to the bit, as
    without these places, where both results are 0."""
    import ppo

    g = torch.Generator().manual_seed(6)
    rewards, values = (torch.randn(4, 9, generator=g, dtype=dtype) for _ in range(2))
    mask = torch.rand(4, 9, generator=g) < 0.6
    rewards[~mask] = float("nan")
    values[~mask] = 1e9
    A, returns = ppo.compute_gae(rewards, values, mask, 0.9, 0.8)
    assert (A[~mask] == 0).all() and (returns[~mask] == 0).all()
    for i in range(4):
        closed = [x[i, mask[i]][None] for x in (rewards, values, mask)]
        A_closed, returns_closed = ppo.compute_gae(*closed, 0.9, 0.8)
        assert torch.equal(A[i, mask[i]], A_closed[0])
        assert torch.equal(returns[i, mask[i]], returns_closed[0])


def test_the_last_reward_stands_on_the_last_token():
    """Also where the mask has holes; the value after it is that of the next place."""
    import ppo

    mask = torch.tensor([[1, 1, 0, 1, 0], [1, 1, 1, 1, 1], [0, 1, 0, 0, 0]]).bool()
    values = torch.arange(18.0).view(3, 6)
    is_cut_off = tensor([[1.0], [1.0], [0.0]])
    given = tensor([[7.0], [8.0], [9.0]]), tensor([[0.0] * 5] * 3), values.double(), is_cut_off
    rewards = ppo.token_rewards(*given, mask, 0.1, 0.5)
    expected = tensor([[0.0] * 5] * 3)
    expected[0, 3] = 7 + 0.5 * 4
    expected[1, 4] = 8 + 0.5 * 11
    expected[2, 1] = 9
    assert torch.equal(rewards, expected)


def test_value_loss_and_whitening():
    import ppo

    # The clipped value is 0.7: too far from 1 by 0.3, so the larger error counts and has no gradient.
    v = tensor([[0.9, 0.1]]).requires_grad_()
    inputs = v, tensor([[0.5, 0.0]]), tensor([[1.0, 0.0]]), tensor([[1, 1]])
    loss = ppo.value_loss(*inputs, value_clip=0.2, num_tokens=2)
    loss.backward()
    assert loss.item() == pytest.approx((0.09 + 0.01) / 2)
    assert v.grad.tolist() == [[0.0, pytest.approx(0.1)]]
    assert ppo.value_loss(*inputs, num_tokens=4).item() == pytest.approx(loss.item() / 2)
    assert ppo.value_loss(*inputs) == ppo.value_loss(*inputs, num_tokens=None) == loss
    first = [x[:, :1] for x in inputs]
    assert ppo.value_loss(*first, value_clip=0.0).item() == pytest.approx(0.01)
    x = tensor([[1.0, 2, 3, float("nan")], [9, 5, float("inf"), 0]])
    mask = tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
    white = ppo.whiten(x, mask)[mask.bool()]
    assert white.mean().item() == pytest.approx(0, abs=1e-12)
    assert white.var(unbiased=False).item() == pytest.approx(1)


def k3_of(log_ratio_ref_over_pi):
    """The KL term that grpo computes for one token: its loss at kl_coef 1 with A = 0."""
    module, args = script_args("grpo", kl_coef=1.0)
    lp = tensor([[-1.0]])
    keywords = keywords_of(module.policy_loss, args, ref_logprobs_BT=lp + log_ratio_ref_over_pi)
    loss, stats = module.policy_loss(lp, lp, tensor([[0.0]]), tensor([[1]]), **keywords)
    assert loss.item() == stats["kl_ref"].item()
    return loss.item()


def test_k3_by_hand():
    """12: log(pi / ref) = 0.2; the reversed formula would give 0.0214028."""
    assert k3_of(-0.2) == pytest.approx(0.0187308, abs=1e-7)


def test_k3_is_the_kl_in_expectation():
    """12: by enumeration over a vocabulary of five."""
    g = torch.Generator().manual_seed(3)
    pi, ref = (torch.randn(5, generator=g, dtype=F64).log_softmax(0) for _ in range(2))
    kl = (pi.exp() * (pi - ref)).sum().item()
    assert sum(pi[a].exp().item() * k3_of((ref - pi)[a].item()) for a in range(5)) == pytest.approx(
        kl, rel=1e-10
    )


def test_corrected_k3_has_the_gradient_of_the_kl():
    """12: E_old[grad(r k3)] = grad KL(pi || ref), which plain k3 or a detached ratio would miss."""
    g = torch.Generator().manual_seed(4)
    logits, old, ref = (torch.randn(5, generator=g, dtype=F64) for _ in range(3))
    old, ref = old.log_softmax(0), ref.log_softmax(0)

    def expected_gradient(corrected, detach=False):
        module, args = script_args("grpo", kl_coef=1.0, kl_is_corrected=corrected)
        theta = logits.clone().requires_grad_()
        total = 0
        for a in range(5):
            lp = theta.log_softmax(0)[a].view(1, 1)
            x = ref[a].view(1, 1)
            if detach:
                k3 = (x - lp).exp() - (x - lp) - 1
                loss = ((lp - old[a]).exp().detach() * k3).sum()
            else:
                keywords = keywords_of(module.policy_loss, args, ref_logprobs_BT=x)
                inputs = lp, old[a].view(1, 1), tensor([[0.0]]), tensor([[1]])
                loss, _ = module.policy_loss(*inputs, **keywords)
            total = total + old[a].exp() * loss
        return torch.autograd.grad(total, theta)[0]

    theta = logits.clone().requires_grad_()
    pi = theta.log_softmax(0)
    (kl_grad,) = torch.autograd.grad((pi.exp() * (pi - ref)).sum(), theta)
    torch.testing.assert_close(expected_gradient(True), kl_grad, rtol=1e-10, atol=1e-12)
    assert (expected_gradient(False) - kl_grad).abs().max() > 1e-2
    assert (expected_gradient(True, detach=True) - kl_grad).abs().max() > 1e-2
