"""Datasets: rows, questions, gold answers, what is left out, held-out problems."""

import json
import math
import re
import shlex
import sys
import textwrap
from types import SimpleNamespace
from unittest.mock import Mock

import datasets
import pytest
from conftest import ROOT, SMALL, completes, read_lines, run, save, script_args, write_lines
from test_architectures import new_model
from transformers import ByT5Tokenizer

from common import Completion, Problem, UserError, load_grader, load_problems
from plumbing.data import ProblemStream, check_template, dataset_function, read_problems

TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}{{ end }}<assistant>"


def policy_with(template=None, limit=None):
    """A model with a limit on positions, and a tokenizer with a token for each byte, which appends an
    EOS."""
    tokenizer = ByT5Tokenizer(extra_ids=0)
    tokenizer.chat_template = template
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(max_position_embeddings=limit))
    embeddings = SimpleNamespace(num_embeddings=len(tokenizer))
    model = SimpleNamespace(config=config, get_input_embeddings=lambda: embeddings)
    return SimpleNamespace(tokenizer=tokenizer, model=model)


def problems_of(rows, policy=None, reads_answers=True, **flags):
    """[(prompt, gold answer, ids, columns)] of rows."""
    args = script_args("grpo", dataset=lambda: rows, **flags)[1]
    problems, _ = read_problems(args, "dataset", policy or policy_with(), reads_answers)
    return list(problems.values())


def refusal(rows, policy=None, **flags):
    with pytest.raises(UserError) as error:
        problems_of(rows, policy, **flags)
    return str(error.value)


def row(question="1+1=", answer="2"):
    return {"question": question, "answer": answer}


def sums(count):
    """With worked solutions."""
    return [row(f"{i}+1=", f"{i}+1={i + 1} #### {i + 1}") for i in range(count)]


def chat(*turns):
    """chat("user", "1+1=") -> [{"role": "user", "content": "1+1="}]"""
    pairs = zip(turns[::2], turns[1::2], strict=True)
    return [{"role": role, "content": content} for role, content in pairs]


# ---------------------------------------------------------------------------------- files, functions


def read(dataset, flag="dataset"):
    args = script_args("grpo", **{flag: dataset})[1]
    load_grader(args)
    return list(dataset_function(args, flag)())


def test_json_lines_and_functions_give_the_same_rows(tmp_path, python_file):
    """A line separator inside a string ends no line."""
    rows = [row("a\u2028b\u0085c", "007"), row(chat("user", "1+1="), 2) | {"level": None}]
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("\r\n\n".join(lines), encoding="utf-8-sig", newline="")
    function = f"{python_file(f'def f(): yield from {rows!r}')}:f"
    for dataset in (str(path), function, lambda: rows):
        assert read(dataset) == read(dataset, "eval_dataset") == rows
    assert read("addition", "eval_dataset") == read("addition")


def test_a_line_that_is_not_json_is_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"question": "1+1="}\n\n{"question": "\xb2\xe2"}')
    with pytest.raises(UserError) as error:
        read(str(path), "eval_dataset")
    assert str(error.value).startswith(
        f"--eval_dataset {path}: line 3 is not JSON: UnicodeDecodeError "
    )


MISSING = [  # a value of the flag, and what the line says
    ("b.jsonl", "FileNotFoundError"),
    ("b.py:f", "there is no file"),
    ("of_split.py:f", "has no attribute 'f'"),
    ("of_split.py:g", "missing a required argument: 'split'"),
    ("openai/gsm8k", "such as examples/gsm8k.py:train: it names no function"),
    (".jsonl", "IsADirectoryError"),
]


