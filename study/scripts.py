"""What the tools share: their command lines, the logs of runs, and what the scripts say about
themselves. A new script is found by its last line; its title, paper, parent and differences are read
from its header."""

import argparse
import ast
import difflib
import functools
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))


def command_line(docstring):
    """A tool's parser, whose --help shows its docstring."""
    raw = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=docstring, formatter_class=raw)


def read_lines(folder, log):
    """The rows of a log, such as metrics.jsonl, in the folder of a run. A last line without its newline
    is left out: it is being written, or the run was killed."""
    *lines, _ = Path(folder, log).read_text().split("\n")
    return [json.loads(line) for line in lines]


def read_run(folder):
    """(settings, rows of metrics.jsonl, rows of evaluations.jsonl) of a run."""
    try:
        settings = json.loads(Path(folder, "settings.json").read_text())
        return settings, read_lines(folder, "metrics.jsonl"), read_lines(folder, "evaluations.jsonl")
    except (OSError, ValueError) as error:
        sys.exit(f"{folder} is not the folder of a run: {error}")


def file_of(name):
    """more.rloo -> more/rloo.py"""
    return f"{name.replace('.', '/')}.py"


@functools.cache
def read(name):
    """(header docstring, the lines after it) of a script."""
    text = (ROOT / file_of(name)).read_text()
    tree = ast.parse(text)
    return ast.get_docstring(tree), text.splitlines()[tree.body[0].end_lineno :]


def title_of(name):
    return read(name)[0].split(":")[0]


def paper_of(name):
    """The first arXiv id in the header; "" if there is none."""
    found = re.search(r"arXiv\s+(\d+\.\d+)", read(name)[0])
    return found[1] if found else ""


def differences_of(name):
    """[text of a numbered difference from the parent]; none for the root."""
    for paragraph in read(name)[0].split("\n\n"):
        if paragraph.startswith("Parent:"):
            numbered = re.split(r"^  \d\. ", paragraph, flags=re.MULTILINE)[1:]
            return [" ".join(text.split()) for text in numbered]
    return []


def changes_of(name):
    """The first words of each difference, without the KL, which all but ppo and grpo leave out."""
    words = [re.split(r"[:.]", text)[0] for text in differences_of(name)]
    return [each for each in words if not each.startswith("No KL")]


def parent_of(name):
    """The parent that the header names, None for the root."""
    found = re.search(r"Parent: (\w+)\.py", read(name)[0])
    if not found:
        return None
    return found[1] if (ROOT / f"{found[1]}.py").exists() else f"more.{found[1]}"


def changed_lines(parent, child):
    """How many lines are added or removed, not counting the header docstring."""
    diff = list(difflib.unified_diff(read(parent)[1], read(child)[1], lineterm=""))
    return sum(line.startswith(("+", "-")) for line in diff[2:])  # after the two names


def named(pattern, prefix=""):
    """The names of the scripts among these files, by the date of their papers; without one, at the
    end."""
    names = []
    for path in ROOT.glob(pattern):
        if path.read_text().endswith("    launch(main, Args)\n"):
            names.append(prefix + path.stem)
    return sorted(names, key=lambda name: (paper_of(name) or "none yet", name))


SCRIPTS = named("*.py")
MORE = named("more/*.py", "more.")
