"""Reads datasets, renders prompts as the model reads them, and streams training problems."""

import hashlib
import json
import math
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from plumbing import ranks
from plumbing.answers import gold_answer, is_same
from plumbing.errors import UserError


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


@dataclass
class Row:
    """A row of a dataset, on its way to a problem."""

    prompt: str | list  # text or chat messages; later the text that the model reads
    answer: str  # the gold answer
    columns: dict = field(default_factory=dict)
    line: int = 0  # its number in the dataset, from 1
    order: str = ""  # a hash of the prompt; the rows with the smallest are held out
    prompt_ids: list | None = None
    fault: str = ""  # why the row is left out
    error: Exception | None = None


def read_dataset(args):
    r"""`--dataset` -> [Row]. A prompt is text or a list of chat messages; the gold answer follows
    '####', is in a '\boxed{}', or is the cell."""
    values = read_rows(args.dataset, args.dataset_config, args.dataset_split)
    columns = list(dict.fromkeys(column for value in values.values() for column in value))
    rows = []
    for line, value in values.items():
        prompt = value.get(args.prompt_column)
        answer = gold_answer(value.get(args.answer_column)) or ""
        row = Row(prompt, answer, {column: value.get(column) for column in columns}, line)
        row.order = hashlib.sha256(repr(prompt).encode()).hexdigest()
        row.error = ValueError(f"the columns are {', '.join(columns)}")
        if not value:
            row.fault = "unreadable"
        elif not prompt:
            row.fault = "without a prompt"
        elif args.reads_answers and not answer:
            row.fault = "without a gold answer"
        rows.append(row)
    return rows


def read_rows(name, config, split):
    """`--dataset` (a file in JSON or parquet, a folder, a hub id) -> {line: dict, empty if unreadable}.
    Files are read directly: names are not interpreted, and there is no cache."""
    path = Path(name)
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet  # imported here, like datasets below: 80 MB that few runs need

            rows = dict(enumerate(pyarrow.parquet.read_table(path).to_pylist(), 1))
        elif path.suffix in (".json", ".jsonl") or path.is_file():
            rows = read_json(path)
        else:
            import datasets

            datasets.logging.set_verbosity(datasets.logging.CRITICAL)
            table = datasets.load_dataset(name, config or None, split=split)
            rows = dict(enumerate(table.to_list(), 1))
        if not rows:
            raise ValueError("there are no rows")
        return {line: row if isinstance(row, dict) else {} for line, row in rows.items()}
    except Exception as error:  # the libraries raise many kinds of exceptions for damaged files
        raise UserError(f"--dataset {name} cannot be read") from error


def read_json(path):
    """{line: value} of a file with JSON on each line, or of a .json file with one array."""
    # With a byte order mark or without. Bytes that are not text become halves of surrogate pairs.
    text = path.read_text(encoding="utf-8-sig", errors="surrogateescape")
    if path.suffix == ".json" and text.lstrip().startswith("["):
        return dict(enumerate(json.loads(text), 1))
    rows = {}
    for number, line in enumerate(text.split("\n"), 1):  # other separators may be inside a string
        if line.strip():
            rows[number] = None
            with suppress(ValueError):
                rows[number] = json.loads(line)
    return rows


def render(row, tokenizer, args):
    """Makes the row's prompt the text that the model reads: through the chat template, if there is one.
    Reward functions get it as `prompts`, a list of messages if there is a template."""
    prompt = row.prompt
    try:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        if args.instruction:
            last = messages[-1]
            messages[-1] = {**last, "content": f"{last['content']}\n{args.instruction}"}
        if args.system_prompt:
            messages.insert(0, {"role": "system", "content": args.system_prompt})
        if tokenizer.chat_template:
            options = {"tokenize": False, "add_generation_prompt": True}
            row.prompt = tokenizer.apply_chat_template(messages, **options)
        elif len(messages) > 1:
            raise ValueError("chat messages and --system_prompt need a tokenizer with a chat template")
        else:
            row.prompt = str(messages[0]["content"])
        prompts = messages if tokenizer.chat_template else row.prompt
        row.columns = {"answer": row.answer, **row.columns, "prompts": prompts}
        (row.prompt + row.answer).encode()  # fails for half of a surrogate pair, which is not text
    except Exception as error:  # templates raise their own exceptions
        row.fault = "unreadable"
        row.error = error


def problem_rows(rows, policy, args):
    """The rows that can be used, with their prompts as the model reads them, the held-out ones first.
    Prints how many are left out, and why; UserError if that is more than a tenth."""
    for row in rows:
        if not row.fault:
            render(row, policy.tokenizer, args)
    rendered = [row for row in rows if not row.fault]
    all_ids = []
    if rendered:
        add_special_tokens = not policy.tokenizer.chat_template  # a template adds them itself
        prompts = [row.prompt for row in rendered]
        all_ids = policy.tokenizer(prompts, add_special_tokens=add_special_tokens).input_ids
    limit = getattr(policy.model.config, "max_position_embeddings", math.inf)
    first_rows = {}
    for row, ids in zip(rendered, all_ids, strict=True):
        row.prompt_ids = ids
        first = first_rows.setdefault(row.prompt, row)
        if not ids:
            row.fault = "unreadable"
        elif len(ids) + args.max_new_tokens > limit:
            row.fault = "too long"
            message = f"with a prompt of {len(ids)} tokens, the model's limit of {limit} is exceeded"
            row.error = ValueError(f"--max_new_tokens {args.max_new_tokens}: {message}")
        elif first is not row:
            if args.reads_answers and not is_same(first.answer, row.answer):
                first.fault = "with two answers"
            row.fault = first.fault or "twice"
    lines = {row.fault: row.line for row in reversed(rows)}  # of the first row with each fault
    counts = Counter(row.fault for row in rows if row.fault)
    faults = ", ".join(f"{count:,} {fault}" for fault, count in counts.items())
    faults = faults.replace("unreadable", f"unreadable (line {lines.get('unreadable')})")
    faulty = [row for row in rows if row.fault not in ("", "twice")]
    if len(faulty) > len(rows) / 10:  # a column is wrong
        message = f"{len(faulty)} of {len(rows)} rows cannot be used: {faults}"
        place = f"the first is in line {faulty[0].line}"
        raise UserError(f"--dataset {args.dataset}: {message}; {place}") from faulty[0].error
    kept = [row for row in rows if not row.fault]
    check_token_ids([row.prompt_ids for row in kept], policy)
    if len(kept) <= args.num_held_out:
        message = f"leaves none of the {len(kept)} problems for training"
        raise UserError(f"--num_held_out {args.num_held_out} {message}")
    if faults and ranks.RANK == 0:
        print(f"{len(kept):,} problems; left out: {faults}")
    return sorted(kept, key=lambda row: row.order)


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
