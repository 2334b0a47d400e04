"""Reads datasets, renders prompts for the model, and streams training problems."""

import functools
import hashlib
import inspect
import json
import math
import random
from collections.abc import Iterable
from numbers import Number
from typing import NamedTuple

import torch
from tqdm import tqdm

from plumbing.answers import MARKERS, final_answer
from plumbing.args import import_function
from plumbing.errors import UserError, one_line


def hash_of(content):
    return hashlib.sha256(repr(content).encode()).hexdigest()


class Problem(NamedTuple):
    prompt: str  # as the model reads it
    answer: str  # the gold answer alone
    prompt_ids: list
    columns: dict | None = None  # for --reward: the dataset's row, and its question again as `prompts`


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
    training, notes = read_problems(args, "dataset", policy, grade.reads_answers)
    others = {}  # the held-out problems are the first ones of these
    if args.eval_dataset:
        others, more_notes = read_problems(args, "eval_dataset", policy, grade.reads_answers)
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
        raise UserError(f"{message}: --dataset {args.settings()['dataset']} has {notes}")
    training = list(training.values())
    held_out = list(held_out.values())
    # Compared as the model reads them: in one dataset a prompt may be text, and in the other messages.
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


# --------------------------------------------------------------------------------------------- rows

LONGEST_GOLD = 200  # characters of a gold answer without a marker; anything longer is a solution


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


def addition_rows():
    return [{"question": prompt, "answer": answer} for prompt, answer in addition_problems()]


def json_rows(flag, path):
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                with one_line(f"--{flag} {path}: line {number} is not JSON"):
                    row = json.loads(line)
                yield row


def dataset_function(args, flag):
    """`--dataset` or `--eval_dataset` as a function that returns rows. UserError if there is none."""
    value = getattr(args, flag)
    if callable(value):
        return value
    if value == "addition":
        return addition_rows
    kinds = "addition, a .jsonl file, or FILE.py:FUNCTION, such as examples/gsm8k.py:train"
    with one_line(f"--{flag} {value!s:.100} must be {kinds}"):
        if not isinstance(value, str):
            raise UserError(f"it is a {type(value).__name__}; a function can return it")
        if value.endswith(".jsonl"):
            open(value, "rb").close()  # fails if it cannot be read
            return functools.partial(json_rows, flag, value)
        function = import_function(value)
        inspect.signature(function).bind()  # it is called without arguments
        return function


def read_rows(args, flag):
    """Yields the rows of `--dataset` or `--eval_dataset`."""
    name = f"--{flag} {args.settings()[flag]}"
    try:
        rows = dataset_function(args, flag)()
        if not isinstance(rows, Iterable):
            raise UserError(f"{name} must return or yield rows, not {rows!r:.100}")
        yield from tqdm(rows, desc="rows", leave=False, disable=None, delay=5)
    except SystemExit as error:
        raise UserError(f"{name} ends the program: SystemExit {error}") from error


# What a reward function can ask for besides a row's keys
TAKEN = {"text", "truncated", "prompts", "rendered_prompt", "completions", "completion_ids"}


def check_row(row, reads_answers):
    """UserError if a row is not a dict, lacks a key that is needed, or has one that is taken."""
    if not isinstance(row, dict):
        raise UserError(f"it is not a dict: {row!r:.100}")
    for key in TAKEN & row.keys():
        raise UserError(f"rename its key {key}: --reward uses that name for something else")
    if not all(isinstance(key, str) for key in row):
        raise UserError(f"its keys must be text: {list(row)!s:.100}")
    needed = ["question", "answer"] if reads_answers else ["question"]
    for key in needed:
        if key not in row:
            raise UserError(f"it has no {key}; its keys are {', '.join(row)}")


def check_question(question):
    """UserError unless it is text, or messages that do not end with a reply."""
    is_chat = isinstance(question, list) and all(map(is_message, question))
    if not question or not (is_chat or isinstance(question, str)):
        expected = "text, or messages with a role and text as content"
        raise UserError(f"its question must be {expected}, not {question!r:.100}")
    if is_chat and question[-1]["role"] == "assistant":
        raise UserError("its question ends with the assistant's reply, which may be the solution")


def is_message(item):
    return isinstance(item, dict) and all(isinstance(item.get(x), str) for x in ("role", "content"))


def gold_answer(answer, args, reads_answers):
    """What is behind a marker in a row's answer, or else all of it. For the verifier, a long text and a
    marker with nothing behind it don't count. UserError if there is no answer, and one is needed."""
    # NaN, which pandas has for an empty cell, does not equal itself.
    is_given = isinstance(answer, (str, Number)) and not isinstance(answer, bool) and answer == answer
    text = str(answer).strip() if is_given else ""
    has_marker = any(marker in text for marker in MARKERS)
    is_solution = "\n" in text or len(text) > LONGEST_GOLD
    whole = "" if (is_solution or has_marker) and not args.reward else text
    gold = final_answer(text) or whole
    if reads_answers and not gold:
        expected = "a number or one short line, or have one behind #### or in \\boxed{}"
        raise UserError(f"its answer must be {expected}, not {answer!r:.100}")
    return gold


