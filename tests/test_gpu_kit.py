"""The kit for a GPU, on a CPU: what its checks find there, and that no check can spoil the others."""

import json
import subprocess
import sys
from argparse import Namespace

import pytest
import torch
from conftest import ROOT

sys.path.append(str(ROOT / "benchmarks"))
import gpu
import gpu_kit
import report

TINY = Namespace(device="cpu", tiny=True)
WORKER = """
import json, sys, time
name = sys.argv[2]
print(json.dumps(["grpo", {"seconds": 1.5}]), flush=True)
if name == "hangs":
    time.sleep(100)
if name == "raises":
    raise ValueError("no such thing")
if name == "skips":
    sys.exit("skipped: TRL is not installed")
"""


def test_checks_end_in_whatever_way_and_what_they_found_is_kept(monkeypatch, tmp_path, capsys):
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    monkeypatch.setattr(gpu, "__file__", str(worker))
    names = ["works", "hangs", "raises", "skips"]
    monkeypatch.setattr(gpu_kit, "CHECKS", dict.fromkeys(names))
    monkeypatch.setattr(gpu_kit, "LIMIT", 3)
    path = tmp_path / "gpu.json"
    args = Namespace(device="cpu", tiny=True, minutes=1, only=None)
    gpu_kit.measure(path, args)
    results = json.loads(path.read_text())
    assert (results["device"], results["torch"]) == ("cpu", torch.__version__)
    checks = results["checks"]
    assert [checks[name]["rows"] for name in names] == 4 * [{"grpo": {"seconds": 1.5}}]
    ended = ["", "killed after 3 s", "ValueError: no such thing", "skipped: TRL is not installed"]
    assert [checks[name]["ended"] for name in names] == ended
    assert "works, grpo: seconds 1.5" in capsys.readouterr().out
    # A second time: only one, for which there is no time; the others stay.
    gpu_kit.measure(path, Namespace(device="cpu", tiny=True, minutes=0, only=["works"]))
    again = json.loads(path.read_text())["checks"]
    assert again["works"]["ended"] == "skipped: no time left"
    assert {name: again[name] for name in names[1:]} == {name: checks[name] for name in names[1:]}
    # What comes from elsewhere is not mixed with this.
    path.write_text(json.dumps(results | {"device": "another"}))
    with pytest.raises(SystemExit, match="another device"):
        gpu_kit.measure(path, args)


def test_speed_at_a_tiny_size():
    rows = dict(gpu_kit.speed(TINY))
    assert list(rows) == ["rollout", "update"]
    for columns in rows.values():
        assert list(columns) == ["seconds", "tokens/s"]  # what a GPU does is known on a GPU
        assert columns["tokens/s"] > 0


@pytest.mark.parametrize("recomputes", [False, True])
def test_what_is_allocated_is_compared_with_what_is_computed(recomputes, monkeypatch):
    """Counters that say 5 bytes at each moment, and 12 at most."""
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 5)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 12)
    flags = {"gradient_checkpointing": recomputes, "num_minibatches": 1, "dtype": "bfloat16"}
    config, job = gpu_kit.job_of(TINY, "Qwen2.5-0.5B", **flags)
    assert gpu.allocated_parts(config, job) == {"stays": 0, "rollout": 7, "update": 7}


def test_no_completion_ends():
    config, job = gpu_kit.job_of(TINY, "Qwen2.5-0.5B")
    policy, _ = gpu.random_policy(config, job)
    completions = gpu.sample(policy, [gpu.problem_of(3)] * 4, job.group_size, job)
    assert {len(c.ids) for c in completions} == {job.max_new_tokens}


def test_the_tables_on_the_page(monkeypatch, tmp_path):
    monkeypatch.setattr(report.stats, "RESULTS", tmp_path)
    rows = {"grpo": {"finite": True}, "ppo": {"error": "out of memory"}}
    checks = {"nine": {"rows": rows, "seconds": 12.3, "ended": "killed after 180 s"}}
    results = {"device": "H200", "torch": "2.11", "transformers": "5.17", "commit": "abc"}
    (tmp_path / "gpu.json").write_text(json.dumps(results | {"checks": checks}))
    lines = report.measured_on_a_gpu()
    assert lines[0] == "Measured on one H200, torch 2.11, transformers 5.17, commit abc."
    assert lines[2] == "`nine`, 12 s: killed after 180 s"
    assert lines[-2:] == ["| grpo | True |  |", "| ppo |  | out of memory |"]


@pytest.mark.slow
def test_one_check_of_each_kind(tmp_path):
    """As it is run, on the CPU."""
    path = tmp_path / "gpu.json"
    command = [sys.executable, ROOT / "benchmarks" / "gpu.py", "measure", path, "--device", "cpu"]
    names = ["nine_bfloat16", "default_job", "memory_moe", "speed", "trl_dynamic", "torchrun_1"]
    names.append("nine_float32_deterministic")
    result = subprocess.run([*command, "--only", *names], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    checks = json.loads(path.read_text())["checks"]
    for name in names:
        ended = checks[name]["ended"]
        assert ended == "" or ended.startswith("skipped"), (name, ended)
        for row, columns in checks[name]["rows"].items():
            assert "error" not in columns, (name, row, columns)
            for column in ("first ratio - 1", "resumed differs by", "differs by"):
                assert columns.get(column, 0) == 0, (name, row, column)
            assert columns.get("finite", True) and columns.get("does the same", True), (name, row)
    assert len(checks["nine_bfloat16"]["rows"]) == 9
