"""Errors that the user can fix."""

import contextlib

import torch


class UserError(Exception):
    """Something the user can fix: one sentence with the flag and what was found. `launch` prints it and
    exits with code 2."""


def cause_of(error):
    """The exception that led to this one, or None. Without a `from`, only an OSError counts: on a full
    disk torch says "unexpected pos", raised while "No space left on device" was handled."""
    context = None if error.__suppress_context__ else error.__context__
    return context if isinstance(context, OSError) else error.__cause__


@contextlib.contextmanager
def one_line(message):
    """Turns an exception inside, except out of memory, into a UserError: this message and its cause."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (Exception, SystemExit) as error:
        cause = error
        while cause_of(cause) is not None and not isinstance(cause, UserError):
            cause = cause_of(cause)
        kind = "" if isinstance(cause, UserError) else f"{type(cause).__name__} "
        raise UserError(f"{message}: {kind}{' '.join(str(cause).split()):.250}") from error
