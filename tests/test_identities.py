"""The identities of the objectives, with numbers worked out by hand, and what holds for every loss:
splits, order and padding change nothing, extremes stay finite, statistics count what they say. In
float64. test_conformance.py compares values and gradients with the objectives as double loops.
"""

import math

import pytest
import torch
from conftest import MORE, SCRIPTS, keywords_of, normalizer_of, script_args

import dapo
import grpo
import ppo
import rspo

F64 = torch.float64
WITH_GROUPS = [name for name in SCRIPTS if name != "ppo"]

# Narrow ranges where the default would hardly ever bind on the data below.
NARROW = {"clip_eps_low": 0.05, "clip_eps_high": 0.07}
WIDE = {"clip_eps_low": 0.2, "clip_eps_high": 0.2}
CASES = {
    "ppo": ("ppo", {}, ("A_BT",)),
    "grpo without KL": ("grpo", {}, ()),
    "grpo": ("grpo", {}, ("ref",)),
    "grpo, corrected KL": ("grpo", {"kl_is_corrected": True, "kl_coef": 0.3}, ("ref",)),
    "dr_grpo": ("dr_grpo", {}, ()),
    "dapo": ("dapo", {}, ()),
    "gspo": ("gspo", NARROW, ()),
    "gspo_token": ("gspo", {**WIDE, "variant": "gspo_token"}, ("A_BT",)),
    "cispo": ("cispo", {"is_weight_cap": 1.2}, ()),
    "cispo, floor": ("cispo", {"is_weight_cap": 1.2, "is_weight_floor": 0.9}, ()),
    "cispo, PPO mask": ("cispo", {"ppo_mask": True}, ("A_BT",)),
    "gmpo": ("gmpo", {"log_ratio_clip": 0.2}, ()),
    "gmpo, sequence": ("gmpo", {"log_ratio_clip": 0.3, "clip_level": "sequence"}, ()),
    "rspo": ("rspo", {"log_ratio_clip": 0.2}, ("gamma",)),
    "rspo, literal": ("rspo", {"log_ratio_clip": 0.2, "shift": "literal"}, ("gamma",)),
    "rspo, before clip": ("rspo", {"log_ratio_clip": 0.2, "shift": "before_clip"}, ("gamma",)),
    "sapo": ("sapo", {"tau_pos": 1.0, "tau_neg": 1.5}, ("A_BT",)),
    "reinforce": ("more.reinforce", {}, ()),
    "rloo": ("more.rloo", {}, ()),
    "vapo": ("more.vapo", {}, ("A_BT",)),
}
WITHOUT_CLIP = ("sapo", "more.reinforce", "more.rloo")


def data(wants, seed=0, groups=3, group_size=4, T=9):
    """Random log-probs with ratios in and out of every range, advantages of both signs and 0, any
    lengths."""
    g = torch.Generator().manual_seed(seed)
    B = groups * group_size
    lengths = torch.randint(1, T + 1, (B,), generator=g)
    lengths[0] = T
    mask = torch.arange(T)[None] < lengths[:, None]
    old = -2 * torch.rand(B, T, generator=g, dtype=torch.float64)
    lp = old + 0.35 * torch.randn(B, T, generator=g, dtype=torch.float64)
    adv = torch.randn(B, 1, generator=g, dtype=torch.float64)
    if "A_BT" in wants:
        adv = torch.randn(B, T, generator=g, dtype=torch.float64)
    adv[1] = 0.0
    extra = {}
    if "ref" in wants:
        extra["ref_logprobs_BT"] = old + 0.3 * torch.randn(B, T, generator=g, dtype=torch.float64)
    if "gamma" in wants:
        extra["router_shift_BT"] = 0.7 + 0.3 * torch.rand(B, T, generator=g, dtype=torch.float64)
    return lp.requires_grad_(), old, adv, mask, lengths.tolist(), extra


def loss_and_grad(module, args, lp, old, adv, mask, extra, split=None):
    """policy_loss over micro-batches of `split` rows, and the gradient with respect to lp. The
    normalizer is given: that of all rows."""
    lp = lp.detach().clone().requires_grad_()
    normalizer = normalizer_of(module.policy_loss, len(lp), mask.sum().item())
    total = 0
    for rows in torch.arange(len(lp)).split(split or len(lp)):
        extra_rows = {key: value[rows] for key, value in extra.items()}
        keywords = keywords_of(module.policy_loss, args, **normalizer, **extra_rows)
        loss, stats = module.policy_loss(lp[rows], old[rows], adv[rows], mask[rows], **keywords)
        assert all(torch.isfinite(torch.as_tensor(value)).all() for value in stats.values()), stats
        total = total + loss
    total.backward()
    return total.detach(), lp.grad


