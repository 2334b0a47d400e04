"""What the losses promise beside their values and gradients, which test_conformance.py compares with
the formulas, NaN in masked places included: shapes, defaults, finite numbers, statistics, keywords."""

import inspect
import math

import pytest
import torch
from conftest import MORE, SCRIPTS, functions_of, has_one_ratio, script_args

F64 = torch.float64
SIBLINGS = [*SCRIPTS, *MORE]


def data(seed=0):
    """Log-probs with ratios in and out of every range, advantages of both signs and 0, any lengths."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 10, (12, 1), generator=g)
    lengths[0] = 9
    mask = torch.arange(9) < lengths
    old = -2 * torch.rand(12, 9, generator=g, dtype=F64)
    lp = old + 0.35 * torch.randn(12, 9, generator=g, dtype=F64)
    adv = torch.randn(12, 1, generator=g, dtype=F64)
    adv[1] = 0.0
    return lp.requires_grad_(), old, adv, mask


def parameters_of(name, function="policy_loss"):
    return inspect.signature(getattr(script_args(name)[0], function)).parameters


def loss_of(name, lp, old, adv, mask, changes=None, **tensors):
    """(loss, stats) with the flags' defaults, except for the changes."""
    module, _ = script_args(name)
    needed = {"max_new_tokens": 48} if "max_new_tokens" in parameters_of(name) else {}
    return module.policy_loss(lp, old, adv, mask, **needed, **(changes or {}), **tensors)


def gradient_of(loss, lp):
    return torch.autograd.grad(loss, lp, retain_graph=True)[0]


# ------------------------------------------------------------------------------------ what is given


@pytest.mark.parametrize("name", SIBLINGS)
def test_half_precision_and_advantages_of_another_shape_are_refused(name):
    """In bfloat16 a ratio is off by up to 0.4%, more than gspo's whole range. A (B,) times a (B, T)
    would be silently wrong where B = T. Where there is one ratio per completion, so is (B, T)."""
    lp, old, adv, _ = data()
    lp, old, adv, mask = lp[:9], old[:9], adv[:9], torch.ones(9, 9)
    for pair in ((lp.bfloat16(), old), (lp, old.half()), (lp.bfloat16(), None)):
        with pytest.raises(AssertionError, match="logits.float()"):
            loss_of(name, *pair, adv, mask)
    wrong = [adv[:1], adv.T, adv[:8, 0], adv[:, :, None]]
    if has_one_ratio(name):
        wrong.append(adv.expand(9, 9))
    for advantages in wrong:
        with pytest.raises(AssertionError, match="advantages_B"):
            loss_of(name, lp, old, advantages, mask)


@pytest.mark.parametrize("name", SIBLINGS)
def test_rows_without_tokens_and_other_shapes_of_advantages_change_nothing(name):
    """Advantages may be (B,) and, with a ratio for each token, (B, T). Rows without tokens count in
    nothing, not even in a statistic, and whatever stands in them is not read."""
    lp, old, adv, mask = data()
    nan = torch.full((3, 9), math.nan, dtype=F64)
    more = [torch.cat([x, nan[:, : x.shape[1]]]) for x in (lp, old, adv)]
    forms = [(lp, old, adv[:, 0], mask), (*more, torch.cat([mask, torch.zeros(3, 9).bool()]))]
    if not has_one_ratio(name):
        forms.append((lp, old, adv.expand(12, 9), mask))
    expected, expected_stats = loss_of(name, lp, old, adv, mask)
    for form in forms:
        loss, stats = loss_of(name, *form)
        torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)
        torch.testing.assert_close(stats, expected_stats, rtol=1e-6, atol=0)


WITHOUT_CRITIC = [name for name in SIBLINGS if "compute_advantages" in functions_of(name)]


@pytest.mark.parametrize("name", WITHOUT_CRITIC)
def test_rewards_may_be_integers_or_booleans(name):
    given = [0.25 for _ in [*parameters_of(name, "compute_advantages")][1:]]  # reinforce's baseline
    rewards = torch.tensor([[1, 0, 0, 0], [1, 1, 1, 1]])
    advantages = script_args(name)[0].compute_advantages
    for kind in (torch.int64, torch.bool):
        found = advantages(rewards.to(kind), *given)
        torch.testing.assert_close(found, advantages(rewards.float(), *given))


