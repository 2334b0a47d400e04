"""How well the critics of ppo.py and more/vapo.py predict what is won, on the same completions.

    python benchmarks/critic.py [--seeds 5]

Measured is the explained variance of the Monte Carlo returns of frozen sets of 1,024 completions, whose
prompts no critic has seen, after as many optimizer steps of both critics:

same     The policy is the base model and stays as it is. Both critics start from the same weights and
         learn from the same rollouts of 256 completions, four steps each, with their scripts' functions
         and defaults: ppo's returns have lambda 0.95, vapo's lambda 1. The set is the base model's.
base     The scripts as they are, stopped after ten iterations, 40 steps: until then vapo has only
         trained its critic, while ppo has moved its policy too. The set is the base model's.
moved    The same two critics, but the set is of ppo's policy after these ten iterations.

Writes results/critic.csv.
"""

import argparse
import csv
import shutil
import subprocess
import sys

import sweep

commit = sweep.prepare()

import torch  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

import common  # noqa: E402
import ppo  # noqa: E402
from more import vapo  # noqa: E402
from verifier import verify  # noqa: E402

CSV = sweep.RESULTS / "critic.csv"
ROLLOUTS = 20
TEST_SIZE = 1024


def rollout(model, tokenizer, problems, args, generator):
    """(batch, rewards (B, 1), which completions were cut off (B, 1))."""
    prompts = [problem.prompt_ids for problem in problems]
    completions = common.sample(model, tokenizer, prompts, 1, args, generator)
    rewards = []
    for completion, problem in zip(completions, problems, strict=True):
        reward, _ = verify(completion.text, problem.answer, completion.truncated)
        rewards.append([reward])
    is_cut_off = [[completion.truncated] for completion in completions]
    return common.collate(completions, "cpu"), torch.tensor(rewards), torch.tensor(is_cut_off)


def returns_of(script, lam, values_BU, batch, rewards_B1, is_cut_off_B1):
    """What the script's critic learns; without a KL, since the policy is still the reference."""
    length_B1 = batch.mask_BT.sum(1, keepdim=True)
    last_reward_B1 = rewards_B1 + is_cut_off_B1 * values_BU.gather(1, length_B1)
    token_rewards_BT = torch.zeros_like(values_BU[:, :-1])
    token_rewards_BT = token_rewards_BT.scatter_add(1, length_B1 - 1, last_reward_B1)
    _, returns_BT = script.compute_gae(token_rewards_BT, values_BU[:, :-1], batch.mask_BT, 1.0, lam)
    return returns_BT


@torch.no_grad()
def explained_variance(critic, batch, rewards_B1):
    """Of the Monte Carlo returns: with gamma 1 each token of a completion has its reward."""
    values = critic(batch)[:, :-1][batch.mask_BT]
    returns = rewards_B1.expand_as(batch.mask_BT)[batch.mask_BT]
    return (1 - (returns - values).var() / returns.var()).item()


def learn(script, lam, model, rollouts, test):
    """The explained variance on the test set before the first rollout and after each one."""
    args = script.Args()
    test_batch, test_rewards_B1, _ = test
    critic = script.Critic(model)
    optimizer = torch.optim.AdamW(critic.parameters(), lr=args.critic_lr, weight_decay=0.0)
    measured = [explained_variance(critic, test_batch, test_rewards_B1)]
    for batch, rewards_B1, is_cut_off_B1 in rollouts:
        with torch.no_grad():
            values_BU = critic(batch)
        returns_BT = returns_of(script, lam, values_BU, batch, rewards_B1, is_cut_off_B1)
        for rows in torch.arange(len(rewards_B1)).tensor_split(args.num_minibatches):
            micro = batch.rows(rows)
            loss = script.value_loss(
                critic(micro)[:, :-1],
                values_BU[rows, :-1],
                returns_BT[rows],
                micro.mask_BT,
                value_clip=args.value_clip,
            )
            (args.value_coef * loss).backward()
            torch.nn.utils.clip_grad_norm_(critic.parameters(), args.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
        measured.append(explained_variance(critic, test_batch, test_rewards_B1))
    return measured


def run(name, seed, iterations):
    """A script as a user runs it. Returns its last checkpoint."""
    folder = sweep.RUNS / "critic" / f"{name}_{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    program = ["-m", name] if name in sweep.MORE else [f"{name}.py"]
    flags = ["--seed", seed, "--iterations", iterations, "--run_dir", folder, *sweep.QUICK]
    command = [sys.executable, *program, *map(str, flags)]
    subprocess.run(command, cwd=sweep.ROOT, check=True, capture_output=True)
    (checkpoint,) = folder.glob("checkpoint-*")
    return checkpoint


def critic_of(checkpoint, script, model):
    critic = script.Critic(model)
    saved = torch.load(checkpoint / "trainer_state.pt", weights_only=True)
    critic.load_state_dict(saved["parts"]["critic"])
    return critic


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--seeds", type=int, default=5)
    num_seeds = parser.parse_args().seeds
    torch.set_num_threads(1)
    rows = []
    for seed in range(1, num_seeds + 1):
        args = ppo.Args(seed=seed, device="cpu", rollout_batch_size=256)
        model, tokenizer = common.load_model(args)
        train_problems, _ = common.load_problems(args, model, tokenizer)
        generator = torch.Generator().manual_seed(seed)
        size = args.prompts_per_iteration
        problems = common.take_problems(train_problems, 0, ROLLOUTS * size + TEST_SIZE, seed)
        rollouts = []
        for start in range(0, ROLLOUTS * size, size):
            part = problems[start : start + size]
            rollouts.append(rollout(model, tokenizer, part, args, generator))
        test = rollout(model, tokenizer, problems[ROLLOUTS * size :], args, generator)
        measured = []  # (variant, script, steps, explained variance)
        for script, lam in ((ppo, args.gae_lambda), (vapo, 1.0)):
            for i, value in enumerate(learn(script, lam, model, rollouts, test)):
                measured.append(("same", script, i * args.num_minibatches, value))
        iterations = vapo.Args().pretraining_iterations
        steps = iterations * args.num_minibatches
        checkpoints = {script: run(script.__name__, seed, iterations) for script in (ppo, vapo)}
        moved = AutoModelForCausalLM.from_pretrained(checkpoints[ppo])
        moved_test = rollout(moved, tokenizer, problems[ROLLOUTS * size :], args, generator)
        for variant, (batch, rewards_B1, _) in (("base", test), ("moved", moved_test)):
            for script, checkpoint in checkpoints.items():
                critic = critic_of(checkpoint, script, model)
                value = explained_variance(critic, batch, rewards_B1)
                measured.append((variant, script, steps, value))
        for variant, script, steps, value in measured:
            row = {"variant": variant, "script": script.__name__, "seed": seed, "steps": steps}
            rows.append({**row, "explained_variance": round(value, 4), "commit": commit})
            if steps == iterations * args.num_minibatches:
                print(rows[-1], flush=True)
    with open(CSV, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
