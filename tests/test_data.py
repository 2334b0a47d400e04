"""Datasets: files, columns, gold answers, the held-out split."""

import json
import os
from datetime import date
from decimal import Decimal

import pyarrow
import pyarrow.parquet
import pytest
from conftest import script_args
from datasets import Dataset

from common import load_problems
from plumbing.args import UserError
from plumbing.data import read_dataset
from plumbing.policy import Policy


def arguments(path, **changes):
    return script_args("grpo", dataset=str(path), **changes)[1]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


ROWS = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10)]


def test_json_lines_and_parquet_hold_the_same_problems(tmp_path):
    path = write(tmp_path / "data.jsonl", ROWS)
    Dataset.from_list(ROWS).to_parquet(tmp_path / "data.parquet")
    a, b = (read_dataset(arguments(p)) for p in (path, tmp_path / "data.parquet"))
    assert a == b and a != [tuple(row.values()) for row in ROWS]  # in another order than in the file
    assert sorted(a) == sorted(tuple(row.values()) for row in ROWS)


def test_gsm8k_needs_no_flag(tmp_path):
    """Its columns are the defaults, and its gold answer stands after '####'."""
    answer = "She sold 48/2 = <<48/2=24>>24 clips in May.\nTogether 48+24 = <<48+24=72>>72.\n#### 1,072"
    path = write(tmp_path / "gsm8k.jsonl", [{"question": "How many?", "answer": answer}])
    assert read_dataset(arguments(path)) == [("How many?", "1,072")]


def gold_of(path):
    """The gold answer of a file with one row; None if it is refused."""
    try:
        ((_, gold),) = read_dataset(arguments(path, prompt_column="p", answer_column="a"))
        return gold
    except UserError as error:
        assert "row 1: " in str(error) and "gold answer" in str(error)
        return None


JSON_ANSWERS = [  # as the file has them; None: refused, since it cannot be read exactly
    ('" 42\\n"', "42"),
    ('"New York"', "New York"),
    ('"2024-01-31"', "2024-01-31"),
    ('"1e+30"', "1e+30"),
    ('"a\u2028b\u0085c"', "a\u2028b\u0085c"),  # other line separators are part of the string
    ('"so #### 1 #### 7"', "7"),
    (r'"hence \\boxed{\\frac{1}{2}}."', r"\frac{1}{2}"),
    *[(number, number) for number in ("42", "0", "0.1", "4.50", "-0.5")],
    *[(number, number) for number in ("9223372036854775809", "-18446744073709551616")],
    *[(number, None) for number in ("1e30", "1E400", "NaN", "Infinity")],
    *[(value, None) for value in ("true", "[1, 2]", '{"a": 1}', "null", '""', '" "')],
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
    (pyarrow.scalar(0.1, pyarrow.float32()), None),
    (pyarrow.scalar(1e30, pyarrow.float64()), None),
    (pyarrow.scalar(float("nan"), pyarrow.float64()), None),
    (pyarrow.scalar(date(2024, 1, 31), pyarrow.date32()), None),
    (pyarrow.scalar(b"365", pyarrow.binary()), None),
    (pyarrow.scalar(True, pyarrow.bool_()), None),
    (pyarrow.scalar([1], pyarrow.list_(pyarrow.int64())), None),
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