@pytest.mark.parametrize("name", SIBLINGS)
def test_old_logprobs_of_none_are_on_policy(name):
    """The policy's own, without gradient."""
    lp, _, adv, mask = data()
    losses = [loss_of(name, lp, old, adv, mask)[0] for old in (None, lp.detach())]
    gradients = [gradient_of(loss, lp) for loss in losses]
    assert losses[0] == losses[1] and torch.equal(*gradients) and gradients[0].any()


@pytest.mark.parametrize("name", SIBLINGS)
def test_no_tokens_no_rows_and_extreme_ratios_stay_finite(name):
    """Without tokens, as dapo's filter may leave a batch, all is 0, not 0 / 0."""
    lp, old, adv, mask = data()
    for rows in (slice(12), slice(0)):
        loss, stats = loss_of(name, lp[rows], old[rows], adv[rows], torch.zeros_like(mask[rows]))
        assert loss == 0 and all(value.isfinite() for value in stats.values())
        assert (gradient_of(loss, lp) == 0).all()
    far = torch.zeros(12, 9)
    far[0, 0] = 1e6
    far[2, 0] = -1e6
    loss, stats = loss_of(name, lp + far, old, adv, mask)
    assert all(value.isfinite() for value in (loss, *stats.values()))
    assert gradient_of(loss, lp).isfinite().all()


def test_the_router_shift_has_no_gradient_and_is_counted_below_its_floor():
    """Here that of each completion's first token is."""
    lp, old, adv, mask = data()
    gamma = torch.full((12, 9), 0.9, dtype=F64)
    gamma[:, 0] = 0.5
    loss, stats = loss_of("rspo", lp, old, adv, mask, router_shift_BT=gamma.requires_grad_())
    loss.backward()
    assert gamma.grad is None and lp.grad.any()
    share = 12 / mask.sum().item()
    assert stats["moe/router_floor_frac"].item() == pytest.approx(share)
    assert stats["moe/router_shift"].item() == pytest.approx(0.9 - 0.4 * share)


# --------------------------------------------------------------------------------------- statistics

CLIPPED = {  # ranges in which these data are on both sides
    "ppo": ("ppo", {}),
    "grpo": ("grpo", {}),
    "dr_grpo": ("dr_grpo", {}),
    "dapo": ("dapo", {}),
    "gspo": ("gspo", {"clip_eps_low": 0.05, "clip_eps_high": 0.07}),
    "gspo_token": ("gspo", {"clip_eps_low": 0.2, "clip_eps_high": 0.2, "variant": "gspo_token"}),
    "cispo, PPO mask": ("cispo", {"ppo_mask": True}),
    "gmpo": ("gmpo", {"log_ratio_clip": 0.2}),
    "gmpo, sequence": ("gmpo", {"log_ratio_clip": 0.3, "clip_level": "sequence"}),
    "rspo": ("rspo", {"log_ratio_clip": 0.2}),
    "rspo, before clip": ("rspo", {"log_ratio_clip": 0.2, "shift": "before_clip"}),
    "vapo": ("more.vapo", {}),
}


@pytest.mark.parametrize("case", CLIPPED)
def test_clip_fractions_count_where_the_clip_takes_the_gradient(case):
    """Independent of the formula: a token counts exactly if it has an advantage and no gradient."""
    name, changes = CLIPPED[case]
    seen = {"clipfrac_low": 0, "clipfrac_high": 0}
    for seed in range(5):
        lp, old, adv, mask = data(seed)
        tensors = {}
        if name == "rspo":
            g = torch.Generator().manual_seed(seed)
            tensors["router_shift_BT"] = 0.7 + 0.3 * torch.rand(12, 9, generator=g, dtype=F64)
        loss, stats = loss_of(name, lp, old, adv, mask, changes, **tensors)
        A = adv.expand_as(lp)[mask]
        is_cut = (gradient_of(loss, lp)[mask] == 0) & (A != 0)
        for key, side in (("clipfrac_low", A < 0), ("clipfrac_high", A > 0)):
            assert stats[key].item() == pytest.approx((is_cut & side).double().mean().item(), abs=1e-6)
            seen[key] += stats[key].item()
    assert all(seen.values())


