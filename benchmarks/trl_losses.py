"""Compares the losses in TRL's GRPOTrainer with the scripts': two processes, two micro-batches each.

    pip install -r benchmarks/requirements.txt
    python benchmarks/trl_losses.py

The trainer of examples/trl_trainer.py makes one rollout of 128 completions with the base model, and
four optimizer steps of 32 of them, at a rate so high that clips bind. `gradient_error` is the distance
of the gradient of all parameters, as it is when the optimizer moves, from that of the script's loss on
the step's 32 completions in one batch in one process, by common.token_logprobs, relative to the norm of
the latter; all in float32. The losses: `plugged`, the script's, as in the example; `trl`, TRL's own,
set to be the script's; `trl, its KL`, with the KL that is TRL's default; `own tokens`, the script's as
in the example, but each process divides by its own count. Writes results/trl_losses.csv.
"""

import csv
import importlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
import common
from plumbing.models import end_ids

ROOT = Path(__file__).parent.parent
CSV = ROOT / "benchmarks" / "results" / "trl_losses.csv"
PROCESSES = 2
STEPS = 4  # for the one rollout
JOB = """--use_cpu True --max_steps 4 --per_device_train_batch_size 8 --gradient_accumulation_steps 2
--steps_per_generation 8 --learning_rate 2e-3 --max_grad_norm 0 --router_aux_loss_coef 0
--disable_tqdm True --shuffle_dataset False"""
# TRL's own loss, set to be that of a script; its gmpo is a trainer of its own, in trl.experimental: see
# conformance/README.md.
TRL = {
    "grpo": "--loss_type grpo --use_bias_correction_kl False",
    "dr_grpo": "--loss_type dr_grpo --scale_rewards none",
    "dapo": "--loss_type dapo --epsilon_high 0.28",
    "gspo": "--loss_type grpo --importance_sampling_level sequence --epsilon 3e-3 --epsilon_high 4e-3",
    "cispo": "--loss_type cispo --epsilon_high 5.0",
    "sapo": "--loss_type sapo",
}
SCRIPTS = ["grpo", "dr_grpo", "dapo", "gspo", "cispo", "gmpo", "sapo"]
CASES = [(name, "plugged") for name in SCRIPTS]
CASES += [(name, "trl") for name in TRL]
CASES += [("grpo", "trl, its KL"), ("dapo", "own tokens"), ("cispo", "own tokens")]