@pytest.mark.parametrize("flag", ["dataset", "eval_dataset"])
@pytest.mark.parametrize("value, expected", MISSING)
def test_a_file_and_its_function_are_looked_for_before_the_model_is_loaded(
    flag, value, expected, python_file, tmp_path, monkeypatch
):
    """By `load_grader`, which every script calls first."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".jsonl").mkdir()
    value = value.replace("of_split.py", python_file("def g(split): pass").name)
    args = script_args("grpo", **{flag: value})[1]
    with pytest.raises(UserError, match=f"^--{flag} {value} must be addition, a .jsonl.*{expected}"):
        load_grader(args)


def test_rows_that_no_function_returns_are_refused():
    args = script_args("grpo", dataset=sums(20))[1]
    with pytest.raises(UserError, match="it is a list; a function can return it"):
        load_grader(args)


def test_an_error_in_a_function_shows_its_traceback(python_file, tmp_path):
    path = python_file("def f():\n    yield {'question': {}['prompt']}")
    with pytest.raises(KeyError, match="prompt") as error:
        run("grpo", "--dataset", f"{path}:f", "--run_dir", tmp_path)
    assert error.traceback[-1].path == path


def rows_and_exit():
    yield row()
    sys.exit(3)


NO_ROWS = [  # what a function returns, and what the line says
    (None, " must return or yield rows, not None"),
    ([], " has no rows"),
    ({"train": sums(2)}, ": row 1 cannot be used: it is not a dict: 'train'"),
    (rows_and_exit(), " ends the program: SystemExit 3"),
]


@pytest.mark.parametrize("rows, expected", NO_ROWS)
def test_a_function_that_returns_no_rows_is_refused(rows, expected):
    assert refusal(rows) == f"--dataset test_data:problems_of.<locals>.<lambda>{expected}"


SHARED = """
texts = []

def f():
    texts.append("1+1=")
    return [{"question": text, "answer": 2} for text in texts]

def lengths(completions):
    return [len(text) for text in texts * len(completions)]
"""


def test_a_file_for_data_and_reward_is_one_module(python_file):
    """What one function stores, the other one sees. The next run gets a new module."""
    path = python_file(SHARED)
    other_spelling = path.parent / ".." / path.parent.name / path.name
    args = script_args("grpo", dataset=f"{path}:f", reward=f"{other_spelling}:lengths")[1]
    problem = Problem("1+1=", "2", [4, 5], {"prompts": "1+1="})
    for _ in range(2):
        grade = load_grader(args)
        assert dataset_function(args, "dataset")() == [{"question": "1+1=", "answer": 2}]
        (completion,) = grade([Completion(problem, [1], [0.0])])
        assert completion.reward == 4


# ------------------------------------------------------------------------------------- what pages show


def test_run_the_command_for_gsm8k(tmp_path, monkeypatch):
    """README's, without the hub, and with a tiny model."""
    asked = []

    def load_dataset(*names, split):
        asked.append((*names, split))
        return sums(9)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    model = save(new_model("qwen2", vocab_size=300, max_position_embeddings=1024), tmp_path / "model")
    tokenizer = ByT5Tokenizer(extra_ids=0)
    tokenizer.chat_template = TURNS
    tokenizer.save_pretrained(model)
    text = (ROOT / "README.md").read_text()
    (command,) = re.findall(r"^python grpo.py --model Qwen.*?(?=^```)", text, re.DOTALL | re.MULTILINE)
    words = shlex.split(command.replace("\\\n", ""))
    words[words.index("--model") + 1] = model
    output = completes("grpo", *words[2:], *SMALL, "--run_dir", tmp_path / "run")
    assert asked == [("openai/gsm8k", "main", "train"), ("openai/gsm8k", "main", "test")]
    assert "problems: 9 to train on, the first 8 of 9 held out; 8 of those" in output
    samples = read_lines(tmp_path / "run" / "samples.jsonl")
    assert len(samples) == 4
    for sample in samples:
        question, advice = sample["prompt"].split("\n")
        assert question == f"<user>{int(sample['answer']) - 1}+1=" and advice.endswith("42<assistant>")


