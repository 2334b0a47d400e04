"""REINFORCE, RLOO and VAPO: their identities, in float64, and their runs. What they share with the nine
is tested with the nine."""

import importlib.util
import itertools
import os
import shlex
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import torch
from conftest import MORE, ROOT, flags_it_has, path_of, run_process, script_args
from test_runs import SMALL, small, untimed, weights

from plumbing.run import Run

F64 = torch.float64


def normal(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def test_leave_one_out_advantages():
    """By hand: R minus the mean of the others; groups do not mix."""
    module, _ = script_args("more.rloo")
    rewards = torch.tensor([[1, 0, 0, 0], [3, 3, 3, 7]], dtype=F64)
    A = module.compute_advantages(rewards)
    third = 1 / 3
    expected = [[1, -third, -third, -third], [-4 * third, -4 * third, -4 * third, 4]]
    torch.testing.assert_close(A, torch.tensor(expected, dtype=F64), rtol=1e-12, atol=0)
    equal = torch.full((1, 7), 0.1)
    assert (module.compute_advantages(equal) == 0).all()


def test_a_leave_one_out_baseline_is_not_divided_by_a_std():
    """The numbers in rloo.py's header: the std of the other seven is 0 for the only right one of eight,
    in float32 as anywhere; the std of all eight makes it grpo's z-score times 8/7."""
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
LOGITS = normal(2, 3, 3, seed=0)


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


def test_kl_in_the_reward_also_counts_what_a_token_leads_to():
    """grpo.py's header: k1 in the reward has the gradient of the KL of whole completions, of two tokens
    here. k2 in the loss has that of each token's KL, at prefixes that are taken as given."""
    reinforce, _ = script_args("more.reinforce")
    reference = normal(2, 3, 3, seed=1)
    logits = LOGITS.clone().requires_grad_()
    total = 0
    in_the_reward = 0
    in_the_loss = 0
    at_given_prefixes = 0
    for prompt in range(2):
        logprobs_OT, mask_OT = logprobs_of(logits, prompt)
        logratio_OT = logprobs_OT - logprobs_of(reference, prompt)[0]
        probability_O1 = logprobs_OT.detach().sum(1, keepdim=True).exp()
        k1_O1 = logratio_OT.sum(1, keepdim=True)
        total = total + (logprobs_OT.sum(1).exp() * k1_O1[:, 0]).sum()
        rewards = -k1_O1.detach() * probability_O1
        inputs = logprobs_OT, logprobs_OT.detach(), rewards, mask_OT
        in_the_reward = in_the_reward + reinforce.policy_loss(*inputs, num_sequences=1)[0]
        in_the_loss = in_the_loss + (probability_O1 * logratio_OT**2 / 2).sum()
        table = logits[prompt].log_softmax(-1)
        kl_of_prefix = (table.exp() * (table - reference[prompt].log_softmax(-1))).sum(-1)
        visited = torch.cat([torch.ones(1, dtype=F64), table[0, 1:].exp().detach()])
        at_given_prefixes = at_given_prefixes + (visited * kl_of_prefix).sum()

    def slope(value):
        return torch.autograd.grad(value, logits, retain_graph=True)[0]

    torch.testing.assert_close(slope(in_the_reward), slope(total), rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(slope(in_the_loss), slope(at_given_prefixes), rtol=1e-12, atol=1e-15)
    assert (slope(total) - slope(in_the_loss)).abs().max() > 0.01


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
    for folder, count in (("whole", 3), ("parts", 1), ("parts", 3)):
        flags = ("--iterations", count, "--eval_every", 0, "--resume", "--run_dir", tmp_path / folder)
        assert small("more.reinforce", *flags, held_out=8).returncode == 0
    assert untimed(tmp_path / "parts")[1:] == untimed(tmp_path / "whole")[1:]
    a, b = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("given", [[], ["--resume"]])
def test_the_line_that_a_stopped_run_prints(given, monkeypatch, capsys):
    """As it was started: python grpo.py, or python -m more.rloo, which sys.argv does not show."""
    monkeypatch.setattr(sys, "argv", ["grpo.py", "--run_dir", "a b", *given])
    rest = "--run_dir 'a b' --resume"
    for module, expected in ((None, f"python grpo.py {rest}"), ("more.rloo", f"-m more.rloo {rest}")):
        main = types.ModuleType("__main__")
        main.__spec__ = importlib.util.find_spec(module) if module else None
        monkeypatch.setitem(sys.modules, "__main__", main)
        Run.on_signal(types.SimpleNamespace(), signal.SIGUSR1, None)
        assert capsys.readouterr().err.strip().endswith(expected)


def test_run_as_a_file_from_any_folder(tmp_path):
    """As `python -m more.rloo` from the project's, also where Python leaves the folder out."""
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONSAFEPATH": "1"}
    command = [sys.executable, path_of("more.rloo"), "--iterations", "0"]
    result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert result.stderr.startswith("rloo.py: error: --iterations must be from 1 to")


@pytest.mark.slow
@pytest.mark.parametrize("name, program", [("grpo", "grpo.py"), ("more.rloo", "-m more.rloo")])
def test_a_stopped_run_prints_a_line_that_works(name, program, tmp_path):
    """SIGTERM, and the printed line as it stands, in a shell."""
    folder = tmp_path / "run"
    flags = [*flags_it_has(name, SMALL), "--iterations", "500", "--run_dir", str(folder)]
    flags += ["--num_held_out", "8", "--eval_every", "0", "--save_every", "0"]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    command = [sys.executable, *program.split(), *flags]
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=-3, stderr=-1, text=True)
    log = folder / "metrics.jsonl"
    while not log.exists() or log.stat().st_size == 0:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 130 and "Traceback" not in error
    (line,) = (line for line in error.replace("\r", "\n").splitlines() if "to resume: " in line)
    printed = line.split("to resume: ")[1].strip()
    assert printed == f"python {program} {shlex.join(flags)} --resume"
    done = len(log.read_text().splitlines())
    further = f"{printed} --iterations {done + 1}"
    result = subprocess.run(further, shell=True, cwd=ROOT, env=env, capture_output=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert len(log.read_text().splitlines()) == done + 1


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_run_every_script_learns(name, tmp_path):
    """The default run, as of the nine: greedy held-out accuracy of 0.9 or more."""
    result = run_process(name, "--run_dir", tmp_path, timeout=900)
    assert result.returncode == 0, result.stderr
    (row,) = (line.split() for line in result.stdout.splitlines() if line.startswith("accuracy"))
    numbers = [float(x.strip("->")) for x in row[1:] if x.strip("->")]
    assert numbers[1] >= max(0.9, numbers[0] + 0.4)
