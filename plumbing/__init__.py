"""What does not change an algorithm's numbers. Scripts import only from common."""

import contextlib
import sys


class UserError(Exception):
    """Something the user can fix: one sentence with the flag and what was found.
    `args.launch` prints it and exits with code 2."""


@contextlib.contextmanager
def one_line(message):
    """Turns any exception inside into a UserError: this message and the first line of the
    original one, which may be long. Being out of memory is reported by `args.launch`."""
    try:
        yield
    except Exception as error:
        kind = type(error).__name__
        if kind in ("UserError", "OutOfMemoryError"):
            raise
        cause = str(error).strip().partition("\n")[0]
        raise UserError(f"{message}: {kind} {cause:.200}") from None


def print_no_traceback(kind, error, traceback):
    """No traceback for Ctrl-C while transformers is imported. After that, see args.launch."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, traceback)


sys.excepthook = print_no_traceback
