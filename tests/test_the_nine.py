"""What study/the_nine.md says of the losses, and numbers that it computes with them, in float64."""

import importlib
import math
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT

import gmpo
import grpo
from common import rollout_weights
from more import rloo
from plumbing.metrics import correction_stats

F64 = torch.float64
PAGE = (ROOT / "study" / "the_nine.md").read_text()
STUDY = (ROOT / "study" / "README.md").read_text()
PAPERS_RANGE = {"clip_eps_low": 3e-4, "clip_eps_high": 4e-4}  # gspo's


def weights_of(name, r_BT, A_B1, mask_BT, **keywords):
    """dJ / d log pi of each token, by autograd; the old log-probs are 0."""
    script = importlib.import_module(name)
    logprobs_BT = r_BT.log().requires_grad_()
    loss, _ = script.policy_loss(logprobs_BT, 0 * r_BT, A_B1, mask_BT, **keywords)
    return torch.autograd.grad(-loss, logprobs_BT)[0]


def test_sapo_keeps_tokens_whose_ratio_has_fallen():
    """The slope f' at r = 0, where some sources say that it is 0; it is only so for a large r."""
    ones = torch.ones(1, 1, dtype=F64)
    for A, expected in ((1.0, "0.786"), (-1.0, "0.768")):
        r = 1e-8 * ones
        slope = (weights_of("sapo", r, A * ones, ones) / (r * A)).item()
        assert f"{slope:.3f}" == expected and expected in PAGE
        assert weights_of("sapo", 30 * ones, A * ones, ones).abs().item() < 1e-9


def test_gspo_does_not_shrink_a_shift_that_all_tokens_share():
    """It shrinks the mean of independent log-ratios, like 1 / sqrt(|o|). And the toy example that says
    that s_i is about 1.02 to 1.03, so that nearly all are clipped: one of three is 1, and none is
    clipped where A < 0."""
    for length in (1, 10, 1000):
        r = torch.full((1, length), 1.1, dtype=F64)
        A = torch.ones(1, 1, dtype=F64)
        assert (weights_of("gspo", r, A, torch.ones_like(r)) == 0).all()  # clipped
    steps = [[1, 1, -1, 1, -1, 1], [1, -1, 1, -1, 1, 0], [-1, 1, -1, 1, 0, 0]]
    r = (torch.tensor(steps, dtype=F64) / 10).exp()
    mask = torch.arange(6) < torch.tensor([[6], [5], [4]])
    wide = {"clip_eps_low": 0.9, "clip_eps_high": 0.9}
    for A, clipped in ((1.0, [True, True, False]), (-1.0, [False, False, False])):
        A_B1 = torch.full((3, 1), A, dtype=F64)
        s = weights_of("gspo", r, A_B1, mask, **wide)[:, 0] / A * 3 * mask.sum(1)
        assert [f"{x:.3f}" for x in s.tolist()] == ["1.034", "1.020", "1.000"]
        is_zero = (weights_of("gspo", r, A_B1, mask, **PAPERS_RANGE) == 0).all(1)
        assert is_zero.tolist() == clipped
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


def of_tokens(logprobs_V, old_V, ref_V, rho_V=None, **keywords):
    """grpo's KL term of each token of a vocabulary."""
    terms = []
    for i in range(len(logprobs_V)):
        logprob, old, ref = (x[i].view(1, 1) for x in (logprobs_V, old_V, ref_V))
        rho = None if rho_V is None else rho_V[i].view(1, 1)
        references = {"ref_logprobs_BT": ref, "rollout_ratio_BT": rho, "kl_coef": 1.0}
        inputs = logprob, old, torch.zeros(1, 1), torch.ones(1, 1)
        loss, _ = grpo.policy_loss(*inputs, **references, **keywords)
        terms.append(loss)
    return torch.stack(terms)


def test_gradients_of_the_estimators_of_the_kl():
    """By enumeration of five tokens, what README.md's table says: the expected gradient of k1 is 0, of
    k2 that of KL(pi || ref), of k3 that of KL(ref || pi). Times the ratio, k3's is that of
    KL(pi || ref), whoever sampled."""
    noise = torch.Generator().manual_seed(0)
    logits, old, mu, ref = torch.randn(4, 5, generator=noise, dtype=F64)
    logits.requires_grad_()
    pi, old, mu, ref = (x.log_softmax(0) for x in (logits, old, mu, ref))

    def gradient(values_V, sampler_V):
        mean = (sampler_V.detach().exp() * values_V).sum()
        return torch.autograd.grad(mean, logits, retain_graph=True)[0]

    forward = torch.autograd.grad((pi.exp() * (pi - ref)).sum(), logits, retain_graph=True)[0]
    reverse = torch.autograd.grad((ref.exp() * (ref - pi)).sum(), logits, retain_graph=True)[0]
    assert (forward - reverse).abs().max() > 0.1
    torch.testing.assert_close(gradient(pi - ref, pi), torch.zeros(5, dtype=F64))
    torch.testing.assert_close(gradient((pi - ref) ** 2 / 2, pi), forward)
    torch.testing.assert_close(gradient(of_tokens(pi, pi.detach(), ref), pi), reverse)
    corrected = of_tokens(pi, old, ref, kl_is_corrected=True)
    torch.testing.assert_close(gradient(corrected, old), forward)
    corrected = of_tokens(pi, old, ref, rho_V=(old - mu).exp(), kl_is_corrected=True)
    torch.testing.assert_close(gradient(corrected, mu), forward)


WEIGHTS = [  # tokens; of sequence_tis median weight and effective size; share that sequence_mis keeps
    (30, "0.94", "0.89", "0.9850"),
    (1_000, "0.14", "0.33", "0.9110"),
    (10_000, "2.1e-09", "0.0017", "0.9995"),
]


@pytest.mark.parametrize("length, median, effective, kept", WEIGHTS)
def test_weights_of_long_answers(length, median, effective, kept):
    """A sampler that is off by 0.002 nats per token: log rho of a token has mean -0.002 and variance
    0.004. So an answer's sum is normal; here it has 2,000 quantiles, spread evenly over the tokens."""
    quantiles = (torch.arange(2000, dtype=F64) + 0.5) / 2000
    sums = -0.002 * length + math.sqrt(0.004 * length) * torch.special.ndtri(quantiles)
    weights = {"sequence_tis": [], "sequence_mis": [], "geo_mask": []}
    for part in (sums / length).split(100):
        log_rho_BT = part[:, None].float().expand(-1, length)
        zeros_BT = torch.zeros(100, length)
        for rule, found in weights.items():
            w, _ = rollout_weights(log_rho_BT, zeros_BT, zeros_BT + 1, rule=rule)
            found.append(w[:, :1])
    tis, mis, geo = (torch.cat(found) for found in weights.values())
    batch = SimpleNamespace(mask_BT=torch.ones(2000, 1), correction_weights=tis)
    args = SimpleNamespace(old_logprobs="sampler", rollout_correction="sequence_tis", rollout_cap=2.0)
    assert f"{tis.quantile(0.5):.2g}" == median
    assert f"{correction_stats(batch, args)['weight_effective_size']:.2g}" == effective
    assert f"{(mis > 0).double().mean():.4f}" == kept
    assert (geo > 0.95).all()
    assert f"| {length:,} | {median} | {effective} | {kept} | 1 |" in STUDY


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
