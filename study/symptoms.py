"""Which bugs can you see? Compares the metrics of scripts with a bug to those of healthy runs, for a
table in report.py. `python study/sweep.py symptoms` makes the runs, in an hour and a half on one core.

A bug shows in a metric if its three runs are all above, or all below, the twenty healthy ones. If a
change has no effect, the probability of that is 2 / C(20 + 3, 3).
"""

import math
import tempfile
from pathlib import Path

import stats
from experiments import BUG_JOBS, HEALTHY_SEEDS, SICK_SEEDS, SYMPTOMS, bug_variant, shown_bugs
from repair import doctor, functions_of, load

NUM_WORDS = 4  # maximum number of metrics in a cell of the table


def shows(sick, healthy):
    """["metric ↑" or "metric ↓"] where all of a bug's runs lie above or below all healthy ones."""
    found = []
    for metric in SYMPTOMS:
        own = stats.values(sick, metric)
        usual = stats.values(healthy, metric)
        if own and usual and min(own) > max(usual):
            found.append(f"{metric} ↑")
        if own and usual and max(own) < min(usual):
            found.append(f"{metric} ↓")
    return found


def cell(sick, healthy):
    """A cell of the table."""
    found = shows(sick, healthy)
    words = found[:NUM_WORDS]
    if len(found) > NUM_WORDS:
        words.append(f"{len(found) - NUM_WORDS} more")
    return ", ".join(words) or "nowhere"


def diagnosis(bug):
    """What the doctor says about the script's functions."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "script.py"
        path.write_text(bug["broken"])
        module = load(path)
    for _, function, section in functions_of(module, bug["script"]):
        _, _, lines = doctor.diagnosed(doctor.examine_shapes(function, section))
        for line in lines:
            kind, _, words = line.strip().partition(": ")
            if kind == "mistake" or kind.startswith("your gradient"):
                return words
    return ""


def summary():
    """The table in a sentence."""
    runs = stats.runs("symptoms")
    found = []
    for bug in shown_bugs().values():
        sick = runs[bug["script"], bug_variant("default", bug)]
        found.append(shows(sick, runs[bug["script"], "default"]))
    num_lower = sum("accuracy on average ↓" in names for names in found)
    num_higher = sum("accuracy on average ↑" in names for names in found)
    return (
        f"We planted {len(found)} bugs. In 25 iterations of the default job, only {num_lower} "
        f"hurt accuracy, {num_higher} improved it, and {found.count([])} left no trace in any of "
        f"{len(SYMPTOMS)} metrics."
    )


def table():
    """The bugs that show in the fewest metrics come first."""
    runs = stats.runs("symptoms")
    rows = []
    num_compared = 0
    for bug in shown_bugs().values():
        cells = [f"{bug['script']}: {bug['title']}"]
        num_found = 0
        for job in BUG_JOBS:
            sick = runs[bug["script"], bug_variant(job, bug)]
            healthy = runs[bug["script"], job]
            cells.append(cell(sick, healthy))
            num_found += len(shows(sick, healthy))
            num_compared += sum(bool(stats.values(healthy, metric)) for metric in SYMPTOMS)
        cells += [diagnosis(bug).replace("|", "\\|"), bug["fix"]]
        rows.append((num_found, cells))
    rows.sort()
    titles = ["bug", *BUG_JOBS, "the doctor", "fix"]
    lines = stats.markdown(titles, [row for _, row in rows])
    ways = math.comb(len(HEALTHY_SEEDS) + len(SICK_SEEDS), len(SICK_SEEDS))
    expected = num_compared * 2 / ways
    chance = f"By chance alone, {expected:.1f} of these {num_compared} comparisons would show."
    return [*lines, "", f"{summary()} {chance}"]
