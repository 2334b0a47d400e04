"""Siblings stay siblings: what is not the algorithm is the same in all nine, and no script leaves its
parent by much."""

import ast
import dataclasses
import difflib
import inspect

import pytest
from conftest import ROOT, SCRIPTS, script_args

PARENTS = {
    "grpo": "ppo",
    "dr_grpo": "grpo",
    "dapo": "grpo",
    "gspo": "grpo",
    "cispo": "grpo",
    "sapo": "grpo",
    "gmpo": "grpo",
    "rspo": "gmpo",
}
BUDGET = {
    "sapo": 45,
    "cispo": 45,
    "dr_grpo": 45,
    "gspo": 60,
    "gmpo": 60,
    "rspo": 60,
    "dapo": 120,
    "grpo": 220,
}
OWN = {
    "ppo": "clip_eps_low clip_eps_high kl_coef gamma gae_lambda value_coef value_clip entropy_coef critic_lr",
    "grpo": "clip_eps_low clip_eps_high kl_coef kl_is_corrected ref_reset_every",
    "dr_grpo": "clip_eps_low clip_eps_high",
    "dapo": "clip_eps_low clip_eps_high overlong overlong_cache max_sampling_rounds",
    "gspo": "clip_eps_low clip_eps_high variant",
    "cispo": "is_weight_cap ppo_mask clip_eps_low clip_eps_high",
    "gmpo": "log_ratio_clip clip_level",
    "rspo": "log_ratio_clip gamma_min shift",
    "sapo": "tau_pos tau_neg",
}
# Shared arguments whose default differs from grpo.py's; the line says why in a comment.
OTHER_DEFAULTS = {"ppo": {"prompts_per_iteration", "group_size"}, "dapo": {"iterations"}}


def source(name):
    return (ROOT / f"{name}.py").read_text()


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


@pytest.mark.parametrize("name", SCRIPTS)
def test_arguments(name):
    """The shared block has the same names, order, help and defaults in all nine; then come the algorithm's
    own."""
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


@pytest.mark.parametrize("name", SCRIPTS)
def test_form_of_a_script(name):
    """Header of at most 30 lines that names paper and parent; the fixed order; signatures; nothing runs at
    import."""
    text, tree = source(name), ast.parse(source(name))
    header = ast.get_docstring(tree)
    assert len(header.splitlines()) <= 30 and "arXiv" in header and f"python {name}.py" in header
    if name in PARENTS:
        assert f"Parent: {PARENTS[name]}.py. Differs only in:\n  1. " in header
    kinds = [type(node).__name__ for node in tree.body]
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert set(kinds) <= {"Expr", "Import", "ImportFrom", "ClassDef", "FunctionDef", "If"}
    assert functions[-1] == "main" and functions[-2 if name != "ppo" else -2] == "policy_loss"
    assert ("compute_gae" if name == "ppo" else "compute_advantages") in functions
    module, _ = script_args(name)
    advantages = "advantages_BT" if name == "ppo" else "advantages_B"
    expected = f"logprobs_BT old_logprobs_BT {advantages} mask_BT num_sequences num_tokens args".split()
    assert list(inspect.signature(module.policy_loss).parameters)[:7] == expected
    assert text.endswith('if __name__ == "__main__":\n    main(parse_args(Args))\n')
    assert 180 <= len(text.splitlines()) <= 300 and max(map(len, text.splitlines())) <= 110


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_argument_is_read(name):
    text = source(name) + source("common") + source("tasks")
    for field in dataclasses.fields(script_args(name)[0].Args):
        assert f"args.{field.name}" in text, f"--{field.name} does nothing"


def test_banners_come_in_the_same_order():
    def banners(name):
        return [line.split("- ")[-1] for line in body(name) if line.strip().startswith("# -----")]

    for name in set(SCRIPTS) - {"ppo"}:
        assert banners(name) == banners("grpo")
    assert sorted(banners("ppo")) == sorted(banners("grpo"))


def test_common_stays_small():
    lines = source("common").splitlines()
    assert len(lines) < 500 and max(map(len, lines)) <= 110
    assert "args.algo" not in source("common")
