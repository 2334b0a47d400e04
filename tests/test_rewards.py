"""The functions of --reward: how they are found and called, and what they may return."""

import json
import sys

import pytest
import torch
from conftest import SMALL, SMALL_ARGS, SUMS, completes, metrics, read_lines, refused
from conftest import resume, script_args, started

import dapo
import grpo
from common import Completion, Problem, UserError, load_grader, load_problems
from plumbing.metrics import missing_signal

CHAT = [{"role": "user", "content": "1+1="}]
TEXTS = {"2": False, "?": False, "300": False, "2.": True, "40": True}  # {text: truncated}


def completions(prompt="1+1=", **columns):
    problem = Problem("1+1=", "2", [4, 5], {"answer": "2", "prompts": prompt} | columns)
    return [Completion(problem, [1], [0.0], cut, text) for text, cut in TEXTS.items()]


def load(reward, **flags):
    return load_grader(script_args("grpo", reward=reward, **flags)[1])


def graded(path, name="f", **columns):
    return load(f"{path}:{name}")(completions(**columns))


SOURCE = """
seen = []

def right(completions, answer, nums, **columns):
    seen.append(columns | {"completions": completions, "answer": answer})
    seen[-1]["completion_ids"] = [ids.pop() for ids in columns["completion_ids"]]
    scores = [numbers.pop() / 5 for numbers in nums]
    values = [score * (gold in str(text)) for score, gold, text in zip(scores, answer, completions)]
    return [None if "?" in str(text) else value for text, value in zip(completions, values)]

def length(text, nums):
    seen.append(text)
    return len(text) - nums.pop(), "wrong"
"""


@pytest.mark.parametrize("prompt", ["1+1=", CHAT], ids=type)
def test_functions_of_lists_and_of_one_completion(prompt, python_file):
    """Completions are messages if prompts are. What a function does to a column or to ids does not
    change them."""
    path = python_file(SOURCE)
    columns = {"prompt": prompt, "level": 2, "nums": [7, 3]}
    grades = graded(path, "right", **columns)
    assert [c.reward for c in grades] == [0.6, 0, 0, 0.6, 0] and all(c.ids == [1] for c in grades)
    seen = sys.modules[path.stem].seen
    texts = list(TEXTS)
    if isinstance(prompt, list):
        texts = [[{"role": "assistant", "content": text}] for text in TEXTS]
    lists = {"answer": ["2"] * 5, "level": [2] * 5, "prompts": [prompt] * 5}
    lists["rendered_prompt"] = ["1+1="] * 5
    assert seen == [{"completions": texts, "completion_ids": [1] * 5, **lists}]
    rewards = [c.reward for c in graded(path, "length", **columns)]
    assert rewards == [len(text) - 3 for text in TEXTS]
    assert sys.modules[path.stem].seen == list(TEXTS)


VALUES = [  # what a function returns, the reward, the verdicts of "2" and "40", which is truncated
    ("not truncated", 1.0, "correct", "truncated"),
    ("None", 0.0, "wrong", "truncated"),
    ("torch.tensor([1])", 1.0, "correct", "correct"),
    ("40", 40.0, None, None),
    ("-1", -1.0, None, None),
    ("(1, 'no_answer')", 1.0, "no_answer", "no_answer"),
]


@pytest.mark.parametrize("value, reward, verdict, cut_verdict", VALUES)
def test_a_result_becomes_a_float_and_a_verdict(value, reward, verdict, cut_verdict, python_file):
    path = python_file(f"import torch\ndef f(text, truncated): return {value}")
    first, *_, last = graded(path)
    assert (first.reward, first.verdict, last.verdict) == (reward, verdict, cut_verdict)
    assert type(first.reward) is float


NO_NUMBERS = ("'1'", "1.1e9", "float('nan')", "(1.0, 'perfect')", "(1.0, None)")
BAD = [("text", value, "for each: ") for value in NO_NUMBERS]
BAD += [  # for all five
    ("completions", "{i: 1.0 for i in range(5)}", "not one dict for 5 completions"),
    ("completions", "[1.0] * 4", "not 4 for 5 completions"),
]


@pytest.mark.parametrize("parameter, value, expected", BAD)
def test_results_that_are_not_one_number_each_are_refused(parameter, value, expected, python_file):
    path = python_file(f"def f({parameter}): return {value}")
    with pytest.raises(UserError, match="^--reward .*:f must return a number") as error:
        graded(path)
    assert expected in str(error.value)


