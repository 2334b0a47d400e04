"""Does everything work on a GPU, and how fast? Needs requirements.txt and one GPU, no network.

    python benchmarks/gpu.py OUT.json [--minutes 20]
    python benchmarks/gpu.py OUT.json --device cpu    # a self-test with tiny sizes; it measures nothing

learns     Each of the nine, in float32 and bfloat16, with its defaults: held-out accuracy before and
           after, how far a first step's ratio is from 1 at most, tokens per second, peak memory.
resume     The largest difference in any weight between three iterations in one go, and two iterations
           plus a resumed third.
speed      grpo.py without its KL on a model of Qwen2.5-0.5B's shape with random weights, in bfloat16:
           64 prompts x 8 completions of 512 tokens, none of which ends.

Each run is one command line in its own process. OUT.json is written after each of them, with the error
if it failed. Checks that cannot start within --minutes are skipped.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "study")]
from experiments import SCRIPTS  # noqa: E402
from plumbing.args import resolve_device  # noqa: E402
from plumbing.folder import versions  # noqa: E402
from plumbing.model import TINY_MOE  # noqa: E402

TINY_JOB = "--prompts_per_iteration 4 --max_new_tokens 16 --num_held_out 8"
SIZES = {  # layers, vocabulary and job of `speed`; True: in the self-test
    False: (24, 151_936, "--prompts_per_iteration 64 --max_new_tokens 512 --num_held_out 8"),
    True: (2, 512, TINY_JOB),
}


def run(script, flags, folder):
    """Runs a script in its own process, and returns the lines of its metrics.jsonl."""
    command = [sys.executable, f"{script}.py", *flags.split(), "--run_dir", folder]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip().split("\n")[-1])
    lines = Path(folder, "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def weights_of(folder):
    (path,) = Path(folder).glob("checkpoint-*/model.safetensors")
    return load_file(path)


# -------------------------------------------------------------------------------------------- checks


def learns(script, dtype, args):
    flags = f"--device {args.device} --dtype {dtype} --save_every 0"
    if args.is_self_test:
        flags += f" --iterations 3 {TINY_JOB}"
    with tempfile.TemporaryDirectory() as folder:
        lines = run(script, flags, folder)
        (checkpoint,) = Path(folder).glob("checkpoint-*")
        saved = torch.load(checkpoint / "trainer_state.pt", weights_only=True, map_location="cpu")
    return {
        "before": saved["before"]["greedy"]["accuracy"],
        "after": saved["after"]["greedy"]["accuracy"],
        "first_ratio_error": max(line["losses/first_step_ratio_error_max"] for line in lines),
        "tokens_per_second": lines[-1]["charts/tokens_per_second"],
        "peak_gib": lines[-1].get("charts/peak_memory_gib", 0),
    }


def resumes(script, dtype, args):
    flags = f"--device {args.device} --dtype {dtype} {TINY_JOB}"
    with tempfile.TemporaryDirectory() as folder:
        run(script, f"{flags} --iterations 3", f"{folder}/whole")
        run(script, f"{flags} --iterations 2", f"{folder}/parts")
        run(script, f"{flags} --iterations 3 --resume", f"{folder}/parts")
        whole = weights_of(f"{folder}/whole")
        parts = weights_of(f"{folder}/parts")
    return {"largest_difference": max((whole[key] - parts[key]).abs().max().item() for key in whole)}


def speed(args):
    num_layers, vocabulary, job = SIZES[args.is_self_test]
    config = transformers.Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=num_layers,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    flags = f"{job} --iterations 3 --eval_every 0 --save_every 0 --kl_coef 0 --lr 1e-6"
    flags += f" --device {args.device} --dtype bfloat16"
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        transformers.AutoTokenizer.from_pretrained(TINY_MOE).save_pretrained(folder)
        lines = run("grpo", f"{flags} --model {folder}", f"{folder}/run")
    last = lines[-1]
    return {
        "rollout_seconds": last["charts/rollout_seconds"],
        "update_seconds": last["charts/update_seconds"],
        "tokens_per_second": last["charts/tokens_per_second"],
        "peak_gib": last.get("charts/peak_memory_gib", 0),
    }


def checks(args):
    """[(name, function, its arguments)], most important first."""
    scripts = ["grpo"] if args.is_self_test else SCRIPTS
    found = []
    for dtype in ("float32", "bfloat16"):
        found += [(f"learns: {name}, {dtype}", learns, (name, dtype, args)) for name in scripts]
    found.append(("speed", speed, (args,)))
    for dtype in ("float32", "bfloat16"):
        found += [(f"resume: {name}, {dtype}", resumes, (name, dtype, args)) for name in scripts]
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="OUT.json")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--device", default="", help="cuda or cpu [cuda if available]")
    args = parser.parse_args()
    args.device = resolve_device(args.device)
    args.is_self_test = args.device == "cpu"
    device = "cpu" if args.is_self_test else torch.cuda.get_device_name()
    results = {"device": device, **versions(), "checks": {}}
    start = time.monotonic()
    for name, check, inputs in checks(args):
        if time.monotonic() - start > 60 * args.minutes:
            break
        try:
            result = check(*inputs)
        except Exception as error:  # the next check may still be fine
            result = {"error": f"{type(error).__name__}: {error}"}
        results["checks"][name] = result
        args.out.write_text(json.dumps(results, indent=1) + "\n")
        print(name, json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
