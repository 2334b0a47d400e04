"""Datasets: files, columns, gold answers, the held-out split."""

import copy
import json
import os
from datetime import date
from decimal import Decimal
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet
import pytest
from conftest import script_args
from datasets import Dataset

import common
from common import load_problems
from plumbing.data import read_dataset
from plumbing.policy import Policy


def arguments(path, **changes):
    return script_args("grpo", dataset=str(path), **changes)[1]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path, **changes):
    """[(prompt, gold answer)] of the rows that can be read, in their order."""
    return [
        (row.prompt, row.answer) for row in read_dataset(arguments(path, **changes)) if not row.fault
    ]


ROWS = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10)]


def test_json_lines_and_parquet_hold_the_same_problems(tmp_path):
    path = write(tmp_path / "data.jsonl", ROWS)
    Dataset.from_list(ROWS).to_parquet(tmp_path / "data.parquet")
    assert read(path) == read(tmp_path / "data.parquet") == [tuple(row.values()) for row in ROWS]


def test_gsm8k_needs_no_flag(tmp_path):
    """Its columns are the defaults, and its gold answer stands after '####'."""
    answer = "She sold 48/2 = <<48/2=24>>24 clips in May.\nTogether 48+24 = <<48+24=72>>72.\n#### 1,072"
    path = write(tmp_path / "gsm8k.jsonl", [{"question": "How many?", "answer": answer}])
    assert read(path) == [("How many?", "1,072")]


def gold_of(path):
    """The gold answer of a file with one row; None if the row is left out."""
    (row,) = read_dataset(arguments(path, prompt_column="p", answer_column="a"))
    assert row.fault == ("" if row.answer else "without a gold answer")
    return row.answer or None


JSON_ANSWERS = [  # as the file has them; None: left out
    ('" 42\\n"', "42"),
    ('"New York"', "New York"),
    ('"2024-01-31"', "2024-01-31"),
    ('"1e+30"', "1e+30"),
    ('"a\u2028b\u0085c"', "a\u2028b\u0085c"),  # other line separators are part of the string
    ('"so #### 1 #### 7"', "7"),
    (r'"hence \\boxed{\\frac{1}{2}}."', r"\frac{1}{2}"),
    *[(number, number) for number in ("42", "0", "0.1", "4.5", "-0.5")],
    *[(number, number) for number in ("9223372036854775809", "-18446744073709551616")],
    *[("1e30", "1e+30"), ("true", "true"), ("[1]", "1")],
    *[(number, None) for number in ("1E400", "NaN", "Infinity")],
    *[(value, None) for value in ("[1, 2]", '{"a": 1}', "null", '""', '" "')],
]


@pytest.mark.parametrize("answer, gold", JSON_ANSWERS)
def test_json_answers(answer, gold, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(f'{{"p": "x", "a": {answer}}}\n')
    assert gold_of(path) == gold


PARQUET_ANSWERS = [
    (pyarrow.scalar(2**64 - 1, pyarrow.uint64()), "18446744073709551615"),
    (pyarrow.scalar(Decimal("1.50"), pyarrow.decimal128(10, 2)), "1.50"),
    (pyarrow.scalar(0.1, pyarrow.float64()), "0.1"),
    (pyarrow.scalar(3.0, pyarrow.float64()), "3.0"),
    (pyarrow.scalar("2024-01-31", pyarrow.string()), "2024-01-31"),
    (pyarrow.scalar(1e30, pyarrow.float64()), "1e+30"),
    (pyarrow.scalar(float("nan"), pyarrow.float64()), None),
    (pyarrow.scalar(date(2024, 1, 31), pyarrow.date32()), None),
    (pyarrow.scalar(b"365", pyarrow.binary()), None),
    (pyarrow.scalar(True, pyarrow.bool_()), "true"),
    (pyarrow.scalar([1], pyarrow.list_(pyarrow.int64())), "1"),
]


@pytest.mark.parametrize("value, gold", PARQUET_ANSWERS, ids=str)
def test_parquet_answers(value, gold, tmp_path):
    path = tmp_path / "data.parquet"
    column = pyarrow.array([value.as_py()], value.type)
    pyarrow.parquet.write_table(pyarrow.table({"p": ["x"], "a": column}), path)
    assert gold_of(path) == gold


def test_a_file_name_is_not_a_pattern(tmp_path):
    for name, answer in (("d1", 1), ("d[1]", 2), ("star", 3), ("s*r", 4)):
        write(tmp_path / f"{name}.jsonl", [{"p": "x", "a": answer}])
    assert gold_of(tmp_path / "d[1].jsonl") == "2" and gold_of(tmp_path / "s*r.jsonl") == "4"


def test_a_file_that_is_written_again_within_a_second(tmp_path):
    for answer in ("1", "2", "3"):
        path = write(tmp_path / "data.jsonl", [{"p": "x", "a": answer}])
        os.utime(path, (1_700_000_000, 1_700_000_000))
        assert gold_of(path) == answer


ROW = '{"p": "x", "a": "2"}'


@pytest.mark.parametrize("name, text", [("data.json", f"\n[\n{ROW}\n]"), ("data.jsonl", ROW)])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_an_array_of_objects_and_a_byte_order_mark(mark, name, text, tmp_path):
    (tmp_path / name).write_text(mark + text, encoding="utf-8")
    assert gold_of(tmp_path / name) == "2"


LEFT_OUT = """
{"question": "1+1=", "answer": ""}
{"question": "1+2=", "answer": null}
{"question": "12345678901234567890", "answer": "0"}
{"question": "3+4=", "answer": "7.0"}
{"question": "5+6=", "answer": "12"}
{"question": "\\ud800", "answer": "1"}
{"question": [{"role": "user", "content": ""}], "answer": "1"}
{"question": "7+8=", "ans
[]
{"question": "", "answer": "1"}
"""


def test_bad_rows_are_left_out_and_counted(tmp_path, tiny_model, capsys):
    """The bytes of the last line are not UTF-8. Of two answers to a prompt neither is used."""
    path = write(tmp_path / "data.jsonl", [row for row in ROWS if row["question"] != "1+1="] + ROWS[:4])
    with path.open("ab") as file:
        file.write(LEFT_OUT.encode() + '{"question": "9+9=", "answer": "ü"}'.encode("latin1"))
    policy = copy.copy(Policy(*tiny_model))
    policy.model = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=60))
    policy.model.get_input_embeddings = tiny_model[0].get_input_embeddings
    args = arguments(path, num_held_out=10, max_new_tokens=45)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "check_window", lambda *args: None)
        stream, held_out = load_problems(args, policy)
    problems = {problem.prompt: problem.answer for problem in stream.problems + held_out}
    sums = {row["question"]: row["answer"] for row in ROWS if row["question"] not in ("1+1=", "5+6=")}
    assert problems == sums and len(stream.problems) == 88
    faults = "2 with two answers, 5 twice, 2 without a gold answer, 1 too long, "
    faults += "5 unreadable (line 110), 1 without a prompt"
    assert capsys.readouterr().out == f"98 problems; left out: {faults}\n"