LISTS = ("(3, 3, 3, 3, 3)", "numpy.full(5, 3)", "map(int, '33333')")


@pytest.mark.parametrize("value", LISTS)
def test_lists_arrays_and_iterators_are_results_for_all(value, python_file):
    path = python_file(f"import numpy\ndef f(completions): return {value}")
    assert [c.reward for c in graded(path)] == [3.0] * 5


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


KEPT = """
import multiprocessing, signal

def length(text):
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    return len(text)

def lengths(completions):
    return pool.map(length, completions)

pool = multiprocessing.get_context("fork").Pool(2)
"""


def test_run_processes_of_a_pool_that_is_made_with_the_file_ignore_ctrl_c(python_file, tmp_path):
    flags = ("--num_held_out", 8, "--dataset", SUMS, "--run_dir", tmp_path / "run")
    with started("grpo", *SMALL, *flags, "--reward", f"{python_file(KEPT)}:lengths") as process:
        assert process.wait() == 0, process.stderr.read()


def test_spawned_processes_find_the_function(python_file):
    completions = graded(python_file(POOL), "lengths", kinds="spawn")
    assert [c.reward for c in completions] == list(map(len, TEXTS))


def test_run_forked_processes_ignore_ctrl_c_and_end_on_sigterm(python_file, tmp_path):
    """With a handler in Python for SIGTERM, one in a hundred pools never ended."""
    flags = ("--num_held_out", 8, "--dataset", SUMS, "--run_dir", tmp_path / "run")
    with started("grpo", *SMALL, *flags, "--reward", f"{python_file(POOL)}:lengths") as process:
        assert process.wait() == 0
        assert process.stderr.read() == "" and "stopping" not in process.stdout.read()
    assert len(metrics(tmp_path / "run")) == 1


def given(text):
    """A reward function that is passed in Python."""
    return len(text)


def test_run_with_a_function_made_in_python(tmp_path):
    """settings.json has its name. A resume needs the function again, and no other one will do."""
    folder = tmp_path / "run"
    flags = SMALL_ARGS | {"run_dir": folder}
    grpo.main(grpo.Args(**flags, reward=given))
    (line,) = metrics(folder)
    assert line["rollout/reward_mean"] == line["rollout/response_len_mean"]  # a token is a character
    settings = json.loads((folder / "settings.json").read_text())
    assert settings["reward"] == "test_rewards:given"
    flags |= {"resume": True, "iterations": 2}
    refused("grpo", *resume(folder, "--iterations", 2), expected="made in Python, pass it again")
    with pytest.raises(UserError, match="has reward test_rewards:given, not"):
        grpo.main(grpo.Args(**flags, reward=lambda text: 0))
    grpo.main(grpo.Args(**flags, reward=given))
    assert len(metrics(folder)) == 2


def test_run_resumed_says_that_the_file_has_moved_or_changed(python_file, tmp_path, monkeypatch):
    """Both are allowed, but the run may no longer be one experiment."""

    path = python_file("def f(text): return 1\ndef g(text): return 2")
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run"
    grpo.main(grpo.Args(**SMALL_ARGS | {"reward": f"{path.name}:f"}, run_dir=str(folder)))
    note = f"note: --reward was {path}:f; since then its file has moved or changed"
    path.write_text("def f(text): return 0")
    assert note in completes("grpo", *resume(folder, "--iterations", 2))
    assert "note: --reward" not in completes("grpo", *resume(folder, "--iterations", 3))
    (tmp_path / "moved").mkdir()
    moved = path.rename(tmp_path / "moved" / path.name)
    monkeypatch.delitem(sys.modules, path.stem)
    flags = resume(folder, "--iterations", 4, "--reward")
    refused("grpo", *flags, f"{moved}:g", expected=f"has reward {path}:f, not {moved}:g")
    assert note in completes("grpo", *flags, f"{moved}:f")


def test_a_file_is_run_once_for_each_run(python_file):
    """It may have changed, as in a notebook."""
    path = python_file("calls = []\ndef f(text): calls.append(text); return len(calls)")
    for _ in range(2):
        grade = load(f"{path}:f")
        assert [c.reward for c in grade(completions()) + grade(completions())] == list(range(1, 11))
    for value in (3, 4):  # two files of one second and one size
        path.write_text(f"def f(text): return {value}")
        assert [c.reward for c in graded(path)] == [value] * 5


