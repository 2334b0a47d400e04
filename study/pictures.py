"""matplotlib, for the files that draw: a run needs none."""

import sys


def pyplot():
    """matplotlib.pyplot, imported where something is drawn."""
    try:
        import matplotlib
    except ImportError:
        sys.exit("pictures need matplotlib: pip install -r study/requirements.txt")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