def test_held_out_problems_are_those_of_the_smallest_hash(tmp_path, tiny_model):
    """A row more moves at most one of them, and the order of the rows none."""
    policy = Policy(*tiny_model)

    def held_out(rows):
        path = write(tmp_path / "data.jsonl", rows)
        return [p.prompt for p in load_problems(arguments(path, num_held_out=20), policy)[1]]

    before = held_out(ROWS)
    assert held_out(ROWS[::-1]) == before
    for i in range(0, 100, 7):
        after = held_out(ROWS[:i] + ROWS[i + 1 :])
        others = [prompt for prompt in before if prompt != ROWS[i]["question"]]
        assert after[: len(others)] == others and len(after) == 20


def test_what_reward_functions_get_of_a_row(tmp_path, tiny_model):
    """Numbers as other readers of JSON have them; the answer column only if something reads it."""
    row = {"question": "1+1=", "tests": [0.5, {"x": 1.50}], "level": None}
    path = write(tmp_path / "data.jsonl", [row, {**row, "question": "1+2=", "level": 3}])
    args = arguments(path, num_held_out=1)
    args.reads_answers = False
    stream, held_out = load_problems(args, Policy(*tiny_model))
    problems = {p.prompt: p.columns for p in stream.problems + held_out}
    assert problems["1+1="] == {**row, "answer": "", "prompts": "1+1="}
    assert problems["1+2="]["level"] == 3 and type(problems["1+2="]["tests"][0] * 2) is float


def test_held_out_problems_are_apart_and_the_same_for_all_seeds(tmp_path, tiny_model):
    """Also when a prompt comes twice in the file; the seed orders the training problems only."""
    path = write(tmp_path / "data.jsonl", ROWS + ROWS[:30])
    policy = Policy(*tiny_model)
    (stream, held_out), (other, same_held_out) = (
        load_problems(arguments(path, num_held_out=20, seed=seed), policy) for seed in (1, 2)
    )
    train = stream.problems
    assert train == other.problems and held_out == same_held_out
    assert len(held_out) == 20 and len(train) == 80
    assert not {p.prompt for p in train} & {p.prompt for p in held_out}
    assert [p.prompt_ids for p in train] == [tiny_model[1](p.prompt).input_ids for p in train]
    assert stream.take(10) != other.take(10)


def test_addition_is_what_it_always_was(tiny_model):
    stream, held_out = load_problems(arguments("addition"), Policy(*tiny_model))
    train = stream.problems
    assert (len(train), len(held_out)) == (20_000, 256)
    assert all(sum(map(int, p.prompt[:-1].split("+"))) == int(p.answer) for p in train[:100] + held_out)
    assert [p.prompt for p in held_out[:3]] == ["876+141=", "623+514=", "588+697="]