@pytest.fixture(params=CASES, ids=lambda case: case)
def case(request):
    name, changes, wants = CASES[request.param]
    module, args = script_args(name, **changes)
    return name, module, args, wants


def tensor(x):
    return torch.tensor(x, dtype=F64)


def gradient(name, lp, old, adv, mask, changes=None, **extra):
    """dJ/dlp = -d(loss)/dlp, and J; the normalizer is that of the rows given. `adv` is (B, 1) or
    (B, T)."""
    module, args = script_args(name, **(changes or {}))
    lp = lp.detach().clone().requires_grad_()
    loss, _ = module.policy_loss(lp, old, adv, mask, **keywords_of(module.policy_loss, args, **extra))
    loss.backward()
    return -lp.grad, -loss.item()


def on_policy():
    mask = tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 0, 0]])
    lp = -torch.arange(16, dtype=F64).view(4, 4) / 7  # a token that is certain, too: 0 is not padding
    return lp, lp.clone(), tensor([[1.5], [-0.5], [0.25], [-2.0]]), mask


# --------------------------------------------------------------------------------------- identities


FIRST_STEPS = "grpo gspo gspo_token gmpo rspo sapo dapo cispo dr_grpo ppo".split()


@pytest.mark.parametrize("variant", FIRST_STEPS)
def test_first_step_gradient(variant):
    """1: with lp_old = lp every member of the family is a policy gradient with the same weights."""
    name = variant.removesuffix("_token")
    changes = {"variant": variant} if name == "gspo" else {}
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
    grad, _ = gradient(name, lp, old, adv, mask, changes)
    torch.testing.assert_close(grad, expected.get(name, per_sequence), rtol=1e-12, atol=1e-15)
    assert (grad[mask == 0] == 0).all()


@pytest.mark.parametrize("name", WITH_GROUPS)
def test_group_advantages(name):
    """2: with and without the std; groups do not mix; the float32 mean of seven times 0.1 is not 0.1,
    and that must not become an advantage."""
    module, _ = script_args(name)
    expected = [[1.5, -0.5, -0.5, -0.5], [-0.5, -0.5, -0.5, 1.5]]
    if name == "dr_grpo":
        expected = [[0.75, -0.25, -0.25, -0.25], [-1, -1, -1, 3]]
    A = module.compute_advantages(tensor([[1, 0, 0, 0], [3, 3, 3, 7]]))
    torch.testing.assert_close(A, tensor(expected), rtol=1e-5, atol=1e-5)
    if name != "dr_grpo":  # of two rewards only the order counts
        pairs = tensor([[1, 0], [0.2, 0.7]])
        expected = tensor([[1, -1], [-1, 1]]) / math.sqrt(2)
        torch.testing.assert_close(module.compute_advantages(pairs), expected, rtol=1e-5, atol=0)
    for dtype in (torch.float32, F64):
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


@pytest.mark.parametrize("A, tau", [(1.0, 1.0), (-1.0, 1.05)])
def test_sapo_gate(A, tau):
    """5: f'(1) = 1 for every tau, f'(2) at tau 1 by hand, and f(1) = 2 / tau. The slope is logged."""
    module, _ = script_args("sapo")
    for r in (0.2, 1.0, 2.0):
        inputs = tensor([[math.log(r)]]), tensor([[0.0]]), tensor([[A]]), tensor([[1]])
        grad, J = gradient("sapo", *inputs)
        slope = 1 / math.cosh(tau * (r - 1) / 2) ** 2
        assert grad.item() == pytest.approx(slope * r * A, rel=1e-12)
        _, stats = module.policy_loss(*inputs)
        assert stats["gate_slope"].item() == pytest.approx(slope, rel=1e-12)
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
    grad, _ = gradient(
        "cispo", lp, old, adv, mask, changes={"is_weight_cap": 2.0, "is_weight_floor": 0.5}
    )
    weight = (lp - old).exp().clamp(0.5, 2.0)
    torch.testing.assert_close(grad, weight * adv / 10 * mask, rtol=1e-12, atol=1e-15)
    bounds = {"clip_eps_low": 0.2, "clip_eps_high": 0.28}
    masked, _ = gradient("cispo", lp, old, adv, mask, changes={"ppo_mask": True, **bounds})
    dapo, _ = gradient("dapo", lp, old, adv, mask, changes=bounds)
    torch.testing.assert_close(masked, dapo, rtol=1e-12, atol=1e-15)
    assert ((dapo == 0) & (mask == 1)).any()


