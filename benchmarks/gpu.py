"""The needs of a run on one GPU: its memory, computed, and everything else, measured.

    python benchmarks/gpu.py                       # prints the memory table of benchmarks/README.md
    python benchmarks/gpu.py measure OUT.json [--minutes 9] [--only NAME ...] [--device cpu]

`measure` needs requirements.txt and a GPU of 80 GB or more, no network. Its checks, the most important
ones first:

nine_DTYPE      the nine scripts: the first ratio's distance from 1, whether the same command does the
                same, and how far 2 iterations and a resumed third one are from 3 in one go
default_job     `python grpo.py`: seconds and held-out accuracy
memory_MODEL    GiB as computed by plumbing/memory.py, and as allocated by CUDA
speed           an iteration in the shape of Qwen2.5-0.5B with random weights in bfloat16: 64 prompts
                x 8 completions of 512 tokens, none of which ends; no KL. A pass is a decoding step
                of the rollout, or a micro-batch of the update.

Each check is a separate process, `python benchmarks/gpu.py check NAME`. After each, OUT.json is
written: {"device", "torch", "transformers", "commit", "checks": {name: {"rows": {row: {column: value}},
"seconds", "ended": the error, if any}}}. Earlier checks in OUT.json are kept.
On a CPU sizes are tiny: this shows that the program works, and measures nothing.
"""

import argparse
import copy
import dataclasses
import functools
import gc
import importlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
import transformers
from experiments import SCRIPTS
from safetensors.torch import load_file
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, supported_activities

sys.path.insert(0, str(Path(__file__).parent.parent))
import common
import grpo
from common import Completion, Problem, collate, sample, score_old, token_logprobs
from plumbing.args import TINY_MOE, parse_args, resolve_device
from plumbing.memory import memory_parts, memory_peak
from plumbing.models import checkpoint_layers
from plumbing.policy import Policy

ROOT = Path(__file__).parent.parent
CARDS = (24, 48, 80)  # GiB
FREE = 0.1  # share of a card for CUDA itself and for fragmented memory
LONGEST_PROMPT = 256
CAP = 512

# The numbers on which memory depends, from the published configs.
MODELS = {
    "Qwen2.5-0.5B": transformers.Qwen2Config(
        vocab_size=151_936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    ),
    "Qwen2.5-3B": transformers.Qwen2Config(
        vocab_size=151_936,
        hidden_size=2048,
        intermediate_size=11_008,
        num_hidden_layers=36,
        num_attention_heads=16,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    ),
    "OLMoE-1B-7B": transformers.OlmoeConfig(
        vocab_size=50_304,
        hidden_size=2048,
        intermediate_size=1024,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=16,
        num_experts=64,
        num_experts_per_tok=8,
        tie_word_embeddings=False,
    ),
}
NO_KL = "grpo, no KL, bfloat16, recomputed layers"
WAYS = {
    "grpo, float32": dict(dtype="float32"),
    "grpo, bfloat16": dict(dtype="bfloat16"),
    NO_KL: dict(dtype="bfloat16", gradient_checkpointing=True, kl_coef=0.0),
    "ppo, bfloat16, recomputed layers": dict(dtype="bfloat16", gradient_checkpointing=True),
}
TABLE = [("Qwen2.5-0.5B", way) for way in ("grpo, float32", "grpo, bfloat16")]
TABLE += [("Qwen2.5-0.5B", "ppo, bfloat16, recomputed layers")]
TABLE += [("Qwen2.5-3B", NO_KL), ("OLMoE-1B-7B", NO_KL)]


def without_weights(config):
    """A model on the device "meta"."""
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


def settings(**flags):
    """grpo.py's arguments, with 256 completions sampled at a time and updates of 16,384 tokens."""
    micro_batch_size = 16_384 // (LONGEST_PROMPT + CAP)
    sizes = {"rollout_batch_size": 256, "micro_batch_size": micro_batch_size, "max_new_tokens": CAP}
    return grpo.Args(**{**sizes, **flags})


def smallest_card(peak):
    """The smallest of the cards that has room for `peak` bytes, as text."""
    for card in CARDS:
        if peak <= (1 - FREE) * card * 2**30:
            return str(card)
    return "none"


