"""The experiments of study/: their statistics, their CSVs, a sweep; and gpu.py's test of itself."""

import importlib
import json
import subprocess
import sys

import pytest
from conftest import ROOT

from plumbing.args import parse_args

import stats
import sweep
from experiments import EXPERIMENTS, Experiment, Job

MEASURED = [name for name in EXPERIMENTS if (sweep.RESULTS / f"{name}.csv").exists()]


def test_area_of_a_broken_line(monkeypatch):
    """The accuracies 0.2, 0.6 and 1.0 were reached after 0, 100 and 300 completions."""
    pairs = [(100, 0.2), (300, 0.6), (350, 1.0)]
    lines = [{"generated": x, "rollout/accuracy": y} for x, y in pairs]
    monkeypatch.setattr(sweep, "END", 100)
    assert sweep.area(lines) == pytest.approx(0.4)
    monkeypatch.setattr(sweep, "END", 200)
    assert sweep.area(lines) == pytest.approx((40 + 70) / 200)  # it ends between two points
    monkeypatch.setattr(sweep, "END", 351)
    assert sweep.area(lines) == ""


def test_the_largest_drop_may_take_several_iterations():
    lines = [{"rollout/accuracy": y} for y in (0.5, 0.7, 0.6, 0.4, 0.9, 0.8)]
    assert sweep.largest_drop(lines) == pytest.approx(0.3)


def test_the_interval_is_that_of_paired_differences():
    low = [0.1, 0.5, 0.9, 0.3, 0.7]
    high = [0.21, 0.59, 1.0, 0.41, 0.79]  # 0.1 more, give or take 0.01: 2.776 0.01 / sqrt(5)
    assert stats.interval(high, low) == "+0.100 ± 0.012"


@pytest.mark.parametrize("name", MEASURED)
def test_every_row_is_of_an_experiment_and_names_its_commit(name):
    jobs = {job[:3]: job for job in EXPERIMENTS[name].jobs}
    rows = sweep.read_csv(name)
    assert [sweep.key_of(row) for row in rows] == list(jobs)
    for row in rows:
        assert jobs[sweep.key_of(row)].flags == row["flags"]
        assert len(row["commit"]) == 7


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_has_flags_that_its_scripts_take(name, monkeypatch):
    for job in EXPERIMENTS[name].jobs:
        words = ["--seed", str(job.seed), "--run_dir", "x", *job.flags.split()]
        monkeypatch.setattr(sys, "argv", [job.file, *words])
        parse_args(importlib.import_module(job.script).Args)


def test_run_a_sweep(monkeypatch, tmp_path, sums):
    """A run that ends normally, one whose numbers are not finite, which is a result too, and one that
    fails."""
    flags = f"--iterations 3 --dataset {sums} --prompts_per_iteration 4 --num_held_out 8 --eval_every 2"
    whole = Job("dapo", "whole", 1, f"{flags} --max_sampling_rounds 2", "dapo.py")
    broken = Job("grpo", "broken", 1, f"{flags} --lr 1e9", "grpo.py")
    fails = Job("grpo", "fails", 1, "", "nowhere.py")
    jobs = [whole, broken, fails]
    monkeypatch.setattr(sweep, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(sweep, "RESULTS", tmp_path)
    monkeypatch.setattr(sweep, "EXPERIMENTS", {"small": Experiment(jobs, has_curves=True)})
    assert sweep.run_all("small", jobs, 1) == 1 and sweep.result_of("small", fails) is None
    sweep.collect("small", jobs)
    first, second = sweep.read_csv("small")
    assert first["ended"] == "" and 0 <= float(first["after_sampled_accuracy"]) <= 1
    assert "iteration 1: " in second["ended"] and "is not finite" in second["ended"]
    lines = sweep.read_metrics(sweep.folder_of("small", whole) / "run")
    assert int(first["generated"]) == 8 * sum(line["rollout/groups_generated"] for line in lines)
    two, three = sweep.read_csv("small_curves")
    assert (two["iteration"], three["iteration"], three["generated"]) == ("2", "3", first["generated"])
    accuracies = [line["rollout/accuracy"] for line in lines]
    assert float(two["accuracy"]) == pytest.approx(sum(accuracies[:2]) / 2, abs=1e-5)
    assert two["held_out"] != ""
    # A machine that has the rows but not the folders: nothing is run again, and the rows stay.
    before = {path.name: path.read_text() for path in tmp_path.glob("*.csv")}
    monkeypatch.setattr(sweep, "RUNS", tmp_path / "elsewhere")
    assert sweep.run_all("small", [whole, broken], 1) == 0
    sweep.collect("small", [whole, broken])
    assert {path.name: path.read_text() for path in tmp_path.glob("*.csv")} == before
    # With other flags it is another run.
    other = whole._replace(flags=f"{whole.flags} --lr 1e-4")
    monkeypatch.setattr(sweep, "RUNS", tmp_path / "runs")
    assert sweep.result_of("small", whole) and not sweep.result_of("small", other)
    assert sweep.kept("small", [other]) == {}


@pytest.mark.slow
def test_run_the_checks_of_a_gpu_on_a_cpu(tmp_path):
    path = tmp_path / "gpu.json"
    command = [sys.executable, ROOT / "benchmarks" / "gpu.py", path, "--device", "cpu"]
    subprocess.run(command, check=True)
    checks = json.loads(path.read_text())["checks"]
    assert len(checks) == 5 and not any("error" in result for result in checks.values())
    for name, result in checks.items():
        assert result.get("first_ratio_error", 0) == result.get("largest_difference", 0) == 0, name