def test_normalizers_agree_for_equal_lengths():
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
    """10: a completion that is cut off has 20 tokens too."""
    lengths = torch.tensor([3, 12, 16, 20])
    penalty = dapo.overlong_penalty(lengths, max_new_tokens=20, overlong_cache=8)
    assert penalty.tolist() == [0, 0, -0.5, -1]


GAE_TABLE = [(0.95, [0.46575, 0.385, 0.3]), (1.0, [0.5, 0.4, 0.3]), (0.0, [0.1, 0.1, 0.3])]


@pytest.mark.parametrize("lam, expected", GAE_TABLE)
def test_gae_by_hand(lam, expected):
    """11: also around a hole in the mask and next to padding, whatever these hold."""
    A, returns = ppo.compute_gae(
        tensor([[0, 9, 0, 1, math.nan]]),
        tensor([[0.5, 9, 0.6, 0.7, math.nan]]),
        tensor([[1, 0, 1, 1, 0]]),
        1.0,
        lam,
    )
    values = tensor([[0.5, 0.6, 0.7]])
    torch.testing.assert_close(A[:, [0, 2, 3]], tensor([expected]))
    torch.testing.assert_close(returns[:, [0, 2, 3]], A[:, [0, 2, 3]] + values)
    assert (A[:, [1, 4]] == 0).all() and (returns[:, [1, 4]] == 0).all()


def test_the_last_reward_stands_on_the_last_token():
    """Also where the mask has holes; the value after it is that of the next place."""
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


def k3_of(log_ratio_ref_over_pi):
    """The KL term that grpo computes for one token: its loss at kl_coef 1 with A = 0."""
    lp = tensor([[-1.0]])
    keywords = {"kl_coef": 1.0, "ref_logprobs_BT": lp + log_ratio_ref_over_pi}
    loss, stats = grpo.policy_loss(lp, lp, tensor([[0.0]]), tensor([[1]]), **keywords)
    assert loss.item() == stats["kl_ref"].item()
    return loss.item()


def test_k3_by_hand():
    """12: log(pi / ref) = 0.2, where the reversed formula would give 0.0214028."""
    assert k3_of(-0.2) == pytest.approx(0.0187308, abs=1e-7)


def test_estimators_of_the_kl():
    """12, by enumeration over a vocabulary of five: E_pi[k3] = KL(pi || ref), as of k1, but not of k2.
    In the loss, k1 has no expected gradient, k2 that of KL(pi || ref), and k3 that of KL(ref || pi);
    k1 in the reward, as in ppo.py, has that of KL(pi || ref)."""
    g = torch.Generator().manual_seed(3)
    logits = torch.randn(5, generator=g, dtype=F64, requires_grad=True)
    ref = torch.randn(5, generator=g, dtype=F64).log_softmax(0)
    pi = logits.log_softmax(0)
    probability = pi.exp().detach()  # of each token to be sampled
    x = ref - pi
    terms = {"k1": -x, "k2": x**2 / 2, "k3": x.expm1() - x, "k1 in the reward": -x.detach() * pi}
    for log_x, k3 in zip(x.tolist(), terms["k3"].tolist(), strict=True):
        assert k3_of(log_x) == pytest.approx(k3, rel=1e-12)  # grpo's
    forward = (pi.exp() * (pi - ref)).sum()
    reverse = (ref.exp() * (ref - pi)).sum()
    for name, is_unbiased in (("k1", True), ("k2", False), ("k3", True)):
        gap = ((probability * terms[name]).sum() - forward).abs()
        assert gap < 1e-12 if is_unbiased else gap > 0.01

    def slope(loss):
        return torch.autograd.grad(loss, logits, retain_graph=True)[0]

    expected = {"k1": 0 * forward, "k2": forward, "k3": reverse, "k1 in the reward": forward}
    for name, term in terms.items():
        found = slope((probability * term).sum())
        torch.testing.assert_close(found, slope(expected[name]), rtol=1e-12, atol=1e-15)
    assert (slope(forward) - slope(reverse)).abs().max() > 0.1


