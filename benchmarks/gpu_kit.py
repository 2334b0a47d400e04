"""Measures on a GPU, by one command, what was only computed or run on a CPU so far.

    python benchmarks/gpu.py measure OUT.json [--minutes 9] [--only NAME ...] [--device cpu] [--tiny]

Needs requirements.txt and a GPU of 80 GB or more, no network. The checks, the important ones first:

nine_DTYPE      the nine scripts: how far is the first ratio from 1, does the same command do the same,
                and how far are 2 iterations and a resumed third one from 3 in one go
default_job     `python grpo.py`: seconds and held-out accuracy
memory_MODEL    GiB as plumbing/memory.py computes them, and as CUDA has allocated them
speed           an iteration in the shape of Qwen2.5-0.5B with random weights in bfloat16: 64 prompts
                x 8 completions of 512 tokens, none of which ends; no KL. A pass is a decoding step
                of the rollout, or a micro-batch of the update.
trl_CACHE       the same by TRL (pip install trl==1.16.0) with bf16=True, by default on float32 weights.
                A static cache takes bfloat16 ones only, and continuous batching casts them in place.
torchrun_RANKS  grpo.py with torchrun against without, and NCCL in one process
nine_DTYPE_deterministic  the nine with PyTorch's deterministic algorithms, where it has any

Each is a process of its own, `python benchmarks/gpu.py check NAME`. What it finds is at once printed
and written to OUT.json: {"device", "torch", "transformers", "commit", "checks": {name: {"rows": {row:
{column: value}}, "seconds", "ended": why, if not by itself}}}. Other checks there are kept. On a CPU,
or with --tiny, the sizes are tiny: this shows that the kit works, and measures nothing.
"""

import argparse
import copy
import dataclasses
import functools
import importlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import gpu
import torch
import transformers
from safetensors.torch import load_file
from speed import second_iteration
from torch import distributed
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, supported_activities

import common
from plumbing.args import TINY_MOE, parse_args, resolve_device
from plumbing.memory import memory_parts

ROOT = Path(__file__).parent.parent
NINE = "grpo ppo dr_grpo dapo gspo cispo gmpo rspo sapo".split()
LIMIT = 180  # seconds: a check that takes longer is killed


def run_script(name, *flags):
    """`python NAME.py FLAGS` in this process, which saves the imports."""
    script = importlib.import_module(name)
    sys.argv = [f"{name}.py", *map(str, flags)]
    script.main(parse_args(script.Args))


def short_run(args, folder):
    """Flags of a short run, on sums that are read faster than those of the default job."""
    sums = Path(folder, "sums.jsonl")
    rows = [{"question": q, "answer": a} for q, a in common.addition_problems()[:300]]
    sums.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--device", args.device, "--dataset", sums, "--num_held_out", 8]
    if args.tiny:
        flags += ["--prompts_per_iteration", 4, "--max_new_tokens", 16]
    return flags


def metrics_of(folder, key):
    """[number] of a run, from the iterations that have it."""
    lines = Path(folder, "metrics.jsonl").read_text().splitlines()
    return [metrics[key] for metrics in map(json.loads, lines) if key in metrics]


def difference(folder, other):
    """The largest between the weights of two runs."""
    paths = [next(Path(run).glob("checkpoint-*/model.safetensors")) for run in (folder, other)]
    weights, others = map(load_file, paths)
    return torch.stack([(weights[name] - others[name]).abs().max() for name in weights]).max().item()


def nine(args, dtype, deterministic=False):
    if deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # read when cuBLAS starts
        torch.use_deterministic_algorithms(True, warn_only=True)  # cumsum may have none
    for name in NINE:
        try:
            with tempfile.TemporaryDirectory() as folder:
                flags = [*short_run(args, folder), "--dtype", dtype, "--run_dir"]
                whole = f"{folder}/whole"
                parts = f"{folder}/parts"
                run_script(name, *flags, whole, "--iterations", 3)
                run_script(name, *flags, parts, "--iterations", 2)
                run_script(name, *flags, parts, "--iterations", 3, "--resume")
                norms = metrics_of(whole, "charts/grad_norm")[:2]
                columns = {
                    "first ratio - 1": max(metrics_of(whole, "losses/first_step_ratio_error_max")),
                    "does the same": norms == metrics_of(parts, "charts/grad_norm")[:2],
                    "resumed differs by": difference(whole, parts),
                }
                columns["finite"] = math.isfinite(columns["resumed differs by"])
        except Exception as error:  # the other scripts may still be fine
            columns = {"error": f"{type(error).__name__}: {error}"}
        yield name, columns


def default_job(args):
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--device", args.device, "--run_dir", folder]
        if args.tiny:
            flags += [*short_run(args, folder), "--iterations", 2]
        start = time.perf_counter()
        run_script("grpo", *flags)
        seconds = time.perf_counter() - start
        yield "grpo", {"seconds": seconds, "accuracy": metrics_of(folder, "eval/accuracy")[-1]}


