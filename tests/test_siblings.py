"""Siblings stay siblings: what is not the algorithm is the same in all nine and in the three of
more/, no script leaves its parent by much, and the house keeps its form."""

import ast
import dataclasses
import difflib
import inspect

import pytest
from conftest import MORE, ROOT, SCRIPTS, path_of, script_args

PARENTS = {
    "grpo": "ppo",
    "dr_grpo": "grpo",
    "dapo": "grpo",
    "gspo": "grpo",
    "cispo": "grpo",
    "sapo": "grpo",
    "gmpo": "grpo",
    "rspo": "gmpo",
    "more.reinforce": "grpo",
    "more.rloo": "more.reinforce",
    "more.vapo": "ppo",
}
BUDGET = {  # changed lines, of shared/DESIGN.md
    "dr_grpo": 55,
    "sapo": 65,
    "gspo": 65,
    "rspo": 65,
    "cispo": 80,
    "gmpo": 80,
    "dapo": 140,
    "grpo": 240,
    "more.reinforce": 100,
    "more.rloo": 45,
    "more.vapo": 65,
}
OWN = {
    "ppo": "clip_eps_low clip_eps_high kl_coef gamma gae_lambda value_coef value_clip entropy_coef "
    "critic_lr",
    "grpo": "clip_eps_low clip_eps_high kl_coef kl_is_corrected ref_reset_every",
    "dr_grpo": "clip_eps_low clip_eps_high",
    "dapo": "clip_eps_low clip_eps_high overlong overlong_cache max_sampling_rounds",
    "gspo": "clip_eps_low clip_eps_high variant",
    "cispo": "is_weight_cap ppo_mask clip_eps_low clip_eps_high",
    "gmpo": "log_ratio_clip clip_level",
    "rspo": "log_ratio_clip gamma_min shift",
    "sapo": "tau_pos tau_neg",
    "more.reinforce": "baseline_decay",
    "more.rloo": "",
    "more.vapo": "clip_eps_low clip_eps_high kl_coef gamma lambda_alpha value_coef value_clip "
    "entropy_coef critic_lr pretraining_iterations positive_lm_coef",
}
# Shared arguments whose default differs from grpo.py's; the line says why in a comment.
OTHER_DEFAULTS = {
    "ppo": {"prompts_per_iteration", "group_size"},
    "dapo": {"iterations"},
    "more.reinforce": {"prompts_per_iteration", "group_size", "lr", "num_minibatches"},
    "more.rloo": {"lr", "num_minibatches"},
}
# of the nine scripts
ROOMS = ["ranks", "harness", "memory", "verifier", "mismatch", "packing", "common"]
SIBLINGS = [*SCRIPTS, *MORE]
HOUSE = [*ROOMS, *SIBLINGS]
LIMITS = {"common": 750, "harness": 450, "ppo": 420, "more.vapo": 460}  # lines; of the others 400
TWO_MODELS = {"ppo", "grpo", "more.vapo"}  # they may hold a reference
HAS_CRITIC = {"ppo", "more.vapo"}


def source(name):
    return path_of(name).read_text()


def body(name):
    """The lines after the header docstring."""
    lines = source(name).splitlines()
    return lines[ast.parse(source(name)).body[0].end_lineno :]


def changed_lines(parent, child):
    diff = difflib.unified_diff(body(parent), body(child), lineterm="", n=0)
    return sum(line[:1] in "+-" and line[:3] not in ("+++", "---") for line in diff)


@pytest.mark.parametrize("child", PARENTS)
def test_changed_lines_stay_within_the_budget(child):
    assert 0 < changed_lines(PARENTS[child], child) <= BUDGET[child]


@pytest.mark.parametrize("name", SIBLINGS)
def test_arguments(name):
    """The shared block has the same names, order, help and defaults in all nine; then come the
    algorithm's own."""
    fields = {f.name: f for f in dataclasses.fields(script_args(name)[0].Args)}
    grpo = {f.name: f for f in dataclasses.fields(script_args("grpo")[0].Args)}
    shared = [f for f in grpo if f not in OWN["grpo"].split()]
    assert list(fields) == shared + OWN[name].split()
    differ = {f for f in shared if fields[f].default != grpo[f].default}
    assert differ == OTHER_DEFAULTS.get(name, set())
    for line in source(name).splitlines():
        if any(line.startswith(f"    {f}: ") for f in differ):
            assert "  # " in line, f"say why: {line}"
    assert all(fields[f].metadata["help"] == grpo[f].metadata["help"] for f in shared)
    assert all(f.metadata["help"] for f in fields.values())


