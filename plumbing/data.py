"""Reads datasets, renders prompts for the model, and streams training problems."""

import ast
import contextlib
import csv
import glob
import hashlib
import json
import math
import random
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from plumbing.answers import MARKERS, final_answer
from plumbing.args import FILES, has_splits
from plumbing.errors import UserError, one_line


def hash_of(content):
    return hashlib.sha256(repr(content).encode()).hexdigest()


class Problem(NamedTuple):
    prompt: str  # as the model reads it
    answer: str  # the gold answer alone
    prompt_ids: list
    # The dataset's, for a reward function, and the prompt as messages or text: prompts
    columns: dict | None = None


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
    check_template(policy, args)
    reading = (policy, args, grade.reads_answers)
    training, notes = usable_rows(read_rows(args, "dataset"), "dataset", *reading)
    others = {}  # the held-out problems are the first ones of these
    if args.eval_dataset:
        others, more_notes = usable_rows(read_rows(args, "eval_dataset"), "eval_dataset", *reading)
        held_out = dict(list(others.items())[: args.num_held_out])
        notes += more_notes
    else:
        # The smallest hashes, so that adding or removing a row changes at most one of them. The sums
        # are already in random order.
        keys = list(training) if args.dataset == "addition" else sorted(training)
        held_out = {key: training[key] for key in keys[: args.num_held_out]}
        training = {key: training[key] for key in keys[args.num_held_out :]}
    if not training and args.iterations > 0:
        message = f"--num_held_out {args.num_held_out} leaves no problem for training"
        notes = "; ".join([str(len(held_out)), *notes])
        raise UserError(f"{message}: --dataset {args.dataset} has {notes}")
    training = list(training.values())
    held_out = list(held_out.values())
    # Compared as the model reads them: in one file a prompt may be text, and in the other messages.
    known = {tuple(problem.prompt_ids) for problem in training}
    num_shared = sum(tuple(problem.prompt_ids) in known for problem in held_out)
    if num_shared > 0:
        notes.append(f"{num_shared:,} of those held out are also in --dataset")
    count = f"{len(held_out):,}"
    if len(others) > len(held_out):
        count = f"the first {count} of {len(others):,}"
    print("; ".join([f"problems: {len(training):,} to train on, {count} held out", *notes]))
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


TEXT_FILES = (".jsonl", ".json", ".csv", ".tsv")


def check_files(args):
    """UserError if `--dataset` or `--eval_dataset` names a file that is not there, or is of an unknown
    kind. `load_grader` calls this, since it comes before the model is loaded, which takes longer."""
    for flag in ("dataset", "eval_dataset"):
        name = getattr(args, flag)
        is_known = Path(name).suffix.lower() in FILES
        with one_line(f"--{flag} {name} cannot be read"):
            if is_known:
                Path(name).stat()
            elif has_splits(name) and Path(name).is_file():
                raise UserError(f"it is none of these: {', '.join(FILES)}")


def read_rows(args, flag):
    """The rows of the dataset that `flag` names: "dataset" or "eval_dataset". A row that is not a dict
    was unreadable. Files have no splits."""
    name = getattr(args, flag)
    if name == "addition":
        return [{"question": prompt, "answer": answer} for prompt, answer in addition_problems()]
    kind = Path(name).suffix.lower()
    if kind not in TEXT_FILES:
        return load_rows(name, args, flag)
    # Not with datasets, which guesses types (007 becomes 7) and rejects a file for one bad line. Bytes
    # that are not UTF-8 become lone surrogates, so that only their rows are left out.
    options = {"encoding": "utf-8-sig", "errors": "surrogateescape", "newline": ""}
    with one_line(f"--{flag} {name} cannot be read"), open(name, **options) as file:
        if kind in (".json", ".jsonl"):
            return read_json(file.read())
        return read_csv(file, "," if kind == ".csv" else "\t")


