"""House rules that ruff does not know: nothing is folded to save a line, no file grows long, and every
commit that benchmarks/results/ names is an ancestor of this one.

    python .ci/style.py
"""

import ast
import csv
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ". plumbing more conformance conformance/rl_loss_vectors examples study tiny_moe .ci".split()
# In lines. A file that comes near its limit has to lose something, not to be folded.
LIMITS = {  # of the others 320
    "common.py": 530,
    "ppo.py": 325,
    "more/vapo.py": 370,
    "examples": 130,
    "conformance/rl_loss_vectors": 425,
}
MAIN_LIMITS = {"more/vapo.py": 145}  # of the others 120


def contains(node, *kinds):
    return any(isinstance(child, kinds) for child in ast.walk(node))


def fold(node):
    """The way in which this statement or expression saves a line, or None."""
    if isinstance(node, ast.Assign):
        names = ast.unparse(node.targets[0])
        is_pair = names == "(low, high)"  # which belong together
        is_tuple = isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)
        if len(node.targets) > 1 or is_tuple and not is_pair:
            return "two assignments"
    if isinstance(node, ast.For) and contains(node.iter, ast.GeneratorExp, ast.IfExp):
        return "logic in a for header"
    if isinstance(node, ast.IfExp):
        parts = (node.test, node.body, node.orelse)
        if any(contains(part, ast.IfExp) for part in parts):
            return "nested conditionals"
    return None


def complaints_about(path):
    name = str(path.relative_to(ROOT))
    folder = str(path.parent.relative_to(ROOT))
    text = path.read_text()
    limit = LIMITS.get(name, LIMITS.get(folder, 320))
    if len(text.splitlines()) > limit:
        yield f"{name}: more than {limit} lines"
    for node in ast.walk(ast.parse(text)):
        is_main = isinstance(node, ast.FunctionDef) and node.name == "main"
        if is_main and node.end_lineno - node.lineno >= MAIN_LIMITS.get(name, 120):
            yield f"{name}: its main is too long"
        if fold(node):
            yield f"{name}:{node.lineno}: {fold(node)}"


def git(*words):
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)


def lost_commits():
    """Commits that results name and nobody can look up; a shallow clone cannot tell."""
    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        return
    names = {}  # of a file for each commit
    for path in ROOT.glob("benchmarks/results/*.csv"):
        with open(path) as file:
            names |= {row["commit"]: path.name for row in csv.DictReader(file) if row.get("commit")}
    for commit, name in names.items():
        if git("merge-base", "--is-ancestor", commit, "HEAD").returncode != 0:
            yield f"{name}: commit {commit} is no ancestor"


def main():
    complaints = list(lost_commits())
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).glob("*.py")):
            complaints += complaints_about(path)
    if complaints:
        sys.exit("\n".join(complaints))


if __name__ == "__main__":
    main()
