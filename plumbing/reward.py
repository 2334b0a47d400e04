"""Grades completions: with the verifier, or with the user's reward function."""

import copy
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tqdm import tqdm

from plumbing.answers import verify
from plumbing.args import import_function, imported
from plumbing.data import dataset_function
from plumbing.errors import UserError, one_line
from plumbing.folder import checkpoints_in
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


def load_grader(args):
    """A `Grader` with `verify`, or with `--reward` (FILE.py:FUNCTION, or a function). The names of its
    parameters decide what it gets: text, answer, truncated and columns of one completion, or, if one is
    named `completions`, lists for all completions, as in TRL."""
    imported.clear()  # files may have changed since the last run in this process
    for flag in ("dataset", "eval_dataset"):
        if getattr(args, flag):
            dataset_function(args, flag)  # a wrong name should not wait until the model is loaded
    if not args.reward:
        return Grader(verify_all, reads_answers=True)
    reward = args.settings()["reward"] if callable(args.reward) else args.reward
    with one_line(f"--reward {reward} must be FILE.py:FUNCTION"):
        function = args.reward if callable(args.reward) else import_function(reward)
        # A torch module's own signature takes anything.
        signature = inspect.signature(getattr(function, "forward", function))
    parameters = signature.parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    takes_lists = "completions" in parameters

    def call(values, first):
        named = {name: values[name] for name in values if takes_all or name in parameters}
        with one_line(f"--reward {reward} can be passed {', '.join(values)}"):
            signature.bind(**named)  # the dataset may lack a column that it needs
            if not named:
                raise UserError("its parameters must have names")
        try:
            result = function(**named)
            # An iterator computes, and may fail, only when its elements are taken.
            return list(result) if isinstance(result, Iterator) else result
        except SystemExit as error:
            raise UserError(f"--reward {reward} ends the program: SystemExit {error}") from error
        except Exception:
            message = failure(first, takes_lists, args.folder)
            tqdm.write(f"--reward {reward} failed. {message}", file=sys.stderr)
            raise

    def grade_all(completions):
        if takes_lists:
            results = call(lists_of(completions), completions[0])
        else:
            results = [call(values_of(c), c) for c in completions]
        with one_line(f"--reward {reward} must return a number, or (number, verdict), for each"):
            # Nothing without an order: a dict would give its keys.
            if not isinstance(results, (list, tuple)) and not hasattr(results, "tolist"):
                raise UserError(f"not one {type(results).__name__} for {len(completions)} completions")
            results = list(results)
            if len(results) != len(completions):
                raise UserError(f"not {len(results)} for {len(completions)} completions")
            return [graded(result, c) for c, result in zip(completions, results, strict=True)]

    return Grader(grade_all, reads_answers="answer" in parameters and not takes_lists)


def failure(c, takes_lists, folder):
    """For a function that failed: its (first) prompt and gold answer, and the run's last checkpoint."""
    kind = "text; in a list they are messages if prompts are"
    if takes_lists and isinstance(c.problem.columns["prompts"], list):
        kind = "messages, since prompts are"
    which = "first prompt" if takes_lists else "prompt"
    message = f"Completions are {kind}. The {which} is {c.problem.prompt!r:.300}"
    message += f", and its gold answer {c.problem.answer!r:.100}."
    checkpoints = checkpoints_in(folder)
    return f"{message} The last checkpoint is {checkpoints[-1]}." if checkpoints else message


def columns_of(c):
    """{column: value}, and the prompt as the model reads it: a template may have begun the answer. They
    are copies, which the function may change: other completions have the same problem."""
    return {"rendered_prompt": c.problem.prompt} | copy.deepcopy(c.problem.columns)


def values_of(c):
    """{parameter: value} for a function of one completion."""
    return columns_of(c) | {"text": c.text, "answer": c.problem.answer, "truncated": c.truncated}


def lists_of(completions):
    """{parameter: list} for a function of all completions. They are messages if prompts are."""
    columns = [{"answer": c.problem.answer} | columns_of(c) for c in completions]
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
    number = float(number + 0)  # rejects "1"
    if not -1e9 <= number <= 1e9 or (has_verdict and verdict not in VERDICTS):  # NaN fails this too
        raise ValueError(f"not {result!r:.80} (verdicts: {', '.join(VERDICTS)})")
    if not has_verdict and number == 1:
        verdict = "correct"
    elif not has_verdict and number == 0:
        verdict = "truncated" if c.truncated else "wrong"
    return number, verdict