def read_json(text):
    """The rows of a JSON array, of a single object, or of JSON lines."""
    whole = parsed(text)
    if isinstance(whole, (list, dict)):
        return whole if isinstance(whole, list) else [whole]
    return [parsed(line) for line in filter(str.strip, text.split("\n"))]


def parsed(text):
    """The value of a JSON text; the text itself if it is not JSON, or nested too deeply."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def read_csv(file, delimiter):
    """The rows of a file with a header. A quote that is not closed is an error: it would swallow all
    rows up to the next quote."""
    csv.field_size_limit(10**9)  # characters in a cell; by default 131,072
    reader = csv.DictReader(file, delimiter=delimiter, strict=True)
    names = reader.fieldnames or []
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"it has two columns with the name {name}")
    rows = []
    try:
        for row in reader:
            rows.append(row)
    except csv.Error as error:
        raise UserError(f"a quote in row {len(rows) + 1} may not be closed ({error})") from error
    return rows


def load_rows(name, args, flag):
    """The rows of a .parquet file, or of a split of a folder or hub dataset."""
    import datasets  # imported here: 80 MB that few runs need

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # an error is one line, which we print
    split_flag = "dataset_split" if flag == "dataset" else "eval_split"
    split = args.dataset_split if flag == "dataset" else args.eval_split
    path = Path(name)
    message = f"--{flag} {name} cannot be read"
    if has_splits(name):
        message += f" with --dataset_config {args.dataset_config!r} and --{split_flag} {split}"
    with one_line(message):
        if path.suffix.lower() == ".parquet":
            rows = datasets.load_dataset("parquet", data_files=glob.escape(name), split="train")
        elif Path(path, "state.json").exists():  # written by save_to_disk
            rows = datasets.load_from_disk(name)
        elif Path(path, "dataset_dict.json").exists():
            rows = datasets.load_from_disk(path / split)
        else:
            # A folder is read again each time. The library finds it in its cache by its name and card,
            # so it would return old rows after a change, or those of a different folder.
            options = {"download_mode": "force_redownload", "verification_mode": "no_checks"}
            options = options if path.is_dir() else {}
            rows = datasets.load_dataset(name, args.dataset_config or None, split=split, **options)
        return as_dicts(rows)


def as_dicts(rows):
    """A dataset as a list of rows. Images and audio are not decoded, since nobody reads them."""
    columns = rows.with_format("arrow")[:].to_pydict()
    for column, feature in rows.features.items():
        if getattr(feature, "dtype", "") != "string":  # text needs no look at each of a million cells
            columns[column] = [as_shown(cell, feature) for cell in columns[column]]
    return [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]


def as_shown(cell, feature):
    """A cell as its file shows it, at every depth: a label is its name, JSON its value, and 0.1 in
    float32 is 0.1, not 0.10000000149011612."""
    kind = getattr(feature, "_type", "")
    if cell is None:
        return None
    if isinstance(feature, dict):
        return {name: as_shown(cell[name], feature[name]) for name in cell}
    if kind in ("List", "LargeList"):
        return [as_shown(item, feature.feature) for item in cell]
    if kind == "ClassLabel":
        return feature.names[cell] if cell >= 0 else None  # -1 is no label
    if kind == "Json":
        return parsed(cell)
    if kind == "Value" and feature.dtype in ("float16", "float32"):
        return float(str(np.dtype(feature.dtype).type(cell)))
    return cell


# --------------------------------------------------------------------------------------------- rows

LONGEST_GOLD = 200  # characters of a gold answer without a marker; anything longer is a solution
IN_BRACES = r"\{([^{}]+)\}"
BATCH = 1_000  # prompts that are tokenized at a time


class BadRow(Exception):
    """A row that cannot be used: one of five reasons, and what was found."""


def cell_of(row, column):
    """The value in a row's column, or at a path such as reward_model.ground_truth; or text made of
    several, such as '{Body} {Question}'. None if there is none."""
    if column in row:
        return row[column]
    names = re.findall(IN_BRACES, column)
    if names:
        cells = {name: cell_of(row, name) for name in names}
        is_whole = all(cell is not None for cell in cells.values())
        return re.sub(IN_BRACES, lambda found: shown(cells[found[1]]), column) if is_whole else None
    cell = row
    for name in column.split("."):
        cell = parsed(cell) if isinstance(cell, str) else cell
        cell = cell.get(name) if isinstance(cell, dict) else None
    return cell


def shown(cell):
    """A cell as its file shows it: text as it is, everything else as JSON."""
    return cell if isinstance(cell, str) else json.dumps(cell, ensure_ascii=False, default=str)


def chat_message(item):
    """A message from a dataset, with its text parts joined. It must have a role and only text."""
    content = item.get("content")
    if content is None and item.get("tool_calls"):
        content = ""
    if isinstance(content, list):
        content = "".join(part["text"] for part in content)  # an image has none
    known = {name: value for name, value in item.items() if value is not None}  # parquet adds None
    return known | {"role": item["role"], "content": content + ""}


def as_chat(cell):
    """The messages in a cell that has them as text, in JSON or as Python prints them, as in a CSV. Any
    other cell stays as it is."""
    if isinstance(cell, str) and re.match(r"\s*\[\s*\{", cell):
        for read in (json.loads, ast.literal_eval):
            with contextlib.suppress(Exception):
                items = read(cell.strip())
                if all("role" in item for item in items):
                    return items
    return cell


def read_prompt(cell, args):
    """The chat messages in a cell: one from the user if it is text. Replies at the end are dropped."""
    reason = f"without a prompt in --prompt_column {args.prompt_column}"
    try:
        messages = [{"role": "user", "content": cell}] if isinstance(cell, str) else cell
        messages = [chat_message(item) for item in messages]
    except (AttributeError, KeyError, TypeError) as error:  # no messages, or not of text
        raise BadRow(reason, cell) from error
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if args.system_prompt:
        messages = [message for message in messages if message["role"] != "system"]
    if not any(message["role"] == "user" and message["content"].strip() for message in messages):
        raise BadRow(reason, cell)
    return messages


def read_answer(cell, args):
    """The gold answer in a cell: what is behind a marker, or else all of it. A list of one text, which
    may be JSON, counts as that text. "" if there is no answer. For the verifier, a long text, a marker
    with nothing behind it, and a JSON object (the tests of a program) are no answers."""
    items = parsed(cell) if isinstance(cell, str) and cell.lstrip()[:1] in ("[", "{") else cell
    if isinstance(items, list) and len(items) == 1 and isinstance(items[0], str):
        cell = items[0]
    elif isinstance(items, dict) and not args.reward:
        return ""
    is_number = isinstance(cell, int) or (isinstance(cell, float) and math.isfinite(cell))
    text = shown(cell).strip() if is_number or isinstance(cell, str) else ""
    is_solution = "\n" in text or len(text) > LONGEST_GOLD
    has_marker = any(marker in text for marker in MARKERS)
    whole = "" if (is_solution or has_marker) and not args.reward else text
    return final_answer(text) or whole


def turn_tokens(policy, args):
    """The token that the chat template writes before a user's message, and the one that it writes after
    an assistant's. None where it writes none."""
    tokenizer = policy.tokenizer
    question = "What is 7+8?"  # words that no template has
    reply = "It is 15."
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
    options = args.chat_template_kwargs or {}
    try:
        text = tokenizer.apply_chat_template(2 * turns, tokenize=False, **options)
    except Exception:  # there is no template, or it raises its own exception
        return None, None
    tokens = [token.content for token in tokenizer.added_tokens_decoder.values()]
    text = text.partition(reply)[2]  # what follows the first reply, so no system prompt
    before = text.partition(question)[0]
    after = text.partition(reply)[2]
    end = min((token for token in tokens if token in after), key=after.find, default=None)
    others = [token for token in tokens if token in before and token != end]
    start = max(others, key=before.rfind, default=None)
    return start, end


