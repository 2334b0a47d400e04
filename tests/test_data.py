"""Datasets: files, columns, prompts, gold answers, rows that are left out, held-out problems."""

import csv
import json
import math
import re
import shlex
from types import SimpleNamespace
from unittest.mock import Mock

import pyarrow.parquet
import pytest
from conftest import ROOT, SMALL, completes, read_lines, save, script_args, write_lines
from datasets import Audio, ClassLabel, Dataset, DatasetDict, Features, Image, Json, List, Value
from test_architectures import new_model
from transformers import ByT5Tokenizer

from common import UserError, load_grader, load_problems
from plumbing.data import ProblemStream, check_template, read_rows, usable_rows

TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}{{ end }}<assistant>"


def policy_with(template=None, limit=None):
    """A model with a limit on positions, and a tokenizer with a token for each byte and two special
    ones, which appends an EOS."""
    tokenizer = ByT5Tokenizer(extra_ids=0)
    tokenizer.add_tokens(["<turn>", "<think>"], special_tokens=True)
    tokenizer.chat_template = template
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(max_position_embeddings=limit))
    embeddings = SimpleNamespace(num_embeddings=len(tokenizer))
    model = SimpleNamespace(config=config, get_input_embeddings=lambda: embeddings)
    return SimpleNamespace(tokenizer=tokenizer, model=model)


def read(path, flag="dataset", **flags):
    """The rows of a file or folder."""
    args = script_args("grpo", **{flag: str(path)}, **flags)[1]
    return list(read_rows(args, flag))


def problems_of(rows, policy=None, reads_answers=True, **flags):
    """[(prompt, gold answer, ids, columns)] of rows."""
    args = script_args("grpo", dataset="mine", **flags)[1]
    problems, _ = usable_rows(rows, "dataset", policy or policy_with(), args, reads_answers)
    return list(problems.values())


def refusal(rows, policy=None, **flags):
    with pytest.raises(UserError) as error:
        problems_of(rows, policy, **flags)
    return str(error.value)


def row(prompt="1+1=", answer="2"):
    return {"question": prompt, "answer": answer}


def sums(count):
    """With worked solutions."""
    return [row(f"{i}+1=", f"{i}+1={i + 1} #### {i + 1}") for i in range(count)]


def chat(*turns):
    """chat("user", "1+1=") -> [{"role": "user", "content": "1+1="}]"""
    pairs = zip(turns[::2], turns[1::2], strict=True)
    return [{"role": role, "content": content} for role, content in pairs]


# --------------------------------------------------------------------------------------------- files


def write_csv(path, rows, delimiter=","):
    with open(path, "w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, rows[0], delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)


# Cells that a reader that guesses types would change, and line separators inside a string
EXACT = [
    row("2024-01-31", "2024-02-01"),
    row("12345678901234567890123", "007"),
    row("None", "NaN"),
    row("a\u2028b\u0085c", "1e5"),
    row('"x", \n"y"', "True"),
]


def test_every_kind_of_file_has_the_same_rows(tmp_path):
    write_lines(tmp_path / "LINES.JSONL", EXACT)
    (tmp_path / "mark.json").write_text("\n" + json.dumps(EXACT, indent=1), encoding="utf-8-sig")
    write_csv(tmp_path / "cells.csv", EXACT)
    write_csv(tmp_path / "cells.tsv", EXACT, "\t")
    Dataset.from_list(EXACT).to_parquet(tmp_path / "data[1].parquet")
    Dataset.from_list(EXACT).save_to_disk(tmp_path / "saved")
    paths = list(tmp_path.iterdir())
    Dataset.from_list(sums(9)).to_parquet(tmp_path / "data1.parquet")  # [1] is not a pattern
    for path in paths:
        assert read(path) == EXACT, path


def test_a_folder_has_splits(tmp_path):
    """By default --dataset is "train", and --eval_dataset is "test"."""
    folder = tmp_path / "sums"
    folder.mkdir()
    Dataset.from_list(sums(9)).to_parquet(folder / "train-00000-of-00001.parquet")
    Dataset.from_list(EXACT).to_parquet(folder / "test.parquet")
    assert read(folder) == read(folder, "eval_dataset", eval_split="train") == sums(9)
    assert read(folder, dataset_split="test[:3]") == EXACT[:3]
    assert read(folder, "eval_dataset") == EXACT
    # One that was saved has any names; `load_dataset` would read only those that it knows.
    splits = DatasetDict(train=Dataset.from_list(sums(9)), train_sft=Dataset.from_list(EXACT))
    splits.save_to_disk(tmp_path / "saved")
    assert read(tmp_path / "saved") == sums(9)
    assert read(tmp_path / "saved", dataset_split="train_sft") == EXACT


CARD = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train*}
  - {split: test, path: main/test*}
