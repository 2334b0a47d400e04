"""REINFORCE, RLOO and VAPO: their expected gradients, in float64, and their runs. What they share with
the nine is tested with the nine."""

import itertools
import json
import os
import subprocess
import sys

import pytest
import torch
from conftest import MORE, path_of, run, run_process, script_args

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
# table of logits: prompt, what came before (nothing, a, b), next token. The first prompt is easy, the
# second hard, and there are three levels of reward.

COMPLETIONS = [(0,), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2)]
REWARDS_PO = torch.tensor([[1, 1, 0.5, 1, 1, 0, 1], [0, 0, 0, 0.5, 0, 1, 0]], dtype=F64)
LOGITS = torch.randn(2, 3, 3, generator=torch.Generator().manual_seed(0), dtype=F64)


def logprobs_of(logits, prompt):
    """Log-probs of the tokens of all completions, (7, 2), and their mask."""
    table = logits[prompt].log_softmax(-1)
    rows = []
    for tokens in COMPLETIONS:
        before = [0, *tokens]
        row = [table[before[t], tokens[t]] for t in range(len(tokens))]
        rows.append(torch.stack([*row, *[torch.zeros((), dtype=F64)] * (2 - len(tokens))]))
    mask = torch.tensor([[1, 1] if len(tokens) == 2 else [1, 0] for tokens in COMPLETIONS])
    return torch.stack(rows), mask.bool()


def true_gradient():
    """Of the mean over the prompts of E[R]."""
    logits = LOGITS.clone().requires_grad_()
    value = 0
    for prompt, rewards_O in enumerate(REWARDS_PO):
        logprobs_OT, _ = logprobs_of(logits, prompt)
        value = value + (logprobs_OT.sum(1).exp() * rewards_O).sum() / len(REWARDS_PO)
    return torch.autograd.grad(value, logits)[0].flatten()


def expected_gradient(compute_advantages, policy_loss, G, **keywords):
    """Of J, over all groups that the policy may sample: each group's rows, its advantages times the
    probability of the group, since J is linear in the advantages."""
    logits = LOGITS.clone().requires_grad_()
    groups = torch.tensor(list(itertools.product(range(len(COMPLETIONS)), repeat=G)))
    loss = 0
    for prompt, rewards_O in enumerate(REWARDS_PO):
        logprobs_OT, mask_OT = logprobs_of(logits, prompt)
        group_logprob = logprobs_OT.detach().sum(1)[groups].sum(1, keepdim=True)
        advantages = compute_advantages(rewards_O[groups]) * group_logprob.exp()
        rows = groups.flatten()
        logprobs_BT = logprobs_OT[rows]
        share, _ = policy_loss(
            logprobs_BT,
            logprobs_BT.detach(),
            advantages.view(-1, 1),
            mask_OT[rows],
            num_sequences=len(REWARDS_PO) * G,
            **keywords,
        )
        loss = loss + share
    return -torch.autograd.grad(loss, logits)[0].flatten()


def cosine(a, b):
    return torch.nn.functional.cosine_similarity(a, b, dim=0).item()


@pytest.mark.parametrize("G", [2, 3])
def test_expected_gradient_of_rloo_is_the_true_one(G):
    """And that of GRPO's z-score is not even parallel to it, nor is that of a mean over tokens. With
    the mean of all G as the baseline it is parallel, but shorter."""
    module, _ = script_args("more.rloo")
    grpo, _ = script_args("grpo")
    dr_grpo, _ = script_args("dr_grpo")
    truth = true_gradient()
    ours = expected_gradient(module.compute_advantages, module.policy_loss, G)
    torch.testing.assert_close(ours, truth, rtol=1e-10, atol=1e-13)
    z_score = expected_gradient(grpo.compute_advantages, module.policy_loss, G)
    assert cosine(z_score, truth) < 0.99
    by_length = expected_gradient(module.compute_advantages, grpo.policy_loss, G)
    assert cosine(by_length, truth) < 0.99
    mean_of_all = expected_gradient(dr_grpo.compute_advantages, module.policy_loss, G)
    torch.testing.assert_close(mean_of_all, truth * (G - 1) / G, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("baseline", [0.0, 0.4, -3.0])
def test_expected_gradient_of_reinforce_is_the_true_one(baseline):
    """With any baseline that was there before the rollout."""
    module, _ = script_args("more.reinforce")

    def compute_advantages(rewards_PG):
        return module.compute_advantages(rewards_PG, baseline)

    ours = expected_gradient(compute_advantages, module.policy_loss, 1)
    torch.testing.assert_close(ours, true_gradient(), rtol=1e-10, atol=1e-13)


# -------------------------------------------------------------------------------------------- runs


def test_run_of_reinforce_continues_with_its_baseline(tmp_path):
    """Stopped after its first iteration and resumed, it is the run that never stopped."""
    flags = "--prompts_per_iteration 16 --max_new_tokens 16 --eval_every 0 --resume".split()
    runs = {}
    for name, stops in (("whole", [3]), ("parts", [1, 3])):
        for stop in stops:
            more = ("--iterations", stop, "--num_held_out", 8, "--run_dir", tmp_path / name)
            result = run("more.reinforce", *flags, *more)
            assert result.returncode == 0, result.stderr
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").open()]
        runs[name] = [row["losses/policy_loss"] for row in rows]
    assert runs["parts"] == runs["whole"] and len(set(runs["whole"])) == 3


def test_run_as_a_file_from_any_folder(tmp_path):
    """As `python -m more.rloo` from the project's, also where Python leaves the folder out."""
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONSAFEPATH": "1"}
    command = [sys.executable, path_of("more.rloo"), "--iterations", "0"]
    result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert result.stderr.startswith("rloo.py: error: --iterations must be from 1 to")


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_run_every_script_learns(name, tmp_path):
    """The default run, as of the nine: greedy held-out accuracy of 0.9 or more."""
    result = run_process(name, "--run_dir", tmp_path, timeout=900)
    assert result.returncode == 0, result.stderr
    *_, last = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(last)["eval/accuracy"] >= 0.9