def read_problems(args, flag, policy, reads_answers=True):
    """`--dataset` or `--eval_dataset` -> ({hash of the question: Problem}, [what was left out and why,
    if anything]). UserError if a row cannot be used."""
    name = f"--{flag} {args.settings()[flag]}"
    problems = {}
    columns = {}
    num_repeated = 0
    num_contradicting = 0
    for number, row in enumerate(read_rows(args, flag), 1):
        with one_line(f"{name}: row {number} cannot be used"):
            check_row(row, reads_answers)
            key = hash_of(row["question"])
            if key not in problems:
                problems[key] = read_row(row, policy, args, reads_answers)
                columns |= dict.fromkeys(row)
            elif repr(problems[key].columns.get("answer")) == repr(row.get("answer")):
                num_repeated += 1
            else:
                num_contradicting += 1
    if not problems:
        raise UserError(f"{name} has no rows")
    no_cells = dict.fromkeys(columns)
    limit = longest_sequence(policy.model.config.get_text_config())  # a multimodal model has several
    usable = {}
    for key, problem in problems.items():
        if len(problem.prompt_ids) + args.max_new_tokens <= limit:
            usable[key] = problem._replace(columns=no_cells | problem.columns)
    left_out = []
    if len(usable) < len(problems):
        message = f"too long for --max_new_tokens and the model's limit of {limit} tokens"
        left_out.append(f"{len(problems) - len(usable):,} {message}")
    if num_repeated > 0:
        left_out.append(f"{num_repeated:,} with the question of an earlier row")
    if num_contradicting > 0:
        message = "with the question of an earlier row and a different answer"
        left_out.append(f"{num_contradicting:,} {message}")
    notes = [f"left out of --{flag}: {', '.join(left_out)}"] if left_out else []
    if not usable:
        raise UserError(f"{name} has no problem; {notes[0]}")
    if getattr(args, flag) != "addition":
        first = next(iter(usable.values()))
        answer = f"its answer {first.answer!r:.200}" if first.answer else "it has no answer"
        print(f"--{flag}: the first prompt is {first.prompt!r:.200}, and {answer}")
    return usable, notes


def read_row(row, policy, args, reads_answers):
    question = row["question"]
    check_question(question)
    answer = gold_answer(row.get("answer"), args, reads_answers)
    prompt = render(question, policy, args)
    return Problem(prompt, answer, token_ids(prompt, policy), {**row, "prompts": question})


# ------------------------------------------------------------------------------ what the model reads


def render(question, policy, args):
    """A question -> the prompt as text."""
    tokenizer = policy.tokenizer
    if isinstance(question, str):
        if not tokenizer.chat_template:
            return question
        question = [{"role": "user", "content": question}]
    options = {"tokenize": False, "add_generation_prompt": True}
    own_options = args.chat_template_kwargs or {}
    return tokenizer.apply_chat_template(question, **options, **own_options)


def token_ids(prompt, policy):
    """The ids of a prompt. UserError if there are none, or if the model does not know them."""
    tokenizer = policy.tokenizer
    ids = tokenizer(prompt, add_special_tokens=not tokenizer.chat_template).input_ids
    if not tokenizer.chat_template and ids[-1:] == [tokenizer.eos_token_id]:
        ids.pop()  # some tokenizers append EOS
    num_embeddings = policy.model.get_input_embeddings().num_embeddings
    is_known = ids.count(tokenizer.unk_token_id) <= len(ids) / 10
    if not ids or max(ids) >= num_embeddings or not is_known:
        raise UserError(f"{prompt!r:.100} has no token, or tokens that the model does not know")
    return ids


def check_template(policy, args):
    """UserError if there is no chat template for `--chat_template_kwargs`. Prints a note if the model
    would not stop where the template ends a turn."""
    tokenizer = policy.tokenizer
    if args.chat_template_kwargs and not tokenizer.chat_template:
        raise UserError(f"--chat_template_kwargs: --model {args.model} has no chat template")
    reply = "It is 15."  # words that no template has
    turns = [{"role": "user", "content": "What is 7+8?"}, {"role": "assistant", "content": reply}]
    options = args.chat_template_kwargs or {}
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False, **options)
    except Exception:  # there is no template, or it raises its own exception
        return
    after = text.partition(reply)[2]
    tokens = [token.content for token in tokenizer.added_tokens_decoder.values()]
    end = min((token for token in tokens if token in after), key=after.find, default=None)
    if end is None:
        return
    end_id = tokenizer.convert_tokens_to_ids(end)
    if end_id not in policy.end_ids:
        known = " or ".join(map(tokenizer.decode, dict.fromkeys(policy.end_ids)))
        message = f"ends an answer with {end}, but the model stops only at {known}"
        advice = f"if its answers run on, add {end_id} to eos_token_id in its generation_config.json"
        print(f"note: the chat template {message}; {advice}")


def longest_sequence(config):
    """The most tokens that a model takes. (longrope changes the angles of all tokens in a sequence that
    is longer than its original length, but the keys in a cache keep the old ones.)"""
    limit = getattr(config, "max_position_embeddings", None) or math.inf
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        return min(limit, rope["original_max_position_embeddings"])
    return limit
