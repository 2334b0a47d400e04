"""Every script's policy_loss against the literal double loop of reference.py: value and gradient, in
float64."""

import pytest
import reference
import torch
from conftest import script_args

# Narrow ranges where the default would hardly ever bind on the data below.
CASES = {
    "ppo": ("ppo", {}, ()),
    "grpo without KL": ("grpo", {}, ()),
    "grpo": ("grpo", {}, ("ref",)),
    "grpo, corrected KL": ("grpo", {"kl_is_corrected": True, "kl_coef": 0.3}, ("ref",)),
    "grpo, asymmetric": ("grpo", {"clip_eps_low": 0.1, "clip_eps_high": 0.3}, ()),
    "dr_grpo": ("dr_grpo", {}, ()),
    "dapo": ("dapo", {}, ()),
    "gspo": ("gspo", {"clip_eps_low": 0.05, "clip_eps_high": 0.07}, ()),
    "gspo_token": ("gspo", {"clip_eps_low": 0.05, "clip_eps_high": 0.07, "variant": "gspo_token"}, ()),
    "gspo_token, A_it": (
        "gspo",
        {"clip_eps_low": 0.2, "clip_eps_high": 0.2, "variant": "gspo_token"},
        ("A_BT",),
    ),
    "cispo": ("cispo", {"is_weight_cap": 1.2}, ()),
    "cispo, PPO mask": ("cispo", {"ppo_mask": True}, ()),
    "gmpo": ("gmpo", {"log_ratio_clip": 0.2}, ()),
    "gmpo, sequence": ("gmpo", {"log_ratio_clip": 0.05, "clip_level": "sequence"}, ()),
    "rspo": ("rspo", {"log_ratio_clip": 0.2}, ("gamma",)),
    "rspo, literal": ("rspo", {"log_ratio_clip": 0.2, "shift": "literal"}, ("gamma",)),
    "rspo, before clip": ("rspo", {"log_ratio_clip": 0.2, "shift": "before_clip"}, ("gamma",)),
    "sapo": ("sapo", {"tau_pos": 1.0, "tau_neg": 1.5}, ()),
}


def data(name, wants, seed=0, groups=3, group_size=4, T=9):
    """Random log-probs with ratios in and out of every range, advantages of both signs and 0, any lengths."""
    g = torch.Generator().manual_seed(seed)
    B = groups * group_size
    lengths = torch.randint(1, T + 1, (B,), generator=g)
    lengths[0] = T
    mask = torch.arange(T)[None] < lengths[:, None]
    old = -2 * torch.rand(B, T, generator=g, dtype=torch.float64)
    lp = old + 0.35 * torch.randn(B, T, generator=g, dtype=torch.float64)
    adv = torch.randn(B, generator=g, dtype=torch.float64)
    adv[1] = 0.0
    if name == "ppo" or "A_BT" in wants:
        adv = torch.randn(B, T, generator=g, dtype=torch.float64)
    extra = {}
    if "ref" in wants:
        extra["ref_logprobs_BT"] = old + 0.3 * torch.randn(B, T, generator=g, dtype=torch.float64)
    if "gamma" in wants:
        extra["router_shift_BT"] = 0.7 + 0.3 * torch.rand(B, T, generator=g, dtype=torch.float64)
    return lp.requires_grad_(), old, adv, mask, lengths.tolist(), extra


def loss_and_grad(module, args, lp, old, adv, mask, extra, split=None, N=None, tokens=None):
    """policy_loss over micro-batches of `split` rows, and the gradient with respect to lp."""
    lp = lp.detach().clone().requires_grad_()
    N, tokens = N or len(lp), tokens or mask.sum().item()
    total = 0
    for rows in torch.arange(len(lp)).split(split or len(lp)):
        kwargs = {key: value[rows] for key, value in extra.items()}
        loss, stats = module.policy_loss(
            lp[rows], old[rows], adv[rows], mask[rows], N, tokens, args, **kwargs
        )
        assert all(torch.isfinite(torch.as_tensor(value)).all() for value in stats.values()), stats
        total = total + loss
    total.backward()
    return total.detach(), lp.grad


@pytest.fixture(params=CASES, ids=lambda case: case)
def case(request):
    name, changes, wants = CASES[request.param]
    module, args = script_args(name, **changes)
    return name, module, args, wants


@pytest.mark.parametrize("seed", range(5))
def test_equals_the_literal_double_loop(case, seed):
    name, module, args, wants = case
    lp, old, adv, mask, lengths, extra = data(name, wants, seed)
    literal = -getattr(reference, name)(lp, old, adv, lengths, args, extra)
    (literal_grad,) = torch.autograd.grad(literal, lp)
    loss, grad = loss_and_grad(module, args, lp, old, adv, mask, extra)
    assert loss.dtype == torch.float64
    torch.testing.assert_close(loss, literal.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad, literal_grad, rtol=1e-10, atol=1e-13)


