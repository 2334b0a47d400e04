"""Imports a function as Python imports it, and writes an adapter for one that cannot be called."""

import ast
import importlib
import inspect
import sys
from pathlib import Path

from rl_loss_vectors.call import VECTORS, Refusal, optional_of, role_of


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
    known = [*VECTORS["sections"][section]["arguments"], *optional_of(section)]
    given = {name: str(x) for name, x in settings.items()}
    given |= {name.split(".")[0]: "..." for name in settings if "." in name}  # a field of it
    passed = []
    for name, x in inspect.signature(function).parameters.items():
        role = role_of(name, section)
        value = given.get(name, role if role in known else "...")
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
    optional = [x for x in optional_of(section) if f"={x}" in passed or "logprobs" not in passed]
    return f"""\
import sys

sys.path.insert(0, {folder!r})
from {module} import {first}


def adapter({", ".join([*VECTORS["sections"][section]["arguments"], *optional])}):
    return {".".join([made, *rest])}({passed})"""
