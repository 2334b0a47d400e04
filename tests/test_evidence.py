"""What the evidence rests on: areas, verdicts, the experiments, the probe, a run."""

import importlib
import math
import statistics
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT

import cispo
import dr_grpo
from plumbing.args import parse_args

sys.path.append(str(ROOT / "benchmarks"))
import evidence
import gradients
import sweep


def test_area_of_a_broken_line():
    points = [(0, 0.2), (100, 0.6), (300, 1.0)]
    assert evidence.area(points, 100) == pytest.approx(0.4)
    assert evidence.area(points, 200) == pytest.approx((40 + 70) / 200)  # it ends between two points
    assert evidence.reaches(points, 0.6) == 100
    assert evidence.reaches(points, 1.1) is None


def test_verdict_is_the_interval_of_paired_differences():
    low = [0.1, 0.5, 0.9, 0.3, 0.7]
    high = [0.21, 0.59, 1.0, 0.41, 0.79]  # 0.1 more, give or take 0.01
    mean, half = evidence.difference(high, low)
    assert mean == pytest.approx(0.1)
    assert half == pytest.approx(2.78 * 0.01 / 5**0.5, rel=1e-6)
    assert evidence.verdict(high, low).startswith("shown")
    assert evidence.verdict(low, high).startswith("the opposite")
    assert evidence.verdict([0.1, 0.3, 0.2], [0.2, 0.1, 0.25]).startswith("not shown")


def test_a_verdict_follows_the_direction_of_the_prediction():
    low, high = [0.50, 0.52, 0.51], [0.60, 0.63, 0.61]
    words = {sign: evidence.first_word(evidence.directed(high, low, sign)) for sign in (1, -1, 0)}
    assert words == {1: "shown", -1: "the opposite", 0: "larger"}
    assert evidence.directed(low, high, 0).startswith("smaller (-0.1")
    unclear = evidence.directed([0.1, 0.3, 0.2], [0.2, 0.1, 0.25], 0)
    assert evidence.first_word(unclear) == "not shown"


def test_the_largest_drop_is_below_the_highest_value_before_it():
    rows = [{"accuracy": value} for value in (0.5, 0.8, 0.3, 0.9, 0.7)]
    assert evidence.drops(rows) == pytest.approx([0, 0, 0.5, 0, 0.2])


@pytest.mark.parametrize("seeds, quantile", [(3, 4.302653), (5, 2.776445)])
def test_p_value_at_the_quantile_of_students_t(seeds, quantile):
    values = [float(i) for i in range(seeds)]
    mean, error = statistics.mean(values), statistics.stdev(values) / math.sqrt(seeds)
    theirs = [mean - quantile * error] * seeds
    assert evidence.p_value(values, theirs) == pytest.approx(0.05, abs=1e-6)
    assert evidence.p_value(theirs, values) == pytest.approx(0.05, abs=1e-6)
    assert evidence.p_value(values, values) == 1


def test_holm_multiplies_by_the_number_that_is_left_and_never_falls():
    assert evidence.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert evidence.holm([0.6, 0.7]) == [1, 1]


def test_rank_correlation_sees_only_the_order():
    assert evidence.rank_correlation([1, 10, 100, 1000], [2, 3, 5, 7]) == pytest.approx(1)
    assert evidence.rank_correlation([1, 10, 100, 1000], [7, 5, 2, 3]) == pytest.approx(-0.8)


def test_the_picture_of_the_nine_is_what_the_scripts_give():
    drawn = gradients.read()
    found = gradients.columns()
    assert list(drawn) == list(found)
    for column, values in found.items():
        assert drawn[column] == pytest.approx(values, rel=1e-3, abs=1e-6), column
    for name in gradients.PANELS:  # dotted: only where all tokens together are another matter
        parts = drawn[f"{name} +1 1"] != drawn[f"{name} +1 10"]
        assert parts == (name in ("gspo", "gmpo", "rspo"))


def test_every_experiment_has_arguments_that_its_scripts_take(monkeypatch):
    folders = []
    for jobs in sweep.experiments().values():
        for job in jobs():
            folders.append(job.folder)
            words = ["--seed", str(job.seed), "--run_dir", "x", *job.flags]
            monkeypatch.setattr(sys, "argv", [f"{job.script}.py", *words])
            parse_args(importlib.import_module(job.script).Args)
    assert len(folders) == len(set(folders)) > 500


