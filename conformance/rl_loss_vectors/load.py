"""Imports a function as Python imports it, makes an instance of a class, and writes adapters."""

import ast
import importlib
import importlib.util
import inspect
import sys
from pathlib import Path

from rl_loss_vectors.names import Misfit, Settings, bind, is_required

COPY = "Copy the function into a file of its own and check that."


def settings_of(texts):
    """{parameter: value} of NAME=VALUE; a.b=VALUE makes Settings, to any depth."""
    settings = Settings()
    for text in texts:
        path, _, value = text.partition("=")
        *outer, name = path.split(".")
        place = settings
        for key in outer:
            place = place.setdefault(key, Settings())
            if not isinstance(place, Settings):
                raise Misfit(f"--set {text}: {key} has a value already")
        try:
            place[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            place[name] = value
    return settings


def place_of(path):
    """(folder for sys.path, the module's name): a file in a package is imported as a part of it."""
    if not path:
        raise Misfit("the target is FILE.py:FUNCTION or pkg.module:FUNCTION")
    if not path.endswith(".py"):
        return str(Path.cwd()), path
    file = Path(path).resolve()
    if not file.is_file():
        raise Misfit(f"no file {path}: the target is FILE.py:FUNCTION")
    names = [file.stem]
    folder = file.parent
    while (folder / "__init__.py").is_file():
        names.insert(0, folder.name)
        folder = folder.parent
    return str(folder), ".".join(names)


def imported(path):
    folder, name = place_of(path)
    sys.path.insert(0, folder)
    try:
        if "." in name or not path.endswith(".py"):
            return importlib.import_module(name)
        name = f"checked_{name}" if name in sys.modules else name
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # where a dataclass looks for it
        spec.loader.exec_module(module)
        return module
    except (Exception, SystemExit) as error:
        raise Misfit(f"{path} cannot be imported: {type(error).__name__}: {error}. {COPY}") from error


def load(target, section, defaults, fixed):
    """(the function of FILE.py:NAME or pkg.module:NAME, {parameter: constant} of its constructor)"""
    path, _, name = target.rpartition(":")
    module = imported(path)
    found = module
    constants = {}
    for attribute in name.split("."):
        if not hasattr(found, attribute):
            own = [key for key, x in vars(module).items() if inspect.getmodule(x) is module]
            raise Misfit(f"no function {name}; it has: {', '.join(own) or 'none'}")
        is_method = inspect.isfunction(inspect.getattr_static(found, attribute, None))
        if inspect.isclass(found) and is_method:
            found, constants = made(found, section, defaults, fixed)
        found = getattr(found, attribute)
    if inspect.isclass(found):
        found, constants = made(found, section, defaults, fixed)
    found = found if callable(found) else getattr(found, "forward", found)
    if not callable(found):
        methods = [key for key, x in inspect.getmembers(found, callable) if not key.startswith("_")]
        raise Misfit(f"{name} cannot be called; it has: {', '.join(methods) or 'no methods'}")
    return found, constants


def made(cls, section, defaults, fixed):
    """(an instance, the constants that we have filled in)"""
    parameters = inspect.signature(cls).parameters
    given = {name: x for name, x in fixed.items() if name in parameters}
    try:
        constants = bind(parameters, [], section, defaults, given).constants
        return cls(**given, **constants), constants
    except Exception as error:
        why = f"{type(error).__name__}: " * (not isinstance(error, Misfit)) + str(error)
        misfit = Misfit(f"the constructor of {cls.__name__}: {why}")
        misfit.unknown, misfit.parameters = getattr(error, "unknown", ()) or ["NAME"], {}
        raise misfit from error


def adapter(target, arguments, optional, parameters, known):
    """Lines that run when every ... is filled in. parameters: of the function, {} if it has none."""
    path, _, name = target.rpartition(":")
    folder, module = place_of(path)
    first, *rest = name.split(".")
    is_class = inspect.isclass(getattr(sys.modules.get(module), first, None))
    called = ".".join([f"{first}(...)" if is_class else first, *rest])
    passed = []
    for parameter in parameters.values():
        is_set = parameter.default not in (None, parameter.empty)
        is_variable = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        value = "None" if parameter.default is None else "..."
        value = known.get(parameter.name, value)
        if parameter.kind == parameter.POSITIONAL_ONLY:
            passed.append(f"{value}")
        elif parameter.name in known or not (is_set or is_variable):
            passed.append(f"{parameter.name}={value}")
    needed = [known[x.name] for x in parameters.values() if x.name in known and is_required(x)]
    taken = [*arguments, *(key if key in needed else f"{key}=None" for key in optional)]
    taken += ["group_size"] if "group_size" in needed else []
    return f"""\
import sys

sys.path.insert(0, {folder!r})
from {module} import {first}


def adapter({", ".join(taken)}):
    # Complete your own call. What is =None is not always passed.
    return {called}({", ".join(passed) or "..."})"""
