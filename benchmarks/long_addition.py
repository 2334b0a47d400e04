"""The job of the second regime: sums of two numbers of 8 to 12 digits, and a base model for them.

    python benchmarks/long_addition.py FOLDER [--steps 1200] [--lr 8e-3] ...

Writes FOLDER/problems.jsonl, for --dataset, and FOLDER/model, for --model, in six minutes on
one core. The model has more layers and experts than the tiny MoE, and works a sum out in 118 to 175
tokens. `sweep.py` makes what its runs need by itself.
"""

import dataclasses
import json
import random
import sys
from pathlib import Path

import transformers

sys.path.insert(0, str(Path(__file__).parent.parent))
from plumbing.args import RunArgs
from tiny_moe.train import ARCHITECTURE, Recipe, train

LONG_ARCHITECTURE = ARCHITECTURE | dict(
    num_hidden_layers=4,
    num_experts=16,
    rope_parameters=dict(rope_type="default", rope_theta=100.0),  # a base for lengths of 200
)
LONG_RECIPE = Recipe(direct=0.4, worked=0.6, cap=192)


def long_sums(fewest_digits):
    """20,256 sums of two numbers of the same length, up to 12 digits: [(prompt, gold answer)]."""
    rng = random.Random(0)
    problems = []
    for _ in range(20_256):
        digits = rng.randint(fewest_digits, 12)
        a = rng.randint(10 ** (digits - 1), 10**digits - 1)
        b = rng.randint(10 ** (digits - 1), 10**digits - 1)
        problems.append((f"{a}+{b}=", str(a + b)))
    return problems


def long_step(x, y, carry, total):
    """All steps have the same width, and say digit and carry: '7+8+0=15 5 1'."""
    return f"{x}+{y}+{carry}={total:02d} {total % 10} {total // 10}"


def write_problems(path):
    """Writes the sums in an order that the shuffle of plumbing.data turns into that of
    `long_sums`."""
    problems = long_sums(fewest_digits=8)
    rows = [None] * len(problems)
    order = random.Random(0).sample(range(len(problems)), len(problems))
    for place, (prompt, answer) in zip(order, problems, strict=True):
        rows[place] = json.dumps({"question": prompt, "answer": answer}) + "\n"
    path.write_text("".join(rows))


def main():
    parser = transformers.HfArgumentParser(Recipe, description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="where problems and model are written to")
    parser.set_defaults(**dataclasses.asdict(LONG_RECIPE))
    recipe, rest = parser.parse_args_into_dataclasses()
    rest.folder.mkdir(parents=True, exist_ok=True)
    write_problems(rest.folder / "problems.jsonl")
    # With short sums among the long ones, it learns sooner which digits to add.
    prompts = [prompt for prompt, _ in long_sums(fewest_digits=1)]
    train(rest.folder / "model", prompts[RunArgs.num_held_out :], recipe, LONG_ARCHITECTURE, long_step)


if __name__ == "__main__":
    main()
