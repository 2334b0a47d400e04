"""Makes a dataset for --dataset: chat messages in JSON lines, here sums for a small model.

    python examples/own_dataset.py small_sums.jsonl
    python grpo.py --model <chat model> --dataset small_sums.jsonl --max_new_tokens 10 --lr 5e-6

Expect: within a second, a file that the scripts can read as it is. Each of the 4,000 rows has the two
default columns: `question`, a list of messages with one solved sum and the sum to solve, and `answer`.
The solved sum shows the format; without it the model writes no '####'. A prompt can also be plain text.
If your columns have other names, use --prompt_column and --answer_column.
"""

import json
import random
import sys

SHOWN = [("system", "Add the numbers."), ("user", "25 + 14"), ("assistant", "#### 39")]


def main():
    rng = random.Random(0)
    pairs = [(a, b) for a in range(100) for b in range(100)]
    with open(sys.argv[1], "w") as file:
        for a, b in rng.sample(pairs, 4000):
            turns = [*SHOWN, ("user", f"{a} + {b}")]
            messages = [{"role": role, "content": text} for role, text in turns]
            print(json.dumps({"question": messages, "answer": str(a + b)}), file=file)


if __name__ == "__main__":
    main()
