"""The experiments of sweep.py, as data. Flags are those of the scripts' command lines."""

from typing import NamedTuple

SCRIPTS = ["ppo", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "gmpo", "rspo", "sapo"]
MORE = ["more.reinforce", "more.rloo", "more.vapo"]


class Experiment(NamedTuple):
    seeds: range
    flags: str  # shared by all runs
    runs: dict  # {(script, variant): its flags, which override the shared ones}
    environment: dict = {}  # variables that are set for all runs


def each(scripts, variant, flags=""):
    return {(script, variant): flags for script in scripts}


QUIET = "--eval_every 0 --save_every 0 "
STEPS_16 = "--num_minibatches 16 "
# A quarter of the default job's completions, in float32: for a CPU without bfloat16 instructions.
SMOLLM2 = (
    "--model runs/smollm2 --dataset runs/smaller_sums.jsonl --max_new_tokens 10 --lr 5e-6 "
    "--prompts_per_iteration 8 --old_logprobs sampler --num_held_out 128 --iterations 20 "
    "--eval_every 5 --save_every 0"
)
FREE = "--kl_coef 0"  # grpo without its KL, which its children do not have

MADE = {  # inputs of the runs, and the command that makes each
    "runs/rambling": "tiny_moe/train.py --direct 0.1 --worked 0.3",
    "runs/smollm2": "examples/smollm2.py",
    "runs/smaller_sums.jsonl": "examples/own_dataset.py --largest 30",
}
STABILITY = {  # from mild to wild; milder settings never made a run fall
    "lr3e-4-steps16": "--lr 3e-4 --num_minibatches 16",
    "lr1e-3-steps4": "--lr 1e-3 --num_minibatches 4",
    "lr1e-3-steps16": "--lr 1e-3 --num_minibatches 16",
}
CORRECTED = {"same": "", "int4": "--rollout_dtype int4"}
for rule in ("token_tis", "sequence_tis", "geo_mask"):
    CORRECTED[f"int4-{rule}"] = f"--rollout_dtype int4 --rollout_correction {rule}"

OLD_LOGPROBS = {  # by precision of the sampler, and by whose log-probs the ratio divides
    (script, f"{precision}-{old}"): f"--rollout_dtype {precision} --old_logprobs {old} {flags}".strip()
    for precision in ("bfloat16", "int8")
    for script, flags in (("grpo", FREE), ("gspo", ""))
    for old in ("sampler", "trainer")
}
REPEATED = {("grpo", "default"): ""}  # runs of `nine` and `stability`
REPEATED |= {("grpo", name): f"--iterations 20 {flags}" for name, flags in STABILITY.items()}

# Runs whose script takes one function from another: grpo's loss without the std of the advantages, and
# dr_grpo's, which has no length in it, with the std.
EXCHANGED = {
    ("grpo", "no-std"): ("compute_advantages", "dr_grpo"),
    ("dr_grpo", "std"): ("compute_advantages", "grpo"),
}

FIVE = range(1, 6)
THREE = range(1, 4)
NEW = range(101, 109)  # nobody had looked at these seeds before the comparisons were chosen

EXPERIMENTS = {
    "nine": Experiment(
        FIVE,
        "--eval_every 2 --save_every 0",
        each(SCRIPTS, "default") | {("dapo", "default"): "--eval_every 1", ("grpo", "free"): FREE},
    ),
    "more": Experiment(THREE, "--eval_every 2 --save_every 0", each(MORE, "default")),
    "stability": Experiment(
        THREE,
        "--iterations 20 " + QUIET,
        {(script, name): flags for name, flags in STABILITY.items() for script in SCRIPTS},
    ),
    "wrong_length": Experiment(
        NEW,
        "--iterations 40 --max_new_tokens 96 " + QUIET,
        each(["grpo"], "free", FREE)
        | each(["grpo"], "no-std", FREE)
        | {("dr_grpo", "std"): "", ("dr_grpo", "default"): ""},
    ),
    "dynamic_sampling": Experiment(
        NEW,
        "--overlong none " + QUIET,
        {
            ("dapo", "refill"): "--iterations 36",
            ("dapo", "drop"): "--iterations 60 --max_sampling_rounds 1",
        },
    ),
    "overlong": Experiment(
        NEW,
        "--model runs/rambling " + QUIET,
        {("dapo", name): f"--overlong {name}" for name in ("soft", "filter", "none")},
    ),
    "ratio_range": Experiment(
        NEW,
        "--iterations 20 --lr 3e-4 " + STEPS_16 + QUIET,
        {
            ("grpo", "free"): FREE,
            ("gmpo", "default"): "",
            ("gmpo", "grpo-range"): "--log_ratio_clip 0.2",
        },
    ),
    "rollout_correction": Experiment(
        NEW,
        f"--iterations 20 --lr 1e-3 {FREE} {STEPS_16} {QUIET}",
        {("grpo", name): flags for name, flags in CORRECTED.items()},
    ),
    "old_logprobs": Experiment(NEW, "--iterations 14 --lr 3e-4 " + STEPS_16 + QUIET, OLD_LOGPROBS),
    "stale_rollouts": Experiment(
        NEW,
        "--iterations 32 --rollout_refresh_every 8 " + QUIET,
        {("grpo", rule): f"--rollout_correction {rule}" for rule in ("none", "token_tis", "geo_mask")}
        | {("grpo", "fresh"): "--rollout_refresh_every 1"},
    ),
    # With the kernels for processors that have AVX2, and for those that do not
    "cpu_avx2": Experiment(THREE, QUIET, REPEATED, {"ATEN_CPU_CAPABILITY": "avx2"}),
    "cpu_default": Experiment(THREE, QUIET, REPEATED, {"ATEN_CPU_CAPABILITY": "default"}),
    "smollm2": Experiment(
        range(1, 2),
        SMOLLM2,
        each([name for name in SCRIPTS if name != "rspo"], "default")
        | {
            ("ppo", "default"): "--prompts_per_iteration 64 --critic_lr 1e-5",
            ("dapo", "default"): "--max_sampling_rounds 3 --overlong_cache 3",
        },
    ),
}
WITH_CURVES = ("nine", "more")  # these keep a row per iteration, too
