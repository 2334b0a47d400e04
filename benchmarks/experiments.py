"""What sweep.py runs: data only. Flags are those of the scripts' command lines."""

from typing import NamedTuple

SCRIPTS = ["ppo", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "gmpo", "rspo", "sapo"]
MORE = ["more.reinforce", "more.rloo", "more.vapo"]


class Experiment(NamedTuple):
    seeds: int  # 1 to this one
    flags: str  # of all its runs
    runs: dict  # {(script, variant): flags of its own, which override the others}


def each(scripts, variant, flags=""):
    return {(script, variant): flags for script in scripts}


QUIET = "--eval_every 0 --save_every 0 "
STEPS_16 = "--num_minibatches 16 "
STEPS_64 = "--num_minibatches 16 --update_epochs 4 "
HARD = "--model benchmarks/hard_base --lr 1e-4 " + QUIET
LONG = (
    "--model runs/long_addition/model --dataset runs/long_addition/problems.jsonl --max_new_tokens 192 "
    "--num_held_out 128 --iterations 15 " + STEPS_16 + QUIET
)
# A quarter of the default job's completions, in float32: for a CPU without bfloat16 instructions.
SMOLLM2 = (
    "--model runs/smollm2 --dataset runs/smaller_sums.jsonl --max_new_tokens 10 --lr 5e-6 "
    "--prompts_per_iteration 8 --old_logprobs sampler --num_held_out 128 --iterations 20 "
    "--eval_every 5 --save_every 0"
)
RAMBLING = "--model runs/rambling --eval_every 2 --save_every 0"
FREE = "--kl_coef 0"  # grpo without its KL, which its children do not have

MADE = {  # what runs name, and what makes it
    "runs/rambling": "tiny_moe/train.py --direct 0.1 --worked 0.3",
    "runs/long_addition": "benchmarks/long_addition.py",
    "runs/smollm2": "examples/smollm2.py",
    "runs/smaller_sums.jsonl": "examples/small_sums.py --largest 30",
}
STABILITY = {  # settings from mild to wild; milder ones were never seen to fall
    "lr3e-4-steps16": "--lr 3e-4 --num_minibatches 16",
    "lr1e-3-steps4": "--lr 1e-3 --num_minibatches 4",
    "lr1e-3-steps16": "--lr 1e-3 --num_minibatches 16",
}
# GSPO's printed range: a mean over long answers varies little.
PRINTED = "--clip_eps_low 3e-4 --clip_eps_high 4e-4"
CORRECTED = {"same": "", "int4": "--rollout_dtype int4"}
for rule in ("token_tis", "sequence_tis", "geo_mask"):
    CORRECTED[f"int4-{rule}"] = f"--rollout_dtype int4 --rollout_correction {rule}"

EXPERIMENTS = {
    # ------------------------------------------------------------------------------ the default job
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
    "one_step": Experiment(
        3,
        "--num_minibatches 1 " + QUIET,
        {("grpo", "one"): FREE} | each(("gspo", "gmpo", "rspo", "sapo", "dr_grpo", "cispo"), "one"),
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
    "gradient_share": Experiment(
        8,
        "--iterations 12 " + QUIET,
        {
            ("cispo", "steps4"): "--num_minibatches 4",
            ("cispo", "steps16"): STEPS_16,
        },
    ),
    "stale_ratio": Experiment(
        5,
        "--iterations 20 --lr 3e-4 " + STEPS_16 + QUIET,
        {("grpo", "stale"): FREE} | each(("gspo", "gmpo"), "stale"),
    ),
    "router_shift": Experiment(
        5, "--iterations 20 --lr 1e-3 " + STEPS_64 + QUIET, each(("gmpo", "rspo"), "lr1e-3")
    ),
    "temperatures": Experiment(
        40,
        "--iterations 20 --lr 1e-3 " + STEPS_16 + QUIET,
        {
            ("sapo", "paper"): "--tau_pos 1.0 --tau_neg 1.05",
            ("sapo", "reversed"): "--tau_pos 1.05 --tau_neg 1.0",
        },
    ),
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
    # -------------------------------------------------------------------------------- long answers
    "replay": Experiment(
        5,
        LONG + "--lr 1e-3",
        {
            ("grpo", "none"): f"--routing_replay none {FREE}",
            ("grpo", "r2"): f"--routing_replay r2 {FREE}",
            ("gspo", "none"): f"--routing_replay none {PRINTED}",
            ("gspo", "r2"): f"--routing_replay r2 {PRINTED}",
        },
    ),
    "replay_lower": Experiment(
        5,
        f"{LONG} --lr 6e-4 {FREE}",
        {("grpo", rule): f"--routing_replay {rule}" for rule in ("none", "r2")},
    ),
    "long_shift": Experiment(
        8, LONG + "--lr 7e-4 --router_aux_coef 0", each(("gmpo", "rspo"), "default")
    ),
    # ------------------------------------------------------------------------------- the hard base
    "hard_tokens": Experiment(
        8,
        HARD + STEPS_16 + "--iterations 100",
        {
            ("cispo", "all"): "",
            ("cispo", "kept"): "--ppo_mask",
            ("cispo", "control"): "",  # sweep.py leaves out as many equally improbable tokens
        },
    ),
    # With seed 99 the clip bound on 0.1 % of the tokens at 1e-4, on 0.3 % at 3e-4, too fast to learn.
    "hard_clip": Experiment(
        6,
        HARD + STEPS_16 + "--iterations 100 --lr 2e-4",
        {("dapo", f"high{high}"): f"--clip_eps_high {high}" for high in ("0.2", "0.28")},
    ),
    "hard_ratios": Experiment(
        8,
        HARD + STEPS_64 + "--iterations 60",
        {("grpo", "free"): FREE, ("gmpo", "default"): ""},
    ),
    # ------------------------------------------------------------------------------- a real model
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