@pytest.mark.parametrize("is_sampled_by_another", [False, True])
def test_corrected_k3_has_the_gradient_of_the_kl(is_sampled_by_another):
    """12: E_old[grad(r k3)] = grad KL(pi || ref), and E_mu[grad(rho r k3)] where mu samples. By
    enumeration over a vocabulary of five; without r, or without rho, it is another gradient."""
    g = torch.Generator().manual_seed(4)
    logits = torch.randn(5, generator=g, dtype=F64, requires_grad=True)
    old, ref, mu = (torch.randn(5, generator=g, dtype=F64).log_softmax(0) for _ in range(3))
    if not is_sampled_by_another:
        mu = old
    pi = logits.log_softmax(0)
    (expected,) = torch.autograd.grad((pi.exp() * (pi - ref)).sum(), logits, retain_graph=True)

    def gap(is_corrected, rho):
        total = 0
        for a in range(5):
            inputs = pi[a].view(1, 1), old[a].view(1, 1), tensor([[0.0]]), tensor([[1]])
            extra = {"ref_logprobs_BT": ref[a].view(1, 1), "rollout_ratio_BT": rho[a].view(1, 1)}
            keywords = {"kl_coef": 1.0, "kl_is_corrected": is_corrected}
            loss, _ = grpo.policy_loss(*inputs, **keywords, **extra)
            total = total + mu[a].exp() * loss
        (found,) = torch.autograd.grad(total, logits, retain_graph=True)
        return (found - expected).abs().max()

    assert gap(True, (old - mu).exp()) < 1e-12
    assert gap(False, (old - mu).exp()) > 0.01
    assert is_sampled_by_another == bool(gap(True, torch.ones(5, dtype=F64)) > 0.01)


# ---------------------------------------------------------------------------------------- every loss


@pytest.mark.parametrize("name", [*SCRIPTS, *MORE])
def test_advantages_of_other_shapes(name):
    """One per completion, (B,) or (B, 1), is (B, T) with equal columns; where there is one ratio per
    completion, (B, T) is refused. A (B,) times a (B, T) would be silently wrong where B = T."""
    module, args = script_args(name)
    lp, old, adv, _, _, _ = data((), groups=3, group_size=3, T=9)
    mask = torch.ones(9, 9)  # square: nothing else would stop it
    keywords = keywords_of(module.policy_loss, args)

    def gradient_with(advantages):
        return torch.autograd.grad(module.policy_loss(lp, old, advantages, mask, **keywords)[0], lp)[0]

    expected = gradient_with(adv)
    assert torch.equal(gradient_with(adv[:, 0]), expected)
    wrong = [adv[:1], adv.T, adv[:8, 0], adv[..., None]]
    if name in ("gspo", "gmpo", "rspo"):
        wrong.append(adv.expand(9, 9))
    else:
        torch.testing.assert_close(gradient_with(adv.expand(9, 9)), expected, rtol=1e-14, atol=0)
    for advantages in wrong:
        with pytest.raises(AssertionError, match="advantages_B"):
            module.policy_loss(lp, old, advantages, mask, **keywords)


def test_old_logprobs_of_none_are_on_policy(case):
    """The policy's own, without gradient: the same loss and gradient as when they are given."""
    name, module, args, wants = case
    lp, _, adv, mask, _, extra = data(wants)
    keywords = keywords_of(module.policy_loss, args, **extra)
    losses = [module.policy_loss(lp, old, adv, mask, **keywords)[0] for old in (None, lp.detach())]
    assert losses[0] == losses[1]
    slopes = [torch.autograd.grad(loss, lp)[0] for loss in losses]
    assert torch.equal(*slopes) and slopes[0].abs().sum() > 0


