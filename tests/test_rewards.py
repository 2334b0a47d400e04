"""The functions of --reward: how they are found and called, and what they may return."""

import itertools
import json
import sys

import pytest
from conftest import run, run_process, script_args

import grpo
from common import Completion, Problem, load_grader, verify
from plumbing.errors import UserError
from plumbing.metrics import rollout_summary

SMALL = """--prompts_per_iteration 4 --group_size 4 --max_new_tokens 8 --num_minibatches 2
--iterations 1""".split()
FILE_NUMBERS = itertools.count()  # a process imports only one file of each name
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


def test_without_the_flag_the_verifier_is_used():
    grade, _ = load()
    for c in grade(completions()):
        assert (c.reward, c.verdict) == verify(c.text, "2", c.truncated)


BOTH = """
seen = []

def right(completions, answer, **columns):
    seen.append(columns | {"completions": completions, "answer": answer})
    values = [0.6 * (gold in str(text)) for text, gold in zip(completions, answer)]
    return [None if "?" in str(text) else value for text, value in zip(completions, values)]

def length(text, answer, truncated):
    seen.append(text)
    return len(text), "wrong"
"""


@pytest.mark.parametrize("prompt", ["1+1=", [{"role": "user", "content": "1+1="}]], ids=type)
def test_functions_of_lists_and_of_one(prompt, tmp_path):
    """The first is called once, with all columns, and with completions as messages where prompts are
    messages. Values are added up. A completion is correct if the first function says so. Both see the
    globals of one module, and metrics tell them apart."""
    path = write(tmp_path, BOTH)
    grade, args = load(f"{path}:right", f"{path}:length", weights=[1.0, -0.5])
    assert args.reads_answers and args.reward_columns == {"answer": f"--reward {path}:right"}
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
    columns = {"answer": "2", "level": 3, "prompts": prompt}
    assert lists == {"completion_ids": [[1]] * 5} | {
        name: [value] * 5 for name, value in columns.items()
    }
    assert grade([]) == []
    assert not load(f"{path}:right")[1].reads_answers
    with pytest.raises(UserError, match="names a function twice"):
        load(f"{path}:right", f"{path.parent}/./{path.name}:right")


VALUES = [  # what a function of (text, answer, truncated) returns, reward, verdicts of "2" and "40"
    ("True", 1.0, "correct", "correct"),
    ("not truncated", 1.0, "correct", "truncated"),
    ("0.5", 0.5, "wrong", "truncated"),
    ("0.51", 0.51, "correct", "correct"),
    ("None", 0.0, "wrong", "truncated"),
    ("(1, 'no_answer')", 1.0, "no_answer", "no_answer"),
    ("torch.tensor(2.0)", 2.0, "correct", "correct"),
    ("torch.tensor([0.25])", 0.25, "wrong", "truncated"),
    ("numpy.bool_(True)", 1.0, "correct", "correct"),
    ("numpy.float32(-3)", -3.0, "wrong", "truncated"),
    ("(numpy.array(0.5), 'correct')", 0.5, "correct", "correct"),
    ("fractions.Fraction(3, 4)", 0.75, "correct", "correct"),
    ("decimal.Decimal('1e9')", 1e9, "correct", "correct"),
]


@pytest.mark.parametrize("value, reward, verdict, cut_verdict", VALUES)
def test_values(value, reward, verdict, cut_verdict, tmp_path):
    """A float is made of whatever can be one; above 0.5 is correct, unless there is a verdict."""
    head = "import decimal, fractions, numpy, torch\n"
    lists = write(tmp_path, f"{head}def f(completions): return [{value}] * 5")
    one = write(tmp_path, f"{head}def f(text, answer, truncated): return {value}")
    asynchronous = write(tmp_path, f"{head}async def f(text, answer, truncated): return {value}")
    if "truncated" in value:
        lists = one
    for path in (one, asynchronous, lists):
        first, *_, last = graded(path)
        assert (first.reward, first.verdict, last.verdict) == (reward, verdict, cut_verdict)
        assert type(first.reward) is float


LISTS = "torch.ones(5) | numpy.ones(5) | (1.0 for _ in range(5)) | (1,) * 5 | [True] * 5"