def memory_rows():
    """[[model, way, GiB that stay, GiB of a rollout, of an update, at most, card]]"""
    rows = []
    for name, way in TABLE:
        model = without_weights(MODELS[name])
        billions = sum(weight.numel() for weight in model.parameters()) / 1e9
        args = settings(**WAYS[way])
        num_critics = 1 if way.startswith("ppo") else 0
        num_references = 1 if args.kl_coef > 0 else 0
        parts = memory_parts(model, args, LONGEST_PROMPT, num_critics, num_references)
        stays = sum(parts[part] for part in ("weights", "masters", "gradients", "moments"))
        peak = memory_peak(parts)
        sizes = [stays, parts["rollout"], parts["update"], peak]
        cells = [f"{size / 2**30:.1f}" for size in sizes]
        rows.append([f"{name}, {billions:.2f} B", way, *cells, smallest_card(peak)])
    return rows


# --------------------------------------------- memory that models with random weights allocate


def random_policy(config, job):
    """(policy, optimizer). No token ends a completion."""
    torch.manual_seed(0)
    torch.backends.cuda.enable_cudnn_sdp(False)  # as in plumbing/models.py
    with torch.device(job.device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    if job.gradient_checkpointing:
        checkpoint_layers(model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY_MOE)
    tokenizer.eos_token = None
    policy = Policy(model, tokenizer, job.dtype)
    return policy, torch.optim.AdamW(policy.parameters(), lr=job.lr, weight_decay=0.0, fused=True)


def problem_of(length):
    return Problem("1" * length, "", [1] * length)


def update(policy, optimizer, batch, job):
    """The update of an iteration as in grpo.py, with advantages of 1 and without metrics."""
    minibatches = batch.minibatches(job.num_minibatches)
    old = score_old(policy, batch, minibatches, job)
    for minibatch in minibatches:
        for rows, micro in batch.micro_batches(minibatch, job.micro_batch_size):
            outputs = token_logprobs(policy, micro, job.temperature)
            loss, _ = grpo.policy_loss(
                outputs.logprobs_BT,
                old.logprobs_NT[rows],
                torch.ones(len(rows), 1, device=job.device),
                micro.mask_BT,
                kl_coef=0.0,
                num_sequences=len(minibatch),
            )
            (loss + job.router_aux_coef * outputs.aux_loss).backward()
        policy.clip_gradients(job.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        policy.refresh()


def peak(work):
    """The most bytes that `work` allocates, beyond those allocated before."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    return torch.cuda.max_memory_allocated() - before


def allocated_parts(config, job):
    """{part: bytes}, where the update has its gradients beside it."""
    gc.collect()  # the model before this one has hooks that refer to it
    before = torch.cuda.memory_allocated()
    policy, optimizer = random_policy(config, job)
    ids = [1] * job.max_new_tokens
    completion = Completion(problem_of(LONGEST_PROMPT), ids, [0.0] * len(ids))
    # Two micro-batches: in the second one the gradients exist already.
    batch = collate([completion] * 2 * job.micro_batch_size, job)
    work = functools.partial(update, policy, optimizer, batch, job)
    work()  # allocates the moments
    stays = torch.cuda.memory_allocated() - before
    in_update = peak(work)
    # After a longer prompt and fewer tokens, which take less time, the cache is as wide.
    few = dataclasses.replace(job, max_new_tokens=8)
    length = LONGEST_PROMPT + job.max_new_tokens - few.max_new_tokens
    problems = [problem_of(length)] * (job.rollout_batch_size // job.group_size)
    in_rollout = peak(lambda: sample(policy, problems, job.group_size, few))
    return {"stays": stays, "rollout": in_rollout, "update": in_update}


# ----------------------------------------------------------------------------------------- checks

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
    if args.device == "cpu":
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


def nine(args, dtype):
    for name in SCRIPTS:
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
        if args.device == "cpu":
            flags += [*short_run(args, folder), "--iterations", 2]
        start = time.perf_counter()
        run_script("grpo", *flags)
        seconds = time.perf_counter() - start
        yield "grpo", {"seconds": seconds, "accuracy": metrics_of(folder, "eval/accuracy")[-1]}


def job_of(args, name, **flags):
    """(the model's config, arguments of grpo.py, by default those of the memory table)"""
    if args.device == "cpu":
        flags |= {"prompts_per_iteration": 2, "max_new_tokens": 16, "micro_batch_size": 4}
        config = transformers.AutoConfig.from_pretrained(TINY_MOE)
    else:
        config = copy.deepcopy(MODELS[name])
    if name == "OLMoE-1B-7B":
        config.num_hidden_layers = min(4, config.num_hidden_layers)  # more do not fit
    return config, settings(device=args.device, kl_coef=0.0, lr=1e-6, **flags)


def memory_check(args, name):
    if args.device == "cpu":
        sys.exit("skipped: nobody counts what is allocated on a CPU")
    # What needs most comes last: it may not fit.
    ways = [("bfloat16", False), ("bfloat16", True), ("float32", True), ("float32", False)]
    for dtype, recomputes in ways:
        flags = {"dtype": dtype, "gradient_checkpointing": recomputes, "num_minibatches": 1}
        config, job = job_of(args, name, **flags)
        parts = memory_parts(without_weights(config), job, LONGEST_PROMPT)
        parts["stays"] = parts["weights"] + parts["masters"] + parts["moments"]
        parts["update"] += parts["gradients"]
        columns = {}
        for part, count in allocated_parts(config, job).items():
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


def speed_check(args):
    config, job = job_of(args, "Qwen2.5-0.5B", **SPEED)
    policy, optimizer = random_policy(config, job)
    problems = [problem_of(LONGEST_PROMPT)] * job.prompts_per_iteration
    few = dataclasses.replace(job, max_new_tokens=4)
    sample(policy, problems, job.group_size, few)  # warm-up
    completions = []

    def rollout():
        completions[:] = sample(policy, problems, job.group_size, job)

    tokens = len(problems) * job.group_size * job.max_new_tokens
    yield "rollout", timed(rollout, tokens, job.max_new_tokens, job.device)
    batch = collate(completions, job)
    work = functools.partial(update, policy, optimizer, batch, job)
    work()
    yield "update", timed(work, tokens, len(completions) / job.micro_batch_size, job.device)


# name: generator of (row, {column: value}), in the order of importance
CHECKS = {
    "nine_float32": functools.partial(nine, dtype="float32"),
    "nine_bfloat16": functools.partial(nine, dtype="bfloat16"),
    "default_job": default_job,
    "memory_0.5B": functools.partial(memory_check, name="Qwen2.5-0.5B"),
    "memory_moe": functools.partial(memory_check, name="OLMoE-1B-7B"),
    "speed": speed_check,
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


def result_of(name, args, seconds):
    """Runs a check in a separate process: {"rows": {row: {column: value}}, "ended": the error}."""
    command = [sys.executable, __file__, "check", name, "--device", args.device]
    ended = ""
    try:
        process = subprocess.run(command, capture_output=True, timeout=seconds, check=False)
        output = process.stdout
        if process.returncode != 0:
            ended = process.stderr.decode().strip().split("\n")[-1]
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""
        ended = f"killed after {seconds:.0f} s"
    rows = [json.loads(line) for line in output.decode().splitlines()]
    return {"rows": dict(rows), "ended": ended}


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
        result = {"rows": {}, "ended": "skipped: no time left"}
        if start < end:
            result = result_of(name, args, min(LIMIT, end - start))
        result["seconds"] = round(time.monotonic() - start, 1)
        results["checks"][name] = result
        path.write_text(json.dumps(results, indent=1) + "\n")
        print(name, json.dumps(result), flush=True)


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("what", nargs="?", choices=["table", "measure", "check"], default="table")
    parser.add_argument("name", nargs="?", help="OUT.json, or a check's name")
    parser.add_argument("--minutes", type=float, default=9)
    parser.add_argument("--only", nargs="+", choices=CHECKS)
    parser.add_argument("--device", default="", help="cuda or cpu [default: cuda if available]")
    args = parser.parse_args()
    if args.what == "table":
        for row in memory_rows():
            print("  ".join(row))
        return
    args.device = resolve_device(args.device)
    if args.what == "check":
        check(args.name, args)
    else:
        measure(Path(args.name), args)


if __name__ == "__main__":
    main()
