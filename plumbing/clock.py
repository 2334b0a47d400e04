"""How long the phases of an iteration take. Phases time themselves; `Run` reads the seconds."""

import time
from contextlib import contextmanager

seconds = {}  # {phase: seconds since the iteration began}
running = []  # the phase that is being timed, if any
bar = None  # the progress bar, once there is one


@contextmanager
def clock(phase):
    """Times the code inside. Phases do not nest: sampling during evaluation counts as evaluation."""
    if running:
        yield
        return
    running.append(phase)
    show(phase)
    start = time.perf_counter()
    try:
        yield
    finally:
        running.clear()
        seconds[phase] = seconds.get(phase, 0) + time.perf_counter() - start
        show("update")  # everything outside other phases


def show(text):
    if bar is not None:
        bar.set_postfix_str(text)
