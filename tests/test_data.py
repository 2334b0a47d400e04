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
from datasets import Audio, Dataset, DatasetDict, Features, Image, Json, List, Value
from test_architectures import new_model
from transformers import ByT5Tokenizer

import plumbing.data
from common import UserError, load_grader, load_problems, verify
from plumbing.data import ProblemStream, read_rows, usable_rows

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


def read(path, flag="dataset", **flags):
    """The rows of a file or folder."""
    args = script_args("grpo", **{flag: str(path)}, **flags)[1]
    return list(read_rows(args, flag))


def problems_of(rows, policy=None, **flags):
    """[(prompt, gold answer, ids, columns)] of rows."""
    args = script_args("grpo", dataset="mine", **flags)[1]
    problems, _ = usable_rows(rows, "dataset", policy or policy_with(), args)
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
    write_lines(tmp_path / "lines.jsonl", EXACT)
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


CARD = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train*}
  - {split: test, path: main/test*}
- config_name: socratic
  data_files:
  - {split: train, path: socratic/train*}
  - {split: test, path: socratic/test*}
---
"""


@pytest.fixture
def like_gsm8k(tmp_path):
    """A folder with two configs, as on the hub."""
    for name in ("main/train", "main/test", "socratic/train", "socratic/test"):
        Dataset.from_list(sums(9)).to_parquet(tmp_path / "gsm" / f"{name}-00000-of-00001.parquet")
    (tmp_path / "gsm" / "README.md").write_text(CARD)
    return tmp_path / "gsm"


def test_configs_and_splits_that_exist_are_named(like_gsm8k, tmp_path):
    assert read(like_gsm8k, dataset_config="main") == sums(9)
    assert read(like_gsm8k, "eval_dataset", dataset_config="main") == sums(9)
    for flag in ("dataset", "eval_dataset"):
        with pytest.raises(UserError, match="--dataset_config can be main, socratic"):
            read(like_gsm8k, flag)
    with pytest.raises(UserError, match="'other' not found. .*main.*socratic"):
        read(like_gsm8k, dataset_config="other")
    with pytest.raises(UserError, match="'train', 'test'"):
        read(like_gsm8k, dataset_config="main", dataset_split="validation")
    DatasetDict(train=Dataset.from_list(EXACT)).save_to_disk(tmp_path / "splits")
    assert read(tmp_path / "splits") == EXACT
    with pytest.raises(UserError, match="it has no split validation, but train"):
        read(tmp_path / "splits", dataset_split="validation")


def test_a_folder_with_a_card_is_read_again_after_a_change(like_gsm8k):
    for count in (5, 7):
        path = like_gsm8k / "main" / "train-00000-of-00001.parquet"
        Dataset.from_list(sums(count)).to_parquet(path)
        assert read(like_gsm8k, dataset_config="main") == sums(count)


def word_problems(first):
    """With the marks that GSM8K has for a calculator."""
    rows = []
    for n in range(first, first + 6):
        question = (
            f"Half of Ada's {2 * n} plums are ripe. Each costs $1,000. What does she get for them?"
        )
        work = (
            f"{2 * n}/2=<<{2 * n}/2={n}>>{n} are ripe.\nThat is {n}*1000=$<<{n}*1000={n}000>>{n},000."
        )
        rows.append(row(question, f"{work}\n#### {n},000"))
    return rows


def test_run_the_command_for_gsm8k(like_gsm8k, tmp_path):
    """README's, with a folder and a tiny model in place of the hub's."""
    model = save(new_model("qwen2", vocab_size=300, max_position_embeddings=1024), tmp_path / "model")
    tokenizer = ByT5Tokenizer(extra_ids=0)
    tokenizer.chat_template = TURNS
    tokenizer.save_pretrained(model)
    for n, split in enumerate(("train", "test"), start=1):
        path = like_gsm8k / "main" / f"{split}-00000-of-00001.parquet"
        Dataset.from_list(word_problems(20 * n)).to_parquet(path)
    text = (ROOT / "README.md").read_text()
    (command,) = re.findall(r"^python grpo.py --model Qwen.*?(?=^```)", text, re.DOTALL | re.MULTILINE)
    paths = {"openai/gsm8k": like_gsm8k, "Qwen/Qwen2.5-0.5B-Instruct": model}
    words = [paths.get(word, word) for word in shlex.split(command.replace("\\\n", ""))]
    output = completes("grpo", *words[2:], *SMALL, "--run_dir", tmp_path / "run")
    assert "problems: 6 to train on, 6 held out\n" in output
    instruction = words[words.index("--instruction") + 1]
    solutions = {
        f"<user>{p['question']}\n{instruction}<assistant>": p["answer"] for p in word_problems(20)
    }
    samples = read_lines(tmp_path / "run" / "samples.jsonl")
    assert len({sample["prompt"] for sample in samples}) == 4
    for sample in samples:
        solution = solutions[sample["prompt"]]
        assert solution.endswith(f"#### {sample['answer']}")
        assert verify(solution, sample["answer"]) == (1.0, "correct")
        assert verify(f"{solution} dollars", sample["answer"]) == (0.0, "wrong")


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.xlsx", "a.txt", "a"])
def test_other_kinds_of_files_are_not_looked_up_on_the_hub(name, tmp_path, monkeypatch):
    monkeypatch.setattr(plumbing.data, "load_rows", lambda *_: pytest.fail("looked up"))
    (tmp_path / name).write_bytes(b"7")
    with pytest.raises(UserError, match=f"{name} .* files: .jsonl, .json, .csv, .tsv, .parquet"):
        read(tmp_path / name)


def test_the_case_of_a_file_name_does_not_matter(tmp_path):
    assert read(write_lines(tmp_path / "A.JSONL", EXACT)) == EXACT


def test_images_and_audio_that_nobody_reads_are_not_decoded(tmp_path):
    """They are damaged, and need libraries. Lists of them are common. A column of JSON is
    decoded, or it would be text."""
    junk = {"bytes": b"junk", "path": None}
    rows = [row() | {"image": junk, "images": [junk], "audio": junk, "extra": {"image": junk}}]
    kinds = {"image": Image(), "images": List(Image()), "audio": Audio(), "extra": {"image": Image()}}
    kinds |= {"question": Value("string"), "answer": Value("string"), "json": Json()}
    table = pyarrow.Table.from_pylist([rows[0] | {"json": '{"a": 1}'}], Features(kinds).arrow_schema)
    rows[0]["json"] = {"a": 1}
    pyarrow.parquet.write_table(table, tmp_path / "data.parquet")
    Dataset(table).save_to_disk(tmp_path / "saved")
    for path in tmp_path.iterdir():
        assert read(path) == rows


def test_the_default_dataset_can_be_evaluated_on():
    assert read("addition", "eval_dataset") == read("addition")


GOOD = '{"question": "1+1=", "answer": "2"}\n'
LINES = {  # what is in a file: its rows
    GOOD + "what?\n": [row(), "what?"],
    "[" * 10_000 + "\n" + GOOD: ["[" * 10_000, row()],
    GOOD + '{"a":' * 10_000: [row(), '{"a":' * 10_000],
    "9" * 5_000 + "\n" + GOOD: ["9" * 5_000, row()],
    '["a", "b"]\n["c"]\n' + GOOD: [["a", "b"], ["c"], row()],
    "[" + GOOD.strip() + ",\n" + GOOD.strip() + "]": [row(), row()],
    "\n\r\n" + GOOD: [row()],
    "": [],
}


@pytest.mark.parametrize("text", LINES, ids=lambda text: f"{text:.10}")
def test_a_line_that_is_not_json_is_an_unreadable_row(text, tmp_path):
    path = tmp_path / "text.jsonl"
    path.write_text(text)
    assert read(path) == LINES[text]


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_bytes_that_are_not_utf8_cost_only_their_rows(kind, tmp_path):
    """As when lines of two files were put together."""
    path = tmp_path / f"data.{kind}"
    rows = [*sums(20), row("né", "2"), row("2", "né")]
    if kind == "csv":
        write_csv(path, rows)
    else:
        path.write_text("".join(json.dumps(each, ensure_ascii=False) + "\n" for each in rows), "utf-8")
    path.write_bytes(path.read_bytes().replace("é".encode(), "é".encode("latin-1")))
    found = read(path)
    assert found[:20] == sums(20) and len(problems_of(found)) == 20


def test_a_csv_cell_may_be_long_and_a_row_with_a_surplus_cell_is_left_out(tmp_path):
    """Its cells may have moved to other columns."""
    path = tmp_path / "cells.csv"
    path.write_text("question,answer\n1+1=,2\n" + "1" * 200_000 + ",3\n1,000+1=,1001\n7+1=\n")
    rows = read(path)
    assert rows[1]["question"] == "1" * 200_000
    problems = problems_of(rows + sums(30))
    assert len(problems) == 31 + 1 - 1  # 1+1= is there twice
    message = refusal(rows[2:])
    assert "1 with more cells than the header (first: row 1 ['1001'])" in message
    assert "1 without a gold answer (first: row 2 None)" in message


# ---------------------------------------------------------------------------------- columns, prompts


def test_a_column_may_be_a_path():
    """A column with the whole name comes first. Reward functions get all columns; one that only other
    rows have is None. The EOS that the tokenizer appends to a prompt is dropped."""
    nested = {"prompt": chat("user", "1+1="), "extra": {"gold": "2"}, "a.b": "3", "a": {"b": "4"}}
    rows = [nested, nested | {"prompt": chat("user", "1+2="), "level": 3}]
    for column, expected in {"extra.gold": "2", "a.b": "3"}.items():
        problem, other = problems_of(rows, prompt_column="prompt", answer_column=column)
        assert problem[:2] == ("1+1=", expected) and len(problem[2]) == 4
        assert problem[3] == nested | {"level": None, "prompts": nested["prompt"]}
        assert other[3]["level"] == 3


SHOT = chat("user", "1+1=", "assistant", "2")
PARTS = [{"type": "text", "text": "1+", "image": None}, {"type": "text", "text": "3="}]
SYSTEM = chat("system", "s", "user", "3")
CALL = chat("user", "1+3=", "assistant", None, "tool", "4", "user", "so?")
CALL[1]["tool_calls"] = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
FLAGS = {"system_prompt": "S", "instruction": "I"}
PROMPTS = [  # cell, flags, rendered prompt, what reward functions get (None: the cell)
    ("1+3=", {}, "<user>1+3=", None),
    (chat("user", " 1+3=\n"), {}, "<user>1+3=", None),
    (chat("user", PARTS), {}, "<user>1+3=", chat("user", "1+3=")),
    ([*SHOT, *chat("user", "2")], {}, "<user>1+1=<assistant>2<user>2", None),
    ([*SHOT, *chat("assistant", "#### 2")], {}, "<user>1+1=", SHOT[:1]),
    ("3", FLAGS, "<system>S<user>3\nI", "3\nI"),
    ("3", {"chat_template_kwargs": '{"end": "!"}'}, "<user>3!", None),
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


NO_TEXT = "with a message that lacks a role, or is not text (first: row 1 {'role'"
FIRST = "{{ messages[0].content }}"
BAD_ROWS = [  # prompt, answer, chat template, why the row is left out
    (" \n", "2", TURNS, "without a prompt (first: row 1 ' \\n')"),
    (["1+1="], "2", TURNS, "without a prompt (first: row 1 ['1+1='])"),
    (chat("user", [*PARTS, {"type": "image"}]), "2", TURNS, NO_TEXT),
    (chat("user", [{"type": "text"}]), "2", TURNS, NO_TEXT),
    ("<user>3</s>", "2", TURNS, "already have the chat template's special tokens"),
    ("1" * 90, "2", TURNS, "the model's limit of 150 tokens (first: row 1"),
    (chat("user", "3", "user", "4"), "2", None, "need a chat template"),
    ([*SHOT, *chat("user", "3")], "2", FIRST, "that the chat template drops"),
    ("3", "2", "{{ raise_exception('no!') }}", "refuses (first: row 1 'no!'"),
    ("3", {"gold": "2"}, TURNS, "without a gold answer (first: row 1 {'gold': '2'})"),
    ("3", "", TURNS, "without a gold answer (first: row 1 '')"),
    ("3\ud83d", "2", TURNS, "text that is not valid Unicode (first: row 1 '<user>3\\ud83d"),
    ("3\udcff", "2", None, "text that is not valid Unicode (first: row 1 '3\\udcff'"),
    (chat("user", "\udc00"), "2", TURNS, "text that is not valid Unicode"),
    ("3", "\ud83d", TURNS, "text that is not valid Unicode (first: row 1 '\\ud83d')"),
    ("3", math.inf, TURNS, "without a gold answer (first: row 1 inf)"),
]


@pytest.mark.parametrize("prompt, answer, template, expected", BAD_ROWS)
def test_a_refusal_names_the_reason_the_cell_and_the_columns(prompt, answer, template, expected):
    message = refusal([row(prompt, answer)], policy_with(template, limit=150))
    assert expected in message and message.endswith("are question, answer")


GOLD = [  # the cell, the gold answer
    ("2 ", "2"),
    (2, "2"),
    (2.5, "2.5"),
    (10**400, str(10**400)),  # too large for a float
    (["10"], "10"),
    ('["10"]', '["10"]'),  # a list inside text is text
    ("so #### 2", "2"),
    ("The answer is 2", "The answer is 2"),
]


@pytest.mark.parametrize("cell, expected", GOLD, ids=lambda x: f"{x!s:.20}")
def test_a_gold_answer_is_text_or_a_number(cell, expected):
    ((_, answer, _, _),) = problems_of([row("1+1=", cell)])
    assert answer == expected


OPTIONS = [  # --chat_template_kwargs that make it something else, the reason
    ('{"tokenize": true}', "that --chat_template_kwargs do not turn into text"),
    ('{"tokenize": true, "return_dict": true}', "that --chat_template_kwargs do not turn into text"),
    ('{"continue_final_message": true}', "that the chat template refuses"),
    ('{"messages": []}', "that the chat template refuses"),
    ('{"conversation": []}', "that the chat template refuses"),
]


@pytest.mark.parametrize("options, expected", OPTIONS)
def test_options_of_the_chat_template_that_cannot_be_used_are_refused(options, expected):
    assert expected in refusal(sums(3), policy_with(TURNS), chat_template_kwargs=options)


def test_a_refusal_without_rows_or_columns_or_gold_answers():
    assert refusal([]) == "--dataset mine has no rows"
    assert refusal(["x"]).endswith("1 unreadable (first: row 1 'x')")
    message = refusal([row(answer="")] * 16, reward="my.py:f")
    assert "16 without a gold answer (if --reward needs none, drop `answer` from its " in message


# ----------------------------------------------------------------------------- rows that are left out


def test_a_tenth_may_be_left_out_besides_equal_prompts():
    bad = [row("", "1"), row("", "2")]
    assert len(problems_of(sums(18) + bad)) == 18
    assert "rows cannot be used" in refusal(sums(17) + bad)
    assert len(problems_of((sums(49) + bad[:1]) * 20)) == 49


def test_a_prompt_is_rendered_once_and_a_template_that_always_fails_a_few_times():
    """Also a prompt that the template refuses."""
    policy = policy_with("{% if '0' in messages[0].content %}{{ no() }}{% endif %}" + TURNS)
    render = Mock(wraps=policy.tokenizer.apply_chat_template)
    policy.tokenizer.apply_chat_template = render
    problems_of(sums(10) * 5, policy)
    assert render.call_count == 10
    render.side_effect = ValueError
    refusal(sums(3000), policy)
    assert render.call_count < 100


def test_the_line_at_the_start_counts_the_rows_that_are_left_out():
    """With the first row of each kind. A row has one reason."""
    rows = [*sums(60), row("", "1"), row("x", {"gold": 1}), "x", row("", "2"), row("1+1=", "3")]
    args = script_args("grpo", dataset="mine")[1]
    policy = policy_with(TURNS)
    problems, left_out = usable_rows(rows, "dataset", policy, args)
    kinds = [
        "2 without a prompt (first: row 61 '')",
        "1 without a gold answer (first: row 62 {'gold': 1})",
        "1 unreadable (first: row 63 'x')",
        "1 with the prompt of an earlier row",
    ]
    assert len(problems) == 60 and left_out == f"; left out of --dataset: {', '.join(kinds)}"


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
    assert capsys.readouterr().out == "problems: 49 to train on, 51 held out\n"
    assert stream.problems[1:] == other.problems and held_out == same_held_out[:50]
    assert not {p.prompt for p in stream.problems} & {p.prompt for p in held_out}
    for p in stream.problems + held_out:
        assert p.prompt_ids == tiny_policy.tokenizer(p.prompt).input_ids
        assert p.answer == str(int(p.prompt.removesuffix("+1=")) + 1)
    with pytest.raises(UserError, match="^--num_held_out 100 leaves no problem for training: .* 100$"):
        load(path, tiny_policy, rows, num_held_out=100)


@pytest.mark.parametrize("num_held_out, expected", [(8, 8), (256, 12)])
def test_eval_dataset_gives_the_held_out_problems(num_held_out, expected, tmp_path, own_policy, capsys):
    """Its first ones, or all if it has fewer. Nothing is held out from training; prompts that are in
    both are counted."""
    path = str(write_lines(tmp_path / "evaluation.jsonl", sums(49)[37:]))
    flags = {"eval_dataset": path, "num_held_out": num_held_out}
    stream, held_out = load(tmp_path / "data.jsonl", own_policy, sums(40), **flags)
    assert len(stream.problems) == 40
    assert [p.prompt for p in held_out] == [f"{i}+1=" for i in range(37, 37 + expected)]
    line = capsys.readouterr().out
    count = "the first 8 of 12" if num_held_out == 8 else "12"
    assert f"40 to train on, {count} held out; 3 of those held out are also in --dataset" in line


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
