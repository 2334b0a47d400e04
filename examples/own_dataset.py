"""A dataset of chat messages for --dataset, here sums for a small model.

    python grpo.py --model <chat model> --dataset examples/own_dataset.py:sums --max_new_tokens 10

Expect: 3,744 problems to train on, 256 held out. A question is a list of messages with one solved sum
and the sum to solve. The solved sum shows the format; without it the model writes no '####'. A question
can also be plain text.
"""

import random

SHOWN = [("system", "Add the numbers."), ("user", "25 + 14"), ("assistant", "#### 39")]
RANGES = [(0, 9), (10, 99)]


def sums():
    rng = random.Random(0)
    answers = {}
    while len(answers) < 4000:
        a = rng.randint(*rng.choice(RANGES))
        b = rng.randint(*rng.choice(RANGES))
        answers[f"{a} + {b}"] = a + b
    for question, answer in answers.items():
        turns = [*SHOWN, ("user", question)]
        messages = [{"role": role, "content": text} for role, text in turns]
        yield {"question": messages, "answer": answer}
