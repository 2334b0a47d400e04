"""Compares the losses in TRL's GRPOTrainer with the scripts': two processes, two micro-batches each.

    pip install -r benchmarks/requirements.txt
    python benchmarks/losses_trl.py

The trainer of examples/trl_trainer.py makes one rollout of 128 completions with the base model, and
four optimizer steps of 32 of them, at a rate so high that clips bind. `gradient_error` is the distance
of the gradient of all parameters, as it is when the optimizer moves, from that of the script's loss on
the step's 32 completions in one batch in one process, by common.token_logprobs, relative to the norm of
the latter; all in float32. The losses: `plugged`, the script's, as in the example; `trl`, TRL's own,
set to be the script's; `trl, its KL`, with the KL that is TRL's default; `own tokens`, the script's as
in the example, but each process divides by its own count. Writes results/trl_losses.csv.
"""

import importlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

sys.path.insert(0, str(Path(__file__).parent.parent))
import common
import sweep
from plumbing.models import end_ids

PROCESSES = 2
JOB = """--use_cpu True --max_steps 4 --per_device_train_batch_size 8 --gradient_accumulation_steps 2
--steps_per_generation 8 --learning_rate 2e-3 --max_grad_norm 0 --router_aux_loss_coef 0
--disable_tqdm True --shuffle_dataset False"""
# TRL's own loss, set to be that of a script; that of gmpo is in a trainer of its own.
TRL = {
    "grpo": "--loss_type grpo --use_bias_correction_kl False",
    "dr_grpo": "--loss_type dr_grpo --scale_rewards none",
    "dapo": "--loss_type dapo --epsilon_high 0.28",
    "gspo": "--loss_type grpo --importance_sampling_level sequence --epsilon 3e-3 --epsilon_high 4e-3",
    "cispo": "--loss_type cispo --epsilon_high 5.0",
    "gmpo": "--epsilon 0.4",
    "sapo": "--loss_type sapo",
}
CASES = [(name, "plugged") for name in TRL]
CASES += [(name, "trl") for name in TRL]
CASES += [("grpo", "trl, its KL"), ("dapo", "own tokens"), ("cispo", "own tokens")]


def work(name, loss, folder):
    """One of the processes: trains, and writes what it had and what it did at each step."""
    import transformers
    from trl import GRPOTrainer
    from trl.experimental.gmpo import GMPOTrainer

    from examples import trl_trainer

    kind = trl_trainer.PluggedTrainer
    if loss.startswith("trl"):
        kind = GMPOTrainer if name == "gmpo" else GRPOTrainer
    losses = []  # of the micro-batches of a step
    steps = []

    class Recorder(trl_trainer.PluggedTrainer):
        def _generate_and_score_completions(self, inputs):
            return kind._generate_and_score_completions(self, inputs)

        def _compute_loss(self, model, inputs):
            value = kind._compute_loss(self, model, inputs)
            losses.append(value.detach())
            return value

        def step_counts(self):
            counts = super().step_counts()
            if loss == "own tokens":
                micro = self._buffered_inputs[self._step % self.args.steps_per_generation]
                own = micro["completion_mask"].sum()
                counts["num_tokens"] = own * self.current_gradient_accumulation_steps
            return counts

        def train(self):
            self.add_callback(Note(self))
            super().train()

    class Note(transformers.TrainerCallback):
        def __init__(self, trainer):
            self.trainer = trainer

        def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
            first = (self.trainer._step - len(losses)) % args.steps_per_generation
            parameters = list(self.trainer.accelerator.unwrap_model(model).parameters())
            steps.append(
                {
                    "micros": self.trainer._buffered_inputs[first : first + len(losses)],
                    "loss": sum(losses),
                    "weights": parameters_to_vector(parameters).detach(),
                    "gradient": parameters_to_vector(weight.grad for weight in parameters),
                }
            )
            losses.clear()

    flags = JOB.split() + ["--output_dir", f"{folder}/model", "--algorithm", name]
    if loss.startswith("trl"):
        flags += TRL[name].split()
    if loss == "trl, its KL":
        flags += ["--use_bias_correction_kl", "True"]
    trl_trainer.main(flags, Recorder)
    torch.save(steps, f"{folder}/{os.environ['RANK']}.pt")


