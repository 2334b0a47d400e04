"""Loads and calls a user's reward functions, which replace common.verify."""

import inspect
import runpy
import sys
from numbers import Real
from pathlib import Path

from plumbing.errors import UserError

VERDICTS = ("correct", "wrong", "no_answer", "truncated")


class RewardFunction:
    """The function that `--reward FILE.py:FUNCTION` names: of (text, answer, truncated), or of lists,
    (completions, **columns), as in TRL."""

    def __init__(self, name, weight):
        path, _, function_name = name.rpartition(":")
        self.flag = f"--reward {name}"
        self.name = f"{Path(path).stem}.{function_name}"
        self.weight = weight
        sys.path.append(str(Path(path).parent))  # for the files that it imports
        try:
            self.function = runpy.run_path(path)[function_name]
        except (Exception, SystemExit) as error:  # the file may raise anything
            raise UserError(f"{self.flag} cannot be loaded as FILE.py:FUNCTION") from error
        try:
            self.signature = inspect.signature(self.function)
            names = {"completions", "completion_ids", "prompts"}
            self.takes_lists = not names.isdisjoint(self.signature.parameters)
            if not self.takes_lists:
                self.signature.bind("text", "answer", False)
        except (TypeError, ValueError) as error:  # no function, other parameters, or it hides them
            message = "must be a function of (text, answer, truncated) or of completions"
            raise UserError(f"{self.flag} {message}") from error

    def refuse(self, result, expected):
        raise UserError(f"{self.flag} returned {result!r:.80}, not {expected}")

    def judge(self, completions):
        """[(value, verdict)]. From lists a value may be None, and more than 0.5 means correct."""
        if not self.takes_lists:
            return [self.judge_one(c) for c in completions]
        values = self.function(**self.lists_of(completions))
        if not hasattr(values, "__len__") or len(values) != len(completions):
            self.refuse(values, f"{len(completions)} values, one for each completion")
        results = []
        for c, value in zip(completions, values, strict=True):
            if value is not None and not is_number(value):
                self.refuse(value, "a number up to a billion, or None")
            verdict = "truncated" if c.truncated else "wrong"
            results.append((value, "correct" if (value or 0) > 0.5 else verdict))
        return results

    def judge_one(self, c):
        result = self.function(c.text, c.problem.answer, c.truncated)
        is_pair = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], str)
        if not is_pair or not is_number(result[0]) or result[1] not in VERDICTS:
            self.refuse(result, f"(a number up to a billion, one of {', '.join(VERDICTS)})")
        return result

    def lists_of(self, completions):
        columns = [c.problem.columns for c in completions]
        lists = {name: [values[name] for values in columns] for name in columns[0]}
        lists["completion_ids"] = [c.ids for c in completions]
        lists["completions"] = [c.text for c in completions]
        if isinstance(columns[0]["prompts"], list):
            lists["completions"] = [[{"role": "assistant", "content": c.text}] for c in completions]
        try:
            self.signature.bind(**lists)
        except TypeError as error:
            raise UserError(f"{self.flag} cannot be called with {', '.join(lists)}") from error
        return lists


def is_number(value):
    """Whether it is a number, and so small that squares of rewards are finite in float32."""
    return isinstance(value, Real) and abs(value) <= 1e9  # not for a NaN


def load_rewards(args):
    """`--reward` -> [RewardFunction]."""
    weights = args.reward_weights or [1.0] * len(args.reward)
    functions = [RewardFunction(*pair) for pair in zip(args.reward, weights, strict=True)]
    args.reads_answers = not all(function.takes_lists for function in functions)
    return functions


def judgements(verify, completions):
    """[{field of a Completion: value}] by `verify`, or by a list of reward functions: the sum of their
    values, the verdict of the first, and the value of each."""
    if not isinstance(verify, list):
        results = [verify(c.text, c.problem.answer, c.truncated) for c in completions]
        return [{"reward": reward, "verdict": verdict} for reward, verdict in results]
    judged = []
    columns = [f.judge(completions) for f in verify if completions]  # a rank may have no share
    for c, *results in zip(completions, *columns, strict=True):
        rewards = {}
        reward = 0.0
        for f, (value, _) in zip(verify, results, strict=True):
            rewards[f.name] = None if value is None else float(value)
            reward += f.weight * float(value or 0)
        if set(rewards.values()) == {None}:
            raise UserError(f"--reward: all functions returned None for the completion {c.text!r:.300}")
        judged.append({"reward": reward, "verdict": results[0][1], "rewards": rewards})
    return judged