@pytest.mark.parametrize("values", LISTS.split(" | "))
def test_lists_of_values(values, tmp_path):
    done = graded(write(tmp_path, f"import numpy, torch\ndef f(prompts, **rest): return {values}"))
    assert [c.reward for c in done] == [1.0] * 5


BAD_VALUES = """'high' | '0.5' | b'1' | 1j | 10**400 | 1.1e9 | float('nan') | -float('inf') | [1.0]
 | torch.ones(2) | (1.0,) | (1.0, 'perfect') | ('1', 'correct') | (1.0, torch.ones(2)) | 'x'.split"""
BAD_LISTS = """None | 0.5 | [] | [1.0] * 4 | [1.0] * 6 | 'wrong' | {'rewards': [1.0] * 5}
 | torch.ones(5, 2)"""
BAD = [("text", value) for value in BAD_VALUES.split(" | ")]
BAD += [("completions", value) for value in BAD_LISTS.split(" | ")]


@pytest.mark.parametrize("parameter, value", BAD)
def test_values_that_are_no_numbers(parameter, value, tmp_path):
    path = write(tmp_path, f"import torch\ndef f({parameter}): return {value}")
    with pytest.raises(UserError, match="^--reward .*:f returned .*, not a number up to a billion"):
        graded(path)


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

async def many(completions, **columns):
    return await asyncio.gather(*map(one, completions))
"""


def test_async_functions_share_a_loop(tmp_path):
    """Calls for one completion run at the same time."""
    path = write(tmp_path, ASYNC)
    for name in ("one", "many", "one"):
        assert [c.reward for c in graded(path, name)] == list(map(len, TEXTS))
    module = sys.modules[path.stem]
    assert len(module.loops) == 1 and module.most == 5


POOL = """
import concurrent.futures
import multiprocessing

def length(text):
    return len(text)

def f(completions, **columns):
    context = multiprocessing.get_context({way!r})
    with concurrent.futures.ProcessPoolExecutor(1, context) as pool:
        return list(pool.map(length, completions))
"""


@pytest.mark.parametrize("way", ["fork", "spawn"])
def test_a_pool_of_processes_finds_the_functions(way, tmp_path):
    done = graded(write(tmp_path, POOL.format(way=way)))
    assert [c.reward for c in done] == list(map(len, TEXTS))


ENDED_POOL = """
import multiprocessing

def length(text):
    return len(text)

def f(completions):
    with multiprocessing.Pool(2) as pool:  # which ends its processes by SIGTERM
        return pool.map(length, completions)