def check_template(policy, args):
    """UserError if there is no chat template for `--chat_template_kwargs`. Prints a note if the model
    would not stop where the template ends a turn."""
    tokenizer = policy.tokenizer
    if args.chat_template_kwargs and not tokenizer.chat_template:
        raise UserError(f"--chat_template_kwargs: --model {args.model} has no chat template")
    _, end = turn_tokens(policy, args)
    if end is None:
        return
    number = tokenizer.convert_tokens_to_ids(end)
    if number not in policy.end_ids:
        known = " or ".join(map(tokenizer.decode, dict.fromkeys(policy.end_ids)))
        message = f"ends an answer with {end}, but the model stops only at {known}"
        advice = f"if its answers run on, add {number} to eos_token_id in its generation_config.json"
        print(f"note: the chat template {message}; {advice}")


def render(messages, policy, args, start):
    """Messages -> the text that the model reads. A row for which this raises is left out. start: the
    token that the template writes before a user's message."""
    tokenizer = policy.tokenizer
    if tokenizer.chat_template:
        if start and any(start in message["content"] for message in messages):
            raise ValueError(f"it already has the chat template's {start}")
        options = {"tokenize": False, "add_generation_prompt": True}
        text = tokenizer.apply_chat_template(messages, **options, **args.chat_template_kwargs or {})
    elif len(messages) == 1:
        text = messages[0]["content"]
    else:
        raise ValueError("several messages, or --system_prompt, need a chat template")
    if messages[-1]["content"].strip() not in text:
        raise ValueError("the chat template drops the last message")
    return text