@pytest.mark.parametrize("garbage", [1e30, float("nan")])
def test_splits_order_and_padding_change_nothing(case, garbage):
    """13: micro-batches of any size, rows in another order, more columns of padding and garbage in all
    of it, and a float mask: same loss, same gradient, 0 on padding."""
    name, module, args, wants = case
    lp, old, adv, mask, _, extra = data(wants)
    loss, grad = loss_and_grad(module, args, lp, old, adv, mask, extra)
    order = torch.randperm(len(lp), generator=torch.Generator().manual_seed(0))
    wide_mask = torch.nn.functional.pad(mask, (0, 3))[order]

    def widen(x):
        x = torch.nn.functional.pad(x.detach(), (0, 3))[order]
        return torch.where(wide_mask, x, garbage)

    adv = widen(adv) if adv.shape[1] > 1 else adv[order]
    extra = {key: widen(value) for key, value in extra.items()}
    inputs = widen(lp), widen(old), adv, wide_mask.double(), extra
    for split in (1, 5, 12):
        loss2, grad2 = loss_and_grad(module, args, *inputs, split=split)
        torch.testing.assert_close(loss2, loss, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(grad2[:, :-3], grad[order], rtol=1e-12, atol=1e-14)
        assert (grad2[~wide_mask] == 0).all()


def test_empty_rows_and_extreme_ratios_stay_finite(case):
    """Rows without a token, as dapo's filter leaves them, have no loss: 0, not 0 / 0, also without a
    normalizer."""
    name, module, args, wants = case
    lp, old, adv, mask, _, extra = data(wants)
    empty = torch.zeros_like(mask)
    keywords = keywords_of(module.policy_loss, args, **extra)
    loss, stats = module.policy_loss(lp, old, adv, empty, **keywords)
    loss.backward()
    assert all(torch.isfinite(value) for value in (loss, *stats.values()))
    assert (lp.grad == 0).all()
    if name not in ("gmpo", "rspo", "gspo"):  # there an empty product is 1
        assert loss == 0
    lp = lp.detach().clone()
    lp[0, 0] += 1e6
    lp[2, 0] -= 1e6
    loss, grad = loss_and_grad(module, args, lp, old, adv, mask, extra)
    assert torch.isfinite(loss) and torch.isfinite(grad).all()


CLIPPED = []
for key, (name, changes, wants) in CASES.items():
    is_cut = name not in WITHOUT_CLIP and (name != "cispo" or "ppo_mask" in changes)
    if is_cut and "ref" not in wants:  # the KL has a gradient of its own
        CLIPPED.append(key)


@pytest.mark.parametrize("case", CLIPPED, indirect=True)
def test_clip_fractions_count_where_the_clip_takes_the_gradient(case):
    """Independent of the formula: a token counts exactly if it has an advantage and no gradient."""
    name, module, args, wants = case
    seen = {"clipfrac_low": 0, "clipfrac_high": 0}
    for seed in range(5):
        lp, old, adv, mask, _, extra = data(wants, seed)
        keywords = keywords_of(module.policy_loss, args, **extra)
        loss, stats = module.policy_loss(lp, old, adv, mask, **keywords)
        loss.backward()
        weight = adv.expand_as(lp)[mask]
        cut = (lp.grad[mask] == 0) & (weight != 0)
        for key, side in (("clipfrac_low", weight < 0), ("clipfrac_high", weight > 0)):
            assert stats[key].item() == pytest.approx((cut & side).double().mean().item(), abs=1e-6)
            seen[key] += stats[key].item()
    assert all(seen.values())


@pytest.mark.parametrize("name", [*SCRIPTS, *MORE])
def test_statistics_are_of_the_response_alone(name):
    """By hand: the ratio of padding, 1, is not the largest where all others are below. No statistic
    keeps its graph alive. In float32 a KL near 0 is no rounding noise, as exp(x) - 1 - x would be."""
    module, args = script_args(name)
    keywords = keywords_of(module.policy_loss, args)
    lp, old, adv, mask, _, _ = data(())
    _, stats = module.policy_loss(lp, lp.detach() + 0.5, adv, mask, **keywords)
    assert stats["ratio_max"].item() == pytest.approx(0.6065306597)  # e^-0.5
    assert stats["approx_kl"].item() == pytest.approx(0.1065306597)  # e^-0.5 - 1 + 0.5
    assert not any(value.requires_grad for value in stats.values())
    near = 1e-5 * torch.randn(100, 100, generator=torch.Generator().manual_seed(0))
    zero = torch.zeros(100, 100)
    if name == "grpo":
        keywords["ref_logprobs_BT"] = zero
    _, stats = module.policy_loss(near, zero, torch.ones(100, 1), zero + 1, **keywords)
    expected = (near.double() ** 2 / 2).mean().item()
    for key in {"approx_kl", "kl_ref"} & set(stats):
        assert stats[key].item() == pytest.approx(expected, rel=1e-3, abs=0)


@pytest.mark.parametrize(
    "name, option", [("gspo", "variant"), ("gmpo", "clip_level"), ("rspo", "shift")]
)
def test_an_option_that_does_not_exist_is_refused(name, option):
    """In a copy of the loss too, where no command line has checked it."""
    module, args = script_args(name)
    lp, old, adv, mask, _, _ = data(())
    keywords = keywords_of(module.policy_loss, args) | {option: "tokn"}
    with pytest.raises(AssertionError):
        module.policy_loss(lp, old, adv, mask, **keywords)
