"""Grades completions: with the verifier, or with the user's reward function."""

import copy
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from plumbing.answers import verify
from plumbing.args import UserError, one_line
from plumbing.metrics import clock

VERDICTS = ("correct", "wrong", "no_answer", "truncated")


class Grader(NamedTuple):
    """Called with completions, it returns them with their rewards and verdicts."""

    grade_all: Callable  # [Completion] -> [(reward, verdict)]
    reads_answers: bool  # whether every problem needs a gold answer

    def __call__(self, completions):
        with clock("reward"):
            grades = self.grade_all(completions)
        return [c._replace(reward=r, verdict=v) for c, (r, v) in zip(completions, grades, strict=True)]


def verify_all(completions):
    return [verify(c.text, c.problem.answer, c.truncated) for c in completions]


def import_function(reward):
    """FILE.py:FUNCTION -> the function. The file is imported under its own name, so that a pool's
    processes can import it too; and again for each run, since it may have changed, as in a notebook."""
    file, _, name = reward.rpartition(":")
    if not file:
        raise UserError("it names no file")
    path = Path(file).absolute()
    if not path.exists():
        raise UserError(f"there is no file {path}; if it was a function made in Python, pass it again")
    sys.path.append(str(path.parent))
    is_known = path.stem in sys.modules
    module = importlib.import_module(path.stem)
    if Path(module.__file__).resolve() != path.resolve():
        raise ImportError(f"rename {path.name}: `import {path.stem}` finds {module.__file__}")
    return getattr(importlib.reload(module) if is_known else module, name)


def load_grader(args):
    """A `Grader` with `verify`, or with `--reward` (FILE.py:FUNCTION, or a function). The names of its
    parameters decide what it gets: text, answer, truncated and columns of one completion, or, if one is
    named `completions`, lists for all completions, as in TRL."""
    if not args.reward:
        return Grader(verify_all, reads_answers=True)
    reward = args.settings()["reward"]
    with one_line(f"--reward {reward} must be FILE.py:FUNCTION"):
        function = args.reward if callable(args.reward) else import_function(reward)
        signature = inspect.signature(function)
    parameters = signature.parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    takes_lists = "completions" in parameters

    def call(values):
        named = {name: values[name] for name in values if takes_all or name in parameters}
        with one_line(f"--reward {reward} can be passed {', '.join(values)}"):
            signature.bind(**named)  # the dataset may lack a column that it needs
            if not named:
                raise UserError("its parameters must have names")
        try:
            return function(**named)
        except SystemExit as error:
            raise UserError(f"--reward {reward} ends the program: SystemExit {error}") from error
        except Exception:
            kind = "text; in a list they are messages if prompts are"
            if takes_lists and isinstance(values["prompts"][0], list):
                kind = "messages, since prompts are"
            tqdm.write(f"--reward {reward} failed. Completions are {kind}.", file=sys.stderr)
            raise

    def grade_all(completions):
        if takes_lists:
            results = call(lists_of(completions))
        else:
            results = [call(values_of(c)) for c in completions]
        with one_line(f"--reward {reward} must return a number, or (number, verdict), for each"):
            # Nothing without an order: a dict would give its keys.
            if not isinstance(results, (list, tuple, Iterator)) and not hasattr(results, "tolist"):
                raise UserError(f"not one {type(results).__name__} for {len(completions)} completions")
            results = list(results)
            if len(results) != len(completions):
                raise UserError(f"not {len(results)} for {len(completions)} completions")
            return [graded(result, c) for c, result in zip(completions, results, strict=True)]

    return Grader(grade_all, reads_answers="answer" in parameters and not takes_lists)


def columns_of(c):
    """{column: value}, and the prompt as the model reads it: a template may have begun the answer. They
    are copies, which the function may change: other completions have the same problem."""
    columns = copy.deepcopy(c.problem.columns)
    return {"answer": c.problem.answer, "rendered_prompt": c.problem.prompt, **columns}


def values_of(c):
    """{parameter: value} for a function of one completion."""
    return columns_of(c) | {"text": c.text, "answer": c.problem.answer, "truncated": c.truncated}


def lists_of(completions):
    """{parameter: list} for a function of all completions. They are messages if prompts are."""
    columns = [columns_of(c) for c in completions]
    lists = {name: [row[name] for row in columns] for name in columns[0]}
    lists["completion_ids"] = [list(c.ids) for c in completions]
    lists["completions"] = [c.text for c in completions]
    if isinstance(columns[0]["prompts"], list):
        lists["completions"] = [[{"role": "assistant", "content": c.text}] for c in completions]
    return lists


def graded(result, c):
    """A result -> (float, verdict). A number alone has a verdict only if it is 0 or 1, else None."""
    has_verdict = isinstance(result, tuple)
    number, verdict = result if has_verdict else (result, None)
    if number is None:
        number = 0.0  # this function does not grade it
    number = float(number + 0)  # text has no sum
    if not -1e9 <= number <= 1e9 or (has_verdict and verdict not in VERDICTS):  # NaN fails this too
        raise ValueError(f"not {result!r:.80} (verdicts: {', '.join(VERDICTS)})")
    if not has_verdict and number == 1:
        verdict = "correct"
    elif not has_verdict and number == 0:
        verdict = "truncated" if c.truncated else "wrong"
    return number, verdict
