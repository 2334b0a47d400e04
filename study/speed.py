"""Measures speed and memory.

    python study/speed.py sampler          # tokens per second: common.sample() and model.generate()
    python study/speed.py trl              # seconds per iteration: grpo.py and TRL's GRPOTrainer
    python study/speed.py memory           # peak memory of an iteration, and its seconds

Prints the rows of the tables in README.md. `sampler` and `trl` are pairs: the two sides take turns with
the same weights and prompts, 32 prompts x 8 completions of at most 48 tokens, and a row has both
medians, and the minimum, median and maximum ratio. On a CPU everything uses one thread.

sampler   A rollout of the default job, from its base model.
trl       Needs examples/requirements.txt. Seven iterations on each side, without the first one, each
          with grpo.py's 16 steps, clip range and KL. TRL samples with generate(). With a learning rate
          of 1e-9 (`fixed`) lengths stay the same; `learning` has grpo.py's.
memory    A model of Qwen2.5-0.5B's shape with random weights, 64 prompts x 8 completions of 512 tokens;
          on a CPU one layer and 2 x 8 x 8, which only shows that the command works.
"""

import argparse
import contextlib
import io
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import transformers  # noqa: E402

import common  # noqa: E402
import grpo  # noqa: E402

ITERATIONS = 7
RATES = {"fixed": 1e-9, "learning": 2e-4}
MEMORY = [  # script, flags
    ("grpo", "--kl_coef 0"),
    ("grpo", "--kl_coef 0 --dtype bfloat16"),
    ("grpo", "--kl_coef 0 --dtype bfloat16 --gradient_checkpointing"),
    ("grpo", "--dtype bfloat16"),
    ("ppo", "--dtype bfloat16"),
]


def run(script, device, folder, flags):
    """Runs a script: (the lines of its metrics.jsonl, its peak memory in GiB)."""
    flags += f" --eval_every 0 --save_every 0 --device {device}"
    command = [sys.executable, f"{script}.py", *flags.split(), "--run_dir", folder]
    with open(f"{folder}.log", "w") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        _, status, usage = os.wait4(process.pid, 0)
    if status != 0:
        sys.exit(Path(f"{folder}.log").read_text())
    lines = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    peak_gib = usage.ru_maxrss / 2**20  # of the process
    return lines, lines[-1].get("charts/peak_memory_gib", peak_gib)


def load(args, num_rollouts):
    """(policy, [the problems of each rollout])"""
    policy = common.load_policy(args)
    stream, _ = common.load_problems(args, policy)
    return policy, [stream.take(args.prompts_per_iteration) for _ in range(num_rollouts)]


def in_turn(sides, pair):
    """The two sides, which take turns going first."""
    return sides if pair % 2 == 0 else sides[::-1]


# -------------------------------------------------------------------------------------- the sampler


def sampler_pairs(device, num_pairs):
    """[(tokens per second with the sampler, with generate())]"""
    args = grpo.Args(device=device)
    policy, rollouts = load(args, num_pairs + 1)
    pairs = []
    for pair, problems in enumerate(rollouts):
        rates = {}
        for side in in_turn([sample, generate], pair):
            start = time.perf_counter()
            num_tokens = side(policy, problems, args)  # a number, so a GPU has finished
            rates[side] = num_tokens / (time.perf_counter() - start)
        pairs.append((rates[sample], rates[generate]))
    return pairs[1:]  # the first one is a warm-up


def sample(policy, problems, args):
    completions = common.sample(policy, problems, args.group_size, args)
    return sum(len(c.ids) for c in completions)


def generate(policy, problems, args):
    """The same with transformers. Counts the tokens up to the first EOS; the rest is padding."""
    prompts = [problem.prompt for problem in problems]
    inputs = policy.tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt")
    inputs = inputs.to(args.torch_device)
    output = policy.model.generate(
        input_ids=inputs.input_ids,
        attention_mask=inputs.attention_mask,
        num_return_sequences=args.group_size,
        max_new_tokens=args.max_new_tokens,
        eos_token_id=policy.end_ids,
        do_sample=True,
        temperature=args.temperature,
        top_k=0,
        top_p=1.0,
    )
    ends = torch.tensor(policy.end_ids, device=output.device)
    is_end = torch.isin(output[:, inputs.input_ids.shape[1] :], ends)
    is_after = is_end.cumsum(1) - is_end.int() > 0
    return (~is_after).sum().item()


# ------------------------------------------------------------------------------------- an iteration


def trl_pairs(case, device, num_pairs):
    """[(seconds per iteration of grpo.py, of TRL)]"""
    pairs = []
    for pair in range(num_pairs):
        seconds = {}
        for side in in_turn([run_ours, run_trl], pair):
            seconds[side] = statistics.median(side(case, device)[1:])
        pairs.append((seconds[run_ours], seconds[run_trl]))
    return pairs


