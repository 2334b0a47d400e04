"""Loads a function from a file, even if the file cannot be imported: the function and what it uses are
then extracted from the syntax tree, with stand-ins for what is not installed."""

import __future__

import ast
import inspect
import runpy
import sys
from pathlib import Path

from rl_loss_vectors.names import Misfit

KEPT = ("staticmethod", "classmethod", "property", "dataclass")  # decorators
IMPORTS = (ast.Import, ast.ImportFrom)
DEFINITIONS = (ast.FunctionDef, ast.ClassDef)


class StandIn:
    """Stands in for a name that cannot be imported. It can be called and subclassed, and has every
    attribute."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args, **keywords):
        return self

    def __mro_entries__(self, bases):
        return (type("Base", (), {"__init__": lambda self, *args, **keywords: None}),)


def statements_of(nodes):
    """The statements of a module, including those in `if` and `try`."""
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
        self.members = {"__name__": self.path.stem}
        self.stand_ins = stand_ins  # a list to which the names of stand-ins are added
        nodes = list(statements_of(ast.parse(self.path.read_text()).body))
        self.nodes = {name: node for node in nodes for name in names_of(node)}

    def __getattr__(self, name):
        if name not in self.nodes:
            raise AttributeError(name)
        if name in self.members:
            return self.members[name]
        node = self.nodes[name]
        self.members[name] = None  # for a function that calls itself
        try:
            define = self.imported if isinstance(node, IMPORTS) else self.defined
            self.members[name] = define(node, name)
        except (Exception, SystemExit):
            if isinstance(node, DEFINITIONS):
                raise
            self.stand_ins.append(name)
            self.members[name] = StandIn()
        return self.members[name]

    def defined(self, node, name):
        for inner in ast.walk(node):
            if isinstance(inner, DEFINITIONS):
                inner.decorator_list = [x for x in inner.decorator_list if ast.unparse(x) in KEPT]
            if isinstance(inner, ast.Name) and inner.id in self.nodes:
                getattr(self, inner.id)
        flags = __future__.annotations.compiler_flag
        code = compile(ast.Module([node], []), str(self.path), "exec", flags, dont_inherit=True)
        exec(code, self.members)
        return self.members[name]

    def imported(self, node, name):
        """From a file in this folder or one above, or else as the statement says."""
        alias = next(x for x in node.names if name in (x.asname, x.name.split(".")[0]))
        module = getattr(node, "module", None)  # None in `import x` and `from . import x`
        for folder in self.path.resolve().parents:
            path = folder.joinpath(*(module or alias.name).split(".")).with_suffix(".py")
            if path.is_file():
                other = Module(path, self.stand_ins)
                return getattr(other, alias.name) if module else other
        return self.defined(node, name)


def load(target, fixed):
    """(the function of FILE.py:NAME or pkg.module:NAME, lines about how it was loaded); for a class,
    the forward of a new instance."""
    path, _, name = target.rpartition(":")
    path = path if path.endswith(".py") else path.replace(".", "/") + ".py"
    places = [Path(folder, path) for folder in (".", *sys.path) if Path(folder, path).is_file()]
    if not places:
        raise Misfit(f"no file {path}: the target is FILE.py:FUNCTION")
    path = str(places[0])
    sys.path.insert(0, str(Path(path).parent))
    first, *attributes = name.split(".")
    module = Module(path, [])
    lines = []
    try:
        found = runpy.run_path(path).get(first)
    except (Exception, SystemExit) as error:
        if first not in module.nodes:
            raise
        found = getattr(module, first)
        why = f"{type(error).__name__}: {error}"
        lines.append(f"the file cannot be imported ({why}): {first} is taken from it")
        lines += [f"stand-ins for {', '.join(module.stand_ins)}"] if module.stand_ins else []
    if found is None:
        here = [key for key, x in module.nodes.items() if not isinstance(x, IMPORTS)]
        raise Misfit(f"no function {name}; it has: {', '.join(here) or 'none'}")
    for attribute in attributes:
        is_method = inspect.isfunction(inspect.getattr_static(found, attribute, None))
        found = getattr(made(found, fixed) if is_method else found, attribute)
    found = made(found, fixed) if inspect.isclass(found) else found
    return (found if callable(found) else getattr(found, "forward", found)), lines


def made(cls, fixed):
    """An instance of a class. Its constructor gets the parameters that are set."""
    taken = inspect.signature(cls).parameters
    return cls(**{name: x for name, x in fixed.items() if name in taken})
