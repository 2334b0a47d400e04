"""The experiments of sweep.py, as data. Flags are the scripts' command-line flags."""

from typing import NamedTuple

from repair import load_bugs

SCRIPTS = ["ppo", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "gmpo", "rspo", "sapo"]
MORE = ["more.reinforce", "more.rloo", "more.vapo"]

# The rows of the tables: grpo twice, the second time without its KL.
ROWS = [("ppo", "default"), ("grpo", "default"), ("grpo", "free")]
ROWS += [(script, "default") for script in SCRIPTS[2:]]


class Job(NamedTuple):
    script: str  # script, variant and seed are the key in the CSV
    variant: str
    seed: int
    flags: str
    file: str  # the program that runs


class Experiment(NamedTuple):
    jobs: list
    columns: dict = {}  # column: key in metrics.jsonl, how many of the last iterations [0: all]
    has_curves: bool = False  # whether a second CSV has the iterations


def file_of(script):
    """more.rloo -> more/rloo.py"""
    return f"{script.replace('.', '/')}.py"


def crossed(seeds, flags, runs, files=None):
    """[Job] for {(script, variant): its own flags}. They come after the common flags, because the last
    value of a repeated flag wins. Jobs are ordered by seed, so an interrupted sweep still leaves
    complete comparisons."""
    jobs = []
    for seed in seeds:
        for (script, variant), own in runs.items():
            file = (files or {}).get((script, variant), file_of(script))
            jobs.append(Job(script, variant, seed, f"{flags} {own}".strip(), file))
    return jobs


# -------------------------------------------------------------------------------- the default job

QUIET = "--eval_every 0 --save_every 0"
NINE = "--eval_every 2 --eval_samples 8 --save_every 0"
DEFAULTS = {(script, "default"): "" for script in SCRIPTS}
DEFAULTS |= {("dapo", "default"): "--eval_every 1", ("grpo", "free"): "--kl_coef 0"}
ACTED = {  # what each mechanism did, for report.acted
    "end_len_wrong": ("rollout/response_len_wrong", 10),
    "clip_low": ("losses/clipfrac_low", 0),
    "clip_high": ("losses/clipfrac_high", 0),
    "kl_ref": ("losses/kl_ref", 0),
    "explained_variance": ("losses/explained_variance", 0),
    "all_right": ("rollout/groups_dropped_all_right", 0),
    "all_wrong": ("rollout/groups_dropped_all_wrong", 0),
    "ratio_max": ("losses/ratio_max", 0),
    "gamma": ("moe/router_shift", 0),
    "gamma_floor": ("moe/router_floor_frac", 0),
    "slope": ("losses/gate_slope", 0),
    "end_entropy": ("losses/entropy", 5),
    "end_len": ("rollout/response_len_mean", 5),
}
STABILITY = {  # from mild to wild; no run fell at milder settings
    "lr3e-4-steps16": "--lr 3e-4 --num_minibatches 16",
    "lr1e-3-steps4": "--lr 1e-3 --num_minibatches 4",
    "lr1e-3-steps16": "--lr 1e-3 --num_minibatches 16",
}
STABILITY_RUNS = {(script, name): flags for name, flags in STABILITY.items() for script in SCRIPTS}
for name, flags in STABILITY.items():
    STABILITY_RUNS["grpo", f"{name}-free"] = f"{flags} --kl_coef 0"

# --------------------------------------------------------------- an MoE's routes, and dapo step by step

LATER = range(201, 204)
STALE = "--rollout_dtype int4 --rollout_refresh_every 4"
ROUTES = {  # variant: flags
    "fresh": "",
    "fresh-r3": "--routing_replay r3",
    "stale": STALE,
    "stale-r2": f"{STALE} --routing_replay r2",
    "stale-r3": f"{STALE} --routing_replay r3",
}
ROUTING = {}
for variant, flags in ROUTES.items():
    ROUTING["grpo", variant] = f"--kl_coef 0 {flags}"
    ROUTING["gspo", variant] = flags
    if variant in ("fresh", "stale", "stale-r3"):
        ROUTING["sapo", variant] = flags
        ROUTING["rspo", variant] = flags
ROUTING_COLUMNS = {
    "clip_low": ("losses/clipfrac_low", 0),
    "clip_high": ("losses/clipfrac_high", 0),
    "mean_accuracy": ("rollout/accuracy", 0),
    "flipped": ("moe/expert_flip_frac", 0),
    "sampler_flipped": ("moe/sampler_flip_frac", 0),
    "ratio_max": ("losses/ratio_max", 0),
    "gamma": ("moe/router_shift", 0),
}
DROP = "--iterations 40 --max_sampling_rounds 1"  # groups that are not mixed are not replaced
DAPO_CHAIN = {
    ("grpo", "free"): "--kl_coef 0",
    ("grpo", "clip-higher"): "--kl_coef 0 --clip_eps_high 0.28",
    ("dapo", "drop-none"): f"{DROP} --overlong none",
    ("dapo", "drop-filter"): f"{DROP} --overlong filter",
    ("dapo", "drop-soft"): f"{DROP} --overlong soft",
    ("dapo", "default"): "",
}
CHAIN_COLUMNS = {
    "end_len_wrong": ("rollout/response_len_wrong", 10),
    "clip_high": ("losses/clipfrac_high", 0),
    "mean_truncated": ("rollout/truncated_frac", 0),
    "end_entropy": ("losses/entropy", 10),
}

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
    sick = {}
    files = {}
    for job, flags in BUG_JOBS.items():
        for file, bug in shown_bugs().items():
            key = (bug["script"], bug_variant(job, bug))
            sick[key] = bug.get(job, flags)  # a bug's own flags if it has some
            files[key] = file
    return crossed(HEALTHY_SEEDS, BUG_FLAGS, healthy) + crossed(SICK_SEEDS, BUG_FLAGS, sick, files)


EXPERIMENTS = {
    "nine": Experiment(crossed(range(1, 6), NINE, DEFAULTS), ACTED, has_curves=True),
    "more": Experiment(
        crossed(range(1, 4), NINE, {(name, "default"): "" for name in MORE}), has_curves=True
    ),
    "stability": Experiment(crossed(range(1, 4), f"--iterations 20 {QUIET}", STABILITY_RUNS)),
    "routing": Experiment(crossed(LATER, f"--iterations 20 {QUIET}", ROUTING), ROUTING_COLUMNS),
    "dapo_chain": Experiment(crossed(LATER, QUIET, DAPO_CHAIN), CHAIN_COLUMNS),
    "symptoms": Experiment(bug_jobs(), SYMPTOMS),
}