def test_data_reaches_every_region():
    """Otherwise the test above would compare too little: ratios beyond both clips under both signs of A."""
    lp, old, adv, mask, _, _ = data("grpo", ())
    r, a = (lp - old).exp()[mask], adv[:, None].expand_as(mask)[mask]
    for sign in (1, -1):
        for region in (r < 0.8, (r > 0.8) & (r < 1.2), r > 1.28):
            assert ((a * sign > 0) & region).sum() >= 3


@pytest.mark.parametrize("split", [1, 2, 5, 12])
def test_micro_batches_change_nothing(case, split):
    name, module, args, wants = case
    lp, old, adv, mask, _, extra = data(name, wants)
    whole = loss_and_grad(module, args, lp, old, adv, mask, extra)
    parts = loss_and_grad(module, args, lp, old, adv, mask, extra, split=split)
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-14)


def test_permutation_inside_a_group_changes_nothing(case):
    name, module, args, wants = case
    lp, old, adv, mask, _, extra = data(name, wants)
    order = torch.cat([4 * g + torch.tensor([2, 0, 3, 1]) for g in range(3)])
    loss, grad = loss_and_grad(module, args, lp, old, adv, mask, extra)
    extra = {key: value[order] for key, value in extra.items()}
    loss2, grad2 = loss_and_grad(module, args, lp[order], old[order], adv[order], mask[order], extra)
    torch.testing.assert_close(loss2, loss, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(grad2, grad[order], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("garbage", [0.0, 1e30, float("inf"), float("nan")])
def test_padding_changes_nothing(case, garbage):
    """More columns of padding, and whatever stands in padding, NaN too: same loss, same gradient, 0 on
    padding."""
    name, module, args, wants = case
    lp, old, adv, mask, _, extra = data(name, wants)
    loss, grad = loss_and_grad(module, args, lp, old, adv, mask, extra)

    def widen(x):
        x = torch.cat([x.detach(), torch.zeros(len(x), 3, dtype=x.dtype)], dim=1)
        return torch.where(torch.nn.functional.pad(mask, (0, 3)), x, garbage)

    adv = torch.nn.functional.pad(adv, (0, 3)) if adv.dim() == 2 else adv
    extra = {key: widen(value) for key, value in extra.items()}
    wide_mask = torch.nn.functional.pad(mask, (0, 3))
    loss2, grad2 = loss_and_grad(module, args, widen(lp), widen(old), adv, wide_mask, extra)
    torch.testing.assert_close(loss2, loss, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(grad2[:, :-3], grad, rtol=1e-12, atol=1e-14)
    assert (grad2[~wide_mask] == 0).all()


def test_bool_and_float_masks_are_the_same(case):
    name, module, args, wants = case
    lp, old, adv, mask, _, extra = data(name, wants)
    assert torch.equal(
        loss_and_grad(module, args, lp, old, adv, mask, extra)[1],
        loss_and_grad(module, args, lp, old, adv, mask.double(), extra)[1],
    )


def test_extreme_log_ratios_stay_finite(case):
    name, module, args, wants = case
    lp, old, adv, mask, _, extra = data(name, wants)
    lp = lp.detach().clone()
    lp[0, 0], lp[2, 0] = lp[0, 0] + 500, lp[2, 0] - 500
    loss, grad = loss_and_grad(module, args, lp, old, adv, mask, extra)
    assert torch.isfinite(loss) and torch.isfinite(grad).all()


def test_clip_fractions_count_where_the_clip_takes_the_gradient(case):
    """Independent of the formula: a token counts exactly if it has an advantage and no gradient."""
    name, module, args, wants = case
    if name == "sapo" or "ref" in wants or (name == "cispo" and not args.ppo_mask):
        return  # nothing is ever cut off there, or the KL has a gradient of its own
    seen = {"clipfrac_low": 0, "clipfrac_high": 0}
    for seed in range(5):
        lp, old, adv, mask, _, extra = data(name, wants, seed)
        loss, stats = module.policy_loss(lp, old, adv, mask, len(lp), mask.sum(), args, **extra)
        loss.backward()
        weight = (adv if adv.dim() == 2 else adv[:, None].expand_as(lp))[mask]
        cut = (lp.grad[mask] == 0) & (weight != 0)
        for key, side in (("clipfrac_low", weight < 0), ("clipfrac_high", weight > 0)):
            assert stats[key].item() == pytest.approx((cut & side).double().mean().item(), abs=1e-6)
            seen[key] += stats[key].item()
    assert all(seen.values())