def test_what_runs_need_is_made_once(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    commands = []

    def make(command, check):
        commands.append(command[1:])
        (tmp_path / command[-1]).mkdir(parents=True)

    monkeypatch.setattr(sweep.subprocess, "run", make)
    sweep.make_what_is_needed(list(sweep.nine()))
    assert commands == []
    for _ in range(2):
        sweep.make_what_is_needed([*sweep.overlong(), *sweep.long_nine()])
    long_addition = ["benchmarks/long_addition.py", "runs/long_addition.tmp"]
    rambling = ["tiny_moe/train.py", "--direct", "0.1", "--worked", "0.3", "runs/rambling.tmp"]
    assert commands == [rambling, long_addition]
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"rambling", "long_addition"}


def test_the_probe_changes_no_gradient_and_finds_what_the_clip_drops():
    """Its share of the gradient is 0 under GRPO's clip, where those tokens have none, and between 0 and
    1 where nothing is clipped."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(4, 6, generator=generator) * 0.5)
    model = SimpleNamespace(parameters=lambda: [weight])
    advantages = torch.tensor([[1.0], [-1.0], [1.0], [-1.0]])
    mask = torch.ones(4, 6, dtype=torch.bool)
    inputs = (weight * 1.0, torch.zeros(4, 6), advantages, mask)
    plain_loss, _ = dr_grpo.policy_loss(*inputs, max_new_tokens=6)
    loss, stats = sweep.probe(dr_grpo.policy_loss, [model])(*inputs, max_new_tokens=6)
    (plain_gradient,) = torch.autograd.grad(plain_loss, weight, retain_graph=True)
    (gradient,) = torch.autograd.grad(loss, weight, retain_graph=True)
    assert torch.equal(gradient, plain_gradient)
    share = ((weight.exp() - 1) * advantages > 0.2).float().mean()
    assert stats["outside"] == share > 0
    assert stats["outside_gradient"] == 0
    _, stats = sweep.probe(cispo.policy_loss, [model])(*inputs)
    assert 0 < stats["outside_gradient"] < 1
    assert stats["log_ratio_up_max"] == weight.max()
    assert stats["log_ratio_down_max"] == -weight.min()


def test_lengths_of_right_and_wrong_answers():
    reasons = {3: "correct", 5: "wrong", 8: "correct", 12: "truncated"}
    completions = [SimpleNamespace(ids=[0] * length, why=why) for length, why in reasons.items()]
    assert sweep.mean_lengths(completions) == {"len_right": 5.5, "len_wrong": 8.5}
    assert sweep.mean_lengths(completions[:1]) == {"len_right": 3}


def test_runs_are_collected_with_what_no_script_logs(monkeypatch, tmp_path):
    """A run that ends as it should, and one that breaks off: that is a result too."""
    monkeypatch.setattr(sweep, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(sweep, "RESULTS", tmp_path)
    monkeypatch.setattr(evidence, "RESULTS", tmp_path)
    flags = ["--device", "cpu", "--iterations", "2"]
    flags += ["--prompts_per_iteration", "4", "--num_held_out", "8"]
    whole = sweep.Job("tiny", "grpo", "whole", 1, tuple(flags))
    broken = sweep.Job("tiny", "grpo", "broken", 1, (*flags, "--lr", "1e9"))
    sweep.run_all("tiny", [whole, broken], 1, "abc1234")
    sweep.collect("tiny", [whole, broken])
    first, second = evidence.table("tiny")
    assert first["ended"] == ""
    assert 0 <= first["after_sampled_accuracy"] <= 1
    assert first["generated"] == 64
    assert first["commit"] == "abc1234"
    assert second["ended"].startswith("grpo.py: error: iteration 1: ")
    assert second["after_sampled_accuracy"] is None
    rows = evidence.curves("tiny")["grpo", "whole"][1]
    assert [row["x"] for row in rows] == [32, 64]
    for column in ("len_wrong", "log_ratio_p99", "outside", "seconds"):
        assert all(row[column] is not None for row in rows)
