"""What the evidence rests on: areas, verdicts, exponents, the probe, the arguments of the experiments."""

import importlib
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT

import cispo
import common
import dr_grpo

sys.path.append(str(ROOT / "benchmarks"))
import evidence
import sweep


def test_area_of_a_broken_line():
    points = [(0, 0.2), (100, 0.6), (300, 1.0)]
    assert evidence.area(points, 100) == pytest.approx(0.4)
    assert evidence.area(points, 200) == pytest.approx((40 + 70) / 200)  # it ends between two points
    assert evidence.reaches(points, 0.6) == 100 and evidence.reaches(points, 1.1) is None


def test_verdict_is_the_interval_of_paired_differences():
    low, high = [0.1, 0.5, 0.9, 0.3, 0.7], [0.21, 0.59, 1.0, 0.41, 0.79]  # 0.1 apart, give or take 0.01
    mean, half = evidence.difference(high, low)
    assert mean == pytest.approx(0.1) and half == pytest.approx(2.78 * 0.01 / 5**0.5, rel=1e-6)
    assert evidence.verdict(high, low).startswith("shown")
    assert evidence.verdict(low, high).startswith("the opposite")
    assert evidence.verdict([0.1, 0.3, 0.2], [0.2, 0.1, 0.25]).startswith("not shown")


def test_exponent_of_a_power():
    assert evidence.exponent([1, 2, 4, 8], [3 * x**1.5 for x in (1, 2, 4, 8)]) == pytest.approx(1.5)


def test_rank_correlation_sees_only_the_order():
    assert evidence.rank_correlation([1, 10, 100, 1000], [2, 3, 5, 7]) == pytest.approx(1)
    assert evidence.rank_correlation([1, 10, 100, 1000], [7, 5, 2, 3]) == pytest.approx(-0.8)


def test_every_experiment_has_arguments_that_its_scripts_take(monkeypatch):
    folders = []
    for jobs in sweep.experiments().values():
        for job in jobs():
            folders.append(job.folder)
            words = ["--seed", str(job.seed), "--run_dir", "x", *job.flags]
            monkeypatch.setattr(sys, "argv", [f"{job.script}.py", *words])
            common.parse_args(importlib.import_module(job.script).Args)
    assert len(folders) == len(set(folders)) > 500


def test_the_probe_changes_no_gradient_and_finds_what_the_clip_drops():
    """Its share of the gradient is 0 under GRPO's clip, where those tokens have none, and all of it when all
    tokens are outside."""
    args = dr_grpo.Args()
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(4, 6, generator=generator) * 0.5)
    old, mask = torch.zeros(4, 6), torch.ones(4, 6, dtype=torch.bool)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])
    model = SimpleNamespace(parameters=lambda: [weight])
    inputs = (old, advantages, mask, 4, 24, args)
    loss, stats = sweep.probe(dr_grpo.policy_loss, [model])(weight * 1.0, *inputs)
    (gradient,) = torch.autograd.grad(loss, weight)
    (plain,) = torch.autograd.grad(dr_grpo.policy_loss(weight * 1.0, *inputs)[0], weight)
    assert torch.equal(gradient, plain)
    share = ((weight.exp() - 1) * advantages[:, None] > 0.2).float().mean()
    assert stats["outside"] == share > 0 and stats["outside_gradient"] == 0
    cispo_inputs = (old, advantages, mask, 4, 24, cispo.Args())
    _, stats = sweep.probe(cispo.policy_loss, [model])(weight * 1.0, *cispo_inputs)
    assert 0 < stats["outside_gradient"] < 1
    assert stats["log_ratio_up_max"] == weight.max() and stats["log_ratio_down_max"] == -weight.min()
