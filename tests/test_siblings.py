"""Siblings stay siblings: what is not the algorithm is the same in all nine and in the three of
more/."""

import ast
import dataclasses
import inspect

import pytest
import report
from conftest import MORE, ROOT, SCRIPTS, path_of, script_args

from plumbing.args import RunArgs

CHILDREN = "grpo dr_grpo dapo gspo cispo gmpo rspo sapo more.reinforce more.rloo more.vapo".split()
OWN = {
    "ppo": "clip_eps_low clip_eps_high kl_coef gamma gae_lambda value_coef value_clip entropy_coef "
    "critic_lr",
    "grpo": "clip_eps_low clip_eps_high kl_coef kl_is_corrected ref_reset_every",
    "dr_grpo": "clip_eps_low clip_eps_high",
    "dapo": "clip_eps_low clip_eps_high overlong overlong_cache max_sampling_rounds",
    "gspo": "clip_eps_low clip_eps_high variant",
    "cispo": "is_weight_cap is_weight_floor ppo_mask clip_eps_low clip_eps_high",
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
    "ppo": {"prompts_per_iteration"},
    "dapo": {"iterations"},
    "more.reinforce": {"prompts_per_iteration", "group_size", "lr"},
    "more.rloo": {"lr"},
}
KNOBS = """iterations prompts_per_iteration group_size max_new_tokens temperature lr update_epochs
num_minibatches max_grad_norm router_aux_coef""".split()
# Knobs that have one legal value, and so are no flags.
FIXED = {
    "ppo": {"group_size"},
    "more.reinforce": {"update_epochs", "num_minibatches"},
    "more.rloo": {"update_epochs", "num_minibatches"},
}
# What each room of plumbing/ knows of the others
ARROWS = {
    "ranks": set(),
    "answers": set(),
    "correction": set(),
    "routing": set(),
    "args": {"ranks"},
    "reward": {"args"},
    "data": {"args", "answers", "ranks"},
    "models": {"args", "memory", "routing"},
    "packing": {"routing"},
    "memory": {"ranks"},
    "metrics": {"args", "ranks"},
    "policy": {"ranks", "routing"},
    "settings": {"args"},
    "run": {"args", "ranks", "settings"},
}
ROOMS = [*(f"plumbing.{room}" for room in ARROWS), "common"]
SIBLINGS = [*SCRIPTS, *MORE]
HOUSE = [*ROOMS, *SIBLINGS]
HAS_CRITIC = {"ppo", "more.vapo"}


def source(name):
    return path_of(name).read_text()


@pytest.mark.parametrize("name", SIBLINGS)
def test_arguments(name):
    """The knobs of the loop have the same order, help and defaults in all; then come the algorithm's
    own flags. The rest is inherited, and nowhere changed."""
    args_class = script_args(name)[0].Args
    own = list(args_class.__annotations__)
    knobs = [knob for knob in KNOBS if knob not in FIXED.get(name, ())]
    assert own == knobs + OWN[name].split()
    fields = {f.name: f for f in dataclasses.fields(args_class)}
    grpo = {f.name: f for f in dataclasses.fields(script_args("grpo")[0].Args)}
    assert list(fields) == [f.name for f in dataclasses.fields(RunArgs)] + own
    differ = {knob for knob in knobs if fields[knob].default != grpo[knob].default}
    assert differ == OTHER_DEFAULTS.get(name, set())
    for line in source(name).splitlines():
        if any(line.startswith(f"    {knob}: ") for knob in differ):
            assert "  # " in line, f"say why: {line}"
    assert all(fields[knob].metadata["help"] == grpo[knob].metadata["help"] for knob in knobs)
    assert all(f.metadata["help"] for f in fields.values())
    assert all(getattr(args_class(), knob) == 1 for knob in FIXED.get(name, ()))