def trained(name, loss):
    """What the processes wrote: [[what one had and did], by process], a list for each step."""
    with tempfile.TemporaryDirectory() as folder:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(PROCESSES)]
        command = [*torchrun, __file__, name, loss, folder]
        env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        result = subprocess.run(command, cwd=sweep.ROOT, env=env, capture_output=True, text=True)
        if result.returncode > 0:
            sys.exit(result.stderr)
        ranks = [torch.load(f"{folder}/{rank}.pt") for rank in range(PROCESSES)]
    return list(zip(*ranks, strict=True))


def completions_of(micros, problems):
    """([Completion], advantages) of the padded tensors of some micro-batches; `problems`: {prompt ids:
    Problem}."""
    completions = []
    for micro in micros:
        for i in range(len(micro["prompt_ids"])):
            prompt = micro["prompt_ids"][i][micro["prompt_mask"][i].bool()].tolist()
            ids = micro["completion_ids"][i][micro["completion_mask"][i].bool()].tolist()
            completions.append(common.Completion(problems[tuple(prompt)], ids, [0.0] * len(ids)))
    return completions, torch.cat([micro["advantages"] for micro in micros])


def advantage_error(script, args, policy, batches):
    """The largest distance of an advantage from what the script makes of the rewards of its group."""
    ends = end_ids(policy.model, policy.tokenizer)
    groups = {}  # prompt: [(reward, advantage)]
    for completions, advantages_B in batches:
        for completion, advantage in zip(completions, advantages_B.tolist(), strict=True):
            text = policy.tokenizer.decode(completion.ids, skip_special_tokens=True)
            truncated = completion.ids[-1] not in ends
            reward, _ = common.verify(text, completion.problem.answer, truncated)
            groups.setdefault(completion.problem.prompt, []).append((reward, advantage))
    rewards_PG, given_PG = torch.tensor(list(groups.values())).unbind(-1)
    assert rewards_PG.shape[1] == args.group_size
    return (script.compute_advantages(rewards_PG) - given_PG).abs().max().item()


def compare(name, loss):
    """Runs the trainer, and computes the same by the script: [row of the CSV, by step]."""
    script = importlib.import_module(name)
    args = script.Args(device="cpu")
    policy = common.load_policy(args)
    problem_stream, _ = common.load_problems(args, policy)
    problems = {tuple(problem.prompt_ids): problem for problem in problem_stream.problems}
    steps = trained(name, loss)
    batches = []
    for shares in steps:
        micros = [micro for share in shares for micro in share["micros"]]
        batches.append(completions_of(micros, problems))

    def logprobs(completions):
        batch = common.collate(completions, args)
        return common.token_logprobs(policy, batch, temperature=1.0).logprobs_BT, batch.mask_BT

    with torch.no_grad():  # the base model is the old policy and the reference
        old = [logprobs(completions)[0] for completions, _ in batches]
    parameters = list(policy.model.parameters())
    error = advantage_error(script, args, policy, batches)
    rows = []
    for number, (completions, advantages_B) in enumerate(batches):
        shares = steps[number]
        vector_to_parameters(shares[0]["weights"], parameters)
        keywords = {}
        if name == "grpo":
            keywords["ref_logprobs_BT"] = old[number]
        if name == "dr_grpo":
            keywords["max_new_tokens"] = args.max_new_tokens
        logprobs_BT, mask_BT = logprobs(completions)
        advantages_B1 = advantages_B.unsqueeze(1)
        value, stats = script.policy_loss(logprobs_BT, old[number], advantages_B1, mask_BT, **keywords)
        policy.model.zero_grad()
        value.backward()
        gradient = parameters_to_vector(weight.grad for weight in parameters)
        theirs = sum(share["loss"] for share in shares).item() / PROCESSES
        counts = [sum(m["completion_mask"].sum().item() for m in share["micros"]) for share in shares]
        row = {
            "script": name,
            "loss": loss,
            "step": number + 1,
            "tokens": " + ".join(map(str, counts)),  # of each process
            "ratio_max": stats["ratio_max"].item(),
            "value": value.item(),
            "value_error": abs(theirs - value.item()),
            "gradient_error": ((gradient - shares[0]["gradient"]).norm() / gradient.norm()).item(),
            "advantage_error": error,
        }
        rows.append(row)
        print(*row.values(), flush=True)
    return rows


def main():
    if len(sys.argv) == 4:
        work(*sys.argv[1:])
        return
    rows = []
    for name, loss in CASES:
        rows += compare(name, loss)
    sweep.write_csv(sweep.RESULTS / "trl_losses.csv", rows)


if __name__ == "__main__":
    main()
