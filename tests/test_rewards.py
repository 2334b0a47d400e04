"""The functions of --reward: how they are found and called, and what they may return."""

import json
import sys

import pytest
from conftest import FILE_NUMBERS, SMALL, refused, run, script_args

import grpo
from common import Completion, Problem, load_grader
from common import UserError

TEXTS = {"2": False, "?": False, "300": False, "2.": True, "40": True}  # {text: truncated}


def write(tmp_path, source):
    path = tmp_path / f"rw{next(FILE_NUMBERS)}.py"
    path.write_text(source)
    return path


def completions(prompt="1+1=", **columns):
    problem = Problem("1+1=", "2", [4, 5], {"answer": "2", "prompts": prompt} | columns)
    return [Completion(problem, [1], [0.0], cut, text) for text, cut in TEXTS.items()]


def load(name):
    return load_grader(script_args("grpo", reward=name)[1])


def graded(path, name="f", **columns):
    return load(f"{path}:{name}")(completions(**columns))


SOURCE = """
seen = []

def right(completions, answer, **columns):
    seen.append(columns | {"completions": completions, "answer": answer})
    values = [0.6 * (gold in str(text)) for text, gold in zip(completions, answer)]
    return [None if "?" in str(text) else value for text, value in zip(completions, values)]

def length(text, level):
    seen.append(text)
    return len(text) + level - 3, "wrong"
"""


@pytest.mark.parametrize("prompt", ["1+1=", [{"role": "user", "content": "1+1="}]], ids=type)
def test_functions_of_lists_and_of_one(prompt, tmp_path):
    """The first is called once, with all columns, and with completions as messages where prompts are
    messages."""
    path = write(tmp_path, SOURCE)
    rewards = [c.reward for c in graded(path, "right", prompt=prompt, level=2)]
    assert rewards == [0.6, 0, 0, 0.6, 0]
    seen = sys.modules[path.stem].seen
    texts = list(TEXTS)
    if isinstance(prompt, list):
        texts = [[{"role": "assistant", "content": text}] for text in TEXTS]
    expected = {"completions": texts, "completion_ids": [[1]] * 5}
    expected |= {
        name: [value] * 5 for name, value in (("answer", "2"), ("level", 2), ("prompts", prompt))
    }
    assert seen == [expected]
    rewards = [c.reward for c in graded(path, "length", prompt=prompt, level=2)]
    assert rewards == [len(text) - 1 for text in TEXTS] and seen[1:] == list(TEXTS)


VALUES = [  # what a function of (text, answer, truncated) returns, reward, verdicts of "2" and "40"
    ("True", 1.0, "correct", "correct"),
    ("not truncated", 1.0, "correct", "truncated"),
    ("None", 0.0, "wrong", "truncated"),
    ("(1, 'no_answer')", 1.0, "no_answer", "no_answer"),
    ("torch.tensor([0.25])", 0.25, "wrong", "truncated"),
    ("numpy.bool_(True)", 1.0, "correct", "correct"),
]


@pytest.mark.parametrize("value, reward, verdict, cut_verdict", VALUES)
def test_values(value, reward, verdict, cut_verdict, tmp_path):
    """A float is made of whatever can be one; above 0.5 is correct, unless there is a verdict."""
    path = write(
        tmp_path,
        "import numpy, torch\n"
        f"def one(text, truncated): return {value}\n"
        f"def lists(completions, truncated=False): return iter([{value}] * 5)\n",
    )
    for name in ("one", "lists"):
        first, *_, last = graded(path, name)
        assert (first.reward, first.verdict) == (reward, verdict) and type(first.reward) is float
        assert last.verdict == cut_verdict or (name, value) == ("lists", "not truncated")


BAD = [("text", value, "not ") for value in ("'1'", "1.1e9", "float('nan')", "(1.0, 'perfect')")]
BAD += [("completions", "0.5", ""), ("completions", "[1.0] * 4", "shorter")]


@pytest.mark.parametrize("parameter, value, expected", BAD)
def test_values_that_are_no_numbers(parameter, value, expected, tmp_path):
    path = write(tmp_path, f"def f({parameter}): return {value}")
    with pytest.raises(UserError, match="^--reward .*:f must return a number") as error:
        graded(path)
    assert expected in str(error.value)


POOL = """
import multiprocessing

def length(text):
    return len(text)

def f(completions):
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        return pool.map(length, completions)
"""


def test_a_pool_of_processes_finds_the_function(tmp_path):
    assert [c.reward for c in graded(write(tmp_path, POOL))] == list(map(len, TEXTS))


BAD_FILES = [  # name, content, what is said of it
    ("rw_a.py", None, "ModuleNotFoundError"),
    ("rw_b.py", "", "AttributeError"),
    ("rw_e.py", "f = 0.5", "0.5 is not a callable object"),
    ("json.py", "", "rename json.py"),
]


@pytest.mark.parametrize("name, source, expected", BAD_FILES, ids=[case[0] for case in BAD_FILES])
def test_files_without_such_a_function(name, source, expected, tmp_path, monkeypatch):
    """Refused before the model is loaded."""
    monkeypatch.setattr(grpo, "load_policy", lambda args: pytest.fail("loaded"))
    if source is not None:
        (tmp_path / name).write_text(source)
    line = refused("grpo", "--reward", f"{tmp_path / name}:f", "--run_dir", tmp_path / "run")
    assert f"--reward {tmp_path / name}:f" in line and expected in line


def test_a_file_its_neighbors_and_another_of_its_name(tmp_path, monkeypatch):
    path = write(tmp_path, "import rw_neighbor\ndef f(text): return rw_neighbor.value")
    (tmp_path / "rw_neighbor.py").write_text("value = 7")
    monkeypatch.chdir(tmp_path)
    assert graded(path.name)[0].reward == 7
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / path.name).write_text("def f(text): return 2")
    with pytest.raises(UserError, match="rename"):
        load(f"other/{path.name}:f")


def test_run_a_function_with_a_bug(tmp_path):
    """It keeps its traceback."""
    path = write(tmp_path, "def bug(text): 1 / 0")
    with pytest.raises(ZeroDivisionError):
        run("grpo", *SMALL, "--run_dir", tmp_path / "run", "--reward", f"{path}:bug", held_out=8)


NEEDS = [  # parameters, what is said; the dataset has the columns question and level
    ("completions, level, difficulty=None, **rest", None),
    ("completions, trainer_state, **rest", "missing a required argument: 'trainer_state'"),
    ("level, solution_str, ground_truth", "missing a required argument: 'solution_str'"),
    ("text, answer, level", "20 without a gold answer"),
]


@pytest.mark.parametrize("parameters, expected", NEEDS)
def test_run_without_a_gold_answer(parameters, expected, tmp_path, monkeypatch):
    """A function needs one if it names it."""
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"question": f"{i}+1=", "level": i}) + "\n" for i in range(20)))
    path = write(tmp_path, f"def f({parameters}): return [x / 20 for x in level]")
    flags = ("--dataset", data, "--reward", f"{path}:f", "--run_dir", tmp_path / "run")
    if expected is not None:
        result = run("grpo", *SMALL, *flags, held_out=8)
        assert result.returncode == 2 and expected in result.stderr
        return
    assert run("grpo", *SMALL, *flags, held_out=8).returncode == 0
    metrics = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert metrics["rollout/reward_mean"] > 0 and metrics["eval/accuracy"] > 0  # of levels above 10
