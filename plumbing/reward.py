"""Loads and checks a user's reward function, which replaces common.verify."""

import inspect
import os
import runpy
import sys
from numbers import Real

import torch

from plumbing.args import UserError

VERDICTS = ("correct", "wrong", "no_answer", "truncated")
# State of the whole process. A reward function that changes it would break the training elsewhere.
SHARED = {
    "whether torch computes gradients": torch.is_grad_enabled,
    "torch's default dtype": torch.get_default_dtype,
    "torch's default device": torch.get_default_device,
    "the working folder": os.getcwd,
}


def load_reward(name):
    """The function that `--reward FILE.py:FUNCTION` names. Its results are checked."""
    path, _, function_name = name.rpartition(":")

    def call(function, *arguments):
        """The function's result. An exit becomes an error, lest the run end as if it had finished."""
        before = {what: value() for what, value in SHARED.items()}
        try:
            result = function(*arguments)
        except SystemExit as error:
            raise RuntimeError(f"--reward {name} called exit({error})") from error
        for what, value in SHARED.items():
            if value() != before[what]:
                raise UserError(f"--reward {name} changes {what}")
        return result

    sys.path.append(os.path.dirname(path))  # for the files that it imports
    try:
        function = call(runpy.run_path, path)[function_name]
    except UserError:
        raise
    except Exception as error:  # the file may raise anything
        raise UserError(f"--reward {name} cannot be loaded as FILE.py:FUNCTION") from error
    check_signature(function, name)

    def checked(text, answer, truncated=False):
        result = call(function, text, answer, truncated)
        if isinstance(result, tuple) and len(result) == 2:
            reward, verdict = result
            is_number = isinstance(reward, Real) and abs(reward) < 3e38  # in float32, no NaN
            if is_number and verdict in VERDICTS:
                return float(reward), verdict
        expected = f"(a finite number, one of {', '.join(VERDICTS)})"
        raise UserError(f"--reward {name} returned {result!r:.80}, not {expected}")

    return checked


def check_signature(function, name):
    """UserError if it cannot be called with a text, an answer, and whether the text is truncated."""
    message = f"--reward {name} must be a function of (text, answer, truncated)"
    if isinstance(function, type) or inspect.iscoroutinefunction(function):
        raise UserError(f"{message}, not a class and not async")
    try:
        inspect.signature(function).bind("text", "answer", False)
    except (TypeError, ValueError) as error:  # no function, other parameters, or it hides them
        raise UserError(message) from error
