"""A reward of the user's own, in place of common.verify."""

import runpy

from plumbing.args import UserError

VERDICTS = ("correct", "wrong", "no_answer", "truncated")


def load_reward(name):
    """The function that `--reward FILE.py:FUNCTION` names; what it returns is checked."""
    path, _, function_name = name.rpartition(":")
    try:
        function = runpy.run_path(path)[function_name]
    except Exception as error:  # the file may raise anything
        raise UserError(f"--reward {name} cannot be loaded as FILE.py:FUNCTION") from error

    def checked(text, answer, truncated=False):
        result = function(text, answer, truncated)
        if isinstance(result, tuple) and len(result) == 2:
            reward, why = result
            is_number = isinstance(reward, (int, float)) and abs(reward) < 3e38  # in float32, no NaN
            if is_number and why in VERDICTS:
                return float(reward), why
        expected = f"(a finite number, one of {', '.join(VERDICTS)})"
        raise UserError(f"--reward {name} returned {result!r:.80}, not {expected}")

    return checked