BAD_FILES = [  # a file and its content, and what the line says
    ("json.py", "", "rename json.py"),
    ("bad1.py", "import sys\nsys.exit()", "must be FILE.py:FUNCTION: SystemExit"),
    ("bad3.py", "f = print", "its parameters must have names"),
    ("bad7.py", "import sys\ndef f(text): sys.exit(3)", "ends the program: SystemExit 3"),
    ("bad8.py", "def f(text, solution_str): return 0", "missing a required argument: 'solution_str'"),
]


@pytest.mark.parametrize("name, source, expected", BAD_FILES)
def test_a_file_whose_function_cannot_be_found_or_called_is_refused(name, source, expected, tmp_path):
    (tmp_path / name).write_text(source)
    with pytest.raises(UserError, match=f"--reward {tmp_path / name}:f .*{expected}"):
        graded(tmp_path / name)


class Judge(torch.nn.Module):
    def forward(self, completions, level):
        return torch.tensor(level)


def test_a_torch_module_is_a_function_with_the_parameters_of_its_forward():
    grade = load(Judge())
    assert [c.reward for c in grade(completions(level=3))] == [3] * 5
    with pytest.raises(UserError, match="missing a required argument: 'level'"):
        grade(completions())


TEXT = "text; in a list they are messages if prompts are."
FIRST = "The first prompt is '1+1=', and its gold answer '2'."
SECOND = "The prompt is '1+2=', and its gold answer '3'."
FAILS = [  # a function's parameters and body, the prompt, and what the line says
    ("text, answer", "answer == '3' and fail()", "1+1=", f"{TEXT} {SECOND}"),
    ("completions", "fail()", "1+1=", f"{TEXT} {FIRST}"),
    ("completions", "yield fail()", CHAT, f"messages, since prompts are. {FIRST}"),
]


@pytest.mark.parametrize("parameters, body, prompt, expected", FAILS, ids=str)
def test_an_error_in_a_function_has_a_line_and_its_traceback(
    parameters, body, prompt, expected, python_file, tmp_path, capsys
):
    """Also one that looks like an error of ours, and one that comes only when results are taken."""
    fail = "def fail(*_): raise BrokenPipeError(32, 'a worker')\n"
    path = python_file(f"{fail}def f({parameters}): {body}")
    for name in ("checkpoint-000020", "checkpoint-000040", "checkpoint-best"):
        (tmp_path / name).mkdir()
    (first, *_) = completions(prompt)
    second = first._replace(problem=first.problem._replace(prompt="1+2=", answer="3"))
    with pytest.raises(BrokenPipeError):
        load(f"{path}:f", run_dir=tmp_path)([first, second])
    expected += f" The last checkpoint is {tmp_path}/checkpoint-000040."
    assert capsys.readouterr().err == f"--reward {path}:f failed. Completions are {expected}\n"


ANSWERS = """
def one(text, answer): return 0
def lists(completions, answer): return completions
"""


def test_rows_need_a_gold_answer_only_if_a_function_of_one_completion_does(python_file, tiny_policy):
    path = python_file(ANSWERS)
    rows = [{"question": f"{i}+1="} for i in range(9)]
    args = script_args("grpo", dataset=lambda: rows, num_held_out=8)[1]
    load_problems(args, tiny_policy, load(f"{path}:lists"))
    with pytest.raises(UserError, match="row 1 cannot be used: it has no answer"):
        load_problems(args, tiny_policy, load(f"{path}:one"))


# ------------------------------------------------------------------------- rewards without verdicts

VERDICTS = {"accuracy", "no_answer_frac", "direct_frac", "pass@1", "pass@2"}  # need them
RESULTS = {"40 + len(text) / 8": set(), "len(text) % 2": VERDICTS}  # the first is a reward model's


@pytest.mark.parametrize("result", RESULTS)
def test_accuracy_is_there_only_with_verdicts_and_the_reward_always(result, tmp_path, reward_file):
    run = tmp_path / "run"
    flags = ("--eval_samples", 2, "--eval_every", 1, "--run_dir", run)
    printed = completes("grpo", *flags, "--reward", reward_file(f"return {result}"))
    has_verdicts = RESULTS[result] != set()
    (line,) = metrics(run)
    assert ("rollout/accuracy" in line) == ("eval/accuracy" in line) == has_verdicts
    assert ("eval/reward_mean" in line) == (not has_verdicts) and "rollout/reward_mean" in line
    for line in read_lines(run / "evaluations.jsonl"):
        assert "reward_mean" in line["greedy"] and VERDICTS & line["sampled"].keys() == RESULTS[result]
    assert ("has no verdict, accuracy is blank" in printed) == (not has_verdicts)
    before = [row.split() for row in printed.splitlines() if row.startswith("        0")]
    assert [len(row) for row in before] == [2]  # the column of held-out problems has one or the other
    titles = [row.split()[0] for row in printed.splitlines() if len(row.split()) == 5]
    assert "reward_mean" in titles and ("accuracy" in titles) == has_verdicts


