"""REINFORCE, RLOO and VAPO: their identities, in float64, and their runs. What they share with the nine
is tested with the nine."""

import importlib.util
import itertools
import math
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
from conftest import MORE, ROOT, TINY_MOE, flags_it_has, keywords_of, path_of, run_process, script_args
from test_runs import CLIPS, COMMON_KEYS, GROUPS, SMALL, keys, metrics, small, untimed, weights
from transformers import AutoModelForCausalLM

from conformance import reference
from plumbing.run import Run

F64 = torch.float64


def normal(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


# ----------------------------------------------------------------------------------- the gradient


@pytest.mark.parametrize("name", MORE)
def test_first_step_gradient(name):
    """dJ/dlp is A_i/N in reinforce and rloo, whatever the length, and A_t/tokens in vapo."""
    module, args = script_args(name)
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 0, 0]])
    lp = -torch.arange(1, 17, dtype=F64).view(4, 4) / 7
    adv = torch.tensor([[1.5], [-0.5], [0.25], [-2.0]], dtype=F64)
    lp.requires_grad_()
    loss, _ = module.policy_loss(lp, lp.detach(), adv, mask, **keywords_of(module.policy_loss, args))
    loss.backward()
    normaliser = 10 if name == "more.vapo" else 4
    torch.testing.assert_close(-lp.grad, adv / normaliser * mask, rtol=1e-12, atol=1e-15)


def test_leave_one_out_advantages():
    """R minus the mean of the others, G / (G - 1) (R - mean); groups do not mix."""
    module, _ = script_args("more.rloo")
    rewards = torch.tensor([[1, 0, 0, 0], [3, 3, 3, 7]], dtype=F64)
    A = module.compute_advantages(rewards)
    third = 1 / 3
    expected = [[1, -third, -third, -third], [-4 * third, -4 * third, -4 * third, 4]]
    torch.testing.assert_close(A, torch.tensor(expected, dtype=F64), rtol=1e-12, atol=0)
    for G in (2, 3, 8):
        rewards = normal(5, G, seed=G)
        A = module.compute_advantages(rewards)
        literal = reference.leave_one_out(reference.batch(rewards=rewards))
        torch.testing.assert_close(A, literal, rtol=1e-12, atol=1e-14)
        scaled = G / (G - 1) * (rewards - rewards.mean(1, keepdim=True))
        torch.testing.assert_close(A, scaled, rtol=1e-12, atol=1e-14)
    equal = torch.full((1, 7), 0.1)
    assert (module.compute_advantages(equal) == 0).all()


def test_running_baseline():
    """One baseline for all prompts and completions."""
    module, _ = script_args("more.reinforce")
    rewards = torch.tensor([[1.0, 0.0], [0.5, 1.0]])
    assert module.compute_advantages(rewards, 0.25).tolist() == [[0.75, -0.25], [0.25, 0.75]]


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


@pytest.mark.parametrize("baseline", [0.0, 0.4, -3.0])
def test_expected_gradient_of_reinforce_is_the_true_one(baseline):
    """With any baseline that was there before the rollout."""
    module, _ = script_args("more.reinforce")

    def compute_advantages(rewards_PG):
        return module.compute_advantages(rewards_PG, baseline)

    ours = expected_gradient(compute_advantages, module.policy_loss, 1)
    torch.testing.assert_close(ours, true_gradient(), rtol=1e-10, atol=1e-13)


# -------------------------------------------------------------------------------------------- vapo


def test_positive_lm_loss():
    """Against the literal loop, split into micro-batches too; nothing right is 0, not 0 / 0; NaN in
    padding changes nothing."""
    module, _ = script_args("more.vapo")
    lengths = [5, 1, 3, 4]
    mask = torch.arange(5)[None] < torch.tensor(lengths)[:, None]
    is_right = torch.tensor([[True], [False], [True], [False]])
    lp = -normal(4, 5, seed=0).abs()
    lp[~mask] = float("nan")
    lp.requires_grad_()
    loss = module.positive_lm_loss(lp, is_right, mask)
    literal = reference.positive_lm_loss(reference.batch(logprobs=lp, is_right=is_right, mask=mask))
    assert loss.item() == pytest.approx(literal.item(), rel=1e-12)
    (grad,) = torch.autograd.grad(loss, lp)
    torch.testing.assert_close(grad, -(mask & is_right).double() / 8, rtol=1e-12, atol=0)
    parts = []
    for rows in ([0, 1], [2], [3]):
        parts.append(module.positive_lm_loss(lp[rows], is_right[rows], mask[rows], num_tokens=8))
    assert sum(parts).item() == pytest.approx(loss.item(), rel=1e-12)
    nothing = module.positive_lm_loss(lp, torch.zeros_like(is_right), mask)
    (grad,) = torch.autograd.grad(nothing, lp)
    assert nothing == 0 and (grad == 0).all()


def state_of(folder):
    """What the checkpoint holds besides the policy."""
    (checkpoint,) = folder.glob("checkpoint-*")
    return torch.load(checkpoint / "trainer_state.pt", weights_only=True)


