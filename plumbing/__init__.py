"""What does not change an algorithm's numbers. Scripts import only from common."""

import sys


class UserError(Exception):
    """Something the user can fix: one sentence with the flag and what was found.
    `args.launch` prints it and exits with code 2."""


def print_no_traceback(kind, error, traceback):
    """No traceback for Ctrl-C during the slow imports. After that, see args.launch."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, traceback)


sys.excepthook = print_no_traceback
