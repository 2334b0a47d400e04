"""Reads datasets, renders prompts as the model reads them, and streams training problems."""

import json
import math
import random
from decimal import Decimal
from pathlib import Path

import torch

from plumbing.answers import gold_answer, is_same
from plumbing.args import UserError


class ProblemStream:
    """An endless stream of training problems, in another random order in each epoch."""

    def __init__(self, problems, seed):
        self.problems = problems
        self.seed = seed
        self.position = 0  # the number of problems taken so far

    def take(self, count):
        size = len(self.problems)
        first_epoch = self.position // size
        last_epoch = (self.position + count - 1) // size
        generator = torch.Generator()
        order = []
        for epoch in range(first_epoch, last_epoch + 1):
            generator.manual_seed(self.seed * 2**20 + epoch)  # no two runs have an epoch in common
            order += torch.randperm(size, generator=generator).tolist()
        start = self.position % size
        self.position += count
        return [self.problems[i] for i in order[start : start + count]]

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def read_dataset(args):
    r"""`--dataset` -> [(prompt, gold answer)] in random order, the same for all seeds. A prompt is text
    or a list of chat messages; the gold answer follows '####', is in a '\boxed{}', or is the cell."""
    rows = read_rows(args.dataset, args.dataset_config, args.dataset_split)
    columns = dict.fromkeys(column for row in rows for column in row)
    found = f"the columns are {', '.join(columns)}"
    for column in (args.prompt_column, args.answer_column):
        if column not in columns:
            raise UserError(f"--dataset {args.dataset} has no column {column}; {found}")
    pairs = []
    for number, row in enumerate(rows, 1):
        prompt = row.get(args.prompt_column)
        gold = gold_answer(row.get(args.answer_column))
        for part, value in (("prompt", prompt), ("gold answer", gold)):
            if not value:
                raise UserError(f"--dataset {args.dataset}, row {number}: no readable {part}; {found}")
        pairs.append((prompt, gold))
    return random.Random(0).sample(pairs, len(pairs))


def read_rows(name, config, split):
    """`--dataset` (a file in JSON or parquet, a folder, a hub id) -> its rows as dicts. Files are read
    directly: names are not interpreted, numbers keep their digits, and there is no cache."""
    path = Path(name)
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet  # imported here, like datasets below: 80 MB that few runs need

            rows = pyarrow.parquet.read_table(path).to_pylist()
        elif path.suffix in (".json", ".jsonl") or path.is_file():
            rows = read_json(path)
        else:
            import datasets

            datasets.logging.set_verbosity(datasets.logging.CRITICAL)
            rows = datasets.load_dataset(name, config or None, split=split).to_list()
        if not rows:
            raise ValueError("there are no rows")
        return rows
    except Exception as error:  # the libraries raise many kinds of exceptions for damaged files
        raise UserError(f"--dataset {name} cannot be read") from error


def read_json(path):
    """[dict] of a file with a JSON object on each line, or of a .json file with one array of objects.
    ValueError names the line or row that is not an object."""
    text = path.read_text(encoding="utf-8-sig")  # with a byte order mark or without
    if path.suffix == ".json" and text.lstrip().startswith("["):
        values = json.loads(text, parse_float=Decimal)
        return [json_object(value, f"row {number}") for number, value in enumerate(values, 1)]
    rows = []
    for number, line in enumerate(text.split("\n"), 1):  # other separators are allowed inside a string
        if line.strip():
            try:
                value = json.loads(line, parse_float=Decimal)
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from error
            rows.append(json_object(value, f"line {number}"))
    return rows


def json_object(value, where):
    """The value; ValueError if it is not an object, or its text cannot be encoded."""
    if not isinstance(value, dict):
        raise ValueError(f"{where} is not an object")
    try:  # JSON can contain half of a surrogate pair, which is not a character
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: {error}") from error
    return value


def render(prompt, tokenizer, args):
    """A prompt as the model reads it: through the chat template, if there is one."""
    try:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        if args.instruction:
            last = messages[-1]
            messages[-1] = {**last, "content": f"{last['content']}\n{args.instruction}"}
        if args.system_prompt:
            messages.insert(0, {"role": "system", "content": args.system_prompt})
        if tokenizer.chat_template:
            return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        if len(messages) > 1:
            raise ValueError("chat messages and --system_prompt need a tokenizer with a chat template")
        return str(messages[0]["content"])
    except Exception as error:  # templates raise their own exceptions
        raise UserError(f"--dataset: the prompt {prompt!r:.60} cannot be used") from error


def render_all(pairs, tokenizer, args):
    """[(prompt, gold answer)] -> {prompt as the model reads it: gold answer}, each prompt once."""
    answers = {}
    for prompt, answer in pairs:
        text = render(prompt, tokenizer, args)
        first = answers.setdefault(text, answer)
        if first != answer and not is_same(first, answer):
            raise UserError(f"--dataset: {text!r:.60} has two gold answers, {first} and {answer}")
    if len(answers) <= args.num_held_out:
        message = f"leaves none of the {len(answers)} problems for training"
        raise UserError(f"--num_held_out {args.num_held_out} {message}")
    return answers


def tokenize(prompts, policy, args):
    """Rendered prompts -> lists of token ids. UserError if the model cannot read them."""
    add_special_tokens = not policy.tokenizer.chat_template  # a template adds them itself
    rows = policy.tokenizer(prompts, add_special_tokens=add_special_tokens).input_ids
    check_token_ids(rows, policy)
    longest = max(len(row) for row in rows)
    limit = getattr(policy.model.config, "max_position_embeddings", math.inf)
    if longest + args.max_new_tokens > limit:
        message = f"with a prompt of {longest} tokens, the model's limit of {limit} is exceeded"
        raise UserError(f"--max_new_tokens {args.max_new_tokens}: {message}")
    return rows


def check_token_ids(rows, policy):
    """UserError if the model has no embedding for a token, or more than a tenth are unknown tokens."""
    ids = [token for row in rows for token in row]
    if not ids:
        raise UserError("--model: its tokenizer makes no tokens of the prompts")
    size = policy.model.get_input_embeddings().num_embeddings
    if max(ids) >= size:
        raise UserError(f"--model: its tokenizer has token {max(ids)}, but it has {size} embeddings")
    unknown = ids.count(policy.tokenizer.unk_token_id)
    if unknown > len(ids) / 10:
        raise UserError(
            f"--model: {unknown} of {len(ids)} tokens of the prompts are unknown to its tokenizer"
        )
