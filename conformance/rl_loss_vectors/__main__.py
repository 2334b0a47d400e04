"""Is your loss the one in the paper? Compares its values and gradients with the test vectors.

    python -m rl_loss_vectors grpo.py:policy_loss --algorithm grpo

Exit code 0: right; 1: not right; 2: it cannot be called, and an adapter is printed.
"""

import argparse
import ast
import importlib
import inspect
import re
import sys
import textwrap
import warnings
from pathlib import Path

from rl_loss_vectors import doctor
from rl_loss_vectors.call import NO_GRAPH, VECTORS, Refusal, optional_of, roles_of
from rl_loss_vectors.reference import LOSSES

ADVANTAGES = dict.fromkeys(["dr_grpo", "deepseek_v32"], "group_differences") | {"rloo": "leave_one_out"}
ADVANTAGES |= dict.fromkeys(["ppo", "vapo", "reinforce"])  # no advantages of groups


def arguments(program):
    parser = argparse.ArgumentParser(program, description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("target", help="FILE.py:FUNCTION or pkg.module:FUNCTION, which is run")
    add("--algorithm", choices=LOSSES, help="whose loss or advantages the function computes")
    what = ["loss", "advantages", "gae", "value_loss", "whiten"]
    add("--what", choices=what, default="loss", help="what the function computes (default: loss)")
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="a number or tensor's name")
    add("--allow", action="append", default=[], choices=doctor.DEPARTURES, help="what to accept")
    add("--verbose", action="store_true", help="print all tables")
    args = parser.parse_args()
    advantages = ADVANTAGES.get(args.algorithm, "group_advantages")
    sections = {"loss": args.algorithm, "advantages": advantages}
    if args.what in sections and args.algorithm is None:
        parser.error("--algorithm is needed")
    args.section = sections.get(args.what, args.what)
    if args.section is None:
        parser.error(f"there are no advantages of {args.algorithm} (GAE: --what gae)")
    return args


def value_of(text):
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text  # a tensor's name


def place_of(path):
    """(folder for sys.path, the module's name): a file in a package is imported as a part of it."""
    if not path.endswith(".py"):
        return str(Path.cwd()), path
    file = Path(path).resolve()
    names = [file.stem]
    folder = file.parent
    while (folder / "__init__.py").is_file():
        names.insert(0, folder.name)
        folder = folder.parent
    return str(folder), ".".join(names)


def load(target):
    """What FILE.py:NAME or pkg.module:NAME is."""
    path, _, name = target.rpartition(":")
    folder, module = place_of(path)
    sys.path.insert(0, folder)
    try:
        found = importlib.import_module(module)
        for attribute in name.split("."):
            found = getattr(found, attribute)
    except (Exception, SystemExit) as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        advice = "The target is FILE.py:FUNCTION; if modules are missing, copy it to a file of its own"
        raise Refusal(f"{why}. {advice}") from error
    return found


def passed_to(function, section, settings):
    """`x=mask, y=...`: what an adapter passes: all that it knows, and what has no default."""
    offered = [*VECTORS["sections"][section]["arguments"], *optional_of(section)]
    given = {name: str(x) for name, x in settings.items()}
    given |= {name.split(".")[0]: "..." for name in settings if "." in name}  # a field of it
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # compiled code may have no signature
        return "..."
    roles, _ = roles_of(parameters, section, settings)
    passed = []
    for name, x in parameters.items():
        role = roles.get(name)
        value = given.get(name, role if role in offered else "...")
        is_variable = x.kind in (x.VAR_POSITIONAL, x.VAR_KEYWORD)
        is_required = x.default is x.empty and not is_variable and name != "self"
        if is_required or value != "..." or name in given:
            passed.append(value if x.kind == x.POSITIONAL_ONLY else f"{name}={value}")
    return ", ".join(passed)


def adapter(target, found, section, settings):
    """Lines that run when every ... is filled in. All arguments are required, so none is ever None:
    where a case has no reference, the policy itself is passed, and the KL is 0."""
    path, _, name = target.rpartition(":")
    folder, module = place_of(path)
    first, *rest = name.split(".")
    owner = getattr(sys.modules[module], first)
    made = f"{first}({passed_to(owner, section, {})})" if inspect.isclass(owner) else first
    passed = "..."
    if not inspect.isclass(found):
        passed = passed_to(getattr(found, "forward", found), section, settings) or "..."
    tensors = VECTORS["sections"][section]["arguments"]
    names = [*tensors, *optional_of(section)]
    names = [x for x in names if re.search(rf"\b{x}\b(?!=)", passed)] or names
    optional = [x for x in optional_of(section) if x in names]
    left = ", ".join(x for x in tensors if x not in names)
    comment = f"# Not passed yet, and to be left out if it stays so: {left}\n" if left else ""
    return f"""\
import sys

sys.path.insert(0, {folder!r})
from {module} import {first}


{comment}def adapter({", ".join([*tensors, *optional])}):
    return {".".join([made, *rest])}({passed})"""


def main(program=None):
    args = arguments(program)
    warnings.simplefilter("ignore")  # the function's
    settings = {}
    for text in args.set:
        name, _, value = text.partition("=")
        settings[name] = value_of(value)
    function = None
    try:
        function = load(args.target)
        report = doctor.examine(function, args.section, settings, args.allow, args.verbose)
    except Refusal as error:
        print(f"{args.target} cannot be called as {args.section}: {error}")
        if function is not None and NO_GRAPH.partition("{")[0] not in str(error):
            print("--set NAME=0.2 passes a number, --set NAME=mask the tensor of that name.")
            print("Or save this as adapter.py, replace each `...`, and check adapter.py:adapter:\n")
            print(textwrap.indent(adapter(args.target, function, args.section, settings), "    "))
        sys.exit(2)
    constants = " ".join(f"{name}={x:g}" for name, x in report.subject.constants.items())
    constants = f" with {constants}" if constants else ""
    print(f"{args.target} as {args.section}{constants}, vectors {VECTORS['version']}")
    print("\n".join([*report.notes(), *(report.lines or ["right"])]))
    sys.exit(bool(report.lines))


if __name__ == "__main__":
    main("python -m rl_loss_vectors")
