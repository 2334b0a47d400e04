r"""Problems from one of reasoning-gym's hundred generators, in JSON lines for --dataset.

    pip install -r examples/requirements.txt
    python examples/reasoning_gym_data.py chain_sum 2000 runs/chain_sum.jsonl max_terms=2 max_digits=2
    python grpo.py --model runs/smollm2 --dataset runs/chain_sum.jsonl --max_new_tokens 10 --lr 5e-6 \
        --iterations 1 --prompts_per_iteration 4 --num_held_out 32

Expect: 1,170 different problems such as "State the final answer to the following arithmetic problem:
15 - 43 =", in a few seconds. Each is a chat in which another problem, with its answer after "####",
shows the format. The last command takes two minutes on one core and shows that the dataset works:
SmolLM2 (see smollm2.py) answers in that format, but none of the 32 answers is right. The arguments
after the file are options of the generator. Use only generators whose problems have one right answer:
the others judge answers with a program, which your --reward would have to call.
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
    shown, shown_answer = answers.popitem()
    form = [
        {"role": "user", "content": shown},
        {"role": "assistant", "content": f"#### {shown_answer}"},
    ]
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        for question, answer in answers.items():
            messages = [*form, {"role": "user", "content": question}]
            print(json.dumps({"question": messages, "answer": answer}), file=file)
    print(f"{len(answers)} problems in {path}; the one shown as an example: {shown!r}")


if __name__ == "__main__":
    main()
