"""Errors that the user can fix."""

import contextlib

import torch


class UserError(Exception):
    """Something the user can fix: one sentence with the flag and what was found. `launch` prints it and
    exits with code 2."""


@contextlib.contextmanager
def one_line(message):
    """Turns any exception inside into a UserError: this message, and what the first cause says."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (Exception, SystemExit) as error:
        cause = error
        while cause.__cause__ is not None and not isinstance(cause, UserError):
            cause = cause.__cause__
        kind = "" if isinstance(cause, UserError) else f"{type(cause).__name__} "
        raise UserError(f"{message}: {kind}{' '.join(str(cause).split()):.250}") from error
