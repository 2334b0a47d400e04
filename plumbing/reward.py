"""Loads and calls the user's reward function, which replaces common.verify."""

import copy
import importlib
import inspect
import sys
from pathlib import Path

from plumbing.args import UserError, one_line

VERDICTS = ("correct", "wrong", "no_answer", "truncated")


SOURCES = {}  # {path of an imported file: its content}


def import_file(path):
    """Imports a file as a module under its own name, so that a pool's processes can import it too; and
    again if it has changed, as in a notebook."""
    sys.path.append(str(path.parent))
    module = importlib.import_module(path.stem)
    if Path(module.__file__).resolve() != path.resolve():
        raise ImportError(f"rename {path.name}: `import {path.stem}` finds {module.__file__}")
    source = path.read_bytes()
    if SOURCES.setdefault(path, source) != source:
        exec(compile(source, path, "exec"), module.__dict__)
        SOURCES[path] = source
    return module


def load_reward(args):
    """`--reward` (FILE.py:FUNCTION, or a function) -> a function that grades completions: [(reward,
    verdict)]. The names of its parameters decide what it gets: text, answer, truncated and columns of
    one completion, or, if one is named `completions`, lists for all completions, as in TRL."""
    reward = args.settings()["reward"]
    path, _, name = reward.rpartition(":")
    function = args.reward
    if path and reward == function and not Path(path).exists():
        message = "if it was a function made in Python, pass it again"
        raise UserError(f"--reward {reward}: there is no file {Path(path).absolute()}; {message}")
    with one_line(f"--reward {reward} must be FILE.py:FUNCTION"):
        if reward == function:
            function = getattr(import_file(Path(path).absolute()), name)
        signature = inspect.signature(function)
        parameters = signature.parameters
        if any(parameter.kind is parameter.POSITIONAL_ONLY for parameter in parameters.values()):
            raise UserError("its parameters must have names, such as text and answer")
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    takes_lists = "completions" in parameters
    args.reads_answers = "answer" in parameters and not takes_lists

    def call(values):
        named = {name: values[name] for name in values if takes_all or name in parameters}
        with one_line(f"--reward {reward} can be passed {', '.join(values)}"):
            signature.bind(**named)  # the dataset may lack a column that it needs
        return function(**named)

    def grade(completions):
        if takes_lists:
            results = call(lists_of(completions))
        else:
            results = [call(values_of(c)) for c in completions]
        with one_line(f"--reward {reward} must return a number, or (number, verdict), for each"):
            return [graded(result, c) for c, result in zip(completions, results, strict=True)]

    return grade


def columns_of(c):
    """A copy, which the function may change: other completions have the same problem."""
    return {"answer": c.problem.answer, **copy.deepcopy(c.problem.columns)}


def values_of(c):
    """{parameter: value} for a function of one completion."""
    return columns_of(c) | {"text": c.text, "answer": c.problem.answer, "truncated": c.truncated}


def lists_of(completions):
    """{parameter: list} for a function of all completions. They are messages if prompts are."""
    columns = [columns_of(c) for c in completions]
    lists = {name: [row[name] for row in columns] for name in columns[0]}
    lists["completion_ids"] = [c.ids for c in completions]
    lists["completions"] = [c.text for c in completions]
    if isinstance(columns[0]["prompts"], list):
        lists["completions"] = [[{"role": "assistant", "content": c.text}] for c in completions]
    return lists


def graded(result, c):
    """A result -> (float, verdict). Without a verdict, a number above 0.5 is correct."""
    if isinstance(result, tuple):
        number, verdict = result
    else:
        number = 0.0 if result is None else result  # None: this function does not grade it
        wrong = "truncated" if c.truncated else "wrong"
        verdict = "correct" if number > 0.5 else wrong
    if not abs(number) <= 1e9 or verdict not in VERDICTS:  # a NaN fails this too
        raise ValueError(f"not {result!r:.80} (verdicts: {', '.join(VERDICTS)})")
    return float(number), verdict
