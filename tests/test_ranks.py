"""Several ranks are one process, to the bit where each has one micro-batch of a step."""

import json
import os
import subprocess
import sys
import time

import pytest
import torch
from conftest import MORE, ROOT, SCRIPTS, run
from safetensors.torch import load_file

SMALL = "--num_held_out 5 --max_new_tokens 32 --eval_every 1 --save_every 1"
SIZES = {
    "ppo": "--prompts_per_iteration 24 --num_minibatches 2",
    "dapo": "--prompts_per_iteration 6 --group_size 4 --num_minibatches 2 --max_sampling_rounds 2",
    "more.reinforce": "--prompts_per_iteration 12",
    "more.rloo": "--prompts_per_iteration 3 --group_size 4",
    "more.vapo": "--prompts_per_iteration 3 --num_minibatches 2 --pretraining_iterations 1",
}
OTHERS = "--prompts_per_iteration 6 --group_size 4 --num_minibatches 2"
NOT_COMPARED = ("seconds", "per_second")


def flags(name, folder, *more):
    sizes = SIZES.get(name, OTHERS)
    return [*SMALL.split(), *sizes.split(), "--run_dir", str(folder), *map(str, more)]


def in_parts(size):
    """Flags for micro-batches of 6, one for each of two ranks, or for more and smaller ones. The loss
    that balances experts is a mean over its micro-batch: it is left out where they differ."""
    parts = ["--iterations", "2", "--micro_batch_size", str(size)]
    if size < 6:
        parts += ["--router_aux_coef", "0"]
    return parts


def torchrun(world, trouble, *commands, timeout=300):
    """Runs the commands, (script, flags), in `world` ranks."""
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={world}",
    ]
    worker = [str(ROOT / "tests" / "ranks_worker.py"), trouble]
    words = [" ".join([name, *flags]) for name, flags in commands]
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [*launcher, *worker, *words],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def outcome(folder):
    """(weights, optimizer's tensors, metrics without times) at the end of a run."""
    (checkpoint,) = folder.glob("checkpoint-*")
    weights = load_file(checkpoint / "model.safetensors")
    state = torch.load(checkpoint / "trainer_state.pt", weights_only=True)["parts"]
    moments = {}
    for number, values in state["optimizer"]["state"].items():
        for name in ("exp_avg", "exp_avg_sq"):
            moments[number, name] = values[name]
    metrics = []
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        kept = {key: row[key] for key in row if not key.endswith(NOT_COMPARED)}
        metrics.append({key: kept[key] for key in kept if "sampler_" not in key})
    return weights, moments, metrics


def same_bits(one, other):
    for ours, theirs in zip(one[:2], other[:2], strict=True):
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            assert torch.equal(tensor, theirs[name]), name
    assert one[2] == other[2]


def close(one, other):
    for name, tensor in one[0].items():
        # Adam divides a gradient by its own size: where that is tiny, its rounding error is not. Up to
        # 1.2e-6 has been seen, after four steps of 2e-4.
        torch.testing.assert_close(tensor, other[0][name], atol=3e-6, rtol=0)
    for ours, theirs in zip(one[2], other[2], strict=True):
        del ours["moe/aux_loss"]
        del theirs["moe/aux_loss"]
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)


