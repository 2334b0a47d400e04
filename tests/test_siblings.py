"""Siblings stay siblings: what is not the algorithm is the same in all nine and in those of more/."""

import dataclasses
import difflib
import inspect
import re
import subprocess
import sys

import pytest
from conftest import MORE, ROOT, SCRIPTS, functions_of, path_of, script_args

from common import Batch

SIBLINGS = [*SCRIPTS, *MORE]
KNOBS = """iterations prompts_per_iteration group_size max_new_tokens temperature lr update_epochs
num_minibatches max_grad_norm router_aux_coef""".split()


def source(name):
    return path_of(name).read_text()


# ------------------------------------------------------------------------- what is the same in all


def own_names(name):
    """What may make a main differ: functions, their parameters, flags, imports from common."""
    module, args = script_args(name)
    found = {*vars(module), *vars(args)}
    for function in functions_of(name):
        found |= {*inspect.signature(vars(module)[function]).parameters}
    return found


def main_diff(left, right):
    mains = [functions_of(name)["main"].splitlines() for name in (left, right)]
    diff = list(difflib.unified_diff(*mains, n=1, lineterm=""))
    return diff[2:]  # after two lines with names; a copy has no difference


def unexplained(left, right):
    """Places where two mains differ without a reason: neither a [1] nor a name that only one has."""
    reasons = own_names(left) ^ own_names(right)
    places = []
    for line in main_diff(left, right):
        if line.startswith("@@"):
            places.append("")
        elif line[0] in "+-":
            places[-1] += line + "\n"
    is_marked = re.compile(r"\[\d\]").search
    return [x for x in places if not is_marked(x) and reasons.isdisjoint(re.findall(r"\w+", x))]


@pytest.mark.parametrize("name", SIBLINGS)
def test_main_differs_from_the_most_similar_one_only_for_a_reason(name):
    sizes = {}
    for other in SIBLINGS:
        if other != name:
            diff = main_diff(name, other)
            sizes[other] = sum(line.startswith(("+", "-")) for line in diff)
    nearest = [other for other in sizes if sizes[other] == min(sizes.values())]
    places = min([unexplained(name, other) for other in nearest], key=len)
    assert places == [], f"{nearest}\n" + "\n\n".join(places)


def test_functions_that_readers_copy_are_the_same_in_all():
    """The last lines; each function that several scripts have, unless its text says with a [1] what is
    different."""
    texts = set()
    for name in SIBLINGS:
        assert source(name).endswith('\n\n\nif __name__ == "__main__":\n    launch(main, Args)\n')
        own = functions_of(name)
        for function in own.keys() - {"main", "policy_loss"}:
            if not re.search(r"\[\d\]", own[function]):
                texts.add((function, own[function]))
    names = [function for function, _ in texts]
    assert {function for function in names if names.count(function) > 1} == set()


@pytest.mark.parametrize("name", SIBLINGS)
def test_flags_of_the_loop_are_the_same(name):
    """First in Args, in the same order, with the same help and default."""
    args_class = script_args(name)[0].Args
    fields = args_class.__dataclass_fields__
    fields_of_grpo = script_args("grpo")[0].Args.__dataclass_fields__
    flags = list(args_class.__annotations__)
    knobs = [knob for knob in KNOBS if knob in flags]
    assert flags[: len(knobs)] == knobs
    for knob in knobs:
        assert fields[knob].metadata["help"] == fields_of_grpo[knob].metadata["help"]
        if fields[knob].default != fields_of_grpo[knob].default:
            (line,) = re.findall(rf"^    {knob}: .*$", source(name), re.MULTILINE)
            assert ")  # " in line, f"no comment says why {knob} is not {fields_of_grpo[knob].default}"


@pytest.mark.parametrize("name", SIBLINGS)
def test_every_flag_is_read(name):
    plumbing = [f"plumbing.{path.stem}" for path in (ROOT / "plumbing").glob("*.py")]
    text = "".join(source(each) for each in [name, "common", *plumbing])
    for field in dataclasses.fields(script_args(name)[0].Args):
        used = rf"\b(args|self)\.{field.name}\b"  # args.dataset does not use a flag `data`
        assert re.search(used, text), f"--{field.name} does nothing"


@pytest.mark.parametrize("name", SIBLINGS)
def test_main_sets_what_it_reads_of_a_batch(name):
    """Unless `split_into_steps` has: a reader of the update finds each tensor a few lines above."""
    main = functions_of(name)["main"]
    read = {*re.findall(r"\bmicro\.(\w+)", main)}
    set_here = {*re.findall(r"\bmicro\.(\w+) = ", main)}
    given = {field.name for field in dataclasses.fields(Batch) if field.default is dataclasses.MISSING}
    assert read <= set_here | given | {"rows_B"}