@pytest.mark.parametrize("distance, advantage, share", [(0.5, -1, 0), (0.625, -1, 1), (0.625, 1, 0)])
def test_the_offpolicy_mask_drops_what_is_farther_than_its_edge(distance, advantage, share):
    """By hand, in numbers that are exact: at the edge a completion stays, and so does a good one."""
    old = torch.zeros(1, 2, dtype=F64)
    lp = old - torch.tensor([[2 * distance, 0.0]])  # the mean over two tokens
    adv = torch.tensor([[advantage]], dtype=F64)
    flags = {"offpolicy_mask": 0.5, "kl_coef": 0.0}
    _, stats = loss_of("more.deepseek_v32", lp, old, adv, torch.ones(1, 2), flags)
    assert stats["offpolicy_mask_frac"] == share


@pytest.mark.parametrize("name", [name for name in SIBLINGS if "kl_coef" in parameters_of(name)])
def test_without_a_coefficient_there_is_no_kl(name):
    """Also where the reference has no probability: 0 * inf would be NaN."""
    lp, old, adv, mask = data()
    ref = torch.full_like(old, -math.inf)
    loss, stats = loss_of(name, lp, old, adv, mask, {"kl_coef": 0}, ref_logprobs_BT=ref)
    assert loss == loss_of(name, lp, old, adv, mask)[0] and "kl_ref" not in stats


@pytest.mark.parametrize("name", SIBLINGS)
def test_statistics_are_of_the_response_alone(name):
    """By hand: the ratio of padding, 1, is not the largest where all others are e^-0.5. No statistic
    keeps its graph alive. In float32 a KL near 0 is no rounding noise, as exp(x) - 1 - x would be."""
    lp, _, adv, mask = data()
    _, stats = loss_of(name, lp, lp.detach() + 0.5, torch.ones_like(adv), mask)
    r = math.exp(-0.5)
    assert stats["ratio_max"].item() == pytest.approx(r)
    assert stats["approx_kl"].item() == pytest.approx(r - 1 + 0.5)
    if "gate_slope" in stats:
        assert stats["gate_slope"].item() == pytest.approx(1 / math.cosh((r - 1) / 2) ** 2)
    assert not any(value.requires_grad for value in stats.values())
    near = 1e-5 * torch.randn(100, 100, generator=torch.Generator().manual_seed(0))
    zero = torch.zeros(100, 100)
    ref = {"ref_logprobs_BT": zero} if "ref_logprobs_BT" in parameters_of(name) else {}
    _, stats = loss_of(name, near, zero, torch.ones(100, 1), zero + 1, **ref)
    for key in {"approx_kl", "kl_ref"} & set(stats):
        expected = (near.double() ** 2 / 2).mean().item()
        assert stats[key].item() == pytest.approx(expected, rel=1e-3, abs=0)


# ----------------------------------------------------------------------------------------- keywords

LOSSES = [(name, each) for name in SIBLINGS for each in functions_of(name) if each.endswith("_loss")]


@pytest.mark.parametrize("name, function", LOSSES)
def test_keywords_have_the_names_and_defaults_of_the_flags(name, function):
    """A keyword that is no flag is the normalizer, or an optional tensor. That main passes all of them:
    test_main.py, and test_siblings.py, where every flag is read."""
    _, args = script_args(name)
    parameters = parameters_of(name, function).values()
    keywords = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    for keyword, default in keywords.items():
        if keyword == "max_new_tokens":
            assert default is inspect.Parameter.empty  # L_max is the user's, not the paper's
        else:
            expected = getattr(args, keyword, None)
            assert default == expected and type(default) is type(expected), keyword
