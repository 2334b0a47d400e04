"""The experiments of sweep.py, as data. Flags are those of the scripts' command lines."""

from typing import NamedTuple

SCRIPTS = ["ppo", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "gmpo", "rspo", "sapo"]
MORE = ["more.reinforce", "more.rloo", "more.vapo"]


class Experiment(NamedTuple):
    seeds: int  # from 1 up to this one
    flags: str  # shared by all runs
    runs: dict  # {(script, variant): its flags, which override the shared ones}


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
RAMBLING = "--model runs/rambling --eval_every 2 --save_every 0"
FREE = "--kl_coef 0"  # grpo without its KL, which its children do not have

MADE = {  # inputs of the runs, and the command that makes each
    "runs/rambling": "tiny_moe/train.py --direct 0.1 --worked 0.3",
    "runs/smollm2": "examples/smollm2.py",
    "runs/smaller_sums.jsonl": "examples/small_sums.py --largest 30",
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

EXPERIMENTS = {
    "nine": Experiment(
        5,
        "--eval_every 2 --save_every 0",
        each(SCRIPTS, "default") | {("dapo", "default"): "--eval_every 1", ("grpo", "free"): FREE},
    ),
    "more": Experiment(3, "--eval_every 2 --save_every 0", each(MORE, "default")),
    "stability": Experiment(
        3,
        "--iterations 20 " + QUIET,
        {(script, name): flags for name, flags in STABILITY.items() for script in SCRIPTS},
    ),
    "wrong_length": Experiment(
        5,
        "--iterations 40 --max_new_tokens 96 " + QUIET,
        {("grpo", "kl0"): FREE, ("dr_grpo", "default"): ""},
    ),
    "dynamic_sampling": Experiment(
        5,
        "--overlong none --save_every 0",
        {
            ("dapo", "refill"): "--iterations 36 --eval_every 1",
            ("dapo", "drop"): "--iterations 60 --eval_every 2 --max_sampling_rounds 1",
        },
    ),
    "overlong": Experiment(
        5,
        RAMBLING,
        {("dapo", name): f"--overlong {name}" for name in ("soft", "filter", "none")},
    ),
    "stale_ratio": Experiment(
        5,
        "--iterations 20 --lr 3e-4 " + STEPS_16 + QUIET,
        {("grpo", "stale"): FREE} | each(("gspo", "gmpo"), "stale"),
    ),
    "old_logprobs": Experiment(5, "--iterations 20 --lr 3e-4 " + STEPS_16 + QUIET, OLD_LOGPROBS),
    "stale_rollouts": Experiment(
        8,
        "--rollout_refresh_every 8 " + QUIET,
        {("grpo", rule): f"--rollout_correction {rule}" for rule in ("none", "token_tis", "geo_mask")},
    ),
    "rollout_correction": Experiment(
        5,
        f"--iterations 20 --lr 1e-3 {FREE} {STEPS_16} {QUIET}",
        {("grpo", name): flags for name, flags in CORRECTED.items()},
    ),
    "smollm2": Experiment(
        1,
        SMOLLM2,
        each([name for name in SCRIPTS if name != "rspo"], "default")
        | {
            ("ppo", "default"): "--prompts_per_iteration 64 --critic_lr 1e-5",
            ("dapo", "default"): "--max_sampling_rounds 3 --overlong_cache 3",
        },
    ),
}
WITH_CURVES = ("nine", "more")  # these keep a row per iteration, too
