"""Problems of one of reasoning-gym's hundred generators, in JSON lines for --dataset.

    pip install -r examples/requirements.txt
    python examples/reasoning_gym_data.py chain_sum 2000 runs/chain_sum.jsonl min_terms=2 max_terms=2
    python grpo.py --model runs/smollm2 --dataset runs/chain_sum.jsonl --max_new_tokens 16 --lr 5e-6 \
        --instruction "Answer: ####" --iterations 1 --prompts_per_iteration 8 --num_held_out 32

Expect: 1,680 problems (some of the 2,000 are drawn twice) such as "State the final answer to the
following arithmetic problem: 1663 - 5242 =", in a few seconds. The other command shows that they are
read (runs/smollm2: see smollm2.py); to learn takes hours on a CPU. Behind the file stand options of the
generator. Only for generators with one right answer: some judge an answer by a program of their own,
which --reward would have to call.
"""

import json
import sys
from pathlib import Path

import reasoning_gym


def main():
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    name, count, path = sys.argv[1:4]
    options = {}
    for option in sys.argv[4:]:
        key, _, value = option.partition("=")
        options[key] = json.loads(value)
    problems = reasoning_gym.create_dataset(name, size=int(count), seed=0, **options)
    answers = {problem["question"]: str(problem["answer"]) for problem in problems}  # each one once
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        for question, answer in answers.items():
            print(json.dumps({"question": question, "answer": answer}), file=file)
    print(f"{len(answers)} problems in {path}, the first: {problems[0]['question']!r}")


if __name__ == "__main__":
    main()
