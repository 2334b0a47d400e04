"""What --head_dtype float32 buys and costs with bfloat16 weights: the table in plumbing/README.md.

    python benchmarks/head.py FOLDER DATASET.jsonl    # made by examples/smollm2.py and small_sums.py

Samples 32 completions, and makes a small step: the sign of the gradient times a rate of 1e-8. The
log-ratios of this step, log r, are compared with those of a head in float64 on the same hidden states,
so that only the head's rounding is seen.
"""

import sys
import time
import types
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent.parent))
import common
import grpo
from plumbing import rollout_correction
from plumbing.args import parse_args
from plumbing.models import float32_product
from stats import markdown

RATE = 1e-8
FLAGS = "--dtype bfloat16 --device cpu --max_new_tokens 32 --num_held_out 16 --micro_batch_size 16"


def float64_product(head, hidden):
    return F.linear(hidden.double(), head.weight.double())


HEADS = {"same": None, "float32": float32_product, "float64": float64_product}


def set_head(policy, name):
    head = policy.model.get_output_embeddings()
    head.__dict__.pop("forward", None)
    if HEADS[name]:
        head.forward = types.MethodType(HEADS[name], head)


def logprobs_of(policy, batch, args):
    """{head: log-probs of the batch, (N, T)}"""
    found = {}
    for name in HEADS:
        set_head(policy, name)
        found[name] = common.score(policy, batch, batch.minibatches(1), args)
    return found


def step(policy, batch, args):
    """With advantages of 1 and -1 in turn."""
    for rows, micro in batch.micro_batches(torch.arange(len(batch.mask_BT)), args.micro_batch_size):
        outputs = common.token_logprobs(policy, micro, 1.0)
        (outputs.logprobs_BT * (1 - 2 * (rows % 2))[:, None]).sum().backward()
    with torch.no_grad():
        for weight in policy.parameters():
            weight += RATE * weight.grad.sign()
    policy.refresh()


def main():
    folder, dataset = sys.argv[1:]
    sys.argv = ["grpo.py", "--model", folder, "--dataset", dataset, *FLAGS.split()]
    args = parse_args(grpo.Args)
    policy = common.load_policy(args)
    _, problems = common.load_problems(args, policy)
    with torch.no_grad():
        for weight in policy.parameters():
            weight.copy_(weight.bfloat16())  # as in a checkpoint that was stored so
    policy.refresh()
    measured = {}
    for name in ("same", "float32"):
        set_head(policy, name)
        start = time.perf_counter()
        completions = common.sample(policy, problems, 2, args, torch.Generator().manual_seed(0))
        middle = time.perf_counter()
        batch = common.collate(completions, args)
        old = common.score_old(policy, batch, batch.minibatches(1), args)
        seconds = [f"{middle - start:.1f}", f"{time.perf_counter() - middle:.1f}"]
        kl = rollout_correction(old, batch, args).stats["sampler_kl"].item()
        measured[name] = [f"{kl:.1e}", *seconds]
        print(name, measured[name], flush=True)
    before = logprobs_of(policy, batch, args)
    step(policy, batch, args)
    after = logprobs_of(policy, batch, args)
    log_r = {name: (after[name] - before[name])[batch.mask_BT] for name in HEADS}
    rows = []
    for name, others in measured.items():
        is_1 = (log_r[name] == 0).float().mean().item()
        error = (log_r[name] - log_r["float64"]).std().item()
        rows.append(
            [name, f"{100 * is_1:.0f} %", f"{log_r[name].std().item():.1e}", f"{error:.1e}", *others]
        )
    header = [
        "`--head_dtype`",
        "ratios of exactly 1",
        "std of log r",
        "std of its error",
        "`sampler_kl`",
    ]
    print("\n".join(markdown([*header, "rollout, s", "forward, s"], rows, "lrrrrrr")))


if __name__ == "__main__":
    main()
