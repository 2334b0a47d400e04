"""Reads datasets, renders prompts for the model, and streams training problems."""

import csv
import glob
import hashlib
import json
import math
import random
import re
from pathlib import Path
from typing import NamedTuple

import torch

from plumbing.answers import final_answer
from plumbing.args import UserError, one_line


def hash_of(content):
    return hashlib.sha256(repr(content).encode()).hexdigest()


class Problem(NamedTuple):
    prompt: str  # as the model reads it
    answer: str  # the gold answer alone
    prompt_ids: list
    columns: dict | None = None  # the dataset's, for a reward function


class ProblemStream:
    """An endless stream of training problems, in a new random order each epoch."""

    def __init__(self, problems, seed, hash=""):
        self.problems = problems
        self.seed = seed
        self.hash = hash  # of all problems and gold answers, so that --resume can reject different data
        self.position = 0  # the number of problems taken so far

    def take(self, count):
        """The next `count` problems."""
        size = len(self.problems)
        first_epoch = self.position // size
        last_epoch = (self.position + count - 1) // size
        generator = torch.Generator()
        order = []
        for epoch in range(first_epoch, last_epoch + 1):
            # Hashed, since torch uses only 32 bits of a seed, and no two seeds should share an epoch.
            generator.manual_seed(int(hash_of((self.seed, epoch))[:8], 16))
            order += torch.randperm(size, generator=generator).tolist()
        start = self.position % size
        self.position += count
        return [self.problems[i] for i in order[start : start + count]]

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def load_problems(args, policy, grade):
    """`--dataset` -> (stream of training problems, [held-out problems]). The held-out ones, which come
    from it or from `--eval_dataset`, are the same for all seeds. `grade` is from `load_grader`."""
    reading = (policy, args, grade.reads_answers)
    training, left_out = usable_rows(read_rows(args, "dataset"), "dataset", *reading)
    others = {}  # the held-out problems are the first ones of these
    if args.eval_dataset:
        others, also_left_out = usable_rows(read_rows(args, "eval_dataset"), "eval_dataset", *reading)
        held_out = dict(list(others.items())[: args.num_held_out])
        left_out += also_left_out
    else:
        # The smallest hashes, so that adding or removing a row changes at most one of them. The sums
        # are already in random order.
        keys = list(training) if args.dataset == "addition" else sorted(training)
        held_out = {key: training[key] for key in keys[: args.num_held_out]}
        training = {key: training[key] for key in keys[args.num_held_out :]}
    if not training and args.iterations > 0:
        message = f"--num_held_out {args.num_held_out} leaves no problem for training"
        raise UserError(f"{message}: --dataset {args.dataset} has {len(held_out)}{left_out}")
    training = list(training.values())
    held_out = list(held_out.values())
    # Compared as the model reads them: in one file a prompt may be text, and in the other messages.
    known = {tuple(problem.prompt_ids) for problem in training}
    num_shared = sum(tuple(problem.prompt_ids) in known for problem in held_out)
    if num_shared > 0:
        left_out += f"; {num_shared:,} of those held out are also in --dataset"
    count = f"{len(held_out):,}"
    if len(others) > len(held_out):
        count = f"the first {count} of {len(others):,}"
    print(f"problems: {len(training):,} to train on, {count} held out{left_out}")
    content = [(p.columns["prompts"], p.answer) for p in held_out + training]
    return ProblemStream(training, args.seed, hash_of(content)), held_out


def addition_problems(count=10_496):
    """Distinct sums of two- and three-digit numbers: [(prompt, gold answer)]. 256 are held out, and no
    script's default run uses more than 10,240, so no sum is seen twice."""
    rng = random.Random(0)
    ranges = [(10, 99), (100, 999)]
    answers = {}
    while len(answers) < count:
        a = rng.randint(*rng.choice(ranges))
        b = rng.randint(*rng.choice(ranges))
        answers[f"{a}+{b}="] = str(a + b)
    return list(answers.items())


# -------------------------------------------------------------------------------------------- files


