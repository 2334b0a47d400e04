"""Makes a dataset for --dataset: chat messages in JSON lines, here sums for a small model.

    python examples/own_dataset.py runs/small_sums.jsonl [--largest 99]
    python grpo.py --model <chat model> --dataset runs/small_sums.jsonl --max_new_tokens 10 --lr 5e-6

Expect: within a second, a file that the scripts can read as it is. Each of the 4,000 rows (fewer if
--largest is small) has the two default columns: `question`, a list of messages with one solved sum and
the sum to solve, and `answer`. The solved sum shows the format; without it the model writes no '####'.
A prompt can also be plain text. If your columns have other names, use --prompt_column and
--answer_column.
"""

import argparse
import json
import random
from pathlib import Path

SHOWN = [("system", "Add the numbers."), ("user", "25 + 14"), ("assistant", "#### 39")]


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--largest", type=int, default=99, help="number in a sum, above 9")
    parser.add_argument("path", type=Path)
    options = parser.parse_args()
    rng = random.Random(0)

    def number():
        low, high = rng.choice([(0, 9), (10, options.largest)])
        return rng.randint(low, high)

    sums = {}
    while len(sums) < min(4000, (options.largest + 1) ** 2):
        a = number()
        b = number()
        sums[f"{a} + {b}"] = a + b
    options.path.parent.mkdir(parents=True, exist_ok=True)
    with open(options.path, "w") as file:
        for question, answer in sums.items():
            turns = [*SHOWN, ("user", question)]
            messages = [{"role": role, "content": text} for role, text in turns]
            print(json.dumps({"question": messages, "answer": str(answer)}), file=file)


if __name__ == "__main__":
    main()