@pytest.mark.parametrize("name", SIBLINGS)
def test_form_of_a_script(name):
    """Header of at most 32 lines that names paper and parent; the fixed order; nothing runs at
    import."""
    text = source(name)
    tree = ast.parse(text)
    header = ast.get_docstring(tree)
    command = f"python -m {name}" if name in MORE else f"python {name}.py"
    assert tree.body[0].end_lineno <= 32 and "arXiv" in header and f"    {command}\n" in header
    if name in PARENTS:
        assert f"Parent: {path_of(PARENTS[name]).name}. Differs only in:\n  1. " in header
    kinds = {type(node) for node in tree.body}
    assert kinds <= {ast.Expr, ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef, ast.If}
    assert [type(node) for node in tree.body].count(ast.Expr) == 1  # the docstring
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    advantages = "compute_gae" if name in HAS_CRITIC else "compute_advantages"
    assert functions[:2] == ["masked_mean", advantages] and functions[-2:] == ["policy_loss", "main"]
    assert text.endswith('\n\n\nif __name__ == "__main__":\n    launch(main, Args)\n')


@pytest.mark.parametrize("name", SIBLINGS)
def test_signatures(name):
    """policy_loss: four tensors, then keywords; what belongs to the whole step is one of three."""
    module, _ = script_args(name)
    parameters = inspect.signature(module.policy_loss).parameters
    advantages = "advantages_B1" if name in ("gmpo", "rspo") else "advantages_BT"
    positional = [key for key, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == ["logprobs_BT", "old_logprobs_BT", advantages, "mask_BT"]
    is_token_mean = name in ("ppo", "dapo", "cispo", "more.vapo")
    normaliser = "num_tokens" if is_token_mean else "num_sequences"
    assert {"num_tokens", "num_sequences"} & set(parameters) == {normaliser}
    assert list(parameters)[-1] == normaliser
    assert ("max_new_tokens" in parameters) == (name == "dr_grpo")
    own = [
        key for key, p in parameters.items() if p.kind is p.KEYWORD_ONLY and key in OWN[name].split()
    ]
    assert own == [key for key in OWN[name].split() if key in own]  # in the order of the flags
    text = inspect.getsource(module.policy_loss)
    for key in parameters:
        assert f"\n    {key} " in text or key in OWN[name].split(), f"{key} is not explained"


def imported(name):
    """The modules of this repository that a file imports, wherever in it."""
    found = set()
    above = {path.stem for path in (ROOT / "examples").glob("*.py")}
    for node in ast.walk(ast.parse(source(name))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            assert [alias.name for alias in node.names] != ["*"], "not a named import"
            found.add(node.module.split(".")[0])
    ours = {path.stem for path in ROOT.glob("*.py")} | {"benchmarks", "examples", "more", "tests"}
    return found & (ours | above)


def test_imports_run_one_way():
    """ranks <- harness <- memory, verifier, mismatch <- packing <- common <- scripts, and no script
    knows another one."""
    assert imported("ranks") == set()
    assert imported("harness") == {"ranks"}
    assert imported("memory") == {"harness", "ranks"}
    assert imported("verifier") == {"harness"}
    assert imported("mismatch") == {"harness"}
    assert imported("packing") == {"mismatch"}
    assert imported("common") == {"harness", "mismatch", "packing", "ranks", "verifier"}
    for name in SIBLINGS:
        needed = set(ROOMS)
        if name not in HAS_CRITIC:
            needed.remove("packing")
        assert imported(name) == needed
    assert not (ROOT / "tasks.py").exists()


def test_examples_stand_above_the_scripts():
    """An example may import scripts and what is below them, but no other room, and no other example;
    that no room below imports from examples/ is in the test above."""
    examples = [path.stem for path in (ROOT / "examples").glob("*.py")]
    assert "trl_trainer" in examples
    for name in examples:
        assert imported(f"examples/{name}") <= {*HOUSE}
        assert len(source(f"examples/{name}").splitlines()) <= 120
        assert folds(ast.parse(source(f"examples/{name}"))) == []


@pytest.mark.parametrize("name", HOUSE)
def test_length(name):
    """Generous limits; a file that comes near has to lose something, not to be folded."""
    assert len(source(name).splitlines()) <= LIMITS.get(name, 400)


@pytest.mark.parametrize("name", HOUSE)
def test_lines_are_short(name):
    assert max(map(len, source(name).splitlines())) <= 104


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
    has_bool = any(
        isinstance(side, ast.Compare | ast.BoolOp) or contains(side, ast.Not) for side in sides
    )
    return has_bool and any(isinstance(side, ast.List) for side in sides)


def dict_named_is(node):
    if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict | ast.DictComp)):
        return False
    return ast.unparse(node.targets[0]).startswith("is_")