TURN = {"from": "human", "value": "1+1="}
FILES = {  # what the functions read, as these datasets have it
    "cells.csv": "problem,answer\n1+1=,2\n",
    "chats.jsonl": {"conversations": [TURN, {"from": "gpt", "value": "2"}]},
    "dapo-math-17k.parquet": {"prompt": chat("user", "1+1="), "reward_model": {"ground_truth": "2"}},
    "openai/gsm8k": row("1+1=", "It is 2.\n#### 2"),
    "EleutherAI/hendrycks_math": {"problem": "1+1=", "solution": "It is $\\boxed{2}$."},
}


def test_the_functions_of_the_pages_give_rows(tmp_path, monkeypatch):
    (tmp_path / "cells.csv").write_text(FILES["cells.csv"])
    monkeypatch.chdir(tmp_path)

    def load_dataset(name, *_, split, data_files=None):
        return [FILES[data_files or name]]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    names = {"__name__": "page"}
    for page in ("README.md", "plumbing/README.md"):
        snippets = re.findall(r"^ *```python\n(.*?)^ *```", (ROOT / page).read_text(), re.S | re.M)
        (snippet,) = [text for text in snippets if "load_dataset" in text]
        exec(textwrap.dedent(snippet), names)
    functions = [x for x in names.values() if getattr(x, "__module__", "") == "page"]
    assert len(functions) == 5
    for function in functions:
        ((prompt, answer, _, _),) = problems_of(function(), policy_with(TURNS))
        assert prompt.startswith("<user>1+1=") and answer == "2"


# ---------------------------------------------------------------------------------------------- rows


def test_reward_functions_get_all_keys():
    """One that only other rows have is None."""
    first, second = problems_of([row(), row("1+2=") | {"level": 3}], reward="my.py:f")
    assert first.columns == row() | {"level": None, "prompts": "1+1="} and second.columns["level"] == 3
    ((_, answer, _, _),) = problems_of([{"question": "1+1="}], reads_answers=False)
    assert answer == ""


SOLUTION = "She has 7 apples and picks 9.\nThe answer is: 16"
SHOT = chat("system", "s", "user", "1+1=", "assistant", "2", "user", " 2\n")
QUESTIONS = [  # a question, the template's settings, and the prompt
    ("1+3=", None, "<user>1+3="),
    (SHOT, None, "<system>s<user>1+1=<assistant>2<user>2"),
    (chat("user", "3"), {"end": "!"}, "<user>3!"),
]


@pytest.mark.parametrize("question, settings, expected", QUESTIONS)
def test_a_question_is_text_or_messages(question, settings, expected):
    flags = {"chat_template_kwargs": settings}
    ((prompt, _, ids, columns),) = problems_of([row(question)], policy_with(TURNS), **flags)
    assert prompt == f"{expected}<assistant>" and len(ids) == len(prompt)
    assert columns["prompts"] == columns["question"] == question


def test_messages_need_a_chat_template_that_takes_them():
    """Text does not. The EOS that the tokenizer appends is dropped."""
    ((prompt, _, ids, _),) = problems_of([row("1+3=")])
    assert prompt == "1+3=" and len(ids) == 4
    assert "row 1 cannot be used: ValueError Cannot use chat template" in refusal([row(SHOT)])
    message = refusal([row(SHOT)], policy_with("{{ raise_exception('no!') }}"))
    assert message.endswith("row 1 cannot be used: TemplateError no!")


GOLD = [  # a row's answer, and the gold answer
    ("2 ", "2"),
    (2.5, "2.5"),
    (f"{SOLUTION}\n#### 16", "16"),
    ("so \\boxed{3}", "3"),
]


@pytest.mark.parametrize("answer, expected", GOLD)
def test_a_gold_answer_is_behind_a_marker_or_all(answer, expected):
    ((_, gold, _, _),) = problems_of([row(answer=answer)])
    assert gold == expected