def read_rows(args, flag):
    """The rows of the dataset that `flag` names: "dataset" or "eval_dataset". A row that is not a dict
    was unreadable. Files have no splits."""
    name = getattr(args, flag)
    if name == "addition":
        return [{"question": prompt, "answer": answer} for prompt, answer in addition_problems()]
    kind = Path(name).suffix.lower()
    with one_line(f"--{flag} {name} cannot be read"):  # the libraries raise many kinds of exceptions
        if kind in (".json", ".jsonl", ".csv", ".tsv"):
            # Bytes that are not UTF-8 become lone surrogates, so that only their rows are left out.
            with open(name, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
                if kind in (".json", ".jsonl"):
                    return read_json(file.read())
                csv.field_size_limit(10**9)  # characters in a cell; by default 131,072
                return list(csv.DictReader(file, delimiter="," if kind == ".csv" else "\t"))
        if Path(name).is_file() and kind != ".parquet":
            raise UserError("it is none of these files: .jsonl, .json, .csv, .tsv, .parquet")
        rows = load_rows(name, args, flag)
        keep_encoded(rows.info.features)
        return rows


def load_rows(name, args, flag):
    """The rows of a .parquet file, or of a split of a folder or hub dataset."""
    import datasets  # imported here: 80 MB that few runs need

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # an error is one line, which we print
    split = args.dataset_split if flag == "dataset" else args.eval_split
    if name.lower().endswith(".parquet"):
        return datasets.load_dataset("parquet", data_files=glob.escape(name), split="train")
    if Path(name, "state.json").exists():  # written by save_to_disk
        return datasets.load_from_disk(name)
    if Path(name, "dataset_dict.json").exists():
        splits = datasets.load_from_disk(name)
        split = split or default_split(splits)
        if split not in splits:
            raise UserError(f"it has no split {split}, but {', '.join(splits)}")
        return splits[split]
    config = args.dataset_config or None
    if config is None and datasets.get_dataset_default_config_name(name) is None:
        names = datasets.get_dataset_config_names(name)
        raise UserError(f"it has several configs: --dataset_config can be {', '.join(names):.300}")
    split = split or default_split(datasets.get_dataset_split_names(name, config))
    options = {}
    if Path(name).is_dir():
        # Read it again each time. The library finds a folder in its cache by its name and card, so it
        # would return old rows after a change, or those of a different folder.
        options = {"download_mode": "force_redownload", "verification_mode": "no_checks"}
    return datasets.load_dataset(name, config, split=split, **options)


def keep_encoded(feature):
    """Images, audio and the like are not read, so they are not decoded, wherever they are in a column.
    Decoding takes other libraries, and one damaged file would end the run."""
    if isinstance(feature, dict):
        for part in feature.values():
            keep_encoded(part)
    elif hasattr(feature, "feature"):  # a list
        keep_encoded(feature.feature)
    elif hasattr(feature, "decode") and feature._type != "Json":
        feature.decode = False


def default_split(names):
    """The split of `--eval_dataset` if `--eval_split` is not given."""
    return "test" if "test" in names else "train"


def read_json(text):
    """The rows of one JSON array or of JSON lines. (datasets rejects a whole file for one bad line, and
    guesses types: 007 becomes 7.)"""
    array = parsed(text) if text.lstrip().startswith("[") else None
    if isinstance(array, list):
        return array
    return [parsed(line) for line in filter(str.strip, text.split("\n"))]


def parsed(text):
    """The value of a JSON text; the text itself if it is not JSON, or nested too deeply."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


# --------------------------------------------------------------------------------------------- rows


class BadRow(Exception):
    """A row that cannot be used: the reason in a few words, and what was found."""


def check_unicode(text):
    """Half a surrogate pair, as in "\\ud83d", cannot be tokenized or printed."""
    if re.search("[\ud800-\udfff]", text):
        raise BadRow("with text that is not valid Unicode", text)


def cell_of(row, column):
    """The value in a row's column, or at a path such as reward_model.ground_truth."""
    if column in row:
        return row[column]
    cell = row
    for name in column.split("."):
        cell = cell.get(name) if isinstance(cell, dict) else None
    return cell


def chat_message(item):
    """A message from a dataset, with its text parts joined. Other parts, such as images, have none."""
    content = item.get("content")
    if content is None and item.get("tool_calls"):
        content = ""
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    if "role" not in item or not all(isinstance(text, str) for text in texts):
        raise BadRow("with a message that lacks a role, or is not text", item)
    known = {name: value for name, value in item.items() if value is not None}  # parquet adds None
    return known | {"content": "".join(texts)}


def read_prompt(cell, args):
    """The chat messages in a cell: one from the user if it is text. Replies at the end are dropped."""
    if isinstance(cell, str):
        messages = [{"role": "user", "content": cell}]
    elif isinstance(cell, list) and all(isinstance(item, dict) for item in cell):
        messages = [chat_message(item) for item in cell]
    else:
        messages = []
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if args.system_prompt:
        messages = [message for message in messages if message["role"] != "system"]
    if not any(message["role"] == "user" and message["content"].strip() for message in messages):
        raise BadRow("without a prompt", cell)
    return messages


def read_answer(cell):
    """The gold answer in a cell: text, a number, or a list of one of these; "" for anything else."""
    if isinstance(cell, list) and len(cell) == 1:
        cell = cell[0]
    is_number = isinstance(cell, int) or (isinstance(cell, float) and math.isfinite(cell))
    return str(cell).strip() if is_number or isinstance(cell, str) else ""


def render(messages, policy, args):
    """Messages -> (the text that the model reads, its token ids, the messages), with `--instruction`
    and `--system_prompt`."""
    tokenizer = policy.tokenizer
    if args.instruction:
        content = f"{messages[-1]['content']}\n{args.instruction}"
        messages = [*messages[:-1], messages[-1] | {"content": content}]
    if args.system_prompt:
        messages = [{"role": "system", "content": args.system_prompt}, *messages]
    if tokenizer.chat_template:
        for message in messages:
            if any(token in message["content"] for token in tokenizer.all_special_tokens):
                raise BadRow("that already have the chat template's special tokens", message["content"])
        options = {"tokenize": False, "add_generation_prompt": True, **args.template_options()}
        try:
            text = tokenizer.apply_chat_template(messages, **options)
        except Exception as error:  # templates raise their own exceptions
            raise BadRow("that the chat template refuses", str(error)) from error
        if not isinstance(text, str):
            raise BadRow("that --chat_template_kwargs do not turn into text", text)
    elif len(messages) == 1:
        text = messages[0]["content"]
    else:
        raise BadRow("with several messages or --system_prompt, which need a chat template", messages)
    check_unicode(text)
    ids = tokenizer(text, add_special_tokens=not tokenizer.chat_template).input_ids
    if not tokenizer.chat_template and ids[-1:] == [tokenizer.eos_token_id]:
        ids.pop()  # some tokenizers append EOS
    if messages[-1]["content"].strip() not in text:
        raise BadRow("with a prompt that the chat template drops", messages[-1]["content"])
    config = policy.model.config.get_text_config()  # where a multimodal model keeps its limit
    limit = getattr(config, "max_position_embeddings", None) or math.inf
    if len(ids) + args.max_new_tokens > limit:
        raise BadRow(f"too long for --max_new_tokens and the model's limit of {limit} tokens", text)
    if not ids or max(ids) >= policy.model.get_input_embeddings().num_embeddings:
        raise BadRow("with a token that has no embedding, or without a token", text)
    if ids.count(tokenizer.unk_token_id) > len(ids) / 10:
        raise BadRow("with tokens that the model does not know", text)
    return text, ids, messages


def read_row(row, known, policy, args, reads_answers):
    """A row -> (hash of its prompt, Problem). BadRow if it cannot be used. `known` remembers what
    became of each prompt, since a dataset may repeat one a hundred times."""
    if not isinstance(row, dict):
        raise BadRow("unreadable", row)
    if None in row:  # where csv puts them
        raise BadRow("with more cells than the header", row[None])
    cell = cell_of(row, args.prompt_column)
    messages = read_prompt(cell, args)
    answer = read_answer(cell_of(row, args.answer_column))
    if reads_answers and not answer:
        advice = " (if --reward needs none, drop `answer` from its parameters)" if args.reward else ""
        raise BadRow(f"without a gold answer{advice}", cell_of(row, args.answer_column))
    check_unicode(answer)
    is_text = isinstance(cell, str)
    key = hash_of(cell if is_text else messages)
    if key not in known:
        try:
            text, ids, messages = render(messages, policy, args)
            shown = messages[-1]["content"] if is_text else messages
            known[key] = Problem(text, answer, ids, {**row, "prompts": shown})
        except BadRow as error:
            known[key] = error
    if isinstance(known[key], BadRow):
        raise known[key]
    return key, known[key]


def usable_rows(rows, flag, policy, args, reads_answers=True):
    """Rows of `--dataset` or `--eval_dataset` -> ({hash of the prompt: Problem}, what was left out and
    why). UserError if more than a tenth is left out."""
    if len(rows) == 0:
        raise UserError(f"--{flag} {getattr(args, flag)} has no rows")
    columns = {}
    known = {}
    problems = {}
    reasons = {}  # {why rows are left out: [which row, and what was found]}
    for number, row in enumerate(rows, 1):
        if isinstance(row, dict):
            columns |= dict.fromkeys(map(str, row))
        try:
            key, problem = read_row(row, known, policy, args, reads_answers)
        except BadRow as error:
            reason, found = error.args
            reasons.setdefault(reason, []).append(f"row {number} {found!r:.80}")
        else:
            problems[key] = problem
        if len(known) == 20 and not problems:
            break  # the chat template, for example, would reject every other row, too
    left_out = [f"{len(bad):,} {reason} (first: {bad[0]})" for reason, bad in reasons.items()]
    num_bad = sum(map(len, reasons.values()))
    if not problems or num_bad > len(rows) / 10:
        message = (
            f"--{flag} {getattr(args, flag)}: {num_bad:,} rows cannot be used: {', '.join(left_out)}"
        )
        if columns:
            message += f"; the columns (--prompt_column, --answer_column) are {', '.join(columns)}"
        raise UserError(message)
    num_equal = len(rows) - num_bad - len(problems)
    if num_equal > 0:
        left_out.append(f"{num_equal:,} with the prompt of an earlier row")
    no_cells = dict.fromkeys(columns)
    for key, problem in problems.items():
        answer = final_answer(problem.answer) or problem.answer
        problems[key] = problem._replace(answer=answer, columns=no_cells | problem.columns)
    return problems, f"; left out of --{flag}: {', '.join(left_out)}" if left_out else ""
