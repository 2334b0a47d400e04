"""A function of somebody's file, also if the file cannot be imported: the function and what it uses are
then taken out of the syntax tree, with stand-ins for what is not installed."""

import __future__

import ast
import importlib
import inspect
import os
import runpy
import sys
from pathlib import Path

from rl_loss_vectors import names
from rl_loss_vectors.vectors import Misfit

CONSTANTS = {"clip_eps": 0.2, "clip_eps_low": 0.2, "clip_eps_high": 0.2, "kl_coef": 0.04}
KEPT = ("staticmethod", "classmethod", "property", "dataclass")  # decorators
IMPORTS = (ast.Import, ast.ImportFrom)
DEFINITIONS = (ast.FunctionDef, ast.ClassDef)


class StandIn(type):
    """A foreign name: it can be called, subclassed or used as a decorator, and it has any attribute."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return stand_in(name)

    def __instancecheck__(cls, x):
        return "is_stand_in" in vars(cls) and type(x).__name__ in ("Bundle", "SimpleNamespace")

    def __call__(cls, *args, **keywords):
        if "is_stand_in" not in vars(cls):  # a class of the file
            return super().__call__(*args, **keywords)
        return args[0] if len(args) == 1 and callable(args[0]) else cls


def stand_in(name):
    return StandIn(name, (), {"is_stand_in": True, "__init__": lambda self, *args, **keywords: None})


def statements_of(nodes):
    """The statements of a module, also those in `if` and `try`."""
    for node in nodes:
        if isinstance(node, (ast.If, ast.Try)):
            yield from statements_of(node.body + node.orelse)
        else:
            yield node


def names_of(node):
    """What a statement defines."""
    if isinstance(node, IMPORTS):
        return [alias.asname or alias.name.split(".")[0] for alias in node.names]
    if isinstance(node, DEFINITIONS):
        return [node.name]
    return [x.id for x in ast.walk(node) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)]


class Module:
    """The names of a file, each defined when it is first needed."""

    def __init__(self, path, stand_ins=()):
        self.path = Path(path)
        self.members = {"__name__": self.path.stem, "__file__": str(path)}
        self.stand_ins = stand_ins or {}
        nodes = list(statements_of(ast.parse(self.path.read_text()).body))
        self.nodes = {name: node for node in nodes for name in names_of(node)}

    def __getattr__(self, name):
        if name not in self.nodes:
            raise AttributeError(name)
        if name not in self.members:
            node = self.nodes[name]
            self.members[name] = None  # for a function that calls itself
            try:
                define = self.imported if isinstance(node, IMPORTS) else self.defined
                self.members[name] = define(node, name)
            except (Exception, SystemExit):
                if isinstance(node, DEFINITIONS):
                    raise
                self.stand_ins[name] = self.members[name] = stand_in(name)
        return self.members[name]

    def defined(self, node, name):
        for inner in ast.walk(node):
            if isinstance(inner, DEFINITIONS):
                inner.decorator_list = [x for x in inner.decorator_list if ast.unparse(x) in KEPT]
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name) and inner.id in self.nodes:
                getattr(self, inner.id)
        flags = __future__.annotations.compiler_flag
        exec(
            compile(ast.Module([node], []), str(self.path), "exec", flags, dont_inherit=True),
            self.members,
        )
        return self.members[name]

    def imported(self, node, name):
        """From what is installed, or else from a file in this folder or one above."""
        alias = next(x for x in node.names if name in (x.asname, x.name.split(".")[0]))
        is_whole = isinstance(node, ast.Import)
        module = alias.name if is_whole else node.module or ""
        level = 0 if is_whole else node.level
        folders = self.path.resolve().parents
        for folder in folders[level - 1 : level] if level else folders:
            place = folder.joinpath(*module.split("."))
            for path in (place.with_suffix(".py"), place / "__init__.py", place / f"{alias.name}.py"):
                if path.is_file():
                    other = Module(path, self.stand_ins)
                    return other if is_whole or path.stem == alias.name else getattr(other, alias.name)
        found = importlib.import_module(module)
        if is_whole:
            return found if alias.asname else sys.modules[name]
        return getattr(found, alias.name)


def path_of(target):
    """(file, name) of FILE.py:NAME or pkg.module:NAME."""
    path, _, name = target.rpartition(":")
    if not path.endswith(".py"):
        module, path = path, path.replace(".", os.sep) + ".py"
        spec = None if Path(path).is_file() else importlib.util.find_spec(module)
        path = spec.origin if spec else path
    if not Path(path).is_file():
        raise Misfit(f"no file {path}")
    return path, name


def load(path, name, fixed):
    """(the function, lines about how it was loaded); a class is made, its forward is the function."""
    sys.path.insert(0, str(Path(path).parent))
    first, *attributes = name.split(".")
    module = Module(path)
    here = [key for key, x in module.nodes.items() if not isinstance(x, IMPORTS)]
    lines = []
    try:
        found = runpy.run_path(path).get(first)
    except (Exception, SystemExit) as error:
        if first not in here:
            raise
        found = getattr(module, first)
        lines = [
            f"the file cannot be imported ({type(error).__name__}: {error}): {first} is taken from it"
        ]
        lines += [f"stand-ins for {', '.join(module.stand_ins)}"] if module.stand_ins else []
    if found is None:
        raise Misfit(f"no function {name}; it has: {', '.join(here) or 'none'}")
    for attribute in attributes:
        is_method = inspect.isfunction(inspect.getattr_static(found, attribute, None))
        found = getattr(made(found, fixed) if is_method else found, attribute)
    found = made(found, fixed) if inspect.isclass(found) else found
    return (found if callable(found) else getattr(found, "forward", found)), lines


def made(cls, fixed):
    """An instance, whose constructor gets what is set and our usual constants."""
    given = {}
    for name, parameter in [*inspect.signature(cls.__init__).parameters.items()][1:]:
        key = names.first_of(names.KEYWORDS, name)
        if name in fixed:
            given[name] = fixed[name]
        elif parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            if key not in CONSTANTS:
                raise Misfit(f"the constructor of {cls.__name__} needs {name}: pass --set {name}=...")
            given[name] = CONSTANTS[key]
    return cls(**given)