def test_vapo_needs_verdicts_before_it_trains(tmp_path, reward_file):
    """Unless it imitates nothing."""
    reward = reward_file("return 40 + len(text)")
    flags = ("--pretraining_iterations", 0, "--run_dir", tmp_path / "run", "--reward", reward)
    line = refused("more.vapo", *flags, expected="--reward must say which answers are right")
    assert "0, 1 or (number, verdict)" in line
    assert metrics(tmp_path / "run") == []
    completes("more.vapo", *flags, "--positive_lm_coef", 0)


GROUPS = [  # rewards and verdicts of a group, whether it is kept; right and wrong groups dropped
    ([1, 0], ["correct", "wrong"], True, 0, 0),
    ([1.2, 1.0], ["correct", "correct"], False, 1, 0),
    ([0.2, 0.0], ["wrong", "no_answer"], False, 0, 1),
    ([40, 41], [None, None], True, 0, 0),
    ([40, 40], [None, None], False, 0, 0),
    ([1, 0.5], ["correct", None], True, 0, 0),
]


@pytest.mark.parametrize("rewards, verdicts, is_kept, right, wrong", GROUPS)
def test_dapo_judges_a_group_by_its_verdicts_or_its_rewards(rewards, verdicts, is_kept, right, wrong):
    pairs = zip(rewards, verdicts, strict=True)
    group = [Completion(None, [1], [0.0], reward=r, verdict=v) for r, v in pairs]
    kept, counts = dapo.mixed_groups(group, 2)
    assert kept == (group if is_kept else [])
    assert counts["rollout/groups_generated"] == 1 and counts["rollout/groups_kept"] == is_kept
    assert counts["rollout/groups_dropped_all_right"] == right
    assert counts["rollout/groups_dropped_all_wrong"] == wrong


CUT = (0, "truncated", True)
WRONG = (0, "wrong", False)
RIGHT = (1, "correct", False)
MUTE = (0, "no_answer", False)
SEVEN = (7, None, False)
SEVEN_CUT = (7, None, True)
WERE_CUT = "of the completions were cut off at --max_new_tokens"
NO_ANSWER = "no answer was found: the verifier looks for ####, \\boxed{}, <answer> or Answer:"
SIGNALS = [  # (reward, verdict, cut off) of each completion, the size of a group, what the line says
    ([CUT] * 4, 2, f"100% {WERE_CUT}"),
    ([MUTE, CUT, CUT, CUT], 2, f"75% {WERE_CUT}"),
    ([MUTE, MUTE, MUTE, CUT], 2, NO_ANSWER),
    ([WRONG] * 4, 2, "the rewards of each group are all equal"),
    ([RIGHT, RIGHT, WRONG, WRONG], 2, "the rewards of each group are all equal"),
    ([RIGHT, RIGHT, WRONG, WRONG], 1, ""),
    ([SEVEN, SEVEN, SEVEN_CUT, SEVEN_CUT], 1, "all rewards are equal"),
    ([SEVEN, SEVEN_CUT, SEVEN_CUT, SEVEN_CUT], 1, f"all rewards are equal, and 75% {WERE_CUT}"),
]


@pytest.mark.parametrize("grades, group_size, expected", SIGNALS, ids=str)
def test_the_reason_for_no_learning_signal(grades, group_size, expected):
    rows = [Completion(None, [1], [0.0], cut, reward=r, verdict=v) for r, v, cut in grades]
    rewards = torch.tensor([reward for reward, *_ in grades]).view(-1, group_size)
    assert missing_signal(rows, rewards) == expected


def test_run_a_first_iteration_without_a_signal_says_why(tmp_path):
    printed = completes("grpo", "--max_new_tokens", 2, "--iterations", 2, "--run_dir", tmp_path)
    (line,) = [line for line in printed.splitlines() if "no learning signal" in line]
    assert line.endswith(f"in iteration 1: 100% {WERE_CUT}")
    samples = read_lines(tmp_path / "samples.jsonl")
    assert {sample["verdict"] for sample in samples} == {"truncated"}  # the verifier is told
