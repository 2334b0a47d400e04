"""Reads datasets, renders prompts for the model, and streams training problems."""

import copy
import csv
import glob
import gzip
import hashlib
import json
import logging
import math
import os
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path

import torch

from plumbing import UserError, ranks
from plumbing.answers import gold_answer, is_same

# These reasons do not suggest that the wrong column was named:
EQUAL = "with the prompt of an earlier row"
NO_ANSWER = "with the answer proof or notfound"
REPLY = "assistant replies at the end"


class ProblemStream:
    """An endless stream of training problems, in a new random order each epoch."""

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
            generator.manual_seed(self.seed * 2**20 + epoch)  # no two runs share an epoch
            order += torch.randperm(size, generator=generator).tolist()
        start = self.position % size
        self.position += count
        return [self.problems[i] for i in order[start : start + count]]

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


# -------------------------------------------------------------------------------------------- files


def read_dataset(args):
    """Yields the rows of `--dataset`. A row that is not a dict was unreadable."""
    name = args.dataset
    kind = Path(name.removesuffix(".gz")).suffix
    open_file = gzip.open if name.endswith(".gz") else open
    try:
        if kind in (".csv", ".json", ".jsonl"):
            read = csv.DictReader if kind == ".csv" else read_json
            with open_file(name, "rt", encoding="utf-8-sig", newline="") as file:
                yield from read(file)
        else:
            yield from read_table(args)
    except Exception as error:  # the libraries raise many kinds of exceptions for damaged files
        cause = error.__cause__ or error  # datasets hides it behind a DatasetGenerationError
        raise UserError(f"--dataset {name} cannot be read") from cause


def read_json(file):
    """The rows of one JSON array or of JSON lines. (datasets turns text that looks like a date into
    one, and rejects a whole file for one bad line.)"""
    start = file.read(1000).lstrip()
    file.seek(0)
    if start.startswith("["):
        yield from json.load(file)
        return
    for line in file:
        row = line.strip()
        with suppress(ValueError):
            row = json.loads(line)
        if row != "":
            yield row


def read_table(args):
    """The rows of a parquet file, a folder or a hub dataset."""
    import datasets  # imported here: 80 MB that few runs need

    for library in ("datasets", "huggingface_hub"):  # errors are reported in one line instead
        logging.getLogger(library).setLevel(logging.CRITICAL)
    datasets.disable_progress_bars()
    name = args.dataset
    if name.endswith(".parquet"):
        pattern = glob.escape(name)
        return datasets.load_dataset("parquet", data_files=pattern, split="train", streaming=True)
    if os.path.isdir(name) and glob.escape(name) != name:
        raise ValueError("datasets reads [, ? and * in a folder's name as a pattern: rename the folder")
    return datasets.load_dataset(name, args.dataset_config or None, split=args.dataset_split or "train")


# --------------------------------------------------------------------------------------------- rows


class BadRow(Exception):
    """A row that cannot be used: why, in a few words, and what was found."""


def hash_of(value):
    return hashlib.sha256(repr(value).encode()).hexdigest()


def describe(cell):
    if isinstance(cell, dict):
        return f"a dict with {', '.join(map(str, cell))}"
    return f"{cell!r:.80}"


def cell_of(row, column):
    """The value in a row's column, or at a path such as reward_model.ground_truth."""
    if column in row:
        return row[column]
    cell = row
    for name in column.split("."):
        cell = cell.get(name) if isinstance(cell, dict) else None
    return cell


def is_text_part(part):
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part["text"], str)


def chat_message(item):
    """A message from a dataset, with its text parts joined."""
    if not {"role", "content"} <= set(item):
        raise BadRow("with messages that lack role and content (as in ShareGPT)", describe(item))
    content = item["content"]
    if isinstance(content, list) and all(is_text_part(part) for part in content):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise BadRow("with a message that is not text", describe(content))
    known = {name: value for name, value in item.items() if value is not None}  # parquet adds None
    return known | {"content": content}


def read_row(row, args):
    """(text or chat messages, whether the assistant's reply was dropped, the gold answer or "")."""
    if not isinstance(row, dict) or None in row:  # csv puts surplus cells under None
        raise BadRow("unreadable", describe(row))
    prompt = cell_of(row, args.prompt_column)
    text = prompt
    items = prompt
    has_reply = False
    if isinstance(prompt, str) and prompt.lstrip().startswith("["):
        with suppress(ValueError, RecursionError):
            items = json.loads(prompt)
    if isinstance(items, list) and items and all(isinstance(item, dict) for item in items):
        prompt = [chat_message(item) for item in items]
        has_reply = prompt[-1]["role"] == "assistant"
        while prompt and prompt[-1]["role"] == "assistant":
            prompt.pop()
        if args.system_prompt:
            prompt = [message for message in prompt if message["role"] != "system"]
        text = "".join(message["content"] for message in prompt if message["role"] == "user")
    if not isinstance(text, str) or not text.strip():
        raise BadRow("without a prompt", describe(text))
    cell = cell_of(row, args.answer_column)
    answer = gold_answer(cell) or ""
    if args.reads_answers and not answer:
        if str(cell).strip().lower() in ("proof", "notfound"):
            raise BadRow(NO_ANSWER)
        raise BadRow("without a gold answer", describe(cell))
    return prompt, has_reply, answer