- config_name: socratic
  data_files: socratic/train*
---
"""


@pytest.fixture
def like_gsm8k(tmp_path):
    """A folder with two configs, as on the hub."""
    for name in ("main/train", "main/test", "socratic/train"):
        Dataset.from_list(sums(9)).to_parquet(tmp_path / "gsm" / f"{name}-00000-of-00001.parquet")
    (tmp_path / "gsm" / "README.md").write_text(CARD)
    return tmp_path / "gsm"


SUM = '{"question": "1+1=", "answer": "2"}\n'
OTHER = '{"problem": "1+1=", "solution": "2"}\n'
UNREADABLE = [  # a flag, the files in its folder, and what the line says: flag and first cause
    ("dataset", {"test.jsonl": SUM}, "--dataset_split train: ValueError "),
    ("eval_dataset", {"train.jsonl": SUM}, "--eval_split test: ValueError "),
    ("dataset", {"train.jsonl": SUM, "test.jsonl": OTHER}, "--dataset_split train: CastError "),
]


@pytest.mark.parametrize("flag, files, expected", UNREADABLE)
def test_a_folder_that_cannot_be_read_is_told_by_its_first_cause(flag, files, expected, tmp_path):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=f"--{flag} {tmp_path} cannot be read with .*{expected}"):
        read(tmp_path, flag)


def test_a_folder_with_a_card_is_read_again_after_a_change(like_gsm8k):
    for count in (5, 7):
        path = like_gsm8k / "main" / "train-00000-of-00001.parquet"
        Dataset.from_list(sums(count)).to_parquet(path)
        assert read(like_gsm8k, dataset_config="main") == sums(count)


def test_run_the_command_for_gsm8k(like_gsm8k, tmp_path):
    """README's, with a folder and a tiny model in place of the hub's."""
    model = save(new_model("qwen2", vocab_size=300, max_position_embeddings=1024), tmp_path / "model")
    tokenizer = ByT5Tokenizer(extra_ids=0)
    tokenizer.chat_template = TURNS
    tokenizer.save_pretrained(model)
    text = (ROOT / "README.md").read_text()
    (command,) = re.findall(r"^python grpo.py --model Qwen.*?(?=^```)", text, re.DOTALL | re.MULTILINE)
    paths = {"openai/gsm8k": like_gsm8k, "Qwen/Qwen2.5-0.5B-Instruct": model}
    words = [paths.get(word, word) for word in shlex.split(command.replace("\\\n", ""))]
    output = completes("grpo", *words[2:], *SMALL, "--run_dir", tmp_path / "run")
    assert "problems: 9 to train on, the first 8 of 9 held out; 8 of those" in output
    instruction = words[words.index("--instruction") + 1]
    known = {(f"<user>{i}+1=\n{instruction}<assistant>", str(i + 1)) for i in range(9)}
    samples = read_lines(tmp_path / "run" / "samples.jsonl")
    shown = {(sample["prompt"], sample["answer"]) for sample in samples}
    assert len(shown) == 4 and shown < known


MISSING = [  # a file that exists, the flag and its value, and what the line says
    ("a.jsonl.gz", "dataset", "a.jsonl.gz", "none of these: .jsonl, .json, .csv, .tsv, .parquet"),
    ("a", "dataset", "b.jsonl", "FileNotFoundError"),
    ("a", "eval_dataset", "b.parquet", "FileNotFoundError"),
]


@pytest.mark.parametrize("file, flag, name, expected", MISSING)
def test_a_file_is_looked_for_before_the_model_is_loaded(file, flag, name, expected, tmp_path):
    """By `load_grader`, which every script calls first. No file is looked up on the hub."""
    (tmp_path / file).write_bytes(b"7")
    args = SimpleNamespace(**{"dataset": "addition", "eval_dataset": "", flag: str(tmp_path / name)})
    with pytest.raises(UserError, match=f"^--{flag} .*{name} cannot be read: .*{expected}"):
        load_grader(args)


JUNK = {"bytes": b"junk", "path": None}  # an image or audio, which would need a library
LABEL = ClassLabel(names=["no", "yes"])
KINDS = [  # of a cell: what it is in the table, and what its file shows
    (Image(), JUNK, JUNK),
    (Audio(), JUNK, JUNK),
    (LABEL, 1, "yes"),
    (LABEL, -1, None),
    (Value("float32"), 0.1, 0.1),
    (Value("float64"), 0.1, 0.1),
]


def test_a_cell_is_as_its_file_shows_it_at_every_depth(tmp_path):
    kinds = {"json": Json()}
    raw = {"json": '{"a": 1}'}
    shown = {"json": {"a": 1}}
    for i, (kind, cell, expected) in enumerate(KINDS):
        name = str(i)
        kinds[name] = kind
        kinds[name + "s"] = List({"deep": kind})
        raw |= {name: cell, name + "s": [{"deep": cell}]}
        shown |= {name: expected, name + "s": [{"deep": expected}]}
    table = pyarrow.Table.from_pylist([raw], Features(kinds).arrow_schema)
    pyarrow.parquet.write_table(table, tmp_path / "data.parquet")
    Dataset(table).save_to_disk(tmp_path / "saved")
    for path in tmp_path.iterdir():
        assert read(path) == [shown]


def test_the_default_dataset_can_be_evaluated_on():
    assert read("addition", "eval_dataset") == read("addition")


LINES = {  # what is in a file: its rows
    SUM + "what?\n": [row(), "what?"],
    "[" * 10_000 + "\n" + SUM: ["[" * 10_000, row()],
    '["a", "b"]\n["c"]\n' + SUM: [["a", "b"], ["c"], row()],
    "[" + SUM.strip() + ",\n" + SUM.strip() + "]": [row(), row()],
    "\n\r\n" + SUM: [row()],
    '{\n "data": [\n  7\n ]\n}': [{"data": [7]}],
    "": [],
}


@pytest.mark.parametrize("text", LINES, ids=lambda text: f"{text:.10}")
def test_a_line_that_is_not_json_is_an_unreadable_row(text, tmp_path):
    path = tmp_path / "text.jsonl"
    path.write_text(text)
    assert read(path) == LINES[text]


def test_bytes_that_are_not_utf8_cost_only_their_rows(tmp_path):
    """As when lines of two files were put together."""
    path = tmp_path / "data.csv"
    write_csv(path, [*sums(20), row("né", "2"), row("2", "né")])
    path.write_bytes(path.read_bytes().replace("é".encode(), "é".encode("latin-1")))
    found = read(path)
    assert found[:20] == sums(20) and len(problems_of(found)) == 20


HEADER = "question,answer\n"
CSV = [  # a file's text, and its rows or what the line says
    (HEADER + "1" * 200_000 + ",3\n", [row("1" * 200_000, "3")]),
    (HEADER + '"1,000\n+1=",1001\n', [row("1,000\n+1=", "1001")]),
    (HEADER + '12" + 1",13"\n', [row('12" + 1"', '13"')]),
    (HEADER + "7+1=\n1,000+1=,1001\n", [row("7+1=", None), row("1", "000+1=") | {None: ["1001"]}]),
    (HEADER + '1+1=,2\n"2+1=,3\n3+1=,4\n', "a quote in row 2 may not be closed"),
    ("question,answer,answer\n1+1=,2,3\n", "two columns with the name answer"),
]


@pytest.mark.parametrize("text, expected", CSV, ids=lambda x: f"{x!s:.40}")
def test_a_csv_file_is_read_exactly_or_refused(text, expected, tmp_path):
    path = tmp_path / "cells.csv"
    path.write_text(text)
    if isinstance(expected, list):
        assert read(path) == expected
    else:
        with pytest.raises(UserError, match=f"--dataset {path} cannot be read: .*{expected}"):
            read(path)


# ---------------------------------------------------------------------------------- columns, prompts


NESTED = {"prompt": chat("user", "1+1="), "extra": {"gold": "2"}, "a.b": "3", "a": {"b": "4"}, "n": 5}
NESTED["j"] = '{"k": {"gold": ["6"]}}'
COLUMNS = [  # columns, prompt and gold answer, and what the line at the start says
    ("prompt", "extra.gold", "1+1=", "2", "answer: extra.gold (the first: 2), not used: a.b, a, n, j"),
    ("prompt", "a.b", "1+1=", "3", "answer: a.b (the first: 3), not used: extra, a, n, j"),
    ("{a.b} and {n}", "n", "3 and 5", "5", "answer: n (the first: 5), not used: prompt, extra, a, j"),
    ("prompt", "j.k.gold", "1+1=", "6", "answer: j.k.gold (the first: 6), not used: extra, a.b, a, n"),
    ("{extra.gold}{a}", "n", '2{"b": "4"}', "5", "answer: n (the first: 5), not used: prompt, a.b, j"),
]


@pytest.mark.parametrize("prompt_column, answer_column, prompt, answer, line", COLUMNS)
def test_a_column_may_be_a_path_or_several(prompt_column, answer_column, prompt, answer, line, capsys):
    """A column with the whole name comes first. The EOS that the tokenizer appends is dropped."""
    flags = {"prompt_column": prompt_column, "answer_column": answer_column}
    ((text, gold, ids, columns),) = problems_of([NESTED], **flags)
    assert (text, gold, len(ids)) == (prompt, answer, len(prompt))
    assert columns.items() > NESTED.items()
    assert capsys.readouterr().out == f"prompt: {prompt_column}, {line}\n"


def test_reward_functions_get_all_columns(capsys):
    """One that only other rows have is None."""
    first, second = problems_of([row(), row("1+2=") | {"level": 3}], reward="my.py:f")
    assert first.columns == row() | {"level": None, "prompts": "1+1="} and second.columns["level"] == 3
    assert capsys.readouterr().out.endswith("(the first: 2), columns for --reward alone: level\n")
    problems_of([{"question": "1+1="}], reward="my.py:f", reads_answers=False)
    assert capsys.readouterr().out == "prompt: question, answer: none\n"


SHOT = chat("user", "1+1=", "assistant", "2")
PARTS = [{"type": "text", "text": "1+", "image": None}, {"type": "text", "text": "3="}]
SYSTEM = chat("system", "s", "user", "3")
NAMED = [message | {"name": None} for message in SYSTEM]  # null in JSON, which is not Python
CALL = chat("user", "1+3=", "assistant", None, "tool", "4", "user", "so?")
CALL[1]["tool_calls"] = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
FLAGS = {"system_prompt": "S", "instruction": "I"}
PROMPTS = [  # cell, flags, rendered prompt, what reward functions get (None: the cell)
    ("1+3=", {}, "<user>1+3=", None),
    (chat("user", " 1+3=\n"), {}, "<user>1+3=", None),
    (chat("user", PARTS), {}, "<user>1+3=", chat("user", "1+3=")),
    (json.dumps(NAMED, indent=1), {}, "<system>s<user>3", SYSTEM),
    (f" {SHOT}", {}, "<user>1+1=", SHOT[:1]),  # as pandas writes it into a CSV
    ("[{1}, 2]", {}, "<user>[{1}, 2]", "[{1}, 2]"),
    ([*SHOT, *chat("user", "2")], {}, "<user>1+1=<assistant>2<user>2", None),
    ([*SHOT, *chat("assistant", "#### 2")], {}, "<user>1+1=", SHOT[:1]),
    ("3", FLAGS, "<system>S<user>3\nI", "3\nI"),
    ("3", {"chat_template_kwargs": {"end": "!"}}, "<user>3!", None),
    (SYSTEM, FLAGS, "<system>S<user>3\nI", chat("system", "S", "user", "3\nI")),
    (
        CALL,
        {},
        "<user>1+3=<assistant><tool>4<user>so?",
        [*CALL[:1], CALL[1] | {"content": ""}, *CALL[2:]],
    ),
]


@pytest.mark.parametrize("cell, flags, expected, shown", PROMPTS)
def test_prompts_are_text_or_messages_without_trailing_replies(cell, flags, expected, shown):
    ((prompt, _, ids, columns),) = problems_of([row(cell)], policy_with(TURNS), **flags)
    assert prompt == f"{expected}<assistant>" and len(ids) == len(prompt)
    assert columns["prompts"] == (cell if shown is None else shown) and columns["question"] == cell


NO_PROMPT = "without a prompt in --prompt_column question (first: row 1 "
NO_GOLD = (
    "without a gold answer in --answer_column answer (it is one short line, or behind #### or \\boxed)"
)
REFUSED = "that the model or its chat template cannot take (first: row 1 "
FIRST = "{{ messages[0].content }}"
# With a default system prompt that names a special token, as Magistral's
MARKED = "<turn>system <think> first.</s>"
MARKED += "{% for m in messages %}<turn>{{ m.role }} {{ m.content }}</s>{% endfor %}"
UNMARKED = "A <think> first.{% for m in messages %} {{ m.role }}: {{ m.content }}</s>{% endfor %}"
BAD_ROWS = [  # prompt, answer, chat template, why the row is left out
    (" \n", "2", TURNS, f"{NO_PROMPT}' \\n')"),
    (["1+1="], "2", TURNS, f"{NO_PROMPT}['1+1='])"),
    (chat("user", [*PARTS, {"type": "image"}]), "2", TURNS, NO_PROMPT),
    ([{"content": "3"}], "2", TURNS, NO_PROMPT),
    (
        [*SHOT, *chat("user", "<turn>user 3")],
        "2",
        MARKED,
        f"{REFUSED}\"it already has the chat template's <turn>",
    ),
    (chat("user", "3", "user", "4"), "2", None, f'{REFUSED}"several messages'),
    ([*SHOT, *chat("user", "3")], "2", FIRST, f'{REFUSED}"the chat template drops the last message'),
    ("3", "2", "{{ raise_exception('no!') }}", f"{REFUSED}'no!: 3')"),
    ("3\ud83d", "2", TURNS, REFUSED),
    ("3", "\ud83d", TURNS, REFUSED),
    ("1" * 90, "2", TURNS, "the model's limit of 150 tokens (first: row 1"),
    ("3", {"gold": "2"}, TURNS, f"{NO_GOLD} (first: row 1 {{'gold': '2'}})"),
]


@pytest.mark.parametrize("prompt, answer, template, expected", BAD_ROWS)
def test_a_refusal_names_the_reason_the_cell_and_the_columns(prompt, answer, template, expected):
    message = refusal([row(prompt, answer)], policy_with(template, limit=150))
    assert expected in message and message.endswith("its columns are question, answer")


@pytest.mark.parametrize("template", [MARKED, UNMARKED])
def test_a_prompt_may_name_special_tokens_that_do_not_begin_a_turn(template):
    flags = {"system_prompt": "<think> first.", "instruction": "Stop with </s>."}
    ((prompt, *_),) = problems_of([row("1+1=<think>")], policy_with(template), **flags)
    assert "1+1=<think>\nStop with </s>." in prompt


def test_a_prompt_in_tokens_that_the_model_does_not_know_is_refused(tiny_policy):
    message = refusal([row("What is 1+1?")], tiny_policy)
    assert f"{REFUSED}'no token, or tokens that the model does not know')" in message


SOLUTION = "She has 7 apples and picks 9, so she has 16."
GOLD = [  # the cell, the gold answer of the verifier, and that of a reward function
    ("2 ", "2", "2"),
    (2.5, "2.5", "2.5"),
    (False, "false", "false"),
    ([10], "", ""),
    ("[10]", "[10]", "[10]"),
    ('["20"]', "20", "20"),
    ("[1, 2]", "[1, 2]", "[1, 2]"),
    ('{"fn_name": "f"}', "", '{"fn_name": "f"}'),
    ("So x is 4. ####", "", "So x is 4. ####"),
    ("\\boxed{4", "", "\\boxed{4"),
    (["so \\boxed{3}"], "3", "3"),
    (f"{SOLUTION}\n#### 16", "16", "16"),
    (SOLUTION, SOLUTION, SOLUTION),  # it is short: the line at the start shows it
    (f"{SOLUTION}\nThe answer is: 16", "", f"{SOLUTION}\nThe answer is: 16"),
    ("7" * 201, "", "7" * 201),
    (None, "", ""),
    (math.inf, "", ""),
    (["1", "2"], "", ""),
]


@pytest.mark.parametrize("cell, expected, rewarded", GOLD, ids=lambda x: f"{x!s:.20}")
def test_a_gold_answer_is_short_or_behind_a_marker(cell, expected, rewarded):
    """Anything else leaves the row out, unless a reward function reads it."""
    for reward, gold in (("", expected), ("my.py:f", rewarded)):
        if gold:
            ((_, answer, _, _),) = problems_of([row("1+1=", cell)], reward=reward)
            assert answer == gold
        else:
            assert "1 without a gold answer" in refusal([row("1+1=", cell)], reward=reward)


HALF = {"prompt_column": "{n} {level}", "answer_column": "n"}
AIME = {"problem": "1+1=", "solution": "2"}
REFUSALS = [  # rows, flags, and what the line says
    ([], {}, "--dataset mine has no rows"),
    ([row(answer="")], {"reward": "my.py:f"}, "answer (if --reward needs none, drop `answer`"),
    ([{"question": "1+1=", "a": "{'b': 2}"}], {"answer_column": "a.b"}, "row 1 \"{'b': 2}\")"),
    ([NESTED], HALF, "without a prompt in --prompt_column {n} {level} (first: row 1 None)"),
    # As AIME beside DAPO-17k: the columns of the training set would not be of help.
    ([AIME], {"eval_dataset": "x.json"}, "--prompt_column and --answer_column are the same for both"),
]


@pytest.mark.parametrize("rows, flags, expected", REFUSALS)
def test_a_refusal_of_all_rows_says_what_to_change(rows, flags, expected):
    assert expected in refusal(rows, **flags)


# ----------------------------------------------------------------------------- rows that are left out


def test_a_tenth_may_be_left_out_besides_equal_prompts():
    """For all reasons together."""
    bad = [row("", "1"), row("9" * 200, "2")]
    policy = policy_with(TURNS, limit=200)
    assert len(problems_of(bad + sums(18), policy)) == 18
    assert "2 rows cannot be used" in refusal(bad + sums(17), policy)
    assert len(problems_of((sums(49) + bad[:1]) * 20, policy)) == 49
    for rows in (bad[:1] * 25 + sums(225), sums(225) + bad[:1] * 25):  # in any order
        assert len(problems_of(rows, policy)) == 225


def test_a_prompt_is_rendered_once():
    policy = policy_with(TURNS)
    render = Mock(wraps=policy.tokenizer.apply_chat_template)
    policy.tokenizer.apply_chat_template = render
    problems_of(sums(10) * 5, policy)
    assert render.call_count == 10 + 1  # what the template writes around a message


def test_the_line_at_the_start_counts_the_rows_that_are_left_out():
    """With the first row of each kind. A row has one reason."""
    bad = [row("", "1"), row("x", {"gold": 1}), "x", row("", "2"), row("1+1=", "3"), row("9" * 200)]
    args = script_args("grpo", dataset="mine")[1]
    problems, notes = usable_rows(sums(60) + bad, "dataset", policy_with(TURNS, limit=200), args)
    kinds = [
        f"2 {NO_PROMPT}'')",
        f"1 {NO_GOLD} (first: row 62 {{'gold': 1}})",
        "1 unreadable (first: row 63 'x')",
        "1 too long for --max_new_tokens and the model's limit of 200 tokens (first: row 66 '<user>999",
        "1 with the prompt of an earlier row",
    ]
    kinds[0] = kinds[0].replace("row 1 ", "row 61 ")
    (note,) = notes
    assert len(problems) == 60 and note.startswith(f"left out of --dataset: {kinds[0]}")
    assert all(kind in note for kind in kinds)


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
    line = "prompt: question, answer: answer (the first: 100)"
    assert capsys.readouterr().out == f"{line}\nproblems: 49 to train on, 51 held out\n"
    assert stream.problems[1:] == other.problems and held_out == same_held_out[:50]
    assert not {p.prompt for p in stream.problems} & {p.prompt for p in held_out}
    for p in stream.problems + held_out:
        assert p.prompt_ids == tiny_policy.tokenizer(p.prompt).input_ids
        assert p.answer == str(int(p.prompt.removesuffix("+1=")) + 1)
    with pytest.raises(UserError, match="^--num_held_out 100 leaves no problem for training: .* 100$"):
        load(path, tiny_policy, rows, num_held_out=100)


def test_eval_dataset_gives_the_held_out_problems(tmp_path, own_policy, capsys):
    """Its first ones. Nothing is held out from training; prompts that are in both are counted."""
    path = str(write_lines(tmp_path / "evaluation.jsonl", [*sums(49)[37:], row("")]))
    flags = {"eval_dataset": path, "num_held_out": 8}
    stream, held_out = load(tmp_path / "data.jsonl", own_policy, sums(40), **flags)
    assert len(stream.problems) == 40
    assert [p.prompt for p in held_out] == [f"{i}+1=" for i in range(37, 45)]
    line = capsys.readouterr().out
    assert "\n--eval_dataset: prompt: question, answer: answer (the first: 38)\n" in line
    assert "the first 8 of 12 held out; left out of --eval_dataset: 1 without a prompt in" in line
    assert "; 3 of those held out are also in --dataset" in line


def test_leaks_are_counted_by_what_the_model_reads(tmp_path, own_policy, capsys):
    """Here one side is text, and the other messages or text with spaces that the template drops. Which
    problems are held out depends on the rows as they are."""
    own_policy.tokenizer.chat_template = "{{ messages[0].content | trim }}"
    messages = [row(chat("user", f"{i}+1=")) for i in range(10)]
    spaces = [row(f" {i}+1=") for i in range(10, 15)]
    path = str(write_lines(tmp_path / "evaluation.jsonl", messages + spaces + [row("77+1=")]))
    load(tmp_path / "data.jsonl", own_policy, sums(40), eval_dataset=path)
    assert "16 held out; 15 of those held out are also in --dataset" in capsys.readouterr().out
    load(tmp_path / "data.jsonl", own_policy, sums(10) + messages, num_held_out=10)
    line = capsys.readouterr().out
    assert "10 to train on, 10 held out; " in line and "of those held out are also in" in line


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


def test_chat_template_kwargs_need_a_template(tmp_path, tiny_policy):
    with pytest.raises(UserError, match="--chat_template_kwargs: --model tiny-moe has no chat"):
        load(tmp_path / "data.jsonl", tiny_policy, sums(9), chat_template_kwargs={"a": 1})


def test_without_training_all_problems_may_be_held_out(tmp_path, tiny_policy):
    stream, held_out = load(tmp_path / "data.jsonl", tiny_policy, sums(9), iterations=0)
    assert stream.problems == [] and len(held_out) == 9


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
