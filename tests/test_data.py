"""Datasets: files, columns, gold answers, the held-out split."""

import json
import random

import pytest
from conftest import script_args
from datasets import Dataset

from common import addition_problems, load_problems, verify
from plumbing.data import read_dataset
from plumbing.policy import Policy
from tiny_moe.train import Recipe, demonstration


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


@pytest.mark.parametrize(
    "answer, gold",
    [
        ("42", "42"),
        (" 42\n", "42"),
        (42, "42"),
        (4.5, "4.5"),
        ("so #### 1 #### 7", "7"),
        (r"hence \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        ("New York", "New York"),
        (0, "0"),
    ],
)
def test_gold_answers(answer, gold, tmp_path):
    path = write(tmp_path / "data.json", [{"p": "x", "a": answer}])
    assert read_dataset(arguments(path, prompt_column="p", answer_column="a")) == [("x", gold)]


def test_worked_demonstrations_are_right():
    recipe = Recipe(direct=0.0, worked=1.0, wrong_step=0.0)
    for prompt, gold in addition_problems():
        assert verify(demonstration(prompt, random.Random(0), recipe), gold)[1] == "correct"
    example = "7+8=15 5+0+1=6 0+3=3 #### 365"
    assert demonstration("57+308=", random.Random(0), recipe) == example


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
