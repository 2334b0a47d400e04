"""Which bugs can you see? Compares the metrics of scripts that have a bug with those of healthy runs.

    python study/symptoms.py run [--jobs 2]   # about three core-hours; continues where it was cut off
    python study/symptoms.py                  # the figure, and the table of README.md, from the CSV

Fixed before the first run: METRICS; twenty healthy seeds of each script and job, and three other seeds
of each bug. A bug shows in a metric if its three values are all above, or all below, those of the
healthy runs. For a change without any effect, the probability of that is 2 / C(20 + 3, 3).
"""

import argparse
import csv
import math
import sys
import tempfile
from pathlib import Path
from statistics import mean

FOLDER = Path(__file__).parent
README = FOLDER / "README.md"
BEGIN = "<!-- table of symptoms.py -->"
END = "<!-- end of the table -->"
SCRIPTS = ("grpo", "ppo", "cispo", "dapo")
JOBS = {"calm": "", "stressed": "--lr 3e-4 --num_minibatches 16"}
ALWAYS = "--iterations 25 --eval_every 0 --save_every 0 --num_held_out 8"
NUM_HEALTHY = 20
NUM_SICK = 3
LAST = 5  # iterations at the end
METRICS = {  # words: key in metrics.jsonl, number of iterations at the end [0: all]
    "accuracy at the end": ("rollout/accuracy", LAST),
    "accuracy on average": ("rollout/accuracy", 0),
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
DRAWN = ("accuracy on average", "length", "entropy", "largest ratio")
NUM_WORDS = 4  # metrics that a cell of the table names


def shown_bugs():
    """{number: bug} of those that are not hidden."""
    from repair import load_bugs  # here and below: it loads torch, and `run` has to prepare that

    return {number: bug for number, bug in load_bugs().items() if "hidden" not in bug}


def flags_of(job, bug):
    """Those of a run. A flag whose default the bug changes is left out of the job's."""
    flags = [ALWAYS]
    for flag in JOBS[job].split("--")[1:]:
        name, _, _ = flag.partition(" ")
        is_changed = f"{name}: " in bug.get("old", "")  # as in `lr: float = flag(...`
        if not is_changed:
            flags.append(f"--{flag.strip()}")
    return " ".join(flags)


def run(num_processes):
    """Runs what has not run yet, and writes symptoms.csv, a row for each run."""
    sys.path.append(str(FOLDER.parent / "benchmarks"))
    import sweep

    commit = sweep.prepare()  # before anything imports torch
    folder = sweep.ROOT / "runs" / "symptoms"
    folder.mkdir(parents=True, exist_ok=True)
    subjects = [({"script": script}, script, range(1, NUM_HEALTHY + 1)) for script in SCRIPTS]
    for number, bug in shown_bugs().items():
        (folder / f"bug_{number}.py").write_text(bug["broken"])
        seeds = range(NUM_HEALTHY + 1, NUM_HEALTHY + NUM_SICK + 1)
        subjects.append((bug, f"runs.symptoms.bug_{number}", seeds))
    jobs = {}  # {sweep.Job: bug}
    for name in JOBS:
        for bug, script, seeds in subjects:
            flags = flags_of(name, bug)
            jobs |= {sweep.Job("symptoms", script, name, seed, flags): bug for seed in seeds}
    num_failed = sweep.run_all("symptoms", list(jobs), num_processes, commit, {})
    if num_failed:
        sys.exit(f"{num_failed} runs failed")
    rows = []
    for job, bug in jobs.items():
        about = {"script": bug["script"], "bug": bug.get("title", ""), "job": job.variant}
        values = values_of(sweep.read_metrics(job))
        result = {key: job.result()[key] for key in ("ended", "commit")}
        rows.append({**about, "seed": job.seed, **values, **result})
    sweep.write_csv(FOLDER / "symptoms.csv", rows)


def values_of(lines):
    """{metric: its mean} of a run; "" for those that its script does not have."""
    values = {}
    for name, (key, count) in METRICS.items():
        found = [line[key] for line in lines if key in line][-count:]
        values[name] = mean(found) if found else ""
    return values


def read():
    """{(script, title of the bug or "", job): its rows in symptoms.csv}."""
    groups = {}
    with open(FOLDER / "symptoms.csv") as file:
        for row in csv.DictReader(file):
            groups.setdefault((row["script"], row["bug"], row["job"]), []).append(row)
    return groups


def column(rows, name):
    return [float(row[name]) for row in rows if row[name]]


def shows(sick, healthy):
    """["metric ↑" or "metric ↓"] for those in which all of a bug's runs lie outside of the healthy."""
    found = []
    for name in METRICS:
        values = column(sick, name)
        usual = column(healthy, name)
        if values and usual and min(values) > max(usual):
            found.append(f"{name} ↑")
        if values and usual and max(values) < min(usual):
            found.append(f"{name} ↓")
    return found


def in_words(sick, healthy):
    """A cell of the table."""
    found = shows(sick, healthy)
    words = found[:NUM_WORDS]
    if len(found) > NUM_WORDS:
        words.append(f"{len(found) - NUM_WORDS} more")
    num_ended = sum(row["ended"] != "" for row in sick)
    if num_ended:
        words.append(f"{num_ended} of {len(sick)} runs end with a loss that is not finite")
    return ", ".join(words) or "nowhere"


def diagnosis(bug):
    """What the doctor says about the script's functions."""
    from repair import doctor, functions_of, load

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "script.py"
        path.write_text(bug["broken"])
        module = load(path)
    for _, function, section in functions_of(module, bug["script"]):
        _, _, lines = doctor.diagnosed(doctor.examine_shapes(function, section))
        for line in lines:
            kind, _, words = line.strip().partition(": ")
            if kind == "mistake" or kind.startswith("your gradient"):
                return words
    return ""


def summary():
    """The table in a sentence."""
    groups = read()
    found = []
    for (script, bug, job), sick in groups.items():
        if bug and job == "calm":
            found.append(shows(sick, groups[script, "", job]))
    num_lower = sum("accuracy on average ↓" in names for names in found)
    num_higher = sum("accuracy on average ↑" in names for names in found)
    num_hidden = found.count([])
    return (
        f"Of {len(found)} planted bugs, in 25 iterations of the default job {num_lower} lower the "
        f"accuracy, {num_higher} raises it, and {num_hidden} show in none of {len(METRICS)} metrics."
    )


def table():
    """The lines between README.md's two marks; what shows in the fewest metrics comes first."""
    groups = read()
    rows = []
    num_compared = 0
    for bug in shown_bugs().values():
        cells = [f"{bug['script']}: {bug['title']}"]
        num_found = 0
        for job in JOBS:
            sick = groups[bug["script"], bug["title"], job]
            healthy = groups[bug["script"], "", job]
            cells.append(in_words(sick, healthy))
            num_found += len(shows(sick, healthy))
            num_compared += sum(bool(column(healthy, name)) for name in METRICS)
        cells += [diagnosis(bug).replace("|", "\\|"), bug["remedy"]]
        rows.append((num_found, f"| {' | '.join(cells)} |"))
    expected = num_compared * 2 / math.comb(NUM_HEALTHY + NUM_SICK, NUM_SICK)
    chance = f"Among these {num_compared} comparisons {expected:.1f} would show by chance alone."
    head = ["| bug | calm | stressed | the doctor | remedy |", "| --- " * 5 + "|"]
    return [*head, *(line for _, line in sorted(rows)), "", f"{summary()} {chance}"]


def figure():
    """The runs of grpo's bugs as dots, and the range of the healthy ones in grey."""
    import matplotlib  # not above: the table needs none

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    groups = read()
    bugs = [bug for script, bug, job in groups if script == "grpo" and bug and job == "calm"]
    plt.rcParams |= {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    picture, axes = plt.subplots(2, 4, figsize=(9, 6.5), sharey=True)
    for panels, job in zip(axes, JOBS, strict=True):
        for axis, name in zip(panels, DRAWN, strict=True):
            usual = column(groups["grpo", "", job], name)
            axis.axvspan(min(usual), max(usual), color="#dddddd")
            for y, bug in enumerate(bugs):
                values = column(groups["grpo", bug, job], name)
                axis.plot(values, [y] * len(values), "o", color="#0072b2", markersize=4, alpha=0.6)
            axis.set_title(f"{name},\n{job}")
            axis.set_yticks(range(len(bugs)), bugs)
            axis.set_ylim(len(bugs) - 0.5, -0.5)  # the first on top
    picture.tight_layout()
    picture.savefig(FOLDER / "figures" / "symptoms.png", dpi=150, metadata={"Software": None})


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="?", choices=["run"])
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    args = parser.parse_args()
    if args.what == "run":
        run(args.jobs)
    figure()
    before, _, rest = README.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    README.write_text("\n".join([before + BEGIN, *table(), END + after]))


if __name__ == "__main__":
    main()
