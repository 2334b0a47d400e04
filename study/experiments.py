"""The experiments of sweep.py, as data. Flags are the scripts' command-line flags."""

import tomllib
from typing import NamedTuple

from repair import load_bugs
from scripts import MORE, ROOT, SCRIPTS, file_of


class Job(NamedTuple):
    script: str  # script, variant and seed are the key in the CSV
    variant: str
    seed: int
    flags: str
    file: str  # the program that runs


class Experiment(NamedTuple):
    jobs: list
    columns: dict = {}  # column: key in metrics.jsonl, how many of the last iterations [0: all]


def crossed(seeds, flags, runs):
    """[Job] for {(script, variant): its own flags}. They come after the common flags, because the last
    value of a repeated flag wins. Jobs are ordered by seed, so an interrupted sweep still leaves
    complete comparisons."""
    jobs = []
    for seed in seeds:
        for (script, variant), own in runs.items():
            jobs.append(Job(script, variant, seed, f"{flags} {own}".strip(), file_of(script)))
    return jobs


# -------------------------------------------------------------------------------- the default job

SHORT = "--iterations 20 --eval_every 0 --save_every 0"
NINE = "--eval_every 0 --eval_samples 8 --save_every 0"
DEFAULTS = {(script, "default"): "" for script in SCRIPTS}
DEFAULTS["grpo", "free"] = "--kl_coef 0"
MORE_DEFAULTS = {(script, "default"): "" for script in MORE}
# What each mechanism did. Column: key in metrics.jsonl, and text for report.py, which leaves out what a
# script does not log.
ACTED = {
    "clip_low": ("losses/clipfrac_low", "clipped: {:.2%} below"),
    "clip_high": ("losses/clipfrac_high", "{:.2%} above"),
    "ratio_max": ("losses/ratio_max", "largest ratio {:.2f}"),
    "kl_ref": ("losses/kl_ref", "KL to the reference {:.3f}"),
    "explained_variance": ("losses/explained_variance", "the critic explains {:.0%}"),
    "all_right": ("rollout/groups_dropped_all_right", "groups replaced: {:.1f} all right"),
    "all_wrong": ("rollout/groups_dropped_all_wrong", "{:.1f} all wrong"),
    "gamma": ("moe/router_shift", "mean gamma {:.3f}"),
    "slope": ("losses/gate_slope", "mean slope of the gate {:.5f}"),
}
STABILITY = {  # from mild to unstable; no run collapsed at milder settings
    "lr3e-4-steps16": "--lr 3e-4 --num_minibatches 16",
    "lr1e-3-steps4": "--lr 1e-3 --num_minibatches 4",
    "lr1e-3-steps16": "--lr 1e-3 --num_minibatches 16",
}
STABILITY_RUNS = {(script, name): flags for name, flags in STABILITY.items() for script in SCRIPTS}
for name, flags in STABILITY.items():
    STABILITY_RUNS["grpo", f"{name}-free"] = f"{flags} --kl_coef 0"
    # In 13 iterations dapo generates about as many completions as the others in 20.
    STABILITY_RUNS["dapo", name] = f"{flags} --iterations 13"

# ------------------------------------------------------------------------------------- exercises

# Each changed script has the seeds of its original, so both start from the same rollout.
EXERCISE_FLAGS = "--iterations 20 --eval_every 0"
EXERCISE_COLUMNS = {
    "mean_accuracy": ("rollout/accuracy", 0),
    "entropy": ("losses/entropy", 5),
    "ratio_max": ("losses/ratio_max", 0),
    "grad_norm": ("charts/grad_norm", 0),
}


def exercises():
    """{file that sweep.py writes: exercise}"""
    found = tomllib.loads((ROOT / "study" / "exercises.toml").read_text())["exercise"]
    return {f"runs/exercises/exercise_{n}.py": each for n, each in enumerate(found, start=1)}


def exercise_jobs():
    """[Job] for the original scripts, then for the exercises."""
    originals = {(each["script"], "original"): "" for each in exercises().values()}
    jobs = crossed(range(1, 4), EXERCISE_FLAGS, originals)
    for seed in range(1, 4):
        for file, each in exercises().items():
            jobs.append(Job(each["script"], each["title"], seed, EXERCISE_FLAGS, file))
    return jobs


# ---------------------------------------------------------------------------------- planted bugs

# Fixed before the first run: the metrics, twenty healthy seeds for each script and job, and three
# different seeds for each bug.
BUGGY = ["grpo", "ppo", "cispo", "dapo"]
BUG_JOBS = {"default": "", "stressed": "--lr 3e-4"}
BUG_FLAGS = "--iterations 25 --eval_every 0 --save_every 0 --num_held_out 8"
HEALTHY_SEEDS = range(1, 21)
SICK_SEEDS = range(21, 24)
SYMPTOMS = {
    "accuracy at the end": ("rollout/accuracy", 5),
    "accuracy on average": ("rollout/accuracy", 0),
    "reward": ("rollout/reward_mean", 5),
    "length": ("rollout/response_len_mean", 5),
    "entropy": ("losses/entropy", 5),
    "KL to old": ("losses/approx_kl", 0),
    "largest ratio": ("losses/ratio_max", 0),
    "largest ratio of a sequence": ("losses/sequence_ratio_max", 0),
    "clipped low": ("losses/clipfrac_low", 0),
    "clipped high": ("losses/clipfrac_high", 0),
    "KL to reference": ("losses/kl_ref", 5),
    "gradient norm": ("charts/grad_norm", 0),
    "KL of sampler": ("rollout/sampler_kl", 0),
    "largest load": ("moe/load_max", 5),
    "explained variance": ("losses/explained_variance", 5),
}


def shown_bugs():
    """{file that sweep.py writes: bug} for the bugs that are not hidden."""
    bugs = load_bugs().items()
    return {f"runs/symptoms/bug_{n}.py": bug for n, bug in bugs if "hidden" not in bug}


def bug_variant(job, bug):
    return f"{job}: {bug['title']}"


def bug_jobs():
    """[Job] for the healthy scripts, then for the bugs."""
    healthy = {(script, job): flags for job, flags in BUG_JOBS.items() for script in BUGGY}
    jobs = crossed(HEALTHY_SEEDS, BUG_FLAGS, healthy)
    for seed in SICK_SEEDS:
        for job, flags in BUG_JOBS.items():
            for file, bug in shown_bugs().items():
                own = bug.get(job, flags)  # a bug's own flags if it has some
                words = f"{BUG_FLAGS} {own}".strip()
                jobs.append(Job(bug["script"], bug_variant(job, bug), seed, words, file))
    return jobs


ACTED_COLUMNS = {column: (key, 0) for column, (key, _) in ACTED.items()}
EXPERIMENTS = {
    "nine": Experiment(crossed(range(1, 6), NINE, DEFAULTS), ACTED_COLUMNS),
    "more": Experiment(crossed(range(1, 4), NINE, MORE_DEFAULTS)),
    "stability": Experiment(crossed(range(1, 4), SHORT, STABILITY_RUNS)),
    "symptoms": Experiment(bug_jobs(), SYMPTOMS),
    "exercises": Experiment(exercise_jobs(), EXERCISE_COLUMNS),
}
