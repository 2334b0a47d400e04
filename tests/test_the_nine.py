"""What the pages of study/ compute with the losses and the weights, in float64."""

import importlib
import math
import re
import textwrap

import pytest
import torch
from conftest import ROOT

import gmpo
import grpo
from more.mismatch import rollout_weights
from more import deepseek_v32, rloo

F64 = torch.float64
STUDY = (ROOT / "study" / "README.md").read_text()
TEXT = (ROOT / "study" / "the_nine.md").read_text()
PAGE = " ".join(TEXT.split())


def keeps_a_gradient(name, *log_ratios, A=1.0, **keywords):
    """[whether a script's objective still moves a completion with these log-ratios]"""
    loss_of = importlib.import_module(name).policy_loss
    answers = []
    for row in log_ratios:
        logprobs_BT = torch.tensor([row], dtype=F64, requires_grad=True)
        A_B1 = torch.tensor([[A]], dtype=F64)
        mask_BT = torch.ones_like(logprobs_BT)
        loss, _ = loss_of(logprobs_BT, 0 * mask_BT, A_B1, mask_BT, **keywords)
        (gradient_BT,) = torch.autograd.grad(loss, logprobs_BT)
        answers.append(bool(gradient_BT.any()))
    return answers


def test_what_secondary_sources_say_of_clips():
    """gspo's toy example, with the paper's range; a shift that all tokens share, which gspo's mean does
    not compress; and 25 tokens at 1.01, none of them clipped, though their product is 1.28."""
    toy = [0.1, 0.1, -0.1, 0.1, -0.1, 0.1], [0.1, -0.1, 0.1, -0.1, 0.1], [-0.1, 0.1, -0.1, 0.1]
    papers = {"clip_eps_low": 3e-4, "clip_eps_high": 4e-4}
    assert keeps_a_gradient("gspo", *toy, A=1.0, **papers) == [False, False, True]
    assert keeps_a_gradient("gspo", *toy, A=-1.0, **papers) == [True, True, True]
    assert keeps_a_gradient("gspo", [0.1], [0.1] * 1000) == [False, False]
    assert keeps_a_gradient("grpo", [math.log(1.01)] * 25) == [True]


COSINES = {"dr_grpo": "1.00", "dapo": "1.00", "cispo": "1.00", "grpo": "0.80", "gspo": "0.80"}


@pytest.mark.parametrize("name", COSINES)
def test_a_sum_over_tokens_has_the_gradient_of_the_sequences_weight(name):
    """Near r = 1, for 2 and 8 tokens: the cosine with the gradient of mean_i A_i prod_t r_it.
    A division by |o_i| turns the gradient."""
    mask_BT = torch.arange(8) < torch.tensor([[2], [8]])
    log_r_BT = 1e-3 * torch.randn(2, 8, generator=torch.Generator().manual_seed(0), dtype=F64)
    log_r_BT.requires_grad_()
    A_B1 = torch.tensor([[1.0], [-1.0]], dtype=F64)
    product_B1 = torch.where(mask_BT, log_r_BT, 0).sum(1, keepdim=True).exp()
    (truth_BT,) = torch.autograd.grad((A_B1 * product_B1).mean(), log_r_BT)
    keywords = {"max_new_tokens": 8} if name == "dr_grpo" else {}
    policy_loss = importlib.import_module(name).policy_loss
    loss, _ = policy_loss(log_r_BT, 0 * mask_BT.double(), A_B1, mask_BT, **keywords)
    (gradient_BT,) = torch.autograd.grad(-loss, log_r_BT)
    cosine = torch.cosine_similarity(truth_BT.flatten(), gradient_BT.flatten(), dim=0)
    assert f"{cosine:.2f}" == COSINES[name]
    assert "is 1 for dr_grpo, but 0.80 for grpo and gspo" in PAGE


def test_what_a_std_makes_of_the_rewards():
    """It blows up a difference of 0.01 in eight rewards; of two rewards, only the ranking counts."""
    near = grpo.compute_advantages(torch.tensor([[0.51] + 7 * [0.5], [1.0] + 7 * [0.0]]))
    assert [f"{A:.3f}" for A in near[:, 0]] == ["2.474", "2.475"]
    pairs = torch.tensor([[1.0, 0.2], [1.0, 0.0]])
    with_std = grpo.compute_advantages(pairs)[:, 0]
    without = importlib.import_module("dr_grpo").compute_advantages(pairs)[:, 0]
    assert [f"{A:.3f}" for A in with_std] == ["0.707", "0.707"]
    assert [f"{A:.1f}" for A in without] == ["0.4", "0.5"]


def test_the_sum_of_geometric_means_may_be_the_larger_one():
    log_r_BT = torch.tensor([[0.1, -0.1], [0.0, 0.0]], dtype=F64)
    A_B1 = torch.tensor([[1.0], [-math.cosh(0.1)]], dtype=F64)
    inputs = log_r_BT, 0 * log_r_BT, A_B1, torch.ones(2, 2)
    arithmetic, _ = grpo.policy_loss(*inputs)
    geometric, _ = gmpo.policy_loss(*inputs)
    assert abs(arithmetic) < 1e-12
    assert f"{-geometric:.4f}" == "-0.0025"