def work(name, loss, folder):
    """One of the processes: trains, and writes what it had and what it did at each step."""
    import transformers
    from trl import GRPOTrainer

    from examples import trl_trainer

    steps = []

    class Note(transformers.TrainerCallback):
        def __init__(self, trainer):
            self.trainer = trainer

        def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
            trainer = self.trainer
            accumulation = args.gradient_accumulation_steps
            first = (trainer._step - accumulation) % args.steps_per_generation
            parameters = dict(trainer.accelerator.unwrap_model(model).named_parameters())
            steps.append(
                {
                    "micros": trainer._buffered_inputs[first : first + accumulation],
                    "loss": sum(trainer.losses),
                    "weights": {key: value.detach().clone() for key, value in parameters.items()},
                    "gradients": {key: value.grad.clone() for key, value in parameters.items()},
                }
            )
            trainer.losses.clear()

    class Recorder(trl_trainer.PluggedTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.losses = []
            self.add_callback(Note(self))

        def _compute_loss(self, model, inputs):
            kind = GRPOTrainer if loss.startswith("trl") else trl_trainer.PluggedTrainer
            value = kind._compute_loss(self, model, inputs)
            self.losses.append(value.detach())
            return value

        def _generate_and_score_completions(self, inputs):
            kind = GRPOTrainer if loss.startswith("trl") else trl_trainer.PluggedTrainer
            return kind._generate_and_score_completions(self, inputs)

        def step_counts(self):
            counts = super().step_counts()
            if loss == "own tokens":
                micro = self._buffered_inputs[self._step % self.args.steps_per_generation]
                own = micro["completion_mask"].sum()
                counts["num_tokens"] = own * self.current_gradient_accumulation_steps
            return counts

    flags = JOB.split() + ["--output_dir", f"{folder}/model", "--algorithm", name]
    if loss.startswith("trl"):
        flags += TRL[name].split()
    if loss == "trl, its KL":
        flags += ["--use_bias_correction_kl", "True"]
    trl_trainer.main(flags, Recorder)
    torch.save(steps, f"{folder}/{os.environ['RANK']}.pt")


def completions_of(micros, problems):
    """([Completion], advantages) of the padded tensors of some micro-batches; `problems`: {prompt ids:
    Problem}."""
    completions = []
    for micro in micros:
        for i in range(len(micro["prompt_ids"])):
            prompt = micro["prompt_ids"][i][micro["prompt_mask"][i].bool()].tolist()
            problem = problems[tuple(prompt)]
            ids = micro["completion_ids"][i][micro["completion_mask"][i].bool()].tolist()
            completions.append(common.Completion(problem, ids, [0.0] * len(ids)))
    return completions, torch.cat([micro["advantages"] for micro in micros])


def advantage_error(script, args, policy, steps):
    """The largest distance of an advantage from what the script makes of the rewards of its group."""
    ends = end_ids(policy.model, policy.tokenizer)
    groups = {}
    for step in steps:
        for completion, advantage in zip(*step, strict=True):
            groups.setdefault(completion.problem.prompt, []).append((completion, advantage))
    error = 0.0
    for group in groups.values():
        assert len(group) == args.group_size
        rewards = []
        for completion, _ in group:
            text = policy.tokenizer.decode(completion.ids, skip_special_tokens=True)
            truncated = completion.ids[-1] not in ends
            rewards.append(common.verify(text, completion.problem.answer, truncated)[0])
        advantages_G = script.compute_advantages(torch.tensor([rewards]))[0]
        given_G = torch.stack([advantage for _, advantage in group])
        error = max(error, (advantages_G - given_G).abs().max().item())
    return error


def compare(name, loss):
    """Runs the trainer, and computes the same by the script: [row of the CSV, by step]."""
    script = importlib.import_module(name)
    args = script.Args(device="cpu")
    policy = common.load_policy(args)
    model = policy.model
    problem_stream, _ = common.load_problems(args, policy)
    problems = {tuple(problem.prompt_ids): problem for problem in problem_stream.problems}
    with tempfile.TemporaryDirectory() as folder:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(PROCESSES)]
        command = [*torchrun, __file__, name, loss, folder]
        env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        if result.returncode > 0:
            sys.exit(result.stderr)
        ranks = [torch.load(f"{folder}/{rank}.pt") for rank in range(PROCESSES)]

    steps = []
    for shares in zip(*ranks, strict=True):
        micros = [micro for share in shares for micro in share["micros"]]
        steps.append(completions_of(micros, problems))
    assert len(steps) == STEPS
    error = advantage_error(script, args, policy, steps)
    batches = [common.collate(completions, args) for completions, _ in steps]

    def logprobs(batch):
        return common.token_logprobs(policy, batch, temperature=1.0).logprobs_BT

    with torch.no_grad():  # the base model is the old policy and the reference
        old = [logprobs(batch) for batch in batches]
    rows = []
    for number, batch in enumerate(batches):
        model.load_state_dict(
            ranks[0][number]["weights"], strict=False
        )  # the head's are the embedding's
        keywords = {}
        if name == "grpo":
            keywords["ref_logprobs_BT"] = old[number]
        if name == "dr_grpo":
            keywords["max_new_tokens"] = args.max_new_tokens
        advantages_B1 = steps[number][1].unsqueeze(1)
        value, stats = script.policy_loss(
            logprobs(batch), old[number], advantages_B1, batch.mask_BT, **keywords
        )
        model.zero_grad()
        value.backward()
        distance = 0.0
        norm = 0.0
        for key, parameter in model.named_parameters():
            distance += (parameter.grad - ranks[0][number]["gradients"][key]).square().sum().item()
            norm += parameter.grad.square().sum().item()
        theirs = sum(rank[number]["loss"] for rank in ranks).item() / PROCESSES
        counts = [
            sum(int(m["completion_mask"].sum()) for m in rank[number]["micros"]) for rank in ranks
        ]
        row = {
            "script": name,
            "loss": loss,
            "step": number + 1,
            "tokens": " + ".join(map(str, counts)),  # of each process
            "ratio_max": stats["ratio_max"].item(),
            "value": value.item(),
            "value_error": abs(theirs - value.item()),
            "gradient_error": (distance / norm) ** 0.5,
            "advantage_error": error,
        }
        rows.append({key: f"{x:.3g}" if isinstance(x, float) else x for key, x in row.items()})
        print(*rows[-1].values(), flush=True)
    return rows


def main():
    if len(sys.argv) == 4:
        work(*sys.argv[1:])
        return
    table = []
    for name, loss in CASES:
        table += compare(name, loss)
    with open(CSV, "w", newline="") as file:
        writer = csv.DictWriter(file, [*table[0]], lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)


if __name__ == "__main__":
    main()
