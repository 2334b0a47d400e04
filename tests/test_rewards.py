"""The functions of --reward: how they are found and called, and what they may return."""

import json
import multiprocessing
import signal
import sys

import pytest
from conftest import FILE_NUMBERS, SMALL, refused, run, script_args

import grpo
from common import Completion, Problem, load_grader
from plumbing import UserError
from plumbing.metrics import rollout_summary
from plumbing.run import Run

TEXTS = {"2": False, "?": False, "300": False, "2.": True, "40": True}  # {text: truncated}


def write(tmp_path, source):
    path = tmp_path / f"rw{next(FILE_NUMBERS)}.py"
    path.write_text(source)
    return path


def completions(prompt="1+1=", **columns):
    problem = Problem("1+1=", "2", [4, 5], {"answer": "2", "prompts": prompt} | columns)
    return [Completion(problem, [1], [0.0], cut, text) for text, cut in TEXTS.items()]


def load(*names, weights=()):
    """(the function that grades, the flags that loading rewards changed)."""
    args = script_args("grpo", reward=list(map(str, names)), reward_weights=list(weights))[1]
    return load_grader(args), args


def graded(path, name="f", **columns):
    grade, _ = load(f"{path}:{name}")
    return grade(completions(**columns))


BOTH = """
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
    messages. Values are added up. A completion is correct if the first function says so. Both see the
    globals of one module, and metrics tell them apart."""
    path = write(tmp_path, BOTH)
    grade, args = load(f"{path}:right", f"{path}:length", weights=[1.0, -0.5])
    needed = {"answer": f"--reward {path}:right", "level": f"--reward {path}:length"}
    assert not args.reads_answers and args.reward_columns == needed
    done = grade(completions(prompt, level=3))
    assert [c.reward for c in done] == pytest.approx([0.1, -0.5, -1.5, -0.4, -1])
    assert [c.verdict for c in done] == ["correct", "wrong", "wrong", "correct", "truncated"]
    right, length = f"{path.stem}.right", f"{path.stem}.length"
    assert done[1].rewards == {right: 0.0, length: 1.0}
    summary = rollout_summary(done)
    assert summary[f"reward_mean_{right}"] == pytest.approx(0.24)
    assert summary[f"reward_mean_{length}"] == pytest.approx(9 / 5)
    assert summary["truncated_frac"] == summary["accuracy"] == 0.4
    texts = list(TEXTS)
    lists, *ones = sys.modules[path.stem].seen
    assert ones == texts
    messages = [[{"role": "assistant", "content": text}] for text in texts]
    assert lists.pop("completions") == (texts if prompt == "1+1=" else messages)
    columns = {"completion_ids": [1], "answer": "2", "level": 3, "prompts": prompt}
    assert lists == {name: [value] * 5 for name, value in columns.items()}
    assert grade([]) == []


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
        f"async def later(text, truncated): return {value}\n"
        f"def lists(completions, truncated=False): return iter([{value}] * 5)\n",
    )
    for name in ("one", "later", "lists"):
        first, *_, last = graded(path, name)
        assert (first.reward, first.verdict) == (reward, verdict) and type(first.reward) is float
        assert last.verdict == cut_verdict or (name, value) == ("lists", "not truncated")


BAD = [("text", value, "not ") for value in ("'1'", "1.1e9", "float('nan')", "(1.0, 'perfect')")]
BAD += [("completions", "0.5", ""), ("completions", "[1.0] * 4", "shorter")]


@pytest.mark.parametrize("parameter, value, expected", BAD)
def test_values_that_are_no_numbers(parameter, value, expected, tmp_path):
    path = write(tmp_path, f"def f({parameter}): return {value}")
    with pytest.raises(UserError, match="^--reward .*:f must return a number up to a bi") as error:
        graded(path)
    assert expected in str(error.value.__cause__)


ASYNC = """
import asyncio

loops = set()
most = running = 0

async def one(text):
    global most, running
    loops.add(asyncio.get_running_loop())
    running += 1
    most = max(most, running)
    await asyncio.sleep(0.01)
    running -= 1
    return len(text)
"""


def test_async_functions_share_a_loop(tmp_path):
    """Calls for one completion run at the same time."""
    path = write(tmp_path, ASYNC)
    for _ in range(2):
        assert [c.reward for c in graded(path, "one")] == list(map(len, TEXTS))
    module = sys.modules[path.stem]
    assert len(module.loops) == 1 and module.most == 5


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


def test_forked_processes_do_not_answer_a_signal_as_the_run_does(monkeypatch):
    monkeypatch.setattr(Run, "answers_signals", True)
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(signal.getsignal, [signal.SIGINT]) == signal.SIG_IGN
        assert pool.apply(signal.getsignal, [signal.SIGTERM]) == signal.SIG_DFL


BAD_FILES = [  # name, content, what is said of it
    ("rw_a.py", None, "cannot be loaded: FileNotFoundError"),
    ("rw_b.py", "", "cannot be loaded: AttributeError"),
    ("rw_d.py", "exit()", "cannot be loaded: SystemExit"),
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
    with pytest.raises(UserError, match="cannot be loaded"):
        load(f"other/{path.name}:f")


def test_run_a_function_that_exits_or_has_a_bug(tmp_path):
    """The first is one line, the second keeps its traceback."""
    source = "async def exits(completions): raise SystemExit(0)\ndef bug(text): 1 / 0"
    path = write(tmp_path, source)
    flags = ("--run_dir", tmp_path / "run", "--reward")
    refused("grpo", *flags, f"{path}:exits", expected=f"--reward {path}:exits called exit()")
    with pytest.raises(ZeroDivisionError):
        run("grpo", *SMALL, *flags, f"{path}:bug", held_out=8)


NEEDS = [  # parameters, what is said; the dataset has the columns question and level
    ("completions, level, difficulty=None, **rest", None),
    ("completions, trainer_state, **rest", "needs trainer_state, but the columns of --dataset are que"),
    ("level, solution_str, ground_truth", "needs solution_str, but the columns of --dataset are que"),
    ("text, answer, level", "20 without a gold answer"),
]


@pytest.mark.parametrize("parameters, expected", NEEDS)
def test_run_without_a_gold_answer(parameters, expected, tmp_path, monkeypatch):
    """A function needs one if it names it. What it needs is known before anything is sampled."""
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"question": f"{i}+1=", "level": i}) + "\n" for i in range(20)))
    path = write(tmp_path, f"def f({parameters}): return [x / 20 for x in level]")
    flags = ("--dataset", data, "--reward", f"{path}:f", "--run_dir", tmp_path / "run")
    if expected is not None:
        monkeypatch.setattr(grpo, "evaluate", lambda *args, **kwargs: pytest.fail("sampled"))
        refused("grpo", *flags, expected=expected)
        return
    assert run("grpo", *SMALL, *flags, held_out=8).returncode == 0
    metrics = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert metrics["rollout/reward_mean"] > 0 and metrics["eval/accuracy"] > 0  # of levels above 10
