"""The functions of --reward: how they are found and called, and what they may return."""

import functools
import json
import sys
from unittest.mock import Mock

import pytest
from conftest import FILE_NUMBERS, SMALL, SUMS, completes, metrics, refused, resume, script_args
from conftest import started, write_lines

import grpo

from common import Completion, Problem, UserError, load_grader

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

def right(completions, answer, nums, **columns):
    seen.append(columns | {"completions": completions, "answer": answer})
    scores = [numbers.pop() / 5 for numbers in nums]
    values = [score * (gold in str(text)) for score, gold, text in zip(scores, answer, completions)]
    return [None if "?" in str(text) else value for text, value in zip(completions, values)]

def length(text, nums):
    seen.append(text)
    return len(text) - nums.pop(), "wrong"
"""


@pytest.mark.parametrize("prompt", ["1+1=", [{"role": "user", "content": "1+1="}]], ids=type)
def test_functions_of_lists_and_of_one_completion(prompt, tmp_path):
    """Completions are messages if prompts are. What a function does to a column does not change it."""
    path = write(tmp_path, SOURCE)
    columns = {"prompt": prompt, "level": 2, "nums": [7, 3]}
    assert [c.reward for c in graded(path, "right", **columns)] == [0.6, 0, 0, 0.6, 0]
    seen = sys.modules[path.stem].seen
    texts = list(TEXTS)
    if isinstance(prompt, list):
        texts = [[{"role": "assistant", "content": text}] for text in TEXTS]
    lists = {"answer": ["2"] * 5, "level": [2] * 5, "prompts": [prompt] * 5}
    assert seen == [{"completions": texts, "completion_ids": [[1]] * 5, **lists}]
    rewards = [c.reward for c in graded(path, "length", **columns)]
    assert rewards == [len(text) - 3 for text in TEXTS] and seen[1:] == list(TEXTS)


VALUES = [  # what a function returns, the reward, the verdicts of "2" and "40"
    ("not truncated", 1.0, "correct", "truncated"),
    ("None", 0.0, "wrong", "truncated"),
    ("(1, 'no_answer')", 1.0, "no_answer", "no_answer"),
    ("torch.tensor([0.25])", 0.25, "wrong", "truncated"),
    ("numpy.bool_(True)", 1.0, "correct", "correct"),
]


@pytest.mark.parametrize("value, reward, verdict, cut_verdict", VALUES)
def test_a_result_becomes_a_float_and_a_verdict(value, reward, verdict, cut_verdict, tmp_path):
    path = write(tmp_path, f"import numpy, torch\ndef f(text, truncated): return {value}")
    first, *_, last = graded(path)
    assert (first.reward, first.verdict, last.verdict) == (reward, verdict, cut_verdict)
    assert type(first.reward) is float


BAD = [("text", value, "not ") for value in ("'1'", "1.1e9", "float('nan')", "(1.0, 'perfect')")]
BAD += [("completions", "0.5", ""), ("completions", "[1.0] * 4", "shorter")]


@pytest.mark.parametrize("parameter, value, expected", BAD)
def test_results_that_are_not_one_number_each_are_refused(parameter, value, expected, tmp_path):
    path = write(tmp_path, f"def f({parameter}): return {value}")
    with pytest.raises(UserError, match="^--reward .*:f must return a number") as error:
        graded(path)
    assert expected in str(error.value)


POOL = """
import multiprocessing, os, signal

def length(text):
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # in an iteration
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        os.kill(os.getpid(), signal.SIGINT)
    return len(text)

def wait_for_all(barrier):  # a signal that arrives in the middle of a fork is lost
    barrier.wait()

def lengths(completions, kinds=("fork",)):
    context = multiprocessing.get_context(kinds[0])
    with context.Pool(2, wait_for_all, (context.Barrier(2),)) as pool:
        return pool.map(length, completions)
