"""Several ranks are one process, to the bit where each has one micro-batch of a step."""

import json
import os
import subprocess
import sys

import pytest
import torch
from conftest import MORE, ROOT, SCRIPTS, run, script_args
from safetensors.torch import load_file

from plumbing import ranks
from plumbing.args import UserError, parse_args

SMALL = "--num_held_out 5 --max_new_tokens 32 --eval_every 1 --save_every 1"
SIZES = {
    "ppo": "--prompts_per_iteration 24 --num_minibatches 2",
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
    parts = ["--iterations", "3", "--micro_batch_size", str(size)]
    if size < 6:
        parts += ["--router_aux_coef", "0"]
    return parts


def torchrun(world, *commands, timeout=300):
    """Runs the commands, (trouble, script, flags), one after the other in `world` ranks."""
    launcher = "-m torch.distributed.run --standalone --nproc-per-node".split()
    worker = ROOT / "tests" / "ranks_worker.py"
    words = [" ".join([trouble, name, *flags]) for trouble, name, flags in commands]
    return subprocess.run(
        [sys.executable, *launcher, str(world), worker, *words],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def codes(result):
    """[the exit code of each rank] of the runs that no rank was lost in."""
    lines = [line for line in result.stdout.splitlines() if line.startswith("ended with")]
    return [tuple(int(code) for code in line.split()[2:]) for line in lines]


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
        more = ("sampler_", "reward.reward")  # the second: of --reward, which one of the runs has
        metrics.append({key: kept[key] for key in kept if not any(word in key for word in more)})
    return weights, moments, metrics


def same_bits(one, other):
    for ours, theirs in zip(one[:2], other[:2], strict=True):
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            assert torch.equal(tensor, theirs[name]), name
    assert one[2] == other[2]


def close(one, other):
    for name, tensor in one[0].items():
        # Adam divides a gradient by its own size: where that is tiny, its rounding error is not. On one
        # processor 1.2e-6 has been seen, on another 7.4e-6, after steps of 2e-4.
        torch.testing.assert_close(tensor, other[0][name], atol=2e-5, rtol=0)
    for ours, theirs in zip(one[2], other[2], strict=True):
        # The loss that balances experts is a mean over its micro-batch.
        same = {"moe/aux_loss": ours["moe/aux_loss"]}
        assert ours == pytest.approx(theirs | same, rel=1e-4, abs=1e-6)


COUNTED = """
import os
from common import verify

def reward(text, answer, truncated):
    with open(f"{folder}/calls-{{os.getpid()}}", "a") as file:
        file.write("x")
    return verify(text, answer, truncated)
"""


@pytest.fixture(scope="module")
def two(tmp_path_factory, sums):
    """(result of one launch of two ranks, folder of its runs): one notes each call of its reward in a
    file per process, one has a signal and is resumed, one is refused, one has ranks with different
    settings, one ends in NaN, two cannot write, one loses a rank."""
    folder = tmp_path_factory.mktemp("two")
    (folder / "reward.py").write_text(COUNTED.format(folder=folder))

    def command(trouble, where, *more, name="grpo", size=6):
        return trouble, name, flags(name, folder / where, "--dataset", sums, *in_parts(size), *more)

    result = torchrun(
        2,
        command("none", "grpo-6", "--reward", f"{folder}/reward.py:reward"),
        command("none", "grpo-2", size=2),
        command("none", "ppo-6", name="ppo"),
        command("signal", "stopped"),
        command("none", "stopped", "--resume"),
        command("none", "refused", "--lr", "-1"),
        command("others", "others"),
        command("nan", "nan"),
        command("log", "log"),
        command("save", "save"),
        command("kill", "killed"),
    )
    return result, folder


@pytest.fixture(scope="module")
def one(tmp_path_factory, sums):
    """one(name, micro batch size): the outcome of the same in one process."""
    known = {}

    def outcome_of(name, size):
        if (name, size) not in known:
            folder = tmp_path_factory.mktemp("one")
            result = run(name, *flags(name, folder, "--dataset", sums, *in_parts(size)))
            assert result.returncode == 0, result.stderr
            known[name, size] = outcome(folder)
        return known[name, size]

    return outcome_of


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_two_ranks_are_one_process_to_the_bit(two, one, name):
    """12 completions in a step: 6 and 6, which one process has as two micro-batches."""
    same_bits(one(name, 6), outcome(two[1] / f"{name}-6"))


def test_a_gradient_that_one_rank_alone_has_counts(two):
    """As of an expert that only one rank's completions have used; what none has used stays None."""
    assert "gradients [2.0, 1.0, None] [2.0, 1.0, None]" in two[0].stdout


def test_rows_of_small_integers(two):
    values = [-2000, -1000, 0, 1000, 2000]
    assert f"rows {values} {values}" in two[0].stdout


def test_each_completion_is_verified_once(two):
    """Not on every rank; both have a share. The run is that of one process, as was tested above."""
    calls = [len(path.read_text()) for path in two[1].glob("calls-*")]
    rollouts = 3 * 6 * 4
    evaluations = 5 * (2 + 1 + 1 + 2)  # the first and the last of them also sampled
    assert len(calls) == 2 and sum(calls) == rollouts + evaluations


def test_more_micro_batches_are_the_same_up_to_the_order_of_a_sum(two, one):
    close(one("grpo", 2), outcome(two[1] / "grpo-2"))


def test_run_a_signal_to_one_rank_stops_all_and_resumed_it_is_exact(two, one):
    """After the iteration in which it comes, with a checkpoint of it; two ranks or one may go on."""
    result, folder = two
    assert "stopped by a signal" in result.stdout
    same_bits(one("grpo", 6), outcome(folder / "stopped"))
    more = ("--iterations", 4, "--micro_batch_size", 6, "--resume")
    settings = json.loads((folder / "stopped" / "settings.json").read_text())
    alone = run("grpo", *flags("grpo", folder / "stopped", "--dataset", settings["dataset"], *more))
    assert alone.returncode == 0, alone.stderr
    assert [row["iteration"] for row in outcome(folder / "stopped")[2]] == [1, 2, 3, 4]


def test_what_ends_a_run_ends_all_ranks_with_one_line(two):
    """A flag, other settings or a NaN on one rank, a full disk on rank 0, a rank that is killed: nobody
    waits for another, nor repeats it."""
    result, folder = two
    lines = [line for line in result.stderr.splitlines() if "grpo.py: error:" in line]
    refused, others, nan, log, save, killed = lines
    assert others.endswith("started with different values of dataset's sums.jsonl, seed")
    assert not (folder / "others").exists()
    for line in (log, save):
        assert "cannot be written" in line and line.endswith("OSError No space left on device")
    assert "--lr" in refused and not (folder / "refused").exists()
    assert "iteration 2: loss is not finite" in nan
    assert [path.name for path in (folder / "nan").glob("checkpoint-*")] == ["checkpoint-000001"]
    assert "lost another" in killed
    assert codes(result) == [(0, 0), (0, 0), (0, 0), (130, 130), (0, 0)] + [(2, 2)] * 5
    assert result.returncode != 0


def test_run_a_bug_in_a_reward_function_of_one_rank(tmp_path, sums):
    """It shows its traceback; the other rank ends with one line."""
    (tmp_path / "reward.py").write_text(
        "import os\ndef f(prompts, **rest): return [1 / (1 - int(os.environ['RANK']))] * len(prompts)"
    )
    own = ("--dataset", sums, "--reward", f"{tmp_path}/reward.py:f", "--iterations", 1)
    result = torchrun(2, ("none", "grpo", flags("grpo", tmp_path / "run", *own)))
    assert result.returncode != 0 and "reward.py" in result.stderr
    assert "ZeroDivisionError: division by zero" in result.stderr
    (line,) = (x for x in result.stderr.splitlines() if "grpo.py: error:" in x)
    assert "rank 0 has lost another" in line


@pytest.mark.parametrize(
    "variables, expected",
    [
        ({}, "MASTER_ADDR expected, but not set"),
        ({"MASTER_ADDR": "localhost"}, "MASTER_PORT expected, but not set"),
        ({"MASTER_ADDR": "localhost", "MASTER_PORT": "x"}, "invalid literal"),
        ({"MASTER_ADDR": "localhost", "MASTER_PORT": "99999"}, "from 0 to 65535"),
    ],
)
def test_run_variables_that_torchrun_would_not_set(variables, expected, monkeypatch):
    """One of two ranks, which does not know where the other is, ends with a line."""
    monkeypatch.setattr(ranks, "WORLD", 2)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", **variables}.items():
        monkeypatch.setenv(name, value)
    result = run("grpo")
    (line,) = result.stderr.splitlines()
    assert result.returncode == 2 and expected in line
    assert line.startswith("grpo.py: error: rank 0 cannot join the others: ")


def test_fewer_completions_than_ranks(monkeypatch):
    monkeypatch.setattr(ranks, "WORLD", 2)
    monkeypatch.setattr(sys, "argv", ["grpo.py", *flags("grpo", "x", "--num_minibatches", 24)])
    with pytest.raises(UserError, match="leaves fewer completions in a minibatch than 2 ranks"):
        parse_args(script_args("grpo")[0].Args)


@pytest.mark.slow
@pytest.mark.parametrize("world", [3, 4])
@pytest.mark.parametrize("name", ["grpo", "ppo", "dapo"])
def test_a_number_of_ranks_that_does_not_divide_the_prompts(world, name, one, sums, tmp_path):
    own = flags(name, tmp_path, "--dataset", sums, *in_parts(2))
    result = torchrun(world, ("none", name, own))
    assert codes(result) == [(0,) * world], result.stderr[-3000:]
    close(one(name, 2), outcome(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in [*SCRIPTS, *MORE] if name not in ("grpo", "ppo")])
def test_two_ranks_are_one_process_in_all(name, tmp_path, one, sums):
    own = flags(name, tmp_path, "--dataset", sums, *in_parts(6))
    result = torchrun(2, ("none", name, own))
    assert codes(result) == [(0, 0)], result.stderr[-3000:]
    same_bits(one(name, 6), outcome(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("replay", ["r2", "r3"])
@pytest.mark.parametrize("name", ["grpo", "dapo"])
def test_run_two_ranks_share_a_mismatch(name, replay, tmp_path):
    """Weights of completions and experts are those of one process; up to rounding, since a sampler's
    log-probs depend, in their last bits, on how many rows are sampled together."""
    mismatch = ("--rollout_dtype", "int4", "--rollout_correction", "token_tis")
    shared = ("--iterations", 2, "--micro_batch_size", 6, "--routing_replay", replay, *mismatch)
    alone = run(name, *flags(name, tmp_path / "1", *shared))
    result = torchrun(2, ("none", name, flags(name, tmp_path / "2", *shared)))
    assert alone.returncode == 0 and codes(result) == [(0, 0)], result.stderr[-3000:]
    close(outcome(tmp_path / "1"), outcome(tmp_path / "2"))


@pytest.mark.slow
@pytest.mark.parametrize("more", ["--rollout_correction geo_filter", "--old_logprobs sampler"])
def test_run_two_ranks_share_a_stale_sampler(more, tmp_path):
    shared = ("--iterations", 3, "--micro_batch_size", 6, "--rollout_refresh_every", 2, *more.split())
    shared += ("--eval_samples", 2)
    alone = run("grpo", *flags("grpo", tmp_path / "1", *shared))
    result = torchrun(2, ("none", "grpo", flags("grpo", tmp_path / "2", *shared)))
    assert alone.returncode == 0 and codes(result) == [(0, 0)], result.stderr[-3000:]
    close(outcome(tmp_path / "1"), outcome(tmp_path / "2"))
