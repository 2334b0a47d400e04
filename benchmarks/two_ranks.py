"""Throughput of two ranks against that of two independent processes, run at once, one thread each.

    python benchmarks/two_ranks.py [--iterations 8] [--rounds 3]

The model is the tiny MoE with a hidden size of 512 (14 million random weights), so that computing
dominates. An independent process runs grpo.py with 16 prompts x 8 completions; two ranks run it with 32
prompts x 8, which is as much work for each. Rounds alternate. The ratio of tokens per second is that of
the two ranks to the sum of the two processes. "together" is the time that a rank spends in gloo, with
its waiting for the other one. Writes results/two_ranks.csv.
"""

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import scaling
import sweep

import common

CSV = sweep.RESULTS / "two_ranks.csv"
FLAGS = "--num_held_out 2 --eval_every 0 --save_every 0 --lr 1e-6 --group_size 8 --max_new_tokens 32"


def command(model, folder, prompts, iterations):
    """The flags of a run."""
    size = ["--prompts_per_iteration", str(prompts), "--iterations", str(iterations)]
    return ["--model", str(model), "--run_dir", str(folder), *size, *FLAGS.split()]


def measured(folder, processes):
    """[{rollout, update, rate, together}] of the iterations of a run, the first left out."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = []
    for line in lines[1:]:
        rollout = line["charts/rollout_seconds"]
        update = line["charts/update_seconds"]
        rows.append({"rollout": rollout, "update": update, "rate": line["charts/tokens_per_second"]})
    seconds = folder / "together.json"
    together = json.loads(seconds.read_text()) if processes > 1 else 0.0
    for row in rows:
        row["together"] = together / len(lines)
    return rows


def worker(flags):
    """A rank that also writes how long it was in gloo."""
    import grpo
    import harness
    import ranks

    real = ranks.together
    spent = []

    def together(*arguments):
        start = time.perf_counter()
        real(*arguments)
        spent.append(time.perf_counter() - start)

    ranks.together = together
    sys.argv = ["grpo.py", *flags]
    harness.launch(grpo.main, grpo.Args)
    if ranks.RANK == 0:
        folder = Path(flags[flags.index("--run_dir") + 1])
        (folder / "together.json").write_text(json.dumps(sum(spent)))


def start(words):
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    quiet = subprocess.DEVNULL
    return subprocess.Popen([sys.executable, *words], env=env, stdout=quiet, stderr=quiet)


def main():
    if "--worker" in sys.argv:
        worker(sys.argv[sys.argv.index("--worker") + 1 :])
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        scratch = Path(scratch)
        tokenizer = common.character_tokenizer()
        model = scaling.wider(512, len(tokenizer))
        model.generation_config.eos_token_id = tokenizer.eos_token_id
        model.save_pretrained(scratch / "model")
        tokenizer.save_pretrained(scratch / "model")
        for number in range(args.rounds):
            folders = [scratch / f"alone-{number}-{i}" for i in range(2)]
            launches = [
                [__file__, "--worker", *command(scratch / "model", folder, 16, args.iterations)]
                for folder in folders
            ]
            processes = [start(words) for words in launches]
            for process in processes:
                assert process.wait() == 0
            alone = [measured(folder, processes=1) for folder in folders]
            folder = scratch / f"ranks-{number}"
            launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
            words = command(scratch / "model", folder, 32, args.iterations)
            assert start([*launcher, "--worker", *words]).wait() == 0
            ranks = measured(folder, processes=2)
            for first, second, both in zip(*alone, ranks, strict=True):
                row = {"round": number}
                for name in ("rollout", "update"):
                    row[f"alone_{name}"] = round((first[name] + second[name]) / 2, 3)
                    row[f"ranks_{name}"] = round(both[name], 3)
                row["together"] = round(both["together"], 3)
                row["ratio"] = round(both["rate"] / (first["rate"] + second["rate"]), 3)
                rows.append(row)
    with open(CSV, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    for name in rows[0]:
        values = sorted(row[name] for row in rows)
        print(f"{name:15} {values[0]:7.3f} {statistics.median(values):7.3f} {values[-1]:7.3f}")


if __name__ == "__main__":
    main()
