"""What changes no number of an algorithm. Scripts import from common alone."""

import sys


def print_no_traceback(kind, error, traceback):
    """Ctrl-C while libraries are imported, which takes seconds, is no bug. Later: see args.launch."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, traceback)


sys.excepthook = print_no_traceback
