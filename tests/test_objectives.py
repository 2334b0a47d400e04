"""Every script's policy_loss against the literal double loop of conformance/reference.py: value and
gradient, in float64."""

import pytest
import torch
from conftest import MORE, SCRIPTS, keywords_of, normaliser_of, script_args

from conformance import reference

# Narrow ranges where the default would hardly ever bind on the data below.
NARROW = {"clip_eps_low": 0.05, "clip_eps_high": 0.07}
WIDE = {"clip_eps_low": 0.2, "clip_eps_high": 0.2}
CASES = {
    "ppo": ("ppo", {}, ("A_BT",)),
    "ppo, A_i": ("ppo", {}, ()),
    "grpo without KL": ("grpo", {}, ()),
    "grpo": ("grpo", {}, ("ref",)),
    "grpo, corrected KL": ("grpo", {"kl_is_corrected": True, "kl_coef": 0.3}, ("ref",)),
    "grpo, asymmetric": ("grpo", {"clip_eps_low": 0.1, "clip_eps_high": 0.3}, ()),
    "grpo, A_it": ("grpo", {}, ("ref", "A_BT")),
    "dr_grpo": ("dr_grpo", {}, ()),
    "dr_grpo, A_it": ("dr_grpo", {}, ("A_BT",)),
    "dapo": ("dapo", {}, ()),
    "dapo, A_it": ("dapo", {}, ("A_BT",)),
    "gspo": ("gspo", NARROW, ()),
    "gspo_token": ("gspo", {**NARROW, "variant": "gspo_token"}, ()),
    "gspo_token, A_it": ("gspo", {**WIDE, "variant": "gspo_token"}, ("A_BT",)),
    "cispo": ("cispo", {"is_weight_cap": 1.2}, ()),
    "cispo, floor": ("cispo", {"is_weight_cap": 1.2, "is_weight_floor": 0.9}, ()),
    "cispo, A_it": ("cispo", {"is_weight_cap": 1.2}, ("A_BT",)),
    "cispo, PPO mask": ("cispo", {"ppo_mask": True}, ()),
    "cispo, PPO mask, A_it": ("cispo", {"ppo_mask": True}, ("A_BT",)),
    "gmpo": ("gmpo", {"log_ratio_clip": 0.2}, ()),
    "gmpo, sequence": ("gmpo", {"log_ratio_clip": 0.3, "clip_level": "sequence"}, ()),
    "rspo": ("rspo", {"log_ratio_clip": 0.2}, ("gamma",)),
    "rspo, literal": ("rspo", {"log_ratio_clip": 0.2, "shift": "literal"}, ("gamma",)),
    "rspo, before clip": ("rspo", {"log_ratio_clip": 0.2, "shift": "before_clip"}, ("gamma",)),
    "sapo": ("sapo", {"tau_pos": 1.0, "tau_neg": 1.5}, ()),
    "sapo, A_it": ("sapo", {"tau_pos": 1.0, "tau_neg": 1.5}, ("A_BT",)),
    "reinforce": ("more.reinforce", {}, ()),
    "reinforce, A_it": ("more.reinforce", {}, ("A_BT",)),
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


def literal_objective(name, args, lp, old, adv, mask, extra):
    """J by the double loop; `extra` has the names of the scripts' keywords."""
    fields = {"logprobs": lp, "old_logprobs": old, "advantages": adv.expand_as(lp), "mask": mask}
    given = {key.removesuffix("_BT"): value for key, value in extra.items()}
    b = reference.batch(**(vars(args) | fields | given))
    return getattr(reference, name.removeprefix("more."))(b)


def loss_and_grad(module, args, lp, old, adv, mask, extra, split=None):
    """policy_loss over micro-batches of `split` rows, and the gradient with respect to lp. The
    normaliser is given: that of all rows."""
    lp = lp.detach().clone().requires_grad_()
    normaliser = normaliser_of(module.policy_loss, len(lp), mask.sum().item())
    total = 0
    for rows in torch.arange(len(lp)).split(split or len(lp)):
        extra_rows = {key: value[rows] for key, value in extra.items()}
        keywords = keywords_of(module.policy_loss, args, **normaliser, **extra_rows)
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


@pytest.mark.parametrize("seed", range(5))
def test_equals_the_literal_double_loop(case, seed):
    name, module, args, wants = case
    lp, old, adv, mask, _, extra = data(wants, seed)
    literal = -literal_objective(name, args, lp, old, adv, mask, extra)
    (literal_grad,) = torch.autograd.grad(literal, lp)
    loss, grad = loss_and_grad(module, args, lp, old, adv, mask, extra)
    assert loss.dtype == torch.float64
    torch.testing.assert_close(loss, literal.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad, literal_grad, rtol=1e-10, atol=1e-13)


def test_data_reaches_every_region():
    """Otherwise the test above would compare too little: ratios beyond both clips under both signs of
    A."""
    lp, old, adv, mask, _, _ = data(())
    r = (lp - old).exp()[mask]
    a = adv.expand_as(mask)[mask]
    for sign in (1, -1):
        for region in (r < 0.8, (r > 0.8) & (r < 1.2), r > 1.28):
            assert ((a * sign > 0) & region).sum() >= 3
    clipped = {1: [], -1: []}  # and, over the seeds, sums of log-ratios on both sides of gmpo's clip
    for seed in range(5):
        lp, old, adv, mask, _, _ = data((), seed)
        total = torch.where(mask, lp - old, 0).sum(1)
        for sign in (1, -1):
            clipped[sign] += (total * sign > 0.3)[adv[:, 0] * sign > 0].tolist()
    assert all(sum(side) >= 3 and sum(side) <= len(side) - 3 for side in clipped.values())


@pytest.mark.parametrize("split", [1, 2, 5, 12])
def test_micro_batches_change_nothing(case, split):
    name, module, args, wants = case
    lp, old, adv, mask, _, extra = data(wants)
    whole = loss_and_grad(module, args, lp, old, adv, mask, extra)
    parts = loss_and_grad(module, args, lp, old, adv, mask, extra, split=split)
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("count", [12, 5, 1])
def test_without_a_normaliser_it_is_that_of_the_rows_given(case, count):
    """num_sequences=None, num_tokens=None: the completions, or tokens, of this call and of no other."""
    name, module, args, wants = case
    lp, old, adv, mask, _, extra = data(wants)
    extra = {key: value[:count] for key, value in extra.items()}
    inputs = lp[:count], old[:count], adv[:count], mask[:count]
    normaliser = normaliser_of(module.policy_loss, count, mask[:count].sum().item())
    assert len(normaliser) == 1
    keywords = keywords_of(module.policy_loss, args, **extra)
    assert not set(normaliser) & set(keywords)
    results = []
    for more in ({}, normaliser, {name: None for name in normaliser}):
        loss, _ = module.policy_loss(*inputs, **keywords, **more)
        (grad,) = torch.autograd.grad(loss, lp)
        results.append((loss.detach(), grad))
    torch.testing.assert_close(results[0], results[1], rtol=1e-14, atol=0)
    torch.testing.assert_close(results[2], results[1], rtol=1e-14, atol=0)
    double = {name: 2 * value for name, value in normaliser.items()}
    loss, _ = module.policy_loss(*inputs, **keywords, **double)
    torch.testing.assert_close(loss, results[0][0] / 2, rtol=1e-14, atol=0)


@pytest.mark.parametrize("name", [*SCRIPTS, *MORE])
def test_an_advantage_without_its_second_axis_is_refused(name):
    """A (B,) times a (B, T) is silently wrong where B = T, a (B,) times a (B, 1) always is; and where
    there is one ratio per completion, there is one advantage too."""
    module, args = script_args(name)
    lp, old, adv, _, _, _ = data((), groups=3, group_size=3, T=9)
    mask = torch.ones(9, 9)  # square: nothing else would stop it
    keywords = keywords_of(module.policy_loss, args)
    module.policy_loss(lp, old, adv, mask, **keywords)
    for wrong in (adv[:, 0], adv[:1], adv.T):  # (B,), (1, 1), (1, B)
        with pytest.raises(AssertionError, match="advantage"):
            module.policy_loss(lp, old, wrong, mask, **keywords)
    if name in ("gspo", "gmpo", "rspo"):
        with pytest.raises(AssertionError, match="advantage"):
            module.policy_loss(lp, old, adv.expand(9, 9), mask, **keywords)
    else:
        shared, _ = module.policy_loss(lp, old, adv.expand(9, 9), mask, **keywords)
        assert shared == module.policy_loss(lp, old, adv, mask, **keywords)[0]


@pytest.mark.parametrize("garbage", [0.0, 1e30, float("inf"), float("nan")])
def test_padding_changes_nothing(case, garbage):
    """More columns of padding, and whatever stands in padding, NaN too: same loss, same gradient, 0 on
    padding."""
    name, module, args, wants = case
    lp, old, adv, mask, _, extra = data(wants)
    loss, grad = loss_and_grad(module, args, lp, old, adv, mask, extra)
    wide_mask = torch.nn.functional.pad(mask, (0, 3))

    def widen(x):
        x = torch.nn.functional.pad(x.detach(), (0, 3))
        return torch.where(wide_mask, x, garbage)

    if adv.shape[1] > 1:
        adv = widen(adv)
    extra = {key: widen(value) for key, value in extra.items()}
    loss2, grad2 = loss_and_grad(module, args, widen(lp), widen(old), adv, wide_mask, extra)
    torch.testing.assert_close(loss2, loss, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(grad2[:, :-3], grad, rtol=1e-12, atol=1e-14)
    assert (grad2[~wide_mask] == 0).all()


def test_rows_without_a_token_have_no_loss(case):
    """As dapo's filter leaves them: 0, not 0 / 0, without a normaliser too."""
    name, module, args, wants = case
    lp, old, adv, mask, _, extra = data(wants)
    empty = torch.zeros_like(mask)
    loss, stats = module.policy_loss(
        lp, old, adv, empty, **keywords_of(module.policy_loss, args, **extra)
    )
    loss.backward()
    assert (lp.grad == 0).all() and all(torch.isfinite(value) for value in stats.values())
    if name not in ("gmpo", "rspo", "gspo"):  # there an empty product is 1
        assert loss == 0


def test_bool_and_float_masks_are_the_same(case):
    name, module, args, wants = case
    lp, old, adv, mask, _, extra = data(wants)
    bools = loss_and_grad(module, args, lp, old, adv, mask, extra)
    floats = loss_and_grad(module, args, lp, old, adv, mask.double(), extra)
    assert torch.equal(bools[0], floats[0]) and torch.equal(bools[1], floats[1])


def test_extreme_log_ratios_stay_finite(case):
    name, module, args, wants = case
    lp, old, adv, mask, _, extra = data(wants)
    lp = lp.detach().clone()
    lp[0, 0] += 500
    lp[2, 0] -= 500
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


@pytest.mark.parametrize("wants", [(), ("A_BT",)], ids=["A_i", "A_it"])
def test_gate_slope_is_the_derivative_of_the_gate(wants):
    """sapo's losses/gate_slope: f'(r) by autograd, and how much of each token's gradient is left."""
    module, args = script_args("sapo", tau_pos=1.0, tau_neg=1.5)
    lp, old, adv, mask, lengths, _ = data(wants)
    loss, stats = module.policy_loss(lp, old, adv, mask, **keywords_of(module.policy_loss, args))
    loss.backward()
    r = (lp - old).detach().exp().requires_grad_()
    tau = torch.where(adv.expand_as(r) > 0, args.tau_pos, args.tau_neg).to(r)
    (slope,) = torch.autograd.grad((4 / tau / (1 + torch.exp(-tau * (r - 1)))).sum(), r)
    assert stats["gate_slope"].item() == pytest.approx(slope[mask].mean().item(), rel=1e-12)
    # The same from the loss itself: without the gate a token's gradient is r A / (N |o|).
    length = torch.tensor(lengths)[:, None]
    plain = (r * adv / (len(lp) * length)).detach()
    moves = mask & (plain != 0)
    torch.testing.assert_close(-lp.grad[moves] / plain[moves], slope[moves], rtol=1e-10, atol=0)
    on_policy, _, _, _, _, _ = data(wants)
    on_policy = on_policy.detach()
    _, stats = module.policy_loss(
        on_policy, on_policy, adv, mask, **keywords_of(module.policy_loss, args)
    )
    assert stats["gate_slope"] == 1
    assert 0 < slope[mask].min() and slope[mask].max() <= 1


@pytest.mark.parametrize("name", [*SCRIPTS, *MORE])
def test_statistics_are_of_the_response_alone(name):
    """By hand: the ratio of padding, 1, is not the largest where all others are below; and no statistic
    keeps the graph of its forward alive."""
    module, args = script_args(name)
    lp, old, adv, mask, _, _ = data(())
    old = lp.detach() + 0.5
    _, stats = module.policy_loss(lp, old, adv, mask, **keywords_of(module.policy_loss, args))
    assert stats["ratio_max"].item() == pytest.approx(0.6065306597)  # e^-0.5
    assert stats["approx_kl"].item() == pytest.approx(0.1065306597)  # e^-0.5 - 1 + 0.5
    assert not any(value.requires_grad for value in stats.values())


@pytest.mark.parametrize("spread", [1e-4, 1e-5])
@pytest.mark.parametrize("name", [*SCRIPTS, *MORE])
def test_a_kl_near_0_is_no_rounding_noise(name, spread):
    """Float32 against float64 on the same numbers, where exp(x) - 1 - x would mostly be noise."""
    module, args = script_args(name)
    g = torch.Generator().manual_seed(0)
    lp = spread * torch.randn(100, 100, generator=g)
    adv = torch.ones(100, 1)
    mask = torch.ones(100, 100)
    found = []
    for dtype in (torch.float32, torch.float64):
        old = torch.zeros(100, 100, dtype=dtype)
        given = {"ref_logprobs_BT": old} if name == "grpo" else {}
        keywords = keywords_of(module.policy_loss, args, **given)
        _, stats = module.policy_loss(lp.to(dtype), old, adv.to(dtype), mask, **keywords)
        found.append({key: stats[key].item() for key in ("approx_kl", "kl_ref") if key in stats})
    assert found[0] == pytest.approx(found[1], rel=1e-3, abs=0)
    assert all(value == pytest.approx(spread**2 / 2, rel=0.05) for value in found[1].values())


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