def read_row(row, known, policy, args, reads_answers, start):
    """A row -> (hash of its prompt, Problem without ids: the known one, if any). BadRow if it cannot be
    used."""
    if not isinstance(row, dict) or None in row:  # where csv puts cells without a column
        raise BadRow("unreadable", row)
    cell = as_chat(cell_of(row, args.prompt_column))
    messages = read_prompt(cell, args)
    gold = cell_of(row, args.answer_column)
    answer = read_answer(gold, args)
    if reads_answers and not answer:
        advice = "it is one short line, or behind #### or \\boxed"
        if args.reward:
            advice = "if --reward needs none, drop `answer` from its parameters"
        found = row.get(args.answer_column.partition(".")[0]) if gold is None else gold
        raise BadRow(f"without a gold answer in --answer_column {args.answer_column} ({advice})", found)
    is_text = isinstance(cell, str)
    key = hash_of(cell if is_text else messages)
    if key in known:
        return key, known[key]
    if args.instruction:
        content = f"{messages[-1]['content']}\n{args.instruction}"
        messages[-1] = messages[-1] | {"content": content}
    if args.system_prompt:
        messages = [{"role": "system", "content": args.system_prompt}, *messages]
    prompt = messages[-1]["content"] if is_text else messages
    try:
        text = render(messages, policy, args, start)
        (text + answer).encode()  # fails for half a surrogate pair, as in "\ud83d"
    except Exception as error:  # templates raise their own exceptions
        raise BadRow("that the model or its chat template cannot take", f"{error}: {prompt}") from error
    return key, Problem(text, answer, [], {**row, "prompts": prompt})


def longest_sequence(config):
    """The most tokens that a model takes. (longrope changes the angles of all tokens in a sequence that
    is longer than its original length, but the keys in a cache keep the old ones.)"""
    limit = getattr(config, "max_position_embeddings", None) or math.inf
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        return min(limit, rope["original_max_position_embeddings"])
    return limit


