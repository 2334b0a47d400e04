"""Makes a dataset for --dataset: chat messages in JSON lines, here sums for a small model.

    python examples/own_dataset.py small_sums.jsonl
    python grpo.py --model <chat model> --dataset small_sums.jsonl --max_new_tokens 10 --lr 1e-5

Expect: within a second, a file that the scripts can read as it is. Each of the 4,000 rows has the two
default columns: `question`, a list of messages with one solved sum and the sum to solve, and `answer`.
The solved sum shows the format; without it the model writes no '####'. A prompt can also be plain text.
If your columns have other names, use --prompt_column and --answer_column.
"""

import argparse
import json
import random

SHOWN = [("system", "Add the numbers."), ("user", "25 + 14"), ("assistant", "#### 39")]
RANGES = [(0, 9), (10, 99)]


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("path")
    path = parser.parse_args().path
    rng = random.Random(0)
    sums = {}
    while len(sums) < 4000:
        a = rng.randint(*rng.choice(RANGES))
        b = rng.randint(*rng.choice(RANGES))
        sums[f"{a} + {b}"] = a + b
    with open(path, "w") as file:
        for question, answer in sums.items():
            turns = [*SHOWN, ("user", question)]
            messages = [{"role": role, "content": text} for role, text in turns]
            print(json.dumps({"question": messages, "answer": str(answer)}), file=file)


if __name__ == "__main__":
    main()