@pytest.fixture(scope="module", params=["grpo", "ppo", "dapo"])
def name(request):
    return request.param


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder of the runs: {name}-{world}-{micro batch size}."""
    folder = tmp_path_factory.mktemp("ranks")
    names = ["grpo", "ppo", "dapo"]
    spread = {2: (6, 2), 3: (2,), 4: (2,)}
    for world, sizes in spread.items():
        commands = []
        for name in names:
            for size in sizes:
                where = folder / f"{name}-{world}-{size}"
                commands.append((name, flags(name, where, *in_parts(size))))
        if world == 2:  # and one that is resumed
            where = folder / "resumed"
            commands.append(("grpo", flags("grpo", where, "--iterations", 1, "--micro_batch_size", 6)))
            more = ("--iterations", 2, "--micro_batch_size", 6, "--resume")
            commands.append(("grpo", flags("grpo", where, *more)))
        result = torchrun(world, "none", *commands)
        assert result.returncode == 0, result.stderr[-3000:]
    for name in names:
        for size in (6, 2):
            where = folder / f"{name}-1-{size}"
            result = run(name, *flags(name, where, *in_parts(size)))
            assert result.returncode == 0, result.stderr
    return folder


def test_two_ranks_are_one_process_to_the_bit(runs, name):
    """12 completions in a step: 6 and 6, which one process has as two micro-batches."""
    same_bits(outcome(runs / f"{name}-1-6"), outcome(runs / f"{name}-2-6"))


def test_more_micro_batches_are_the_same_up_to_the_order_of_a_sum(runs, name):
    close(outcome(runs / f"{name}-1-2"), outcome(runs / f"{name}-2-2"))


@pytest.mark.parametrize("world", [3, 4])
def test_a_number_of_ranks_that_does_not_divide_the_prompts(runs, name, world):
    close(outcome(runs / f"{name}-1-2"), outcome(runs / f"{name}-{world}-2"))


def test_resume_with_the_same_number_is_exact_and_another_goes_on(runs):
    same_bits(outcome(runs / "resumed"), outcome(runs / "grpo-2-6"))
    more = ("--iterations", 3, "--micro_batch_size", 6, "--resume")
    result = run("grpo", *flags("grpo", runs / "resumed", *more))
    assert result.returncode == 0, result.stderr
    assert [row["iteration"] for row in outcome(runs / "resumed")[2]] == [1, 2, 3]


def errors(result):
    return [line for line in result.stderr.splitlines() if "grpo.py: error:" in line]


def test_a_signal_to_one_rank_stops_all_after_the_iteration(tmp_path):
    result = torchrun(2, "signal", ("grpo", flags("grpo", tmp_path, "--iterations", 3)))
    assert result.returncode != 0 and "stopped by a signal" in result.stdout, result.stderr[-2000:]
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-000002"]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_nan_on_one_rank_ends_all_with_one_line(tmp_path):
    result = torchrun(2, "nan", ("grpo", flags("grpo", tmp_path, "--iterations", 3)))
    assert result.returncode != 0
    (line,) = errors(result)
    assert "iteration 2: loss is not finite" in line
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-000001"]


def test_when_one_rank_is_killed_the_others_end_and_say_so(tmp_path):
    start = time.time()
    result = torchrun(2, "kill", ("grpo", flags("grpo", tmp_path, "--iterations", 3)))
    assert result.returncode != 0 and time.time() - start < 60 + 60  # the start is in it
    (line,) = errors(result)
    assert "lost another" in line


def test_bad_input_is_one_line(tmp_path):
    result = torchrun(2, "none", ("grpo", flags("grpo", tmp_path, "--lr", "-1")))
    assert result.returncode != 0
    (line,) = errors(result)
    assert "--lr" in line
    many = torchrun(2, "none", ("grpo", flags("grpo", tmp_path, "--num_minibatches", 24)))
    assert len(errors(many)) == 1 and "fewer completions" in many.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SCRIPTS, *MORE])
def test_two_ranks_are_one_process_in_all(name, tmp_path):
    shared = ("--iterations", 3, "--micro_batch_size", 6)
    one = run(name, *flags(name, tmp_path / "1", *shared))
    two = torchrun(2, "none", (name, flags(name, tmp_path / "2", *shared)))
    assert one.returncode == two.returncode == 0, two.stderr[-3000:]
    same_bits(outcome(tmp_path / "1"), outcome(tmp_path / "2"))


@pytest.mark.slow
@pytest.mark.parametrize("replay", ["r2", "r3"])
@pytest.mark.parametrize("name", ["grpo", "dapo"])
def test_two_ranks_share_a_mismatch(name, replay, tmp_path):
    """Weights of completions and experts are those of one process; up to rounding, since a sampler's
    log-probs depend, in their last bits, on how many rows are sampled together."""
    mismatch = ("--rollout_dtype", "int4", "--rollout_correction", "token_tis")
    shared = ("--iterations", 2, "--micro_batch_size", 6, "--routing_replay", replay, *mismatch)
    one = run(name, *flags(name, tmp_path / "1", *shared))
    two = torchrun(2, "none", (name, flags(name, tmp_path / "2", *shared)))
    assert one.returncode == two.returncode == 0, two.stderr[-3000:]
    close(outcome(tmp_path / "1"), outcome(tmp_path / "2"))