PARTS = [{"role": "user", "content": [{"type": "text", "text": "1+3="}]}]
NO_QUESTION = "its question must be text, or messages with a role and text as content, not "
NO_ANSWER = (
    "its answer must be a number or one short line, or have one behind #### or in \\boxed{}, not "
)
BAD_ROWS = [  # a row, and why it cannot be used
    ({"problem": "3", "gold": "2"}, "it has no question; its keys are problem, gold"),
    (row() | {None: ["2"]}, "its keys must be text: ['question', 'answer', None]"),  # by csv.DictReader
    (row(answer=True), f"{NO_ANSWER}True"),
    (row(""), f"{NO_QUESTION}''"),
    (row(7), f"{NO_QUESTION}7"),
    (row(PARTS), NO_QUESTION),
    (row(SHOT[:3]), "its question ends with the assistant's reply"),
    ({"question": "3", "gold": 4}, "it has no answer; its keys are question, gold"),
    (row() | {"text": "3"}, "rename its key text: --reward uses that name for something else"),
    (row(answer=math.nan), f"{NO_ANSWER}nan"),
    (row(answer=["2"]), f"{NO_ANSWER}['2']"),
    (row(answer=SOLUTION), f"{NO_ANSWER}{SOLUTION!r}"),
    (row(answer="7" * 201), f"{NO_ANSWER}'777"),
    (row(answer="So x is 4. ####"), f"{NO_ANSWER}'So x is 4. ####'"),
]


@pytest.mark.parametrize("bad, expected", BAD_ROWS)
def test_the_first_row_that_cannot_be_used_ends_the_run(bad, expected):
    message = refusal([row("4"), bad, {}], policy_with(TURNS))
    assert f": row 2 cannot be used: {expected}" in message and len(message) < 450


def test_a_reward_function_may_read_a_whole_solution():
    ((_, answer, _, _),) = problems_of([row(answer=SOLUTION)], reward="my.py:f")
    assert answer == SOLUTION


def test_a_prompt_in_tokens_that_the_model_does_not_know_is_refused(tiny_policy):
    message = refusal([row(), row("Sum?")], tiny_policy)
    expected = "'Sum?' has no token, or tokens that the model does not know"
    assert message.endswith(f"row 2 cannot be used: {expected}")


def test_equal_questions_and_long_prompts_are_left_out():
    """And counted. A prompt is rendered once."""
    policy = policy_with(TURNS, limit=200)
    policy.tokenizer.apply_chat_template = Mock(wraps=policy.tokenizer.apply_chat_template)
    rows = sums(10) + [row("9" * 200)] + sums(3) + [sums(1)[0] | {"answer": "7"}]
    problems, notes = read_problems(script_args("grpo", dataset=lambda: rows)[1], "dataset", policy)
    assert [problem.answer for problem in problems.values()] == [str(i + 1) for i in range(10)]
    too_long = "1 too long for --max_new_tokens and the model's limit of 200 tokens"
    repeated = "with the question of an earlier row"
    two_answers = f"1 {repeated} and a different answer"
    assert notes == [f"left out of --dataset: {too_long}, 3 {repeated}, {two_answers}"]
    assert policy.tokenizer.apply_chat_template.call_count == 11
    assert f"has no problem; left out of --dataset: {too_long}" in refusal(rows[10:11], policy)


# ------------------------------------------------------------------------------- training and held out


def load(path, policy, rows, **flags):
    args = script_args("grpo", dataset=str(write_lines(path, rows)), **flags)[1]
    return load_problems(args, policy, load_grader(args))