def test_vapo_learns_values_first_and_measures_lambda_by_length(tmp_path, monkeypatch):
    """While the critic is pre-trained the policy stays as it is, to the bit; returns have lambda 1,
    advantages a lambda of each completion's length; the LM loss reads right completions only, and with
    a large weight it falls."""
    module = importlib.import_module("more.vapo")
    original = {name: getattr(module, name) for name in ("compute_gae", "positive_lm_loss")}
    lambdas = []
    shares = []
    verdicts = []

    def compute_gae(rewards_BT, values_BT, mask_BT, gamma, lam):
        lambdas.append((lam, mask_BT.sum(1).tolist()))
        return original["compute_gae"](rewards_BT, values_BT, mask_BT, gamma, lam)

    def positive_lm_loss(logprobs_BT, is_right_B1, mask_BT, *, num_tokens):
        right = [sum(row) for row, keep in zip(mask_BT.tolist(), is_right_B1, strict=True) if keep]
        shares.append((sum(right), num_tokens.item()))
        verdicts.append(is_right_B1.float().mean().item())
        return original["positive_lm_loss"](logprobs_BT, is_right_B1, mask_BT, num_tokens=num_tokens)

    monkeypatch.setattr(module, "compute_gae", compute_gae)
    monkeypatch.setattr(module, "positive_lm_loss", positive_lm_loss)
    flags = ("--iterations", 4, "--pretraining_iterations", 1, "--lambda_alpha", 0.05)
    flags = (*flags, "--micro_batch_size", 16, "--lr", 1e-3, "--positive_lm_coef", 100)
    base = AutoModelForCausalLM.from_pretrained(TINY_MOE).state_dict()
    saved = []
    real_save = Run.save

    def save(self, iteration):
        real_save(self, iteration)
        saved.append((weights(tmp_path), state_of(tmp_path)["parts"]["critic"]["head.weight"]))

    monkeypatch.setattr(Run, "save", save)
    flags = ("--run_dir", tmp_path, "--save_every", 1, *flags)
    result = small("more.vapo", *flags, held_out=8)
    assert result.returncode == 0, result.stderr
    (first, head), (second, _), *_ = saved
    assert all(torch.equal(first[key], base[key]) for key in base) and head.abs().sum() > 0
    assert not all(torch.equal(second[key], base[key]) for key in base)
    assert [lam for lam, _ in lambdas[::2]] == [1.0] * 4
    for lam, lengths in lambdas[1::2]:
        expected = [max(0, 1 - 1 / (0.05 * length)) for length in lengths]
        assert lam.tolist() == pytest.approx(expected) and min(expected) == 0 < max(expected)
    # Two minibatches of two micro-batches: the tokens of right completions are the whole step's.
    for i in range(0, len(shares), 2):
        assert shares[i][0] + shares[i + 1][0] == shares[i][1] == shares[i + 1][1] > 0
    lines = check_metrics("more.vapo", tmp_path)
    assert sum(verdicts[:4]) / 4 == pytest.approx(lines[0]["rollout/accuracy"])
    assert lines[3]["losses/positive_lm_loss"] < 0.8 * lines[0]["losses/positive_lm_loss"]


# -------------------------------------------------------------------------------------------- runs

EXTRA_KEYS = {
    "more.reinforce": GROUPS - {"rollout/frac_zero_std_groups"},
    "more.rloo": GROUPS,
    "more.vapo": CLIPS
    | GROUPS - {"rollout/frac_zero_std_groups"}
    | keys("losses/", "value_loss explained_variance kl_ref positive_lm_loss"),
}


def check_metrics(name, folder):
    lines = metrics(folder)
    for line in lines:
        logged = {key for key in line if not key.startswith(("eval/", "iteration"))}
        assert logged == COMMON_KEYS | EXTRA_KEYS[name]
        assert all(math.isfinite(value) for value in line.values())
        assert line["losses/first_step_ratio_error_max"] < 1e-4 and line["charts/grad_norm"] > 0
        if name != "more.vapo":  # one step per rollout
            assert line["losses/ratio_max"] == 1 and line["losses/approx_kl"] == 0
    return lines


def test_rloo_runs(tmp_path):
    result = small("more.rloo", "--run_dir", tmp_path, "--iterations", 2, held_out=8)
    assert result.returncode == 0 and "held-out" in result.stdout, result.stderr
    check_metrics("more.rloo", tmp_path)


def test_the_baseline_is_the_mean_of_earlier_rewards_and_survives_a_stop(tmp_path, monkeypatch):
    """b by hand from the logged rewards, in the advantages and in the checkpoint; stopped and resumed,
    it is the same run."""
    module, _ = script_args("more.reinforce")
    original = module.compute_advantages
    baselines = []

    def compute_advantages(rewards_PG, baseline):
        baselines.append(baseline)
        return original(rewards_PG, baseline)

    monkeypatch.setattr(module, "compute_advantages", compute_advantages)
    for folder, count in (("whole", 3), ("parts", 1), ("parts", 3)):
        flags = ("--iterations", count, "--eval_every", 0, "--resume", "--baseline_decay", 0.75)
        flags = ("--run_dir", tmp_path / folder, *flags)
        assert small("more.reinforce", *flags, held_out=8).returncode == 0
    lines = check_metrics("more.reinforce", tmp_path / "whole")
    assert untimed(tmp_path / "parts")[1:] == untimed(tmp_path / "whole")[1:]
    a, b = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(torch.equal(a[key], b[key]) for key in a)
    expected = [0.0]
    for line in lines:
        expected.append(0.75 * expected[-1] + 0.25 * line["rollout/reward_mean"])
    assert baselines == pytest.approx(expected[:3] * 2, rel=1e-12) and expected[1] > 0
    for folder in ("whole", "parts"):
        baseline = state_of(tmp_path / folder)["extra_state"]["baseline"]
        assert baseline == pytest.approx(expected[3], rel=1e-12)


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
def test_every_script_learns(name, tmp_path):
    """The default run, as of the nine: greedy held-out accuracy of 0.9 or more."""
    result = run_process(name, "--run_dir", tmp_path, timeout=900)
    assert result.returncode == 0, result.stderr
    (row,) = (line.split() for line in result.stdout.splitlines() if line.startswith("accuracy"))
    numbers = [float(x.strip("->")) for x in row[1:] if x.strip("->")]
    assert numbers[1] >= max(0.9, numbers[0] + 0.4)
