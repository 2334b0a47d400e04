"""A repair shop: writes a script with one bug from bugs.toml, and checks whether you have fixed it.

python study/repair.py --list       # the numbers, and which script each one changes
python study/repair.py 7            # writes runs/repair/bug_7.py
python -m runs.repair.bug_7         # run it, read it and its metrics, fix it
python study/repair.py 7 --hint
python study/repair.py 7 --check    # does it behave like the original?
"""

import contextlib
import io
import math
import runpy
import sys
import tempfile
import tomllib
import zlib

from scripts import ROOT, command_line, read_lines

SHOP = ROOT / "runs" / "repair"

# Two iterations, because some bugs show only in the next rollout; several micro-batches per step.
JOB = {"iterations": 2, "prompts_per_iteration": 12, "num_minibatches": 2, "micro_batch_tokens": 256}
JOB |= {"lr": 1e-3, "num_held_out": 2, "device": "cpu"}


def changed(bug):
    """The script that the bug is in, with the bug, as text."""
    original = (ROOT / f"{bug['script']}.py").read_text()
    return original.replace(bug["old"], bug["new"])


def load_bugs():
    """{number: bug}. The numbers do not give anything away."""
    kinds = tomllib.loads((ROOT / "study" / "bugs.toml").read_text())
    bugs = sorted(sum(kinds.values(), []), key=lambda bug: zlib.crc32(bug["title"].encode()))
    return dict(enumerate(bugs, start=1))


def metrics_of_a_run(script):
    """{key: [value in each iteration]} for a small run with a fixed seed, without timings."""
    found = {}
    silence = io.StringIO()
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stdout(silence),
        contextlib.redirect_stderr(silence),
    ):
        script["main"](script["Args"](**JOB, run_dir=folder))
        for row in read_lines(folder, "metrics.jsonl"):
            for key, value in row.items():
                if "second" not in key:
                    found.setdefault(key, []).append(value)
    return found


def behavior(path):
    """{name: [values]}: the defaults of a script's flags, and the metrics of a run."""
    script = runpy.run_path(str(path))
    defaults = {"defaults of the flags": list(vars(script["Args"]()).items())}
    return defaults | metrics_of_a_run(script)


def is_same(x, y):
    if isinstance(x, float) and isinstance(y, float):
        return math.isclose(x, y, rel_tol=1e-4, abs_tol=1e-5)
    return x == y


def differences(found, expected):
    """One line for each name where a script does not behave like the original."""
    lines = []
    for name in [*expected, *(found.keys() - expected.keys())]:
        ours = expected.get(name, [])
        theirs = found.get(name, [])
        num_same = sum(is_same(x, y) for x, y in zip(ours, theirs, strict=False))
        if num_same < max(len(ours), len(theirs)):
            lines.append(f"{name}: {num_same} of {len(ours)} as in the original")
    return lines


def main():
    parser = command_line(__doc__)
    bugs = load_bugs()
    parser.add_argument("number", type=int, nargs="?", choices=bugs, metavar=f"1..{len(bugs)}")
    parser.add_argument("--list", action="store_true", help="the numbers, with their scripts")
    parser.add_argument("--hint", action="store_true", help="where to look")
    parser.add_argument("--check", action="store_true", help="does it behave like the original?")
    args = parser.parse_args()
    if args.list:
        for number, bug in bugs.items():
            print(f"{number:2}  {bug['script']}.py")
        return
    if args.number is None:
        parser.error("which bug? Name a number, or --list")
    bug = bugs[args.number]
    path = SHOP / f"bug_{args.number}.py"
    if args.hint:
        print(bug["hint"])
    elif args.check:
        lines = differences(behavior(path), behavior(ROOT / f"{bug['script']}.py"))
        if lines:
            sys.exit("\n".join(["not fixed:", *lines]))
        print(f"fixed: {bug['title']}. {bug['wrong']}\nFix: {bug['fix']} {bug.get('seen', '')}")
    elif path.exists():
        sys.exit(f"{path} exists: remove it to start again")
    else:
        SHOP.mkdir(parents=True, exist_ok=True)
        path.write_text(changed(bug))
        print(f"{path} has a bug. To run it: python -m runs.repair.{path.stem}")


if __name__ == "__main__":
    main()