FOLDS = [
    two_assignments,
    logic_in_a_for_header,
    conditional_inside_range,
    comparison_as_a_slice_bound,
    slice_of_a_list_written_out,
    nested_conditionals,
    list_times_bool,
    dict_named_is,
]


def folds(tree):
    """[(line or text, what)] of the ways to save a line that DESIGN.md forbids."""
    found = []
    for node in ast.walk(tree):
        for fold in FOLDS:
            if fold(node):
                found.append((getattr(node, "lineno", ast.unparse(node)), fold.__name__))
    return found


@pytest.mark.parametrize("name", HOUSE)
def test_nothing_is_folded(name):
    assert folds(ast.parse(source(name))) == []


FOLDED = """
a = b = 1
a, b = 1, 2
for x in (y for y in z if y): pass
for x in z if y else (): pass
range(3 if x else 0)
[x for x in range(y or 0 if z else 1)]
x[: y > 0]
x[y not in z :]
[x][:y]
a if b else c if d else e
a if (b if c else d) else e
[x] * (y > 0)
[x] * (not y)
is_moe = {"a": 1}
"""
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
kinds = {"a": 1}
"""


def test_folds_are_found():
    """The checker can tell: each line of the one is found, none of the other."""
    assert not [line for line in FOLDED.strip().splitlines() if not folds(ast.parse(line))]
    assert not [line for line in UNFOLDED.strip().splitlines() if folds(ast.parse(line))]


@pytest.mark.parametrize("name", SIBLINGS)
def test_every_argument_is_read(name):
    text = source(name) + "".join(source(room) for room in ROOMS)
    for field in dataclasses.fields(script_args(name)[0].Args):
        assert f"args.{field.name}" in text, f"--{field.name} does nothing"


def banners(name):
    return [line.split("- ")[-1] for line in body(name) if line.strip().startswith("# -----")]


def test_banners_come_in_the_same_order():
    for name in set(SIBLINGS) - HAS_CRITIC:
        assert banners(name) == banners("grpo")
    assert sorted(banners("ppo")) == sorted(banners("grpo"))
    assert banners("more.vapo") == banners("ppo")


def test_what_is_copied_is_the_same_in_all():
    """masked_mean in all scripts and in common, compute_advantages in all of the nine but ppo and
    dr_grpo; vapo has ppo's GAE, whitening and value loss."""

    def function(name, wanted):
        for node in ast.parse(source(name)).body:
            if isinstance(node, ast.FunctionDef) and node.name == wanted:
                return ast.get_source_segment(source(name), node)

    assert len({function(name, "masked_mean") for name in ["common", *SIBLINGS]}) == 1
    others = set(SCRIPTS) - {"ppo", "dr_grpo"}
    assert len({function(name, "compute_advantages") for name in others}) == 1
    for wanted in ("compute_gae", "whiten", "value_loss"):
        assert function("more.vapo", wanted) == function("ppo", wanted)


def test_only_these_scripts_know_a_reference():
    for name in SIBLINGS:
        assert ("ref_model" in source(name)) == (name in TWO_MODELS)


def test_nothing_chooses_the_algorithm():
    for name in HOUSE:
        assert "args.algo" not in source(name)
    for name in ROOMS:  # below the scripts, no script is known by name
        assert not [script for script in SIBLINGS if f'"{script}"' in source(name)]
