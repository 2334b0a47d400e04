"""House rules of style that ruff does not know: nothing is folded to save a line, and no file grows
long. Of the scripts and what is below them, and of what people copy or start from. And every commit
that benchmarks/results/ names is an ancestor of this one.

    python .ci/style.py
"""

import ast
import csv
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PATTERNS = "*.py plumbing/*.py more/*.py conformance/*.py examples/*.py tiny_moe/*.py"
PATTERNS += " benchmarks/long_addition.py"
# Lines. A file that comes near has to lose something, not to be folded.
LIMITS = {"common.py": 500, "more/vapo.py": 360, "examples": 130}  # of the others 320
MAIN_LIMITS = {"more/vapo.py": 145}  # lines of a script's main; of the others 120
PAIRS = {("low", "high")}  # names that belong together and may be assigned in one statement


def contains(node, *kinds):
    return any(isinstance(child, kinds) for child in ast.walk(node))


def two_assignments(node):
    if not isinstance(node, ast.Assign):
        return False
    if len(node.targets) > 1:
        return True  # a = b = ...
    (target,) = node.targets
    if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
        return tuple(ast.unparse(element) for element in target.elts) not in PAIRS
    return False


def logic_in_a_for_header(node):
    return isinstance(node, ast.For) and contains(node.iter, ast.GeneratorExp, ast.IfExp)


def conditional_inside_range(node):
    is_range = isinstance(node, ast.Call) and ast.unparse(node.func) == "range"
    return is_range and contains(node, ast.IfExp)


def comparison_as_a_slice_bound(node):
    return isinstance(node, ast.Slice) and contains(node, ast.Compare, ast.BoolOp, ast.Not)


def slice_of_a_list_written_out(node):  # [x][:condition]
    is_slice = isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice)
    return is_slice and isinstance(node.value, ast.List)


def nested_conditionals(node):
    if not isinstance(node, ast.IfExp):
        return False
    return any(contains(part, ast.IfExp) for part in (node.test, node.body, node.orelse))


def list_times_bool(node):
    if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)):
        return False
    sides = (node.left, node.right)
    has_bool = any(contains(side, ast.Compare, ast.BoolOp, ast.Not) for side in sides)
    return has_bool and any(isinstance(side, ast.List) for side in sides)


def dict_named_is(node):
    if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict | ast.DictComp)):
        return False
    return ast.unparse(node.targets[0]).startswith("is_")


FOLDS = {  # each with lines that are folded
    two_assignments: ["a = b = 1", "a, b = 1, 2"],
    logic_in_a_for_header: ["for x in (y for y in z if y): pass", "for x in z if y else (): pass"],
    conditional_inside_range: ["range(3 if x else 0)"],
    comparison_as_a_slice_bound: ["x[: y > 0]", "x[y not in z :]"],
    slice_of_a_list_written_out: ["[x][:y]"],
    nested_conditionals: ["a if b else c if d else e", "a if (b if c else d) else e"],
    list_times_bool: ["[x] * (y > 0)", "[x] * (not y)"],
    dict_named_is: ["is_moe = {1: 2}"],
}
UNFOLDED = """
low, high = 1, 2
a, b = f()
a, b = [int(x) for x in y]
for x in [y for y in z if y]: pass
[x for x in (y for y in z)]
x[: y + 1]
x[y > 0]
x[:y]
a if b else c
(a if b else c) + (d if e else f)
[0] * (width - len(row))
is_end = x == y
kinds = {1: 2}
"""


def folds(text):
    """[(line, what)] of the ways to save a line."""
    found = []
    line = 0
    for node in ast.walk(ast.parse(text)):
        line = getattr(node, "lineno", line)
        found += [(line, fold.__name__) for fold in FOLDS if fold(node)]
    return found


def git(*words):
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)


def lost_commits():
    """What results name and cannot be looked up; a shallow clone does not know."""
    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        return []
    named = {}  # {commit: a file}
    for path in ROOT.glob("benchmarks/results/*.csv"):
        with open(path) as file:
            named |= {row["commit"]: path.name for row in csv.DictReader(file) if row.get("commit")}
    lost = []
    for commit, name in named.items():
        if git("merge-base", "--is-ancestor", commit, "HEAD").returncode != 0:
            lost.append(f"{name}: commit {commit} is no ancestor")
    return lost


def main():
    for fold, lines in FOLDS.items():  # the checker can tell
        assert all((1, fold.__name__) in folds(line) for line in lines), fold.__name__
    assert folds(UNFOLDED) == []
    complaints = lost_commits()
    for pattern in [*PATTERNS.split(), ".ci/*.py"]:
        paths = sorted(ROOT.glob(pattern))
        assert paths, pattern
        for path in paths:
            name = str(path.relative_to(ROOT))
            text = path.read_text()
            limit = LIMITS.get(name, LIMITS.get(path.parent.name, 320))
            if len(text.splitlines()) > limit:
                complaints.append(f"{name}: more than {limit} lines")
            for node in ast.parse(text).body:
                is_main = isinstance(node, ast.FunctionDef) and node.name == "main"
                if is_main and node.end_lineno - node.lineno >= MAIN_LIMITS.get(name, 120):
                    complaints.append(f"{name}: its main is too long")
            complaints += [f"{name}:{line}: {what.replace('_', ' ')}" for line, what in folds(text)]
    if complaints:
        sys.exit("\n".join(complaints))


if __name__ == "__main__":
    main()
