"""What a run prints: a line every few iterations, and the results at the end."""

import io
import math
import os

# Title of a column: key in metrics.jsonl, format
COLUMNS = {
    "iteration": ("iteration", "d"),
    "reward": ("rollout/reward_mean", ".3f"),
    "accuracy": ("rollout/accuracy", ".3f"),
    "length": ("rollout/response_len_mean", ".1f"),
    "entropy": ("losses/entropy", ".3f"),
    "clipped": ("clipped", ".2%"),
    "held-out": ("eval/accuracy", ".3f"),
}
TITLES = "  ".join(COLUMNS)
WAYS = ("greedy", "sampled")  # to answer held-out problems


class Stream:
    """stdout or stderr of a run. The run continues if nothing can be printed anymore, as after `| head`
    or on a full disk."""

    def __init__(self, stream):
        self.stream = stream or io.StringIO()  # None if it was closed from the start
        if hasattr(self.stream, "reconfigure"):
            # A prompt may contain characters that the terminal cannot show.
            self.stream.reconfigure(errors="backslashreplace")

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text):
        try:
            self.stream.write(text)
            self.stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())

    def flush(self):
        """`write` has already done it."""


def progress_line(metrics):
    """A line below `TITLES`. Cells without a metric (a key in metrics.jsonl) stay blank."""
    clips = [metrics[key] for key in ("losses/clipfrac_low", "losses/clipfrac_high") if key in metrics]
    if clips:
        metrics = metrics | {"clipped": sum(clips)}
    cells = []
    for title, (key, kind) in COLUMNS.items():
        text = f"{metrics[key]:{kind}}" if key in metrics else ""
        cells.append(text.rjust(len(title)))
    return "  ".join(cells).rstrip()


def results_text(before, after):
    """The results of two evaluations (common.evaluate) as a table, and some completions. `after` is
    None for a run that was not evaluated after training."""
    evaluations = {"before": before}
    if after is not None:
        evaluations["after"] = after
    title = "held-out problems"
    width = max(len(name) for name in [title, *before["sampled"]])
    header = f"{title:{width}}"
    for way in WAYS:
        header += f"{way:>9}"
        header += "".join(f"{when:>8}" for when in evaluations)
    lines = [header]
    for name in before["sampled"]:
        line = f"{name:{width}}"
        for way in WAYS:
            line += " " * 9
            for results in evaluations.values():
                value = results[way].get(name, math.nan)  # pass@k needs several samples
                digits = 3 if value < 1000 else 1
                cell = "" if math.isnan(value) else f"{value:.{digits}f}"
                line += f"{cell:>8}"
        lines.append(line.rstrip())
    for i, (prompt, answer, _) in enumerate(before["examples"]):
        lines += ["", f"{prompt}   (sampled; the answer is {answer})"]
        for when, results in evaluations.items():
            lines.append(f"  {when + ':':7} {results['examples'][i][2]}")
    return "\n".join(lines)