def torchrun(args, ranks):
    """On a CPU both are the same to the bit: two ranks have a micro-batch each, one process has two."""
    if args.device != "cpu" and torch.cuda.device_count() < ranks:
        sys.exit(f"skipped: GPUs here: {torch.cuda.device_count()}")
    device = args.device.split(":")[0]  # each rank has a GPU of its own
    launcher = f"-m torch.distributed.run --standalone --nproc-per-node {ranks} grpo.py".split()
    with tempfile.TemporaryDirectory() as folder:
        flags = [*short_run(args, folder), "--device", device, "--iterations", 3]
        flags += ["--micro_batch_size", 4 if args.tiny else 32, "--run_dir"]
        run_script("grpo", *flags, f"{folder}/one")
        command = [sys.executable, *launcher, *map(str, flags), f"{folder}/ranks"]
        subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=True)
        yield "grpo", {"differs by": difference(f"{folder}/one", f"{folder}/ranks")}
    if ranks == 1 and device == "cuda":  # grpo.py does not use it in one process
        options = {"store": distributed.HashStore(), "rank": 0, "world_size": 1}
        distributed.init_process_group("cpu:gloo,cuda:nccl", **options)
        numbers = torch.arange(1000.0, device=device)
        distributed.all_reduce(numbers)
        yield "NCCL", {"differs by": (numbers.cpu() - torch.arange(1000.0)).abs().max().item()}


def job_of(args, name, **flags):
    """(the model's config, arguments of grpo.py, by default those of the memory table)"""
    if args.tiny:
        flags |= {"prompts_per_iteration": 2, "max_new_tokens": 16, "micro_batch_size": 4}
        config = transformers.AutoConfig.from_pretrained(TINY_MOE)
    else:
        config = copy.deepcopy(gpu.MODELS[name])
    if name == "OLMoE-1B-7B":
        config.num_hidden_layers = min(4, config.num_hidden_layers)  # more do not fit
    return config, gpu.settings(device=args.device, kl_coef=0.0, lr=1e-6, **flags)


def memory(args, name):
    if args.device == "cpu":
        sys.exit("skipped: nobody counts what is allocated on a CPU")
    # What needs most comes last: it may not fit.
    ways = [("bfloat16", False), ("bfloat16", True), ("float32", True), ("float32", False)]
    for dtype, recomputes in ways:
        flags = {"dtype": dtype, "gradient_checkpointing": recomputes, "num_minibatches": 1}
        config, job = job_of(args, name, **flags)
        parts = memory_parts(gpu.without_weights(config), job, gpu.LONGEST_PROMPT)
        parts["stays"] = parts["weights"] + parts["masters"] + parts["moments"]
        parts["update"] += parts["gradients"]
        columns = {}
        for part, count in gpu.allocated_parts(config, job).items():
            columns[f"{part}, computed"] = parts[part] / 2**30
            columns[part] = count / 2**30
        yield f"{dtype}, recomputed layers" if recomputes else dtype, columns


def timed(work, tokens, passes, device):
    """{column: value} of `work`, which is done once for its time and once with the profiler."""
    start = time.perf_counter()
    work()
    if device != "cpu":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    columns = {"seconds": seconds, "tokens/s": tokens / seconds}
    if device == "cpu" or ProfilerActivity.CUDA not in supported_activities():
        return columns
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
    kernel_seconds = 0
    calls = Counter()  # of CUDA by the host
    for event in profiler.profiler.kineto_results.events():
        if event.device_type() != DeviceType.CUDA:
            calls[event.name()] += 1
        elif not event.name().startswith(("Memcpy", "Memset")):
            kernel_seconds += event.duration_ns() / 1e9
    # A copy to the host waits for its stream. cudaDeviceSynchronize is the profiler's own.
    waits = calls["cudaStreamSynchronize"] + calls["cudaEventSynchronize"]
    launches = sum(count for name, count in calls.items() if "Launch" in name)
    columns["GPU computes"] = kernel_seconds / seconds
    columns["launches per pass"] = launches / passes
    columns["waits per pass"] = waits / passes
    return columns


SPEED = dict(dtype="bfloat16", prompts_per_iteration=64, rollout_batch_size=512, micro_batch_size=16)


def speed(args):
    config, job = job_of(args, "Qwen2.5-0.5B", **SPEED)
    policy, optimizer = gpu.random_policy(config, job)
    problems = [gpu.problem_of(gpu.LONGEST_PROMPT)] * job.prompts_per_iteration
    few = dataclasses.replace(job, max_new_tokens=4)
    common.sample(policy, problems, job.group_size, few)  # warm-up
    completions = []

    def rollout():
        completions[:] = common.sample(policy, problems, job.group_size, job)

    tokens = len(problems) * job.group_size * job.max_new_tokens
    yield "rollout", timed(rollout, tokens, job.max_new_tokens, job.device)
    batch = common.collate(completions, job)
    work = functools.partial(gpu.update, policy, optimizer, batch, job)
    work()
    yield "update", timed(work, tokens, len(completions) / job.micro_batch_size, job.device)