def render(prompt, policy, args):
    """(the text for the model, its token ids, the prompt for reward functions)."""
    tokenizer = policy.tokenizer
    is_text = isinstance(prompt, str)
    messages = [{"role": "user", "content": prompt}] if is_text else copy.deepcopy(prompt)
    question = [message for message in messages if message["role"] == "user"][-1]
    if args.instruction:
        question["content"] += f"\n{args.instruction}"
    if args.system_prompt:
        messages.insert(0, {"role": "system", "content": args.system_prompt})
    try:
        if tokenizer.chat_template:
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **args.template_options()
            )
            ids = tokenizer(text, add_special_tokens=False).input_ids  # the template adds them
        elif len(messages) == 1:
            text = question["content"]
            ids = tokenizer(text).input_ids
            if ids[-1] == tokenizer.eos_token_id:
                ids.pop()  # some tokenizers append EOS
        else:
            raise ValueError("several messages, and --system_prompt, need a chat template")
    except Exception as error:  # templates raise their own exceptions
        raise BadRow("that cannot be rendered", f"{type(error).__name__} {error}") from error
    for needed in (question["content"], args.system_prompt):
        if needed.strip() not in text:
            raise BadRow("with a prompt that the chat template drops", describe(needed))
    config = policy.model.config.get_text_config()  # where a multimodal model keeps its limit
    limit = getattr(config, "max_position_embeddings", None) or math.inf
    if len(ids) + args.max_new_tokens > limit:
        reason = f"too long for --max_new_tokens {args.max_new_tokens} and the model's limit of {limit}"
        raise BadRow(reason, f"with {len(ids)} tokens")
    return text, ids, question["content"] if is_text else messages


# ----------------------------------------------------------------------------------------- problems


def problem_rows(rows, policy, args):
    """Rows -> [(prompt, gold answer, ids of the prompt, columns)], sorted by prompt hash. The first
    `--num_held_out` are held out: adding or removing a row changes at most one of them."""
    for name in args.template_options():
        if name not in str(policy.tokenizer.chat_template):
            raise UserError(f"--chat_template_kwargs: the model's chat template does not use {name}")
    counts = Counter()  # {why rows are left out: how many}
    firsts = {}  # {why: the first of them, and what was found}
    columns = {}
    problems = {}  # {hash: (number of the row, prompt, gold answer, ids, columns)}
    contradicted = {}  # {hash: number of the row}

    def count(number, reason, found=""):
        counts[reason] += 1
        firsts.setdefault(reason, f"row {number} {found}".strip())

    for number, row in enumerate(rows, 1):
        if isinstance(row, dict):
            columns |= dict.fromkeys(map(str, row))
        try:
            prompt, has_reply, answer = read_row(row, args)
            key = hash_of(prompt)
            if key in problems:  # a dataset may repeat each prompt a hundred times
                first_number, _, first_answer, *_ = problems[key]
                if not is_same(answer, first_answer):
                    contradicted[key] = first_number
                raise BadRow(EQUAL)
            text, ids, shown = render(prompt, policy, args)
        except BadRow as error:
            count(number, *error.args)
            continue
        if has_reply:
            count(number, REPLY)
        if answer:
            columns["answer"] = None
        problems[key] = (number, text, answer, ids, {"answer": answer, **row, "prompts": shown})
    for key, number in contradicted.items():
        count(number, "with a different gold answer for the same prompt in a later row")
        del problems[key]
    left_out = ", ".join(f"{n:,} {reason} (first: {firsts[reason]})" for reason, n in counts.items())
    num_rows = len(problems) + counts.total() - counts[REPLY]
    num_bad = num_rows - len(problems) - counts[EQUAL] - counts[NO_ANSWER]
    if num_bad > num_rows / 10:
        raise UserError(
            f"--dataset {args.dataset}: {num_bad:,} of {num_rows:,} rows cannot be used: {left_out}; "
            f"the columns (--prompt_column, --answer_column) are {', '.join(columns)}"
        )
    check_problems(len(problems), columns, f"; left out: {left_out}" if left_out else "", args)
    check_token_ids([token for _, _, _, ids, _ in problems.values() for token in ids], policy)
    no_cells = dict.fromkeys(columns)
    # addition's are already in random order.
    keys = problems if args.dataset == "addition" else sorted(problems)
    return [(*problems[key][1:4], no_cells | problems[key][4]) for key in keys]


def check_problems(num_problems, columns, left_out, args):
    """UserError if a column that a reward function needs is missing, or no problem is left to train
    on. Otherwise prints what is left."""
    for name, flag in args.reward_columns.items():
        if name not in columns:
            names = ", ".join(columns)
            raise UserError(f"{flag} needs {name}, but the columns of --dataset are {names}")
    num_training = num_problems - args.num_held_out
    if num_training < 1:
        message = f"leaves none of the {num_problems} problems for training{left_out}"
        raise UserError(f"--num_held_out {args.num_held_out} {message}")
    if ranks.RANK > 0:
        return
    print(f"problems: {num_training:,} to train on, {args.num_held_out:,} held out{left_out}")
    if num_training < args.num_held_out:
        message = "more problems are held out than trained on; lower --num_held_out"
        print(f"warning: {message}", file=sys.stderr)


def check_token_ids(ids, policy):
    """UserError if the model has no embedding for a token, or over a tenth of them are unknown."""
    size = policy.model.get_input_embeddings().num_embeddings
    if max(ids) >= size:
        raise UserError(f"--model: its tokenizer has token {max(ids)}, but it has {size} embeddings")
    unknown = ids.count(policy.tokenizer.unk_token_id)
    if unknown > len(ids) / 10:
        found = f"{unknown} of {len(ids)} tokens of the prompts"
        raise UserError(f"--model: {found} are unknown to its tokenizer")
