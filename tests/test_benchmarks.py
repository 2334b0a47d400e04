"""The measurements: their statistics, the CSVs and tables, a sweep, and the checks for a GPU."""

import importlib
import json
import subprocess
import sys
from argparse import Namespace

import pytest
import torch
from conftest import ROOT

from plumbing.args import parse_args

import experiments
import gpu
import stats
import sweep

RESULTS = ROOT / "benchmarks" / "results"
ON_A_CPU = Namespace(device="cpu")


def test_area_of_a_broken_line():
    """The accuracies 0.2, 0.6 and 1.0 were reached after 0, 100 and 300 completions."""
    pairs = [(0.2, 100), (0.6, 200), (1.0, 50)]
    rows = [{"accuracy": accuracy, "generated": generated} for accuracy, generated in pairs]
    rows[0]["x"], rows[1]["x"], rows[2]["x"] = 100, 300, 350
    assert stats.area(rows, 100) == pytest.approx(0.4)
    assert stats.area(rows, 200) == pytest.approx((40 + 70) / 200)  # it ends between two points


def test_the_interval_is_that_of_paired_differences():
    low = [0.1, 0.5, 0.9, 0.3, 0.7]
    high = [0.21, 0.59, 1.0, 0.41, 0.79]  # 0.1 more, give or take 0.01: 2.776 0.01 / sqrt(5)
    assert stats.interval(high, low) == "+0.100 ± 0.012"


def test_a_detectable_difference_is_shown_four_times_in_five():
    """Eight pairs, whose differences scatter by 1 around the one that such a scatter can show."""
    generator = torch.Generator().manual_seed(0)
    mean = 3.261 / 8**0.5
    deltas = torch.randn(20_000, 8, generator=generator, dtype=torch.float64) + mean
    half = 2.365 * deltas.std(1) / 8**0.5
    assert (deltas.mean(1) > half).double().mean() == pytest.approx(0.8, abs=0.01)
    unit = (deltas[0] - deltas[0].mean()) / deltas[0].std()
    assert float(stats.detectable((unit + 5).tolist(), [0.0] * 8)) == pytest.approx(mean, abs=0.05)


@pytest.mark.parametrize("name", experiments.EXPERIMENTS)
def test_every_row_is_of_an_experiment_and_names_its_code(name):
    jobs = {sweep.key_of(job._asdict()): job for job in sweep.jobs_of(name)}
    rows = sweep.read_csv(name)
    assert {sweep.key_of(row) for row in rows} == set(jobs) and len(rows) == len(jobs)
    for row in rows:
        assert jobs[sweep.key_of(row)].flags == row["flags"]
        assert len(row["commit"]) >= 7 and len(row["code"]) == 12


def test_every_experiment_has_arguments_that_its_scripts_take(monkeypatch):
    for name in experiments.EXPERIMENTS:
        for job in sweep.jobs_of(name):
            words = ["--seed", str(job.seed), "--run_dir", "x", *job.flags.split()]
            monkeypatch.setattr(sys, "argv", [f"{job.script}.py", *words])
            parse_args(importlib.import_module(job.script).Args)


def test_shares_of_tokens():
    """Two groups of two: one mixed, with 3 and 5 tokens, one all right, with 8 and 10, the cap."""
    completions = []
    for length, verdict in ((3, "correct"), (5, "wrong"), (8, "correct"), (10, "correct")):
        truncated = length == 10
        completions.append(Namespace(ids=[7] * length, verdict=verdict, truncated=truncated))
    args = Namespace(group_size=2, max_new_tokens=10, overlong_cache=3)
    shares = sweep.token_shares(completions, args)
    expected = {"tokens_mixed": 8 / 26, "tokens_cut": 10 / 26, "tokens_near_cap": 18 / 26}
    assert shares == pytest.approx(expected)


def test_share_of_tokens_with_a_weight():
    """Ratios of training forward to sampler of 1, 1.005 and 1.02, and of 3 on padding."""
    old = Namespace(logprobs_NT=torch.tensor([[1.0, 1.005, 1.02, 3.0]]).log())
    mask = torch.tensor([[True, True, True, False]])
    batch = Namespace(sampler_logprobs_BT=torch.zeros(1, 4), mask_BT=mask)
    ones = Namespace(weights=torch.ones(1, 1))
    args = Namespace(rollout_correction="none")
    assert sweep.weighted_share(ones, old, batch, args) == pytest.approx(1 / 3)
    weights = Namespace(weights=torch.tensor([[0.0]]))  # a completion that is rejected
    args = Namespace(rollout_correction="geo_mask")
    assert sweep.weighted_share(weights, old, batch, args) == 1


