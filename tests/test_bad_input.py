"""Mistakes of a user in flags, data, models and rewards: each ends with exit code 2 and one line on
stderr that names it, without a traceback. Run folders and checkpoints are in test_run_folder.py."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import flags_it_has, path_of, run, script_args

import grpo
import plumbing.args
import plumbing.models
import plumbing.settings
from common import Completion, Problem, judge, load_verifier, verify
from plumbing.memory import plan_memory
from plumbing.metrics import rollout_summary

SMALL = """--prompts_per_iteration 4 --group_size 4 --max_new_tokens 8 --num_minibatches 2
--iterations 1""".split()
OWN_LR = ("--lr", "1e-6")  # with --model; without it there is a warning, a second line


def refused(name, *flags, expected):
    """Runs a script, which must end with 2 and one line that contains the expected words."""
    own = OWN_LR if "--model" in flags else ()
    result = run(name, *flags_it_has(name, SMALL), *own, *flags, held_out=8)
    assert result.returncode == 2, (result.stdout, result.stderr)
    lines = result.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith(f"{path_of(name).name}: error: "), result.stderr
    for words in [expected] if isinstance(expected, str) else expected:
        assert words in lines[0], lines[0]
    assert result.stdout == ""


def completes(*flags):
    """Runs grpo.py, which must succeed; what it prints on stderr."""
    result = run("grpo", *SMALL, *flags, held_out=8)
    assert result.returncode == 0, result.stderr
    return result.stderr


# --------------------------------------------------------------------------------------------- flags


FLAGS = [row.strip().split(" | ") for row in (Path(__file__).parent / "bad_flags.txt").open()]


@pytest.mark.parametrize("name, flags, expected", FLAGS, ids=lambda x: x if x[:1] == "-" else "")
def test_flags(name, flags, expected, tmp_path):
    own = () if "--run_dir" in flags else ("--run_dir", tmp_path / "run")
    refused(name, *own, *flags.split(), expected=expected)


def test_a_run_folder_that_is_not_utf8(tmp_path):
    """As umlauts are under LC_ALL=C with UTF-8 mode off. It would end at the first checkpoint."""
    refused("grpo", "--run_dir", tmp_path / "l\udcc3\udca4uft", expected="--run_dir")
    assert not list(tmp_path.iterdir())


def test_run_batch_sizes_above_the_number_of_completions(tmp_path, tiny_policy):
    """They mean all completions, as 0 does where memory is sufficient."""
    problem = SimpleNamespace(prompt_ids=[1] * 8)
    for size in (0, 1000, 1_000_000_000):
        args = script_args("grpo", device="cpu", micro_batch_size=size, rollout_batch_size=size)[1]
        planned = plan_memory(args, tiny_policy, SimpleNamespace(problems=[problem]), [problem])
        assert (planned.micro_batch_size, planned.rollout_batch_size) == (64, 256)
    completes("--micro_batch_size", size, "--rollout_batch_size", size, "--run_dir", tmp_path)


def test_run_one_prompt_and_one_token(tmp_path):
    """A single token has no variance that a critic could explain."""
    flags = "--prompts_per_iteration 1 --num_minibatches 1 --max_new_tokens 1 --iterations 1".split()
    result = run("ppo", *flags, "--run_dir", tmp_path, held_out=8)
    assert result.returncode == 0 and "Warning" not in result.stderr, result.stderr
    metrics = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert "losses/explained_variance" not in metrics


def test_a_warning_about_the_tiny_models_learning_rate(monkeypatch):
    monkeypatch.setattr(grpo, "main", lambda args: None)
    assert completes("--model", "mine").startswith("warning: --lr 0.0002 suits tiny-moe")
    assert completes("--model", "mine", *OWN_LR) == completes() == ""


def test_a_warning_about_float32_on_a_gpu(monkeypatch):
    monkeypatch.setattr(grpo, "main", lambda args: None)
    monkeypatch.setattr(plumbing.args, "resolve_device", lambda name: "cuda:1")
    own = ("--model", "mine", *OWN_LR)
    assert "faster: --dtype bfloat16" in completes(*own)
    assert completes(*own, "--dtype", "bfloat16") == completes() == ""


def test_memory_is_pinned_by_the_gpu_of_the_run(monkeypatch):
    """That of the current one, which would otherwise be the first."""
    current = []
    on_gpu = SimpleNamespace(device=torch.device("cuda:1"))
    monkeypatch.setattr(torch, "zeros", lambda *size, device: on_gpu)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert plumbing.args.resolve_device("cuda:1") == "cuda:1" and current == [on_gpu.device]


# ---------------------------------------------------------------------------------------------- data


def row(question="1+1=", **answer):
    return json.dumps({"question": question, **(answer or {"answer": "2"})}) + "\n"


ROW = row()
ENOUGH = "".join(row(f"{i}+1=", answer=str(i + 1)) for i in range(12))
SAME = ENOUGH + row("1+1=", answer="2.0")
WORDS = "".join(row(f"How many are {i} and one?", answer=str(i + 1)) for i in range(20))
HALF_A_PAIR = row([{"role": "user", "content": "\ud800"}])
BAD_DATA = [
    ("missing.jsonl", None, "missing.jsonl cannot be read"),
    ("empty.jsonl", "", "empty.jsonl cannot be read"),
    ("blank.jsonl", "\n\n", "blank.jsonl cannot be read"),
    ("text.jsonl", f"{ROW}{ROW}\nwhat?\n", ("1 of 3 rows cannot be used", "unreadable (line 4)")),
    ("half.jsonl", ROW + ROW + ROW[:12], "unreadable (line 3)"),
    ("latin.jsonl", "{'ü'}".encode("latin1"), "1 of 1 rows"),
    ("numbers.jsonl", "1\n2\n", "2 unreadable (line 1)"),
    ("array.jsonl", f"[{ROW.strip()}]\n", "1 unreadable (line 1)"),  # not a row with one column
    ("numbers.json", "[1]", "1 unreadable (line 1)"),
    ("mixed.json", f"[{ROW}, 1]", "unreadable (line 2)"),
    ("open.json", f"[{ROW}", "open.json cannot be read"),
    ("number.json", "3", "1 unreadable (line 1)"),
    ("string.json", '"question"', "1 unreadable (line 1)"),
    ("half a pair.json", f"[{ROW},{HALF_A_PAIR}]", "unreadable (line 2)"),
    ("half a pair.jsonl", ROW + HALF_A_PAIR, ("unreadable (line 2)", "surrogates")),
    ("bytes.parquet", "PAR1 and no more", "bytes.parquet cannot be read"),
    ("d[1].jsonl", None, "d[1].jsonl cannot be read"),  # a name is not a pattern: d1.jsonl exists
    ("columns.jsonl", '{"text": "a", "label": 3}', ("1 without a prompt", "text, label")),
    ("column.jsonl", row(label=3), ("1 without a gold answer", "question, label")),
    ("null.jsonl", ROW + row(answer=None), ("line 2", "gold answer", "question, answer")),
    ("absent.jsonl", ROW + ROW + '{"question": "a"}', ("absent.jsonl", "line 3", "gold answer")),
    ("marker.jsonl", row(answer="so it is ####"), ("line 1", "gold answer")),
    ("box.jsonl", ROW + row(answer="\\boxed{1"), ("line 2", "gold answer")),
    ("prompt.jsonl", ROW + row(""), ("line 2", "prompt")),
    ("chat.jsonl", row([{"role": "user", "content": "a"}] * 2), "chat template"),
    ("roles.jsonl", row([{"from": "user", "value": "a"}]), ("unreadable (line 1)", "content")),
    ("number.jsonl", row(7), "1 unreadable (line 1)"),
    ("few.jsonl", ROW * 20, "--num_held_out 8 leaves none of the 1 problems"),
    ("long.jsonl", ROW + row("1" * 40_000), ("1 too long", "the model's limit of 32768")),
    ("words.jsonl", WORDS, ("--model", "unknown")),  # the tiny model's tokenizer knows only digits
    ("two.jsonl", SAME + row("5+1=", answer="7"), "2 of 14 rows cannot be used: 2 with two answers"),
]


@pytest.mark.parametrize("name, content, expected", BAD_DATA, ids=[row[0] for row in BAD_DATA])
def test_datasets(name, content, expected, tmp_path):
    (tmp_path / "d1.jsonl").write_text(ENOUGH)
    if content is not None:
        content = content if isinstance(content, bytes) else content.encode()
        (tmp_path / name).write_bytes(content)
    refused("grpo", "--run_dir", tmp_path / "run", "--dataset", tmp_path / name, expected=expected)


# ------------------------------------------------------------------------------------------- rewards


def test_run_a_reward_function_is_used_in_training_and_evaluation(reward_file, tmp_path):
    """And its file belongs to the settings."""
    verdict = '"truncated" if truncated else "correct"'
    reward = reward_file(f"return len(text) / 100 + 0.5, {verdict}")
    flags = ("--reward", reward, "--run_dir", tmp_path / "run", "--max_new_tokens", 30)
    completes(*flags)
    metrics = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert metrics["rollout/reward_mean"] > 0.5
    assert metrics["rollout/accuracy"] == 1 - metrics["rollout/truncated_frac"]
    assert metrics["eval/accuracy"] > 0.5
    reward_file(f"return len(text) / 100 + 0.6, {verdict}")
    refused("grpo", *flags, "--resume", "--iterations", 2, expected="has reward's rewards.py")


REWARDS = """
seen = []