def tokenized(problems, policy, args):
    """Yields each of the problems with its ids, or a BadRow that says why the model cannot take it."""
    tokenizer = policy.tokenizer
    limit = longest_sequence(policy.model.config.get_text_config())  # a multimodal model has several
    num_embeddings = policy.model.get_input_embeddings().num_embeddings
    numbers = list(range(num_embeddings))  # shared by all prompts: new ones would take 28 bytes a token
    for start in range(0, len(problems), BATCH):
        batch = problems[start : start + BATCH]
        texts = [problem.prompt for problem in batch]
        encoded = tokenizer(texts, add_special_tokens=not tokenizer.chat_template)
        for problem, ids in zip(batch, encoded.input_ids, strict=True):
            if not tokenizer.chat_template and ids[-1:] == [tokenizer.eos_token_id]:
                ids.pop()  # some tokenizers append EOS
            is_known = ids.count(tokenizer.unk_token_id) <= len(ids) / 10
            if not ids or max(ids) >= num_embeddings or not is_known:
                message = "no token, or tokens that the model does not know"
                yield BadRow("that the model or its chat template cannot take", message)
            elif len(ids) + args.max_new_tokens > limit:
                message = f"too long for --max_new_tokens and the model's limit of {limit} tokens"
                yield BadRow(message, problem.prompt)
            else:
                yield problem._replace(prompt_ids=[numbers[token] for token in ids])


def usable_rows(rows, flag, policy, args, reads_answers=True):
    """Rows of `--dataset` or `--eval_dataset` -> ({hash of the prompt: Problem}, [what was left out and
    why, if anything]). UserError if more than a tenth is left out."""
    if len(rows) == 0:
        raise UserError(f"--{flag} {getattr(args, flag)} has no rows")
    start, _ = turn_tokens(policy, args)
    columns = {}
    problems = {}
    numbers = {}  # {hash of the prompt: number of its first row}
    reasons = {}  # {why rows are left out: [which row, and what was found]}

    def leave_out(number, error):
        reason, found = error.args
        reasons.setdefault(reason, []).append(f"row {number} {found!r:.80}")

    for number, row in enumerate(tqdm(rows, desc="rows", leave=False, disable=None, delay=5), 1):
        if isinstance(row, dict):
            columns |= dict.fromkeys(map(str, row))
        try:
            key, problem = read_row(row, problems, policy, args, reads_answers, start)
        except BadRow as error:
            leave_out(number, error)
        else:
            problems[key] = problem
            numbers.setdefault(key, number)
    no_cells = dict.fromkeys(columns)
    results = tokenized(list(problems.values()), policy, args)
    for key, result in zip(list(problems), results, strict=True):
        if isinstance(result, BadRow):
            leave_out(numbers[key], result)
            del problems[key]
        else:
            problems[key] = result._replace(columns=no_cells | result.columns)
    left_out = [f"{len(bad):,} {reason} (first: {bad[0]})" for reason, bad in reasons.items()]
    num_bad = sum(map(len, reasons.values()))
    if not problems or num_bad > len(rows) / 10:
        message = f"{num_bad:,} rows cannot be used: {', '.join(left_out)}"
        names = f"its columns are {', '.join(columns) or 'none'}"
        if args.eval_dataset:
            names += "; --prompt_column and --answer_column are the same for both datasets"
        raise UserError(f"--{flag} {getattr(args, flag)}: {message}; {names}")
    num_equal = len(rows) - num_bad - len(problems)
    if num_equal > 0:
        left_out.append(f"{num_equal:,} with the prompt of an earlier row")
    if getattr(args, flag) != "addition":
        where = "" if flag == "dataset" else "--eval_dataset: "
        print(where + columns_line(columns, problems, args))
    return problems, [f"left out of --{flag}: {', '.join(left_out)}"] if left_out else []


def columns_line(columns, problems, args):
    """What the columns of a dataset are used for, and the first gold answer."""
    used = set()
    for column in (args.prompt_column, args.answer_column):
        names = [column] if column in columns else re.findall(IN_BRACES, column) or [column]
        used |= {name if name in columns else name.partition(".")[0] for name in names}
    rest = [column for column in columns if column not in used]
    first = next(iter(problems.values())).answer
    answer = f"{args.answer_column} (the first: {first:.200})" if first else "none"
    line = f"prompt: {args.prompt_column}, answer: {answer}"
    words = "columns for --reward alone" if args.reward else "not used"
    return f"{line}, {words}: {', '.join(rest)}" if rest else line