"""


def test_spawned_processes_find_the_function(tmp_path):
    completions = graded(write(tmp_path, POOL), "lengths", kinds="spawn")
    assert [c.reward for c in completions] == list(map(len, TEXTS))


def test_run_forked_processes_ignore_ctrl_c_and_end_on_sigterm(tmp_path):
    """With a handler in Python for SIGTERM, one in a hundred pools never ended."""
    flags = ("--num_held_out", 8, "--dataset", SUMS, "--run_dir", tmp_path / "run")
    with started("grpo", *SMALL, *flags, "--reward", f"{write(tmp_path, POOL)}:lengths") as process:
        assert process.wait() == 0
        assert process.stderr.read() == "" and "stopping" not in process.stdout.read()
    assert len(metrics(tmp_path / "run")) == 1


def given(text):
    """A reward function that is passed in Python."""
    return len(text)


def test_run_with_a_function_made_in_python(tmp_path):
    """settings.json has its name. A resume needs the function again, and no other one will do."""
    numbers = {name[2:]: int(value) for name, value in zip(SMALL[::2], SMALL[1::2], strict=True)}
    numbers |= {"dataset": SUMS, "num_held_out": 8, "run_dir": tmp_path / "run"}
    grpo.main(grpo.Args(**numbers, reward=given))
    (line,) = metrics(tmp_path / "run")
    assert line["rollout/reward_mean"] == line["rollout/response_len_mean"]  # a token is a character
    settings = json.loads((tmp_path / "run" / "settings.json").read_text())
    assert settings["reward"] == "test_rewards:given"
    refused(
        "grpo", *resume(tmp_path / "run", "--iterations", 2), expected="made in Python, pass it again"
    )
    numbers |= {"resume": True, "iterations": 2}
    for other in ("", lambda text: 0):
        with pytest.raises(UserError, match="has reward given, not"):
            grpo.main(grpo.Args(**numbers, reward=other))
    grpo.main(grpo.Args(**numbers, reward=given))
    assert len(metrics(tmp_path / "run")) == 2


CALLABLES = [lambda text: 7, functools.partial(lambda score, text: score, 7), Mock(return_value=7)]


@pytest.mark.parametrize("function", CALLABLES, ids=lambda function: type(function).__name__)
def test_what_can_be_called_is_a_reward_function(function):
    assert [c.reward for c in load(function)(completions())] == [7.0] * 5


def test_a_file_that_has_changed_is_imported_again(tmp_path):
    """Even in the same second, with the same size. One that has not is not: it may keep a state."""
    path = write(tmp_path, "calls = []\ndef f(text): calls.append(text); return len(calls)")
    assert [c.reward for c in graded(path)] == [1, 2, 3, 4, 5]
    assert [c.reward for c in graded(path)] == [6, 7, 8, 9, 10]
    path.write_text("calls = []\ndef f(text): calls.append(text); return 1")
    assert [c.reward for c in graded(path)] == [1] * 5
    path.write_text("def f(text) return 1")
    for _ in range(2):
        with pytest.raises(UserError, match="SyntaxError"):
            graded(path)
    path.write_text("def f(text): return 3")
    assert [c.reward for c in graded(path)] == [3] * 5


BAD_FILES = [("rw.py", "f = len", "parameters must have names"), ("json.py", "", "rename json.py")]


@pytest.mark.parametrize("name, source, expected", BAD_FILES)
def test_a_file_whose_function_cannot_be_called_or_found_is_refused(name, source, expected, tmp_path):
    (tmp_path / name).write_text(source)
    with pytest.raises(UserError, match=f"--reward {tmp_path / name}:f .*{expected}"):
        load(f"{tmp_path / name}:f")


GOLD = """
def one(text, answer): return 0
def other(text, solution_str): return 0
def lists(completions, level, difficulty=None, **rest): return [x / 20 for x in level]
"""


def test_run_rows_need_a_gold_answer_only_if_the_function_does(tmp_path):
    """The dataset has the columns question and level."""
    rows = [{"question": f"{i}+1=", "level": i} for i in range(20)]
    data = write_lines(tmp_path / "data.jsonl", rows)
    path = write(tmp_path, GOLD)
    flags = ("--dataset", data, "--run_dir", tmp_path / "run", "--reward")
    refused("grpo", *flags, f"{path}:one", expected="20 without a gold answer")
    refused("grpo", *flags, f"{path}:other", expected="missing a required argument: 'solution_str'")
    completes("grpo", *flags, f"{path}:lists")
    (line,) = metrics(tmp_path / "run")
    assert line["rollout/reward_mean"] > 0 and line["eval/accuracy"] > 0  # for levels above 10
