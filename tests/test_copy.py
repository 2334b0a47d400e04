"""What the scripts are for: masked_mean, the advantages and the losses can be copied as they are into a
file that imports only torch, and their keywords are the flags."""

import ast
import builtins
import dis
import inspect
import types

import pytest
from conftest import COPIED, MORE, SCRIPTS, copied, path_of, script_args

SIBLINGS = [*SCRIPTS, *MORE]
NORMALIZERS = {"num_sequences", "num_tokens"}
LOSSES = [(name, "policy_loss") for name in SIBLINGS] + [("ppo", "value_loss")]
LOSSES += [("more.vapo", "value_loss"), ("more.vapo", "positive_lm_loss")]


@pytest.mark.parametrize("name", SIBLINGS)
def test_a_copy_needs_nothing_but_torch(name):
    """Functions read only torch, Python's own names, and each other. test_conformance.py compares what
    the copies compute with the formulas."""
    copy = copied(name)
    known = {"torch", *COPIED[name], *dir(builtins)}
    for function in COPIED[name]:
        assert names_read(getattr(copy, function).__code__) <= known


def names_read(code):
    """The global names that a function reads, also in the comprehensions inside it."""
    names = {part.argval for part in dis.get_instructions(code) if part.opname == "LOAD_GLOBAL"}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= names_read(constant)
    return names


@pytest.mark.parametrize("name, function", LOSSES)
def test_keywords_are_the_flags(name, function):
    """With names and defaults. A keyword that is no flag is the normalizer, or an optional tensor."""
    module, args = script_args(name)
    parameters = inspect.signature(getattr(module, function)).parameters
    for keyword, parameter in parameters.items():
        if parameter.kind is not parameter.KEYWORD_ONLY:
            assert parameter.default is parameter.empty
        elif keyword in NORMALIZERS or keyword.endswith("_BT"):
            assert parameter.default is None and not hasattr(args, keyword)
        elif keyword == "max_new_tokens":
            # The one without a default: L_max is the user's, not the paper's.
            assert name == "dr_grpo" and parameter.default is parameter.empty
        else:
            default = getattr(args, keyword)
            assert parameter.default == default and type(parameter.default) is type(default), keyword
    assert "args" not in parameters and len(NORMALIZERS & set(parameters)) == 1


@pytest.mark.parametrize("name, function", LOSSES)
def test_main_passes_every_keyword(name, function):
    """Once, and a flag as it is: a loss would ignore a flag that is not passed on."""
    module, args = script_args(name)
    tree = ast.parse(path_of(name).read_text())
    (main,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "main")
    found = []
    for node in ast.walk(main):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == function:
            found.append(node)
    (call,) = found
    parameters = inspect.signature(getattr(module, function)).parameters
    keyword_only = [key for key, p in parameters.items() if p.kind is p.KEYWORD_ONLY]
    assert [keyword.arg for keyword in call.keywords] == keyword_only
    for keyword in call.keywords:
        if hasattr(args, keyword.arg):
            assert ast.unparse(keyword.value) == f"args.{keyword.arg}"