"""


def test_run_a_pool_that_is_ended_by_a_signal(tmp_path):
    """Its processes are forked from the run, and must not answer a signal as the run does."""
    path = write(tmp_path, ENDED_POOL)
    flags = "--iterations 1 --num_held_out 8 --prompts_per_iteration 4 --max_new_tokens 8".split()
    folder = ("--run_dir", tmp_path / "run")
    result = run_process("grpo", *flags, "--reward", f"{path}:f", *folder, timeout=120)
    assert result.returncode == 0 and "stopping" not in result.stdout + result.stderr, result.stderr


VERL = "not of (data_source, solution_str, ground_truth)"
BAD_FILES = [  # name, content, what is said of it
    ("rw_a.py", None, "cannot be loaded: FileNotFoundError"),
    ("rw_b.py", "", "cannot be loaded: AttributeError"),
    ("rw_c.py", "1 / 0", "cannot be loaded: ZeroDivisionError"),
    ("rw_d.py", "exit()", "cannot be loaded: SystemExit"),
    ("rw_e.py", "import nonesuch", "cannot be loaded: ModuleNotFoundError"),
    ("rw_f.py", "f = 0.5", "0.5 is not a callable object"),
    ("rw_g.py", "def f(data_source, solution_str, ground_truth, extra_info=None): pass", VERL),
    ("rw_h.py", "def f(text, answer, truncated, tokenizer): pass", "not of (tokenizer)"),
    ("rw_i.py", "def f(*args, **kwargs): pass", "not of ()"),
    ("rw_j.py", "def f(response): pass", "not of (response)"),
    ("common.py", "", "rename common.py"),
    ("json.py", "", "rename json.py"),
    ("sys.py", "", "rename sys.py"),
    ("pyarrow.py", "", "rename pyarrow.py"),
    ("rw.v2.py", "", "rename rw.v2.py"),
]


@pytest.mark.parametrize("name, source, expected", BAD_FILES, ids=[case[0] for case in BAD_FILES])
def test_files_without_such_a_function(name, source, expected, tmp_path, monkeypatch):
    """Refused before the model is loaded."""
    monkeypatch.setattr(grpo, "load_policy", lambda args: pytest.fail("loaded"))
    if source is not None:
        (tmp_path / name).write_text(source)
    result = run("grpo", "--reward", f"{tmp_path / name}:f", "--run_dir", tmp_path / "run")
    assert result.returncode == 2 and len(result.stderr.splitlines()) == 1, result.stderr
    assert f"--reward {tmp_path / name}:f" in result.stderr and expected in result.stderr


def test_two_files_of_one_name(tmp_path):
    first = write(tmp_path, "def f(text): return 1")
    (tmp_path / "other").mkdir()
    other = tmp_path / "other" / first.name
    other.write_text("def f(text): return 2")
    with pytest.raises(UserError, match="cannot be loaded"):
        load(f"{first}:f", f"{other}:f")


def test_a_file_and_its_neighbors(tmp_path, monkeypatch):
    """By a relative path, through a link, with a space in its name."""
    path = write(tmp_path, "import rw_neighbor\ndef f(text): return rw_neighbor.value")
    (tmp_path / "rw_neighbor.py").write_text("value = 7")
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "my reward.py").symlink_to(path)
    monkeypatch.chdir(tmp_path)
    for name in (path.name, "links/my reward.py"):
        assert graded(name)[0].reward == 7


@pytest.mark.parametrize(
    "source", ["def f(text): exit()", "async def f(completions): raise SystemExit(0)"]
)
def test_run_a_function_that_exits(source, tmp_path):
    path = write(tmp_path, source)
    result = run("grpo", *SMALL, "--reward", f"{path}:f", "--run_dir", tmp_path / "run", held_out=8)
    assert result.returncode == 2 and f"--reward {path}:f called exit()" in result.stderr


def test_run_a_bug_in_a_function_keeps_its_traceback(tmp_path):
    path = write(tmp_path, "def f(text): 1 / 0")
    with pytest.raises(ZeroDivisionError):
        run("grpo", *SMALL, "--reward", f"{path}:f", "--run_dir", tmp_path / "run", held_out=8)


def test_run_a_reward_is_used_in_training_and_evaluation(tmp_path):
    source = 'def f(text, truncated): return len(text) / 100 + 0.5, "wrong" if truncated else "correct"'
    flags = ("--reward", f"{write(tmp_path, source)}:f", "--run_dir", tmp_path / "run")
    result = run("grpo", *SMALL, *flags, "--max_new_tokens", 30, held_out=8)
    assert result.returncode == 0, result.stderr
    metrics = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert metrics["rollout/reward_mean"] > 0.5
    assert metrics["rollout/accuracy"] == 1 - metrics["rollout/truncated_frac"] < 1
    assert metrics["eval/accuracy"] > 0.5


NEEDS = [  # parameters, what is said; the dataset has the columns question and level
    ("completions, level, **rest", None),
    ("completions, level, difficulty=None", None),
    (
        "completions, trainer_state, **rest",
        "needs trainer_state, but the columns of --dataset are question, level",
    ),
    ("prompts, answer", "needs answer, but"),
    ("text, level", "not of (level)"),
    ("text", "20 without a gold answer"),
]


@pytest.mark.parametrize("parameters, expected", NEEDS)
def test_run_without_a_gold_answer(parameters, expected, tmp_path, monkeypatch):
    """A function of lists needs none. What it does need is known before anything is sampled."""
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"question": f"{i}+1=", "level": i}) + "\n" for i in range(20)))
    path = write(tmp_path, f"def f({parameters}): return [x / 20 for x in level]")
    if expected is not None:
        monkeypatch.setattr(grpo, "evaluate", lambda *args, **kwargs: pytest.fail("sampled"))
    flags = ("--dataset", data, "--reward", f"{path}:f", "--run_dir", tmp_path / "run")
    result = run("grpo", *SMALL, *flags, held_out=8)
    if expected is None:
        metrics = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
        mean = metrics[f"rollout/reward_mean_{path.stem}.f"]
        assert metrics["rollout/reward_mean"] == pytest.approx(mean) and mean > 0
    else:
        assert result.returncode == 2 and expected in result.stderr
