"""Which bugs can you see? Runs scripts with and without bugs of bugs.toml, and compares their metrics.

    python study/symptoms.py run [--jobs 2]   # about two core-hours; continues where it was cut off
    python study/symptoms.py                  # the figure, and the table of README.md, from the CSVs

Fixed before the first run: METRICS; NUM_HEALTHY seeds of each script and job, and three other seeds of
each bug. A bug shows in a metric if its three values are all above, or all below, those of the healthy
runs. A change without any effect would do so with probability 2 / C(NUM_HEALTHY + 3, 3).
"""

import argparse
import sys
from pathlib import Path
from statistics import mean

FOLDER = Path(__file__).parent
SCRIPTS = ("grpo", "ppo", "cispo", "dapo")
JOBS = {"calm": "", "stressed": "--lr 3e-4 --num_minibatches 16"}
ALWAYS = "--iterations 25 --eval_every 0 --save_every 0 --num_held_out 8"
NUM_HEALTHY = 20
NUM_SICK = 3
LAST = 5  # iterations at the end

METRICS = {  # words: key in metrics.jsonl, number of iterations at the end [0: all]
    "accuracy at the end": ("rollout/accuracy", LAST),
    "accuracy": ("rollout/accuracy", 0),
    "reward": ("rollout/reward_mean", LAST),
    "length": ("rollout/response_len_mean", LAST),
    "entropy": ("losses/entropy", LAST),
    "KL to old": ("losses/approx_kl", 0),
    "largest ratio": ("losses/ratio_max", 0),
    "largest ratio of a sequence": ("losses/sequence_ratio_max", 0),
    "clipped low": ("losses/clipfrac_low", 0),
    "clipped high": ("losses/clipfrac_high", 0),
    "KL to reference": ("losses/kl_ref", LAST),
    "gradient norm": ("charts/grad_norm", 0),
    "KL of sampler": ("rollout/sampler_kl", 0),
    "largest load": ("moe/load_max", LAST),
    "explained variance": ("losses/explained_variance", LAST),
}


def job_of(sweep, script, name, seed, replaced=""):
    """A run of sweep.py. A flag whose default a bug replaces keeps it in the stressed job, too."""
    flags = [
        f"--{flag}" for flag in JOBS[name].split("--")[1:] if f"{flag.split()[0]}:" not in replaced
    ]
    return sweep.Job("symptoms", script, name, seed, " ".join([ALWAYS, *flags]))


def run(num_processes):
    sys.path.append(str(FOLDER.parent / "benchmarks"))
    import sweep

    commit = sweep.prepare()
    from repair import ROOT, load_bugs  # not above: torch is loaded after `prepare`

    jobs = {}  # {job: title of the bug, or ""}
    healthy = range(1, NUM_HEALTHY + 1)
    sick = range(NUM_HEALTHY + 1, NUM_HEALTHY + NUM_SICK + 1)
    folder = ROOT / "runs" / "symptoms"
    folder.mkdir(parents=True, exist_ok=True)
    for name in JOBS:
        for number, bug in load_bugs().items():
            if "hidden" not in bug:
                (folder / f"bug_{number}.py").write_text(bug["broken"])
                script = f"runs.symptoms.bug_{number}"
                for seed in sick:
                    jobs[job_of(sweep, script, name, seed, bug["old"])] = bug["title"]
        for script in SCRIPTS:
            jobs |= {job_of(sweep, script, name, seed): "" for seed in healthy}
    num_failed = sweep.run_all("symptoms", list(jobs), num_processes, commit)
    rows = []
    for job, title in jobs.items():
        lines = sweep.read_metrics(job)
        row = {"script": job.script, "bug": title, "job": job.variant, "seed": job.seed}
        rows.append({**row, **values_of(lines), "iterations": len(lines), **job.result()})
    sweep.write_csv(FOLDER / "symptoms.csv", rows)
    sys.exit(num_failed > 0)


def values_of(lines):
    """{metric: its mean}; without those that a run does not have."""
    values = {}
    for name, (key, count) in METRICS.items():
        found = [line[key] for line in lines if key in line][-count:]
        if found:
            values[name] = mean(found)
    return values


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="?", choices=["run"])
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    args = parser.parse_args()
    if args.what == "run":
        run(args.jobs)


if __name__ == "__main__":
    main()