def test_run_a_sweep(monkeypatch, tmp_path):
    """A run that ends normally, one that breaks off, which is a result too, and one that fails."""
    monkeypatch.setattr(sweep, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(sweep, "RESULTS", tmp_path)
    flags = "--device cpu --iterations 2 --prompts_per_iteration 4 --num_held_out 8"
    whole = sweep.Job("nine", "grpo", "whole", 1, flags)
    broken = sweep.Job("nine", "grpo", "broken", 1, f"{flags} --lr 1e9")
    fails = sweep.Job("nine", "grpo", "fails", 1, "--model nowhere")
    jobs = [whole, broken, fails]
    assert sweep.run_all("nine", jobs, 1, "abc1234", {}) == 1 and fails.result() is None
    sweep.collect("nine", jobs)
    first, second = sweep.read_csv("nine")
    assert first["ended"] == "" and 0 <= float(first["after_sampled_accuracy"]) <= 1
    assert (first["generated"], first["commit"]) == ("64", "abc1234")
    assert first["code"] == sweep.code_hash("grpo") != sweep.code_hash("gspo")
    assert float(first["log_ratio_range"]) > 0 and 0 < float(first["tokens_mixed"]) <= 1
    assert second["ended"].startswith("grpo.py: error: iteration 1: ")
    curve = sweep.read_csv("nine_curves")
    accuracies = [float(row["accuracy"]) for row in curve]
    assert float(first["end_accuracy"]) == pytest.approx(sum(accuracies) / 2, abs=1e-3)
    drop = max(0, accuracies[0] - accuracies[1])
    assert float(first["largest_drop"]) == pytest.approx(drop, abs=1e-3)
    # A machine that has the rows but not the folders: nothing is run again, and the rows stay.
    before = {path.name: path.read_text() for path in tmp_path.glob("*.csv")}
    monkeypatch.setattr(sweep, "RUNS", tmp_path / "elsewhere")
    assert sweep.run_all("nine", [whole, broken], 1, "another", {}) == 0
    sweep.collect("nine", [whole, broken])
    assert {path.name: path.read_text() for path in tmp_path.glob("*.csv")} == before
    # With other flags it is another run.
    other = whole._replace(flags=whole.flags + " --lr 1e-4")
    monkeypatch.setattr(sweep, "RUNS", tmp_path / "runs")
    assert whole.result() and not other.result() and sweep.kept("nine", [other]) == {}


def test_run_with_an_exchanged_function(monkeypatch, tmp_path):
    """grpo's loss with dr_grpo's advantages: other weights than either script's."""
    monkeypatch.setattr(sweep, "RUNS", tmp_path)
    flags = "--device cpu --iterations 1 --prompts_per_iteration 4 --num_held_out 8"
    jobs = [sweep.Job("x", "grpo", "no-std", 1, f"{flags} --kl_coef 0")]
    jobs += [jobs[0]._replace(variant="plain"), sweep.Job("x", "dr_grpo", "plain", 1, flags)]
    assert sweep.run_all("nine", jobs, 1, "abc1234", {}) == 0
    assert len({job.result()["weights"] for job in jobs}) == 3


def test_memory_that_is_allocated_is_compared_with_the_estimate(monkeypatch):
    """Counters that say 5 bytes at each moment, and 12 at most."""
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 5)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 12)
    config, job = gpu.job_of(ON_A_CPU, "Qwen2.5-0.5B", num_minibatches=1, dtype="bfloat16")
    assert gpu.allocated_parts(config, job) == {"stays": 0, "rollout": 7, "update": 7}


def test_a_check_ends_in_any_way_and_keeps_its_rows(monkeypatch, tmp_path):
    worker = tmp_path / "worker.py"
    worker.write_text(
        'import json, sys, time\nprint(json.dumps(["grpo", {"seconds": 1.5}]), flush=True)\n'
        'if sys.argv[2] == "hangs":\n    time.sleep(100)\n'
        'if sys.argv[2] == "raises":\n    raise ValueError("no such thing")\n'
    )
    monkeypatch.setattr(gpu, "__file__", str(worker))
    monkeypatch.setattr(gpu, "CHECKS", dict.fromkeys(["works", "hangs", "raises"]))
    monkeypatch.setattr(gpu, "LIMIT", 2)
    path = tmp_path / "gpu.json"
    gpu.measure(path, Namespace(device="cpu", minutes=1, only=None))
    results = json.loads(path.read_text())
    assert (results["device"], results["torch"]) == ("cpu", torch.__version__)
    checks = results["checks"].values()
    assert all(check["rows"] == {"grpo": {"seconds": 1.5}} for check in checks)
    assert [check["ended"] for check in checks] == ["", "killed after 2 s", "ValueError: no such thing"]


@pytest.mark.slow
def test_run_the_checks_on_a_cpu(tmp_path):
    path = tmp_path / "gpu.json"
    names = ["nine_bfloat16", "default_job", "speed"]
    command = [sys.executable, ROOT / "benchmarks" / "gpu.py", "measure", path, "--device", "cpu"]
    subprocess.run([*command, "--only", *names], check=True)
    checks = json.loads(path.read_text())["checks"]
    assert [checks[name]["ended"] for name in names] == ["", "", ""]
    assert len(checks["nine_bfloat16"]["rows"]) == 9
    for row, columns in checks["nine_bfloat16"]["rows"].items():
        assert columns["first ratio - 1"] == columns["resumed differs by"] == 0, row
        assert columns["does the same"] and columns["finite"], row
