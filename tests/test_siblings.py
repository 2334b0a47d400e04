"""Siblings stay siblings: what is not the algorithm is the same in all nine and in the three of
more/."""

import ast
import dataclasses
import difflib
import inspect
import re

import pytest
from conftest import MORE, ROOT, SCRIPTS, path_of, script_args

import common
from plumbing.args import RunArgs

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
OWN_FLAGS = {
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
# Shared arguments whose default differs from grpo.py's; a comment in the line says why.
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
# What each room of plumbing/ imports from others: only from rooms above it, so there is no circle.
ARROWS = {
    "errors": "",
    "ranks": "",
    "clock": "",
    "screen": "",
    "answers": "",
    "routing": "",
    "packing": "routing",
    "policy": "ranks routing",
    "models": "errors routing",
    "reward": "errors",
    "data": "answers errors ranks",
    "metrics": "errors ranks",
    "folder": "errors ranks",
    "args": "errors folder ranks screen",
    "run": "clock errors folder metrics ranks screen",
}
ROOMS = [f"plumbing.{room}" for room in ARROWS]
SIBLINGS = [*SCRIPTS, *MORE]
HAS_CRITIC = {"ppo", "more.vapo"}


def source(name):
    return path_of(name).read_text()


def functions_of(name):
    """{name of a top-level function: its text}"""
    text = source(name)
    nodes = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    return {node.name: ast.get_source_segment(text, node) for node in nodes}


# ------------------------------------------------------------------------------------------- form


@pytest.mark.parametrize("name", SIBLINGS)
def test_arguments(name):
    """The knobs of the loop have the same order, help and defaults in all; then come the algorithm's
    own flags. The rest is inherited, and nowhere changed."""
    args_class = script_args(name)[0].Args
    own = list(args_class.__annotations__)
    knobs = [knob for knob in KNOBS if knob not in FIXED.get(name, ())]
    assert own == knobs + OWN_FLAGS[name].split()
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
def test_every_argument_is_read(name):
    text = "".join(source(each) for each in [name, "common", *ROOMS])
    for field in dataclasses.fields(script_args(name)[0].Args):
        used = (f"args.{field.name}", f"self.{field.name}")
        assert any(each in text for each in used), f"--{field.name} does nothing"


@pytest.mark.parametrize("name", SIBLINGS)
def test_form_of_a_script(name):
    """The header names paper and parent; the order is fixed; nothing runs at import."""
    text = source(name)
    tree = ast.parse(text)
    header = ast.get_docstring(tree)
    command = f"python -m {name}" if name in MORE else f"python {name}.py"
    assert "arXiv" in header and f"    {command}\n" in header
    if name in PARENTS:
        assert f"Parent: {path_of(PARENTS[name]).name}. Differs only in:\n  1. " in header
    kinds = {type(node) for node in tree.body}
    assert kinds <= {ast.Expr, ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef, ast.If}
    expressions = [node for node in tree.body if isinstance(node, ast.Expr)]
    assert len(expressions) == 1 + (name in MORE)  # the docstring, and in more/ the path of common
    functions = list(functions_of(name))
    advantages = "compute_gae" if name in HAS_CRITIC else "compute_advantages"
    assert functions[:2] == ["masked_mean", advantages] and functions[-2:] == ["policy_loss", "main"]
    assert text.endswith('\n\n\nif __name__ == "__main__":\n    launch(main, Args)\n')


@pytest.mark.parametrize("name", SIBLINGS)
def test_signatures(name):
    """policy_loss: four tensors, then keywords, of which the last is the step's normalizer."""
    module, _ = script_args(name)
    parameters = inspect.signature(module.policy_loss).parameters
    advantages = "advantages_B1" if name in ("gmpo", "rspo") else "advantages_BT"
    positional = [key for key, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == ["logprobs_BT", "old_logprobs_BT", advantages, "mask_BT"]
    is_token_mean = name in ("ppo", "dapo", "cispo", "more.vapo")
    normalizer = "num_tokens" if is_token_mean else "num_sequences"
    assert {"num_tokens", "num_sequences"} & set(parameters) == {normalizer}
    assert list(parameters)[-1] == normalizer
    flags = OWN_FLAGS[name].split()
    own = [key for key in parameters if key in flags]
    assert own == [key for key in flags if key in own]  # in the order of the flags
    text = functions_of(name)["policy_loss"]
    for key in parameters:
        assert f"\n    {key} " in text or key in flags, f"{key} is not explained"


# ---------------------------------------------------------------------------------------- imports


def imported(name):
    """The modules of this repository that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(source(name))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            names = [alias.name for alias in node.names]
            rooms = {f"plumbing.{each}" for each in names if each in ARROWS}
            found |= rooms if node.module == "plumbing" else {node.module}
    folders = [path for path in ROOT.iterdir() if path.is_dir() and path.name[0] != "."]
    ours = {path.name for path in folders}
    for folder in (ROOT, *folders):
        ours |= {path.stem for path in folder.glob("*.py")}
    return {each for each in found if each.split(".")[0] in ours}


def test_imports_run_one_way():
    """plumbing <- common <- scripts <- everything else. A script knows common alone, and does not even
    name plumbing; an example knows no other example; the doctor knows nothing of ours."""
    assert {path.stem for path in (ROOT / "plumbing").glob("*.py")} == {*ARROWS, "__init__"}
    above = []
    for room, below in ARROWS.items():
        assert imported(f"plumbing.{room}") == {f"plumbing.{each}" for each in below.split()}
        assert set(below.split()) <= set(above), f"{room} is part of a circle"
        above.append(room)
    assert imported("plumbing.__init__") == set()
    assert imported("common") <= {"plumbing", *ROOMS}
    for name in SIBLINGS:
        assert imported(name) == {"common"} and "plumbing" not in source(name)
    for path in (ROOT / "examples").glob("*.py"):
        assert imported(f"examples.{path.stem}") <= {"common", *ROOMS, *SIBLINGS}
    for path in (ROOT / "conformance" / "rl_loss_vectors").glob("*.py"):
        assert imported(f"conformance.rl_loss_vectors.{path.stem}") == set()


def test_common_offers_what_scripts_import():
    names = set()
    for name in SIBLINGS:
        for node in ast.walk(ast.parse(source(name))):
            if isinstance(node, ast.ImportFrom) and node.module == "common":
                names |= {alias.name for alias in node.names}
    assert sorted(names) == sorted(common.__all__)


# ----------------------------------------------------------------------------- what is the same in all


def test_what_is_copied_is_the_same_in_all():
    """masked_mean in all scripts and in plumbing, compute_advantages in all of the nine but ppo and
    dr_grpo; vapo has ppo's GAE, whitening, rewards of tokens and value loss."""
    means = {functions_of(name)["masked_mean"] for name in ["plumbing.metrics", *SIBLINGS]}
    assert len(means) == 1
    others = set(SCRIPTS) - {"ppo", "dr_grpo"}
    assert len({functions_of(name)["compute_advantages"] for name in others}) == 1
    ppo, vapo = functions_of("ppo"), functions_of("more.vapo")
    for name in ("compute_gae", "whiten", "token_rewards", "value_loss"):
        assert vapo[name] == ppo[name]


def blocks_of(name):
    """{banner: lines} of main, in its order. The keywords of losses are left out: test_losses.py."""
    lines = functions_of(name)["main"].splitlines()[1:]
    blocks = {}
    is_in_a_loss = False
    for line in map(str.strip, lines):
        if line.startswith("# ---"):
            block = blocks[line.split()[-1]] = []
            continue
        if not is_in_a_loss:
            block.append(line)
        is_in_a_loss = (is_in_a_loss or line.endswith("loss(")) and line != ")"
    return blocks


# Blocks of main that are the algorithm's own, and lines that the parent's main does not have elsewhere.
OWN_BLOCKS = {"grpo": "advantages", "dapo": "rollout", "more.reinforce": "advantages"}
OWN_BLOCKS["more.vapo"] = "advantages"
RUN = "run = Run(args, policy, problems, optimizer=optimizer)  # log, checkpoints\n"
CORRECTION = "rollout_correction(batch, args)  # sets correction_weights, 1 by default\n"
OWN_LINES = {
    "grpo": """
        optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr, weight_decay=0.0, fused=True)
        run = Run(args, policy, problems, optimizer=optimizer, reference=reference)  # log, checkpoints
        rollout_correction(batch, args)  # sets correction_weights, rollout_ratio_BT: 1 by default
        batch.advantages = batch.correction_weights * advantages_B1
        outputs = token_logprobs(policy, micro, args.temperature)
        total_loss = loss + args.router_aux_coef * outputs.aux_loss * share
        run.record(loss, stats, outputs, micro)
        run.record_step(minibatch, grad_norm)  # ends the run if loss or norm is not finite
        if args.ref_reset_every > 0 and iteration % args.ref_reset_every == 0:
        reference.load_state_dict(policy.state_dict())
        run.log(batch, completions, rewards_PG)
    """,
    "dr_grpo": RUN + CORRECTION,
    "dapo": f"""
        {RUN}
        rewards_B = torch.tensor([c.reward for c in kept])
        if args.overlong == "soft":
        # [4] R falls by up to 1
        lengths_B = torch.tensor([len(c.ids) for c in kept])
        rewards_B += overlong_penalty(lengths_B, args.max_new_tokens, args.overlong_cache)
        rewards_PG = rewards_B.view(-1, args.group_size)
        batch = collate(kept, args)
        if args.overlong == "filter":
        # [4] Truncated completions get no gradient, and their tokens leave the step's token count.
        is_whole_B1 = torch.tensor([[not c.truncated] for c in kept], device=args.device)
        batch.mask_BT = batch.mask_BT & is_whole_B1
        {CORRECTION}
        num_tokens = minibatch.mask_BT.sum().clamp(min=1)  # filter may mask all of them
        run.log(batch, generated, rewards_PG, **counts)  # rewards of the groups kept
    """,
    "gspo": f"""
        {RUN}
        rollout_correction(batch, args, per_sequence=args.variant == "gspo")  # sets correction_weights
    """,
    "cispo": RUN + CORRECTION + "num_tokens = minibatch.mask_BT.sum()",
    "sapo": RUN + CORRECTION,
    "gmpo": RUN + CORRECTION.replace("args)", "args, per_sequence=True)"),
    "rspo": """
        if not policy.routers.has_softmax:
        raise UserError(f"--model {args.model} has no experts chosen by a softmax: use gmpo.py")
        # sets old_logprobs_BT, the experts, and their log p_old(e_jk)
        record_old_policy(policy, batch, args, router_fn=expert_logprobs)
        active_BTLK = micro.active_experts(micro.old_experts_BTLK)  # e_jk
        scores_BTLK = expert_logprobs(outputs.router_logits, active_BTLK)
        raw_gamma_BT = router_shift(scores_BTLK, micro.old_router_scores_BTLK)
        is_floored_BT = raw_gamma_BT < args.gamma_min
        stats["moe/router_shift"] = masked_mean(raw_gamma_BT, micro.mask_BT)
        stats["moe/router_floor_frac"] = masked_mean(is_floored_BT.float(), micro.mask_BT)
    """,
    "more.reinforce": f"""
        {RUN}
        run.extra_state.setdefault("baseline", 0.0)
        {CORRECTION}
        for micro in batch.micro_batches(args):  # this process's rows
        share = len(micro) / len(batch)
        run.record_step(batch, grad_norm)  # ends the run if loss or norm is not finite
        run.log(batch, completions, rewards_PG.view(-1, 1))
    """,
    "more.rloo": """
        advantages_B1 = compute_advantages(rewards_PG).view(-1, 1).to(args.device)
        run.log(batch, completions, rewards_PG)
    """,
    "more.vapo": """
        is_right_B1 = [[c.verdict == "correct"] for c in completions]
        batch.is_right_B1 = torch.tensor(is_right_B1, device=args.device)
        num_right_tokens = (minibatch.mask_BT & minibatch.is_right_B1).sum().clamp(min=1)
        # [1] Without gradients AdamW leaves the policy, and its moments, as they are.
        with torch.set_grad_enabled(iteration > args.pretraining_iterations):
        lm_loss = positive_lm_loss(
        # [5] J has -mu L_LM, the loss +mu L_LM
        total_loss = total_loss + args.positive_lm_coef * lm_loss
        losses = {"value_loss": critic_loss, "positive_lm_loss": lm_loss}
        run.record(loss, stats, outputs, micro, **losses)
    """,
}
OF_THE_PARENT = ("reference", "ref_reset", "baseline", "[1] b becomes")  # the KL, the running mean


@pytest.mark.parametrize("child", PARENTS)
def test_main_is_that_of_its_parent_except_for_its_own_lines(child):
    """What a child leaves out is the KL or the running mean, or it has a line that begins alike; of
    ppo's critic grpo leaves out all."""
    mine = blocks_of(child)
    parents = blocks_of(PARENTS[child])
    assert list(mine) == list(parents) or (child == "grpo" and sorted(mine) == sorted(parents))
    new = []
    gone = []
    for block in set(mine) - {OWN_BLOCKS.get(child)}:
        matcher = difflib.SequenceMatcher(None, parents[block], mine[block], autojunk=False)
        for kind, start, end, first, last in matcher.get_opcodes():
            if kind != "equal":
                gone += parents[block][start:end]
                new += mine[block][first:last]
    own = [line.strip() for line in OWN_LINES[child].splitlines() if line.strip()]
    assert sorted(new) == sorted(own)
    if child != "grpo":
        gone = [line for line in gone if not any(word in line for word in OF_THE_PARENT)]
        assert {first_word(line) for line in gone} <= {first_word(line) for line in new}


def first_word(line):
    return re.split(r"[ (]", line)[0]


OF_ALL_ROWS = {"critic.model(micro)[:, :-1]", "values_BU[:, :-1]"}  # columns of all rows


@pytest.mark.parametrize("name", SIBLINGS)
def test_no_rows_are_picked_in_main(name):
    """Tensors with a row per completion are fields of Batch, whose parts are slices: main has no index
    but names of numbers, and columns."""
    for node in ast.walk(ast.parse(functions_of(name)["main"])):
        if isinstance(node, ast.Subscript):
            is_name = isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str)
            assert is_name or ast.unparse(node) in OF_ALL_ROWS, ast.unparse(node)
