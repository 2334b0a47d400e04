"""Loads and calls a user's reward functions, which replace common.verify."""

import asyncio
import importlib.util
import inspect
import sys
from pathlib import Path

from plumbing import UserError


VERDICTS = ("correct", "wrong", "no_answer", "truncated")
ONE = ("text", "answer", "truncated")
LISTS = ("completions", "completion_ids", "prompts")
RUNNER = asyncio.Runner()  # one event loop, since a function may keep a client that is tied to it


def import_file(path):
    """Imports a file as a module under its own name, so that a pool's processes can import it too."""
    path.stat()  # raises if there is no file
    sys.path.append(str(path.parent))
    spec = importlib.util.find_spec(path.stem) if "." not in path.stem else None
    origin = spec.origin if spec is not None else None
    if origin is None or Path(origin).resolve() != path.resolve():
        raise ImportError(f"rename {path.name}: `import {path.stem}` finds {origin}")
    return importlib.import_module(path.stem)


class RewardFunction:
    """The function that `--reward FILE.py:FUNCTION` names. Its parameter names decide what it is
    passed: text, answer, truncated and columns, or lists of completions and columns, as in TRL."""

    def __init__(self, name, weight):
        path, _, function_name = name.rpartition(":")
        self.flag = f"--reward {name}"
        if not path.endswith(".py"):
            raise UserError(f"{self.flag} must be FILE.py:FUNCTION")
        self.name = f"{Path(path).stem}.{function_name}"
        self.weight = weight
        try:
            self.function = getattr(import_file(Path(path).absolute()), function_name)
            parameters = inspect.signature(self.function).parameters.values()
        except (Exception, SystemExit) as error:  # the file may raise anything
            raise UserError(f"{self.flag} cannot be loaded") from error
        self.names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self.takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self.takes_lists = any(name in LISTS for name in self.names)
        known = LISTS if self.takes_lists else ONE
        required = [p.name for p in parameters if p.name in self.names and p.default is p.empty]
        self.columns = [name for name in required if name not in known]

    def results(self, completions):
        """The function's results for completions, from one call each or one call for all."""
        calls = [lists_of(completions)] if self.takes_lists else map(values_of, completions)
        results = []
        try:
            for call in calls:
                named = {name: call[name] for name in call if self.takes_all or name in self.names}
                results.append(self.function(**named))
            if inspect.isawaitable(results[0]):
                results = RUNNER.run(gather(results))
        except SystemExit as error:
            raise UserError(f"{self.flag} called exit()") from error
        return results[0] if self.takes_lists else results

    def grade(self, completions):
        """[(value, verdict)]. If the function returns no verdict, a value above 0.5 means correct."""
        results = self.results(completions)
        try:
            return [grade_of(result, c) for c, result in zip(completions, results, strict=True)]
        except Exception as error:
            expected = "a number up to a billion, or (number, verdict), for each completion"
            raise UserError(f"{self.flag} must return {expected}") from error


def values_of(c):
    """{parameter: value} for a function of one completion."""
    return c.problem.columns | {"text": c.text, "answer": c.problem.answer, "truncated": c.truncated}


def lists_of(completions):
    """{parameter: list} for a TRL-style function. Completions are messages if prompts are."""
    columns = [c.problem.columns for c in completions]
    lists = {name: [values[name] for values in columns] for name in columns[0]}
    lists["completion_ids"] = [c.ids for c in completions]
    lists["completions"] = [c.text for c in completions]
    if isinstance(columns[0]["prompts"], list):
        lists["completions"] = [[{"role": "assistant", "content": c.text}] for c in completions]
    return lists


def grade_of(result, c):
    """A function's result for a completion -> (float, verdict). Raises if it is neither a number nor
    (number, verdict)."""
    value = result
    verdict = "truncated" if c.truncated else "wrong"
    if isinstance(result, tuple):
        value, verdict = result
    elif value is None:
        value = 0.0
    elif float(value) > 0.5:
        verdict = "correct"
    is_number = not isinstance(value, (str, bytes)) and abs(float(value)) <= 1e9  # no NaN
    if not is_number or verdict not in VERDICTS:
        raise ValueError(f"not {result!r:.80} (verdicts are {', '.join(VERDICTS)})")
    return float(value), verdict


async def gather(awaitables):
    return await asyncio.gather(*awaitables)


def load_rewards(args):
    weights = args.reward_weights or [1.0] * len(args.reward)
    functions = [RewardFunction(*pair) for pair in zip(args.reward, weights, strict=True)]
    args.reads_answers = any("answer" in f.names for f in functions if not f.takes_lists)
    args.reward_columns = {column: f.flag for f in functions for column in f.columns}
    return functions


def graded(verify, completions):
    """[{field of a Completion: value}] from `verify`, or from a list of reward functions: the weighted
    sum of their values, the verdict of the first, and each value."""
    if not isinstance(verify, list):
        results = [verify(c.text, c.problem.answer, c.truncated) for c in completions]
        return [{"reward": reward, "verdict": verdict} for reward, verdict in results]
    columns = [f.grade(completions) for f in verify if completions]  # a rank may have none
    grades = []
    for _, *results in zip(completions, *columns, strict=True):
        rewards = {f.name: value for f, (value, _) in zip(verify, results, strict=True)}
        reward = sum(f.weight * rewards[f.name] for f in verify)
        grades.append({"reward": reward, "verdict": results[0][1], "rewards": rewards})
    return grades
