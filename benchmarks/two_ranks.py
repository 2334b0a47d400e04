"""Throughput of two ranks against that of two independent processes, run at once, one thread each.

    python benchmarks/two_ranks.py
    python benchmarks/two_ranks.py --model smollm2 --iterations 1 --pairs 3

The model is the tiny MoE with a hidden size of 512 (14 million random weights), or SmolLM2-135M on
small sums, both made in runs/ as examples/smollm2.py says. An independent process runs grpo.py with
16 prompts x 8 completions (SmolLM2: 8 x 8). Two ranks run it with twice as many prompts, which is as
much work for each. Runs of the one and of the other alternate. Left out are a run's first iteration
(SmolLM2: not that, it takes a minute), and those during which other programs used more than a tenth of
a core; the rest are paired in their order. The ratio of tokens per second is that of the two ranks to
the sum of the two processes. A rank's time in gloo has two parts, told apart by a barrier before each
call: it waits for the other rank, then the two exchange what they have. Writes the rows of this model
in results/two_ranks.csv.
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
FLAGS = "--num_held_out 2 --eval_every 0 --save_every 0 --group_size 8"
SMOLLM2 = "--model runs/smollm2 --dataset runs/small_sums.jsonl --max_new_tokens 10 --lr 5e-6"
QUIET = 0.1  # cores
PROMPTS = {"hidden 512": 16, "smollm2": 8}  # of an independent process
WARM_UP = {"hidden 512": 1, "smollm2": 0}  # iterations


def make_model(name, folder):
    """The flags that choose the model, which is written to the folder if it is ours."""
    if name == "smollm2":
        return SMOLLM2.split()
    tokenizer = common.character_tokenizer()
    model = scaling.wider(512, len(tokenizer))
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return ["--model", str(folder), "--max_new_tokens", "32", "--lr", "1e-6"]


def measured(folders, warm_up):
    """[what to compare of each quiet iteration] of a run of two processes, in one folder or in two."""
    metrics = []
    for folder in folders:
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        metrics.append([json.loads(line) for line in lines])
    noted = []
    for folder in folders:
        noted += [json.loads(path.read_text()) for path in sorted(folder.glob("noted-*.json"))]
    rows = []
    for number in range(warm_up, len(noted[0])):
        lines = [of_run[number] for of_run in metrics]
        both = [of_process[number] for of_process in noted]
        busy = statistics.mean(note["busy"] for note in both)
        others = (busy - sum(note["own"] for note in both)) / both[0]["seconds"]
        if others > QUIET:
            print(f"left out: other programs used {others:.2f} cores", flush=True)
            continue
        rows.append(
            {
                "rollout": statistics.mean(line["charts/rollout_seconds"] for line in lines),
                "update": statistics.mean(line["charts/update_seconds"] for line in lines),
                "rate": sum(line["charts/tokens_per_second"] for line in lines),
                "waiting": statistics.mean(note["waiting"] for note in both),
                "exchange": statistics.mean(note["exchange"] for note in both),
            }
        )
    return rows


def clocks():
    """Seconds: of the wall; of all cores that did something; of this process."""
    with open("/proc/stat") as file:
        user, nice, system = [int(word) for word in file.readline().split()[1:4]]
    return {
        "seconds": time.perf_counter(),
        "busy": (user + nice + system) / os.sysconf("SC_CLK_TCK"),
        "own": time.process_time(),
    }


def worker(flags):
    """A process, or one of two ranks, that also writes how long its iterations took."""
    import torch.distributed as dist

    import grpo
    import harness
    import ranks

    real_together = ranks.together
    real_log = harness.Run.log
    spent = {"waiting": 0.0, "exchange": 0.0}
    before = clocks()
    iterations = []

    def together(*arguments):
        start = time.perf_counter()
        dist.barrier()
        everyone = time.perf_counter()
        real_together(*arguments)
        spent["waiting"] += everyone - start
        spent["exchange"] += time.perf_counter() - everyone

    def log(*arguments):
        real_log(*arguments)
        now = clocks()
        iterations.append({**spent, **{name: now[name] - before[name] for name in now}})
        before.update(now)
        spent.update(waiting=0.0, exchange=0.0)

    ranks.together = together
    harness.Run.log = log
    sys.argv = ["grpo.py", *flags]
    harness.launch(grpo.main, grpo.Args)
    folder = Path(flags[flags.index("--run_dir") + 1])
    (folder / f"noted-{ranks.RANK}.json").write_text(json.dumps(iterations))


def start(words):
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    quiet = subprocess.DEVNULL
    return subprocess.Popen([sys.executable, *words], env=env, stdout=quiet, stderr=quiet)


def main():
    if "--worker" in sys.argv:
        worker(sys.argv[sys.argv.index("--worker") + 1 :])
        return
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--model", choices=list(PROMPTS), default="hidden 512")
    parser.add_argument("--iterations", type=int, default=8, help="of a run")
    parser.add_argument("--pairs", type=int, default=10, help="of quiet iterations")
    args = parser.parse_args()
    rows = []
    if CSV.exists():
        with open(CSV) as file:
            rows = [row for row in csv.DictReader(file) if row["model"] != args.model]
    alone = []
    ranks = []
    with tempfile.TemporaryDirectory() as scratch:
        scratch = Path(scratch)
        flags = [*make_model(args.model, scratch / "model"), *FLAGS.split()]
        flags += ["--iterations", str(args.iterations)]

        def words(folder, prompts):
            size = ["--prompts_per_iteration", str(prompts), "--run_dir", str(folder)]
            return [__file__, "--worker", *flags, *size]

        prompts = PROMPTS[args.model]
        while min(len(alone), len(ranks)) < args.pairs:
            if len(alone) <= len(ranks):
                folders = [Path(tempfile.mkdtemp(dir=scratch)) for _ in range(2)]
                processes = [start(words(folder, prompts)) for folder in folders]
                for process in processes:
                    assert process.wait() == 0
                alone += measured(folders, WARM_UP[args.model])
                print(f"{len(alone)} iterations of two processes", flush=True)
            else:
                folder = Path(tempfile.mkdtemp(dir=scratch))
                launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
                assert start([*launcher, *words(folder, 2 * prompts)]).wait() == 0
                ranks += measured([folder], WARM_UP[args.model])
                print(f"{len(ranks)} iterations of two ranks", flush=True)
    new_rows = []
    for independent, together in list(zip(alone, ranks, strict=False))[: args.pairs]:
        row = {"model": args.model}
        for part in ("rollout", "update"):
            row[f"alone_{part}"] = round(independent[part], 3)
            row[f"ranks_{part}"] = round(together[part], 3)
        row["waiting"] = round(together["waiting"], 3)
        row["exchange"] = round(together["exchange"], 3)
        row["ratio"] = round(together["rate"] / independent["rate"], 3)
        print(row)
        new_rows.append(row)
    with open(CSV, "w", newline="") as file:
        writer = csv.DictWriter(file, list(new_rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows + new_rows)


if __name__ == "__main__":
    main()