# ------------------------------------------------------------------------------------------ headers

SUBSCRIPTED = r"(?!sum_)[A-Za-z]\w*?_(?:it|i|old|ref|v|e|V|LM|low|high|min|max|jk|j)"
SYMBOL = rf"(?<!--)\b(?:{SUBSCRIPTED}|beta|gamma|lambda|delta|eps|mu|cap|[bdfH])\b(?!,t)"


def header_of(name):
    """The paragraphs of a docstring: title, objective, symbols, suffixes, and so on."""
    return script_args(name)[0].__doc__.split("\n\n")


@pytest.mark.parametrize("name", SIBLINGS)
def test_every_symbol_of_an_objective_is_defined_in_its_header(name):
    """At the start of a line, or in front of a colon or an equals sign."""
    _, objective, definitions, *_ = header_of(name)
    for symbol in {*re.findall(SYMBOL, objective + definitions)}:
        is_defined = rf"^  {symbol}\b|\b{symbol}(, \w+)*: |\b{symbol} = "
        assert re.search(is_defined, definitions, re.MULTILINE), symbol


@pytest.mark.parametrize("name", SIBLINGS)
def test_the_header_names_every_axis_that_the_file_has(name):
    (line,) = [paragraph for paragraph in header_of(name) if paragraph.startswith("Suffixes")]
    code = source(name).split('"""', 2)[2]
    suffixes = re.findall(r"[a-z0-9]_([A-Z1]+)\b", code)
    shapes = re.findall(r"\(([A-Z1](?:(?:,| \*) [A-Z1])*),?\)", code)
    assert {*re.findall(r"\b[A-Z1](?= )", line)} == {*"".join(suffixes + shapes)} - {*", *"}


@pytest.mark.parametrize("name", SIBLINGS)
def test_what_is_absent_is_said_where_it_would_be(name):
    own = functions_of(name)
    assert ("# no reference\n" in own["main"]) == ("reference = " not in own["main"])
    if "compute_advantages" in own:
        has_std = ".std(" in own["compute_advantages"]
        assert ("# no std\n" in own["compute_advantages"]) == (not has_std)


# ---------------------------------------------------------------------------------------- imports


IMPORTS = """
import importlib, os, signal, sys, threading
import torch, transformers
from torch.optim import optimizer

def state():
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    hooks = [len(value) for name, value in vars(optimizer).items() if name.endswith("_hooks")]
    streams = (sys.stdout, sys.stderr)
    return handlers, hooks, streams, threading.enumerate(), torch.get_num_threads(), {**os.environ}

before = state()
del os.register_at_fork
for name in sys.argv[1:]:
    importlib.import_module(name)
assert state() == before
"""


def test_importing_scripts_changes_nothing_in_the_process():
    """Neither hooks nor signals nor threads."""
    done = subprocess.run([sys.executable, "-c", IMPORTS, *SIBLINGS], cwd=ROOT, capture_output=True)
    assert done.returncode == 0, done.stderr


def test_a_name_is_imported_by_the_same_line_in_all():
    """So that a script that needs one more differs by one line."""
    lines = {*re.findall(r"^from common import .+$", "\n".join(map(source, SIBLINGS)), re.MULTILINE)}
    names = [name for line in lines for name in line.removeprefix("from common import ").split(", ")]
    assert {name for name in names if names.count(name) > 1} == set()


def imported_of_ours(path):
    """The files and folders of ours from which a file imports, wherever in it."""
    found = re.findall(r"^ *(?:from|import) (\w+)", path.read_text(), re.MULTILINE)
    return {*found} & {path.stem for path in [*ROOT.iterdir(), *ROOT.glob("*/*.py")]}


def test_imports_run_one_way():
    """plumbing <- common <- scripts <- everything else. A script does not even name plumbing; an
    example knows no other example; the doctor knows nothing of ours."""
    for path in (ROOT / "plumbing").glob("*.py"):
        assert imported_of_ours(path) <= {"plumbing"}
    assert imported_of_ours(path_of("common")) == {"plumbing"}
    for name in SIBLINGS:
        assert imported_of_ours(path_of(name)) == {"common"}
        assert "plumbing" not in source(name)
    for path in (ROOT / "examples").glob("*.py"):
        assert imported_of_ours(path) <= {"plumbing", "common", *SCRIPTS}
    for path in (ROOT / "conformance" / "rl_loss_vectors").glob("*.py"):
        assert imported_of_ours(path) == set()