def right(completions, answer, **columns):
    seen.append(columns | {"completions": completions, "answer": answer})
    values = [0.6 * (gold in str(text)) for text, gold in zip(completions, answer)]
    return [None if "?" in str(text) else value for text, value in zip(completions, values)]

def length(text, answer, truncated):
    return len(text), "wrong"
"""


@pytest.mark.parametrize(
    "prompt", ["1+1=", [{"role": "user", "content": "1+1="}]], ids=["text", "chat"]
)
def test_reward_functions_of_lists(prompt, tmp_path):
    """Called once, with all columns, and with messages where there is a chat template; their values are
    added up. A completion is correct if the first of them says so, whatever the sum."""
    (tmp_path / "rewards.py").write_text(REWARDS)
    names = [f"{tmp_path}/rewards.py:{name}" for name in ("right", "length")]
    args = script_args("grpo", reward=names, reward_weights=[1.0, -0.5])[1]
    verify = load_verifier(args)
    columns = {"answer": "2", "level": 3, "prompts": prompt}
    problem = Problem("1+1=", "2", [4, 5], columns)
    texts = {"2": False, "?": False, "300": False, "2.": True, "40": True}
    completions = [Completion(problem, [len(text)], [], cut, text) for text, cut in texts.items()]
    judged = judge(completions, verify)
    assert [c.reward for c in judged] == pytest.approx([0.1, -0.5, -1.5, -0.4, -1])
    assert [c.verdict for c in judged] == ["correct", "wrong", "wrong", "correct", "truncated"]
    assert judged[1].rewards == {"rewards.right": None, "rewards.length": 1.0}
    summary = rollout_summary(judged)
    assert summary["reward_mean_rewards.right"] == pytest.approx(0.24)
    assert summary["reward_none_frac_rewards.right"] == 0.2 and summary["accuracy"] == 0.4
    (seen,) = verify[0].function.__globals__["seen"]
    given = list(texts)
    if prompt != "1+1=":
        given = [[{"role": "assistant", "content": text}] for text in texts]
    expected = {"completions": given, "completion_ids": [[1], [1], [3], [2], [2]]}
    assert seen == expected | {name: [value] * 5 for name, value in columns.items()}
    assert args.reads_answers and judge([], verify) == []
    load_verifier(args := script_args("grpo", reward=names[:1])[1])
    assert not args.reads_answers


BAD_CALLS = [
    (
        "return 1.0, 'perfect'",
        "returned (1.0, 'perfect'), not (a number up to a billion, one of correct",
    ),
    ("return float('nan'), 'wrong'", "returned (nan, 'wrong'), not (a number"),
    ("return 1.0", "returned 1.0, not (a number"),
    ("return None, 'wrong'", "returned (None, 'wrong'), not (a number"),
    ("return 10**400, 'correct'", "returned (1000000000"),
    ("return 1e38, 'correct'", "returned (1e+38, 'correct'), not (a number up to a billion"),
    ("return 1.0, torch.ones(2)", "returned (1.0, tensor([1., 1.])), not (a number"),
]


@pytest.mark.parametrize("line, expected", BAD_CALLS)
def test_run_reward_functions_that_misbehave(line, expected, reward_file, tmp_path):
    reward = reward_file("import torch", line, "return 1.0, 'correct'")
    result = run("grpo", *SMALL, "--reward", reward, "--run_dir", tmp_path / "run", held_out=8)
    assert result.returncode == 2 and f"--reward {reward} {expected}" in result.stderr
    assert not list((tmp_path / "run").glob("checkpoint-*"))


BAD_LISTS = [
    ("completions, **rest", "[1.0]", "returned [1.0], not 8 values"),
    ("completions, **rest", "None", "returned None, not 8 values"),
    ("completions, **rest", "['high'] * 8", "returned 'high', not a number"),
    ("completions, **rest", "[2e9] * 8", "returned 2000000000.0, not a number"),
    ("prompts, solution, **rest", "[]", "cannot be called with answer, prompts, completion_ids"),
    ("completions", "[]", "TypeError got an unexpected keyword argument 'answer'"),
    ("completion_ids, **rest", "[None] * 8", "returned None for the completion '6+1=7 7+'"),
]


@pytest.mark.parametrize("parameters, values, expected", BAD_LISTS)
def test_run_reward_functions_of_lists_that_misbehave(parameters, values, expected, tmp_path):
    path = tmp_path / "rewards.py"
    path.write_text(f"def f({parameters}): return {values}")
    flags = ("--reward", f"{path}:f", "--run_dir", tmp_path / "run")
    result = run("grpo", *SMALL, *flags, held_out=8)
    assert result.returncode == 2 and "error: --reward" in result.stderr and expected in result.stderr


THREE = "function of (text, answer, truncated)"
BAD_FILES = [
    ("", "cannot be loaded as FILE.py:FUNCTION: KeyError"),
    ("1 / 0", "cannot be loaded as FILE.py:FUNCTION: ZeroDivisionError"),
    ("exit()", "cannot be loaded as FILE.py:FUNCTION: SystemExit"),
    ("reward = 0.5", THREE),
    ("reward = None", THREE),
    ("def reward(text, answer): pass", "of completions: TypeError too many"),
    ("def reward(text, answer, *, truncated): pass", THREE),
]


@pytest.mark.parametrize("source, expected", BAD_FILES)
def test_reward_files_without_such_a_function(source, expected, tmp_path, monkeypatch):
    """Refused before the model is loaded."""
    monkeypatch.setattr(grpo, "load_policy", lambda args: pytest.fail("loaded"))
    path = tmp_path / "my reward.py"
    path.write_text(source)
    flags = ("--reward", f"{path}:reward", "--run_dir", tmp_path / "run")
    refused("grpo", *flags, expected=("--reward", expected))


def test_run_without_a_gold_answer(tmp_path):
    """A reward function that does not read one, as in TRL, needs no column of them."""
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"question": f"{i}+1=", "level": i}) + "\n" for i in range(20)))
    rewards = tmp_path / "rewards.py"
    rewards.write_text("def f(completions, level, **rest): return [x / 20 for x in level]")
    flags = ("--dataset", data, "--run_dir", tmp_path / "run")
    completes(*flags, "--reward", f"{rewards}:f")
    metrics = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert metrics["rollout/reward_mean"] == pytest.approx(metrics["rollout/reward_mean_rewards.f"])
    refused("grpo", *flags, "--resume", expected="reward")
    rewards.write_text("def f(text, answer, truncated): return 1.0, 'correct'")
    flags = ("--dataset", data, "--run_dir", tmp_path / "other", "--reward", f"{rewards}:f")
    refused("grpo", *flags, expected="20 without a gold answer")


def test_run_a_bug_in_a_reward_function_keeps_its_traceback(reward_file, tmp_path):
    with pytest.raises(ZeroDivisionError):
        run("grpo", *SMALL, "--reward", reward_file("1 / 0"), "--run_dir", tmp_path / "run", held_out=8)


def test_without_the_flag_the_verifier_is_used():
    assert load_verifier(script_args("grpo")[1]) is verify


# ---------------------------------------------------------------------- files that cannot be opened


@pytest.mark.parametrize("flag, value", [("dataset", "{}"), ("reward", "{}:f"), ("model", "{}")])
@pytest.mark.parametrize("why", ["too long", "forbidden"])
def test_a_file_that_cannot_be_opened(why, flag, value, tmp_path, monkeypatch):
    """Its flag is named, not --run_dir."""
    original = plumbing.settings.file_hash

    def file_hash(file):
        if file != path:
            return original(file)
        raise PermissionError(13, "Permission denied", str(file))

    path = tmp_path / ("x" * 300)
    if why == "forbidden":
        path = tmp_path / "config.json"
        path.write_text("{}")
        monkeypatch.setattr(plumbing.settings, "file_hash", file_hash)
    flags = ("--run_dir", tmp_path / "run", f"--{flag}", value.format(path))
    refused("grpo", *flags, expected=f"--{flag} {path} cannot be read")
