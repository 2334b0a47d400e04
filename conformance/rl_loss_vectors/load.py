"""A function of somebody's file, also if the file cannot be imported: the function and what it uses are
then taken out of the syntax tree, with stand-ins for what is not installed."""

import __future__

import ast
import importlib
import inspect
import runpy
import sys
from pathlib import Path

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

    def __call__(cls, *args, **keywords):
        if "is_stand_in" not in vars(cls):  # a class of the file
            return super().__call__(*args, **keywords)
        return cls


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

    def __init__(self, path, stand_ins):
        self.path = Path(path)
        self.members = {"__name__": self.path.stem, "__file__": str(path)}
        self.stand_ins = stand_ins  # gets the names of foreign things
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
                self.stand_ins.append(name)
                self.members[name] = stand_in(name)
        return self.members[name]

    def defined(self, node, name):
        for inner in ast.walk(node):
            if isinstance(inner, DEFINITIONS):
                inner.decorator_list = [x for x in inner.decorator_list if ast.unparse(x) in KEPT]
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name) and inner.id in self.nodes:
                getattr(self, inner.id)
        flags = __future__.annotations.compiler_flag
        code = compile(ast.Module([node], []), str(self.path), "exec", flags, dont_inherit=True)
        exec(code, self.members)
        return self.members[name]

    def imported(self, node, name):
        """From what is installed, or `from` a file in this folder or one above."""
        alias = next(x for x in node.names if name in (x.asname, x.name.split(".")[0]))
        if isinstance(node, ast.Import):
            found = importlib.import_module(alias.name)
            return found if alias.asname else sys.modules[name]
        for folder in self.path.resolve().parents:
            path = folder.joinpath(*(node.module or alias.name).split(".")).with_suffix(".py")
            if path.is_file():
                other = Module(path, self.stand_ins)
                return getattr(other, alias.name) if node.module else other
        return getattr(importlib.import_module(node.module), alias.name)


def load(target, fixed):
    """(the function of FILE.py:NAME or pkg.module:NAME, lines about how it was loaded); of a class,
    the forward of a new instance."""
    path, _, name = target.rpartition(":")
    path = path if path.endswith(".py") else path.replace(".", "/") + ".py"
    places = [Path(folder, path) for folder in (".", *sys.path) if Path(folder, path).is_file()]
    if not places:
        raise Misfit(f"no file {path}")
    path = str(places[0])
    sys.path.insert(0, str(Path(path).parent))
    first, *attributes = name.split(".")
    module = Module(path, [])
    here = [key for key, x in module.nodes.items() if not isinstance(x, IMPORTS)]
    lines = []
    try:
        found = runpy.run_path(path).get(first)
    except (Exception, SystemExit) as error:
        if first not in here:
            raise
        found = getattr(module, first)
        why = f"{type(error).__name__}: {error}"
        lines = [f"the file cannot be imported ({why}): {first} is taken from it"]
        lines += [f"stand-ins for {', '.join(module.stand_ins)}"] if module.stand_ins else []
    if found is None:
        raise Misfit(f"no function {name}; it has: {', '.join(here) or 'none'}")
    for attribute in attributes:
        is_method = inspect.isfunction(inspect.getattr_static(found, attribute, None))
        found = getattr(made(found, fixed) if is_method else found, attribute)
    found = made(found, fixed) if inspect.isclass(found) else found
    return (found if callable(found) else getattr(found, "forward", found)), lines


def made(cls, fixed):
    """An instance, whose constructor gets what is set, and our usual constants."""
    given = {}
    for name, parameter in [*inspect.signature(cls.__init__).parameters.items()][1:]:
        if name in fixed or name in CONSTANTS:
            given[name] = (CONSTANTS | fixed)[name]
        elif parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            raise Misfit(f"the constructor of {cls.__name__} needs {name}: pass --set {name}=...")
    return cls(**given)