def run_ours(case, device):
    """The seconds of each iteration of grpo.py."""
    with tempfile.TemporaryDirectory() as folder:
        lines, _ = run("grpo", device, f"{folder}/run", f"--lr {RATES[case]} --iterations {ITERATIONS}")
    phases = [f"charts/{phase}_seconds" for phase in ("rollout", "reward", "update")]
    return [sum(line[phase] for phase in phases) for line in lines]


def run_trl(case, device):
    """The same for TRL."""
    import datasets
    from trl import GRPOConfig, GRPOTrainer

    args = grpo.Args(device=device, lr=RATES[case])
    policy, rollouts = load(args, ITERATIONS)
    rows = [{"prompt": p.prompt, "answer": p.answer} for problems in rollouts for p in problems]
    steps = args.num_minibatches
    times = []

    def reward(completions, completion_ids, answer, **kwargs):
        rows = zip(completions, completion_ids, answer, strict=True)
        return [common.verify(text, gold, ids[-1] not in policy.end_ids)[0] for text, ids, gold in rows]

    class Clock(transformers.TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            times.append(time.perf_counter())

        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step % steps == 0:
                times.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=device == "cpu",
            seed=args.seed,
            per_device_train_batch_size=args.prompts_per_iteration * args.group_size // steps,
            steps_per_generation=steps,
            num_generations=args.group_size,
            max_completion_length=args.max_new_tokens,
            max_steps=steps * ITERATIONS,
            temperature=args.temperature,
            loss_type="grpo",
            epsilon=args.clip_eps_high,
            beta=args.kl_coef,
            use_bias_correction_kl=False,
            router_aux_loss_coef=args.router_aux_coef,
            learning_rate=args.lr,
            lr_scheduler_type="constant",
            max_grad_norm=args.max_grad_norm,
            bf16=False,
            gradient_checkpointing=False,
            shuffle_dataset=False,
            save_strategy="no",
        )
        trainer = GRPOTrainer(
            model=policy.model,
            reward_funcs=reward,
            args=config,
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=policy.tokenizer,
            callbacks=[Clock()],
        )
        with contextlib.redirect_stdout(io.StringIO()):  # TRL's log
            trainer.train()
    return [end - start for start, end in itertools.pairwise(times)]


# ------------------------------------------------------------------------------------------- memory


def save_model(folder, is_small):
    """A model of Qwen2.5-0.5B's shape with random weights, and the tokenizer of the tiny MoE."""
    config = transformers.Qwen2Config(
        vocab_size=512 if is_small else 151_936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=1 if is_small else 24,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(ROOT / "tiny_moe").save_pretrained(folder)


def print_memory(device):
    num_prompts, length = (2, 8) if device == "cpu" else (64, 512)
    common_flags = f"--max_new_tokens {length} --num_minibatches 2 --num_held_out 2 --lr 1e-6"
    with tempfile.TemporaryDirectory() as folder:
        save_model(f"{folder}/model", is_small=device == "cpu")
        for number, (script, flags) in enumerate(MEMORY):
            rows = 8 * num_prompts if script == "ppo" else num_prompts  # ppo has no groups
            words = f"--model {folder}/model --prompts_per_iteration {rows} {common_flags} {flags}"
            words += " --iterations 2"
            lines, peak_gib = run(script, device, f"{folder}/{number}", words)
            seconds = [lines[-1][f"charts/{phase}_seconds"] for phase in ("rollout", "update")]
            cells = [f"`{script}.py {flags}`", f"{peak_gib:.1f}", *(f"{s:.1f}" for s in seconds)]
            print(f"| {' | '.join(cells)} |", flush=True)


def print_row(case, pairs, form):
    medians = [format(statistics.median(values), form) for values in zip(*pairs, strict=True)]
    ratios = sorted(ours / theirs for ours, theirs in pairs)
    chosen = [f"{x:.2f}" for x in (ratios[0], statistics.median(ratios), ratios[-1])]
    print(f"| `{case}` | {len(pairs)} | {' | '.join(medians)} | {', '.join(chosen)} |", flush=True)


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("command", choices=["sampler", "trl", "memory"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--pairs", type=int, help="[40; trl: 10]")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.command == "sampler":
        print_row("default", sampler_pairs(args.device, args.pairs or 40), ",.0f")
    elif args.command == "memory":
        print_memory(args.device)
    else:
        for case in RATES:
            print_row(case, trl_pairs(case, args.device, args.pairs or 10), ".2f")


if __name__ == "__main__":
    main()