def kl_terms(script, logprobs_V, ref_V, **more_V):
    """The KL term of each token in a script's loss, (V,)."""
    terms = []
    for token in range(len(logprobs_V)):
        at_token = {name: x_V[token].view(1, 1) for name, x_V in more_V.items()}
        inputs = logprobs_V[token].view(1, 1), None, torch.zeros(1, 1), torch.ones(1, 1)
        ref = ref_V[token].view(1, 1)
        loss, _ = script.policy_loss(*inputs, ref_logprobs_BT=ref, kl_coef=1.0, **at_token)
        terms.append(loss)
    return torch.stack(terms)


def test_gradients_of_the_estimators_of_the_kl():
    """By enumeration of five tokens, what study/README.md's table says: the expected gradient of k1 is
    0, of k2 that of KL(pi || ref), of k3 that of KL(ref || pi). Times pi / mu, as in DeepSeek-V3.2,
    k3's is that of KL(pi || ref), whoever sampled."""
    noise = torch.Generator().manual_seed(0)
    logits, mu, ref = torch.randn(3, 5, generator=noise, dtype=F64)
    logits.requires_grad_()
    pi, mu, ref = (x.log_softmax(0) for x in (logits, mu, ref))

    def gradient(values_V, sampler_V):
        mean = (sampler_V.detach().exp() * values_V).sum()
        return torch.autograd.grad(mean, logits, retain_graph=True)[0]

    forward = torch.autograd.grad((pi.exp() * (pi - ref)).sum(), logits, retain_graph=True)[0]
    reverse = torch.autograd.grad((ref.exp() * (ref - pi)).sum(), logits, retain_graph=True)[0]
    assert (forward - reverse).abs().max() > 0.1
    torch.testing.assert_close(gradient(pi - ref, pi), torch.zeros(5, dtype=F64))
    torch.testing.assert_close(gradient((pi - ref) ** 2 / 2, pi), forward)
    torch.testing.assert_close(gradient(kl_terms(grpo, pi, ref), pi), reverse)
    corrected = kl_terms(deepseek_v32, pi, ref, sampler_logprobs_BT=mu)
    torch.testing.assert_close(gradient(corrected, mu), forward)


WEIGHTS = [  # tokens; of sequence_tis median weight and effective size; share that sequence_mis keeps
    (30, "0.94", "0.89", "0.9850"),
    (1_000, "0.14", "0.33", "0.9110"),
    (10_000, "2.1e-09", "0.0017", "0.9995"),
]


@pytest.mark.parametrize("length, median, effective, kept", WEIGHTS)
def test_weights_of_long_answers(length, median, effective, kept):
    """A sampler that is off by 0.002 nats per token: log rho of a token has mean -0.002 and variance
    0.004. So an answer's sum is normal; here it has 2,000 quantiles. The rules only read its sum or its
    mean, so one token can stand for all."""
    quantiles = (torch.arange(2000, dtype=F64) + 0.5) / 2000
    sum_B1 = -0.002 * length + math.sqrt(0.004 * length) * torch.special.ndtri(quantiles)[:, None]
    one_B1 = torch.ones_like(sum_B1)
    tis = rollout_weights(sum_B1, 0 * one_B1, one_B1, rule="sequence_tis")
    mis = rollout_weights(sum_B1, 0 * one_B1, one_B1, rule="sequence_mis")
    geo = rollout_weights(sum_B1 / length, 0 * one_B1, one_B1, rule="geo_mask")
    assert f"{tis.median():.2g}" == median
    assert f"{tis.mean() ** 2 / (tis**2).mean():.2g}" == effective
    assert f"{(mis > 0).double().mean():.4f}" == kept
    assert (geo > 0).all()
    assert f"| {length:,} | {median} | {effective} | {kept} | 1 |" in STUDY


@pytest.mark.parametrize("length, kept", [(200, "52%"), (1_000, "17%"), (10_000, "0.06%")])
def test_two_bounds_on_the_product_drop_long_answers(length, kept):
    """With the same sampler: the probability that the product of rho lies in [1/2, 2]."""
    bounds = torch.tensor([-math.log(2), math.log(2)], dtype=F64)
    low, high = torch.special.ndtr((bounds + 0.002 * length) / math.sqrt(0.004 * length))
    assert f"{100 * (high - low):.2g}%" == kept
    assert f"{kept} at {length:,}" in PAGE


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


def test_the_advantages_of_gdpo():
    """The page's snippet: in a group of two, both parts right count twice as much as one, in grpo the
    same. The whole batch has a std of 1."""
    (snippet,) = re.findall(r"^  ```python\n(.*?)^  ```", TEXT, re.DOTALL | re.MULTILINE)
    names = {"grpo": grpo}
    exec(textwrap.dedent(snippet), names)
    parts_PGK = torch.tensor([[[1, 0], [0, 0]], [[1, 1], [0, 0]]])
    advantages_PG = names["compute_advantages"](parts_PGK)
    torch.testing.assert_close(advantages_PG[1], 2 * advantages_PG[0])
    torch.testing.assert_close(advantages_PG.std(), torch.tensor(1.0))
    assert [f"{A:.3f}" for A in grpo.compute_advantages(parts_PGK.sum(2))[:, 0]] == ["0.707", "0.707"]