def test_held_out_problems_are_apart_and_the_same_for_all_seeds(tmp_path, tiny_policy, capsys):
    """And for all orders of the rows. A worked solution is reduced to its answer."""
    path = tmp_path / "data.jsonl"
    rows = sums(100)
    stream, held_out = load(path, tiny_policy, rows + rows[:30], num_held_out=50, seed=1)
    assert capsys.readouterr().err == ""
    other, same_held_out = load(path, tiny_policy, rows[::-1], num_held_out=51, seed=2)
    line = "--dataset: the first prompt is '99+1=', and its answer '100'"
    assert capsys.readouterr().out == f"{line}\nproblems: 49 to train on, 51 held out\n"
    assert stream.problems[1:] == other.problems and held_out == same_held_out[:50]
    assert not {p.prompt for p in stream.problems} & {p.prompt for p in held_out}
    for p in stream.problems + held_out:
        assert p.prompt_ids == tiny_policy.tokenizer(p.prompt).input_ids
        assert p.answer == str(int(p.prompt.removesuffix("+1=")) + 1)
    with pytest.raises(UserError, match="^--num_held_out 100 leaves no problem for training: .* 100$"):
        load(path, tiny_policy, rows, num_held_out=100)
    stream, held_out = load(path, tiny_policy, rows, num_held_out=100, iterations=0)
    assert stream.problems == [] and len(held_out) == 100


def test_eval_dataset_gives_the_held_out_problems(tmp_path, own_policy, capsys):
    """Its first ones. Nothing is held out from training; prompts that are in both are counted."""
    path = str(write_lines(tmp_path / "evaluation.jsonl", sums(49)[37:]))
    flags = {"eval_dataset": path, "num_held_out": 8}
    stream, held_out = load(tmp_path / "data.jsonl", own_policy, sums(40), **flags)
    assert len(stream.problems) == 40
    assert [p.prompt for p in held_out] == [f"{i}+1=" for i in range(37, 45)]
    line = capsys.readouterr().out
    assert "\n--eval_dataset: the first prompt is '37+1=', and its answer '38'\n" in line
    assert "the first 8 of 12 held out; 3 of those held out are also in --dataset" in line


def test_leaks_are_counted_by_what_the_model_reads(tmp_path, own_policy, capsys):
    """Here one side is text, and the other messages or text with spaces that the template drops."""
    own_policy.tokenizer.chat_template = "{{ messages[0].content | trim }}"
    messages = [row(chat("user", f"{i}+1=")) for i in range(10)]
    spaces = [row(f" {i}+1=") for i in range(10, 15)]
    path = str(write_lines(tmp_path / "evaluation.jsonl", messages + spaces + [row("77+1=")]))
    load(tmp_path / "data.jsonl", own_policy, sums(40), eval_dataset=path)
    assert "16 held out; 15 of those held out are also in --dataset" in capsys.readouterr().out


NOTE = "note: the chat template ends an answer with <pad>, but the model stops only at <eos>; "
TURN_ENDS = {
    "<pad>": NOTE,
    "<eos><pad>": "",
    "{{ raise_exception('no!') }}": "",
}


@pytest.mark.parametrize("end", TURN_ENDS)
def test_a_model_that_does_not_stop_where_its_turns_end_is_told(end, own_policy, capsys):
    """A base model with the chat template of an instruct model never ends."""
    template = "{% for m in messages %}<unk>{{ m.content }}" + end + "\n{% endfor %}"
    own_policy.tokenizer.chat_template = template
    check_template(own_policy, script_args("grpo")[1])
    assert capsys.readouterr().out[: len(NOTE)] == TURN_ENDS[end]


# -------------------------------------------------------------------------------------------- epochs


def test_each_epoch_of_each_seed_is_a_different_permutation_however_it_is_taken():
    problems = list(range(50))
    epochs = set()
    for seed in (1, 2, 4097):
        taken = ProblemStream(problems, seed).take(160)
        stream = ProblemStream(problems, seed)
        pieces = [stream.take(20) for _ in range(8)]
        assert sum(pieces, []) == taken
        for start in (0, 50, 100):
            epoch = taken[start : start + 50]
            assert sorted(epoch) == problems
            epochs.add(tuple(epoch))
    assert len(epochs) == 9
