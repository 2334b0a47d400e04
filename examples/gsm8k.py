"""GSM8K from the hub, as rows for --dataset and --eval_dataset. README has the whole command:

    python grpo.py --dataset examples/gsm8k.py:train --eval_dataset examples/gsm8k.py:test ...

Expect: 7,473 problems to train on, the first 256 of 1,319 held out. An answer is a worked solution that
ends with #### and a number, which becomes the gold answer.
"""

from datasets import load_dataset

ADVICE = "Reason step by step. End with #### and the number alone, as in #### 42"


def rows(split):
    for row in load_dataset("openai/gsm8k", "main", split=split):
        yield {"question": f"{row['question']}\n{ADVICE}", "answer": row["answer"]}


def train():
    return rows("train")


def test():
    return rows("test")