def trl(args, weights="float32", **options):
    if importlib.util.find_spec("trl") is None:
        sys.exit("skipped: TRL is not installed")
    config, job = job_of(args, "Qwen2.5-0.5B", **SPEED)
    policy, _ = gpu.random_policy(config, job)
    torch.backends.cuda.enable_cudnn_sdp(True)  # PyTorch's default
    model = policy.master.to(getattr(torch, weights))
    problems = [gpu.problem_of(gpu.LONGEST_PROMPT)] * 2 * job.prompts_per_iteration
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY_MOE)
    passes = job.prompts_per_iteration * job.group_size // job.num_minibatches // job.micro_batch_size
    options["generation_kwargs"] = {"eos_token_id": None}
    inputs = (model, tokenizer, problems, job, passes)
    sampling, rest, tokens = second_iteration(*inputs, **options)
    yield "rollout", {"seconds": sampling, "tokens/s": tokens / sampling}
    columns = {"seconds": rest, "tokens/s": tokens / rest}
    after = str(model.dtype).removeprefix("torch.")
    yield "update", columns | {"dtype before": weights, "dtype after": after}


# name: generator of (row, {column: value}), in the order of importance
CHECKS = {
    "nine_float32": functools.partial(nine, dtype="float32"),
    "nine_bfloat16": functools.partial(nine, dtype="bfloat16"),
    "default_job": default_job,
    "memory_0.5B": functools.partial(memory, name="Qwen2.5-0.5B"),
    "memory_1.5B": functools.partial(memory, name="Qwen2.5-1.5B"),
    "memory_moe": functools.partial(memory, name="OLMoE-1B-7B"),
    "speed": speed,
    "trl_dynamic": trl,
    "trl_static": functools.partial(trl, weights="bfloat16", cache_implementation="static"),
    "trl_continuous": functools.partial(trl, use_transformers_continuous_batching=True),
    "torchrun_1": functools.partial(torchrun, ranks=1),
    "torchrun_2": functools.partial(torchrun, ranks=2),
    "nine_float32_deterministic": functools.partial(nine, dtype="float32", deterministic=True),
    "nine_bfloat16_deterministic": functools.partial(nine, dtype="bfloat16", deterministic=True),
}


def check(name, args):
    """One check in this process: a line of JSON for each row, and nothing else on stdout."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed goes to stderr
    for row, columns in CHECKS[name](args):
        for column, value in columns.items():
            if isinstance(value, float):
                columns[column] = float(f"{value:.4g}")
        print(json.dumps([row, columns]), file=out, flush=True)


def rows_of(name, args, seconds, result):
    """Yields (row, columns) of a check in a process of its own, and notes why that ended."""
    command = [sys.executable, gpu.__file__, "check", name, "--device", args.device]
    if args.tiny:
        command.append("--tiny")
    with tempfile.TemporaryFile("w+") as errors:
        pipes = {"stdout": subprocess.PIPE, "stderr": errors, "text": True}
        process = subprocess.Popen(command, **pipes, process_group=0)
        timer = threading.Timer(seconds, os.killpg, [process.pid, signal.SIGKILL])
        timer.start()
        try:
            for line in process.stdout:
                yield json.loads(line)
            code = process.wait()
        finally:
            timer.cancel()
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        errors.seek(0)
        last_line = errors.read().strip().split("\n")[-1]
    result["ended"] = last_line if code != 0 else ""
    if code == -signal.SIGKILL:
        result["ended"] = f"killed after {seconds:.0f} s"


def measure(path, args):
    git = ["git", "rev-parse", "--short", "HEAD"]
    results = {
        "device": "cpu" if args.device == "cpu" else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout.strip(),
        "checks": {},
    }
    if path.exists():
        old = json.loads(path.read_text())
        if old | {"checks": {}} != results:
            sys.exit(f"{path} comes from another device, version or commit")
        results = old
    end = time.monotonic() + 60 * args.minutes
    for name in args.only or CHECKS:
        start = time.monotonic()
        result = {"rows": {}, "seconds": 0, "ended": "skipped: no time left"}
        results["checks"][name] = result
        if start < end:
            for row, columns in rows_of(name, args, min(LIMIT, end - start), result):
                result["rows"][row] = columns
                path.write_text(json.dumps(results, indent=1) + "\n")
                listed = ", ".join(f"{column} {value}" for column, value in columns.items())
                print(f"{name}, {row}: {listed}", flush=True)
        result["seconds"] = round(time.monotonic() - start, 1)
        path.write_text(json.dumps(results, indent=1) + "\n")
        print(f"{name}: {result['ended'] or 'done'}, {result['seconds']} s", flush=True)


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("what", choices=["measure", "check"])
    parser.add_argument("name", help="OUT.json, or a check's name")
    parser.add_argument("--minutes", type=float, default=9)
    parser.add_argument("--only", nargs="+", choices=CHECKS)
    parser.add_argument("--device", default="", help="cuda or cpu [cuda if it is there]")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    args.device = resolve_device(args.device)
    args.tiny = args.tiny or args.device == "cpu"
    if args.what == "check":
        check(args.name, args)
    else:
        measure(Path(args.name), args)
