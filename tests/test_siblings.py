"""Siblings stay siblings: what is not the algorithm is the same in all nine and in the three of
more/."""

import ast
import dataclasses
import difflib
import graphlib

import pytest
from conftest import MORE, ROOT, SCRIPTS, path_of, script_args

SIBLINGS = [*SCRIPTS, *MORE]
KNOBS = """iterations prompts_per_iteration group_size max_new_tokens temperature lr update_epochs
num_minibatches max_grad_norm router_aux_coef""".split()
# Knobs with another default than in grpo.py; a comment in the script says why.
OTHER_DEFAULTS = {
    "ppo": {"prompts_per_iteration"},
    "dapo": {"iterations"},
    "more.reinforce": {"prompts_per_iteration", "group_size", "lr"},
    "more.rloo": {"lr"},
}
# (script, its parent, or dr_grpo, which is grpo without its KL): how many lines only one of their mains
# has. If you change what the algorithm does in main, count again; a larger number means that something
# else drifts apart.
CHANGED_LINES = {
    ("grpo", "ppo"): 70,
    ("dr_grpo", "grpo"): 15,
    ("dapo", "dr_grpo"): 41,
    ("gspo", "dr_grpo"): 4,
    ("cispo", "dr_grpo"): 7,
    ("sapo", "dr_grpo"): 5,
    ("gmpo", "dr_grpo"): 7,
    ("rspo", "gmpo"): 15,
    ("more.reinforce", "dr_grpo"): 50,
    ("more.rloo", "more.reinforce"): 10,
    ("more.vapo", "ppo"): 28,
}


def source(name):
    return path_of(name).read_text()


def functions_of(name):
    """{name of a top-level function: its text}"""
    text = source(name)
    nodes = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    return {node.name: ast.get_source_segment(text, node) for node in nodes}


# ------------------------------------------------------------------------- what is the same in all


@pytest.mark.parametrize("pair", CHANGED_LINES, ids=" and ".join)
def test_main_changes_only_what_the_algorithm_changes(pair):
    mains = [functions_of(name)["main"].splitlines() for name in pair]
    _, _, *diff = difflib.unified_diff(*mains, n=0, lineterm="")  # after two lines with names
    changed = [line for line in diff if not line.startswith("@@")]
    assert len(changed) == CHANGED_LINES[pair], "\n".join(changed)


def test_what_is_copied_is_the_same_in_all():
    """The last lines; masked_mean in all scripts and in plumbing, compute_advantages in all of the nine
    but ppo and dr_grpo; vapo has ppo's GAE, whitening, rewards of tokens and value loss."""
    for name in SIBLINGS:
        assert source(name).endswith('\n\n\nif __name__ == "__main__":\n    launch(main, Args)\n')
    means = {functions_of(name)["masked_mean"] for name in ["plumbing.metrics", *SIBLINGS]}
    assert len(means) == 1
    z_scores = set(SCRIPTS) - {"ppo", "dr_grpo"}  # except scripts with other advantages
    assert len({functions_of(name)["compute_advantages"] for name in z_scores}) == 1
    ppo, vapo = functions_of("ppo"), functions_of("more.vapo")
    for name in ("compute_gae", "whiten", "token_rewards", "value_loss"):
        assert vapo[name] == ppo[name]


@pytest.mark.parametrize("name", SIBLINGS)
def test_the_objective_stands_in_one_block(name):
    """What is only logged stands below the loss, which reads none of it."""
    loss = functions_of(name)["policy_loss"]
    objective, log = loss.split("    loss = -")
    for word in ("stats", "approx_kl", "ratio_max", "masked_mean"):
        assert word not in objective.split('"""')[2] and word in log


@pytest.mark.parametrize("name", SIBLINGS)
def test_flags_of_the_loop_are_the_same(name):
    """First in Args, in the same order, with the same help and default."""
    args_class = script_args(name)[0].Args
    fields = args_class.__dataclass_fields__
    fields_of_grpo = script_args("grpo")[0].Args.__dataclass_fields__
    flags = list(args_class.__annotations__)
    knobs = [knob for knob in KNOBS if knob in flags]
    assert flags[: len(knobs)] == knobs
    other_defaults = set()
    for knob in knobs:
        assert fields[knob].metadata["help"] == fields_of_grpo[knob].metadata["help"]
        if fields[knob].default != fields_of_grpo[knob].default:
            other_defaults.add(knob)
    assert other_defaults == OTHER_DEFAULTS.get(name, set())


@pytest.mark.parametrize("name", SIBLINGS)
def test_every_flag_is_read(name):
    plumbing = [f"plumbing.{path.stem}" for path in (ROOT / "plumbing").glob("*.py")]
    text = "".join(source(each) for each in [name, "common", *plumbing])
    for field in dataclasses.fields(script_args(name)[0].Args):
        used = (f"args.{field.name}", f"self.{field.name}")
        assert any(each in text for each in used), f"--{field.name} does nothing"


# ---------------------------------------------------------------------------------------- imports


def imported(path):
    """The modules that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            names = [alias.name for alias in node.names]
            found |= (
                {f"plumbing.{name}" for name in names} if node.module == "plumbing" else {node.module}
            )
    return found


def imported_of_ours(path):
    ours = {path.stem for path in [*ROOT.iterdir(), *ROOT.glob("*/*.py")]}
    return {name.split(".")[0] for name in imported(path)} & ours


def test_imports_run_one_way():
    """plumbing <- common <- scripts <- everything else. A script does not even name plumbing; an
    example knows no other example; the doctor knows nothing of ours."""
    rooms = {f"plumbing.{path.stem}": imported(path) for path in (ROOT / "plumbing").glob("*.py")}
    graphlib.TopologicalSorter(rooms).prepare()  # fails if there is a circle
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