@pytest.mark.parametrize("name", SIBLINGS)
def test_form_of_a_script(name):
    """The header names paper and parent; the order is fixed; nothing runs at import."""
    text = source(name)
    tree = ast.parse(text)
    header = ast.get_docstring(tree)
    command = f"python -m {name}" if name in MORE else f"python {name}.py"
    assert "arXiv" in header and f"    {command}\n" in header
    if name in CHILDREN:
        parent = path_of(report.parent_of(name)).name
        assert f"Parent: {parent}. Differs only in:\n  1. " in header
    kinds = {type(node) for node in tree.body}
    assert kinds <= {ast.Expr, ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef, ast.If}
    expressions = [node for node in tree.body if isinstance(node, ast.Expr)]
    assert len(expressions) == 1 + (name in MORE)  # the docstring, and in more/ the path of common
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
    for node in ast.walk(ast.parse(source(name))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            names = [alias.name for alias in node.names]
            assert names != ["*"], "not a named import"
            rooms = [f"plumbing.{each}" for each in names if each in ARROWS]
            found |= set(rooms) if node.module == "plumbing" and rooms else {node.module}
    folders = [path for path in ROOT.iterdir() if path.is_dir() and path.name[0] != "."]
    ours = {path.name for path in folders}
    for folder in (ROOT, *folders):
        ours |= {path.stem for path in folder.glob("*.py")}
    return {each for each in found if each.split(".")[0] in ours}


def test_imports_run_one_way():
    """plumbing <- common <- scripts: a script knows these two and no other script; inside plumbing/
    the arrows are those above."""
    assert {path.stem for path in (ROOT / "plumbing").glob("*.py")} == {*ARROWS, "__init__"}
    for room, below in ARROWS.items():
        assert imported(f"plumbing.{room}") == {f"plumbing.{each}" for each in below}
    assert imported("common") <= {f"plumbing.{room}" for room in ARROWS}
    for name in SIBLINGS:
        assert imported(name) - {"plumbing.ranks"} == {"common", "plumbing"}


def test_its_readme_lists_every_room():
    text = (ROOT / "plumbing" / "README.md").read_text()
    listed = [line.split("`")[1] for line in text.splitlines() if line.startswith("| [`")]
    assert listed == [f"{room}.py" for room in sorted(ARROWS)]


def test_examples_stand_above_the_scripts():
    """An example may import scripts and what is below them, but no other example; that nothing below
    imports from examples/ is in the test above."""
    examples = [path.stem for path in (ROOT / "examples").glob("*.py")]
    assert "trl_trainer" in examples
    for name in examples:
        assert imported(f"examples.{name}") <= {"plumbing", *HOUSE}


@pytest.mark.parametrize("name", SIBLINGS)
def test_every_argument_is_read(name):
    text = source(name) + "".join(source(room) for room in ROOMS)
    for field in dataclasses.fields(script_args(name)[0].Args):
        used = (f"args.{field.name}", f"self.{field.name}")
        assert any(each in text for each in used), f"--{field.name} does nothing"


def banners(name):
    lines = [line.strip() for line in source(name).splitlines()]
    return [line.split("- ")[-1] for line in lines if line.startswith("# -----")]


def test_banners_come_in_the_same_order():
    for name in set(SIBLINGS) - HAS_CRITIC:
        assert banners(name) == banners("grpo")
    assert sorted(banners("ppo")) == sorted(banners("grpo"))
    assert banners("more.vapo") == banners("ppo")


def test_what_is_copied_is_the_same_in_all():
    """masked_mean in all scripts and in plumbing, compute_advantages in all of the nine but ppo and
    dr_grpo; vapo has ppo's GAE, whitening, rewards of tokens and value loss."""

    def function(name, wanted):
        for node in ast.parse(source(name)).body:
            if isinstance(node, ast.FunctionDef) and node.name == wanted:
                return ast.get_source_segment(source(name), node)

    assert len({function(name, "masked_mean") for name in ["plumbing.metrics", *SIBLINGS]}) == 1
    others = set(SCRIPTS) - {"ppo", "dr_grpo"}
    assert len({function(name, "compute_advantages") for name in others}) == 1
    for wanted in ("compute_gae", "whiten", "token_rewards", "value_loss"):
        assert function("more.vapo", wanted) == function("ppo", wanted)
