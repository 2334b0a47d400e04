"""What the scripts are for: masked_mean, the advantages and the losses can be copied as they stand into
a file that has nothing but torch, and their keywords are the flags."""

import ast
import inspect
import types

import pytest
import torch
from conftest import MORE, SCRIPTS, keywords_of, path_of, script_args

SIBLINGS = [*SCRIPTS, *MORE]
COPIED = {name: ["masked_mean", "compute_advantages"] for name in SIBLINGS}
COPIED["ppo"] = ["masked_mean", "compute_gae", "whiten", "token_rewards", "value_loss"]
COPIED["more.vapo"] = [*COPIED["ppo"], "positive_lm_loss"]
COPIED["rspo"] += ["expert_logprobs", "router_shift"]
COPIED["dapo"] += ["overlong_penalty"]
for functions in COPIED.values():
    functions.append("policy_loss")
NORMALISERS = {"num_sequences", "num_tokens"}
LOSSES = [(name, "policy_loss") for name in SIBLINGS] + [("ppo", "value_loss")]
LOSSES += [("more.vapo", "value_loss"), ("more.vapo", "positive_lm_loss")]


def copied(name):
    """An empty module with `import torch` and the copied functions of a script."""
    text = path_of(name).read_text()
    parts = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name in COPIED[name]:
            parts[node.name] = ast.get_source_segment(text, node)
    assert set(parts) == set(COPIED[name])
    module = types.ModuleType(f"copy_of_{name}")
    exec("import torch\n\n\n" + "\n\n\n".join(parts.values()), module.__dict__)
    return module


def normal(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def outcome(function, *inputs, **keywords):
    """All values of a call, and the gradient of its first one with respect to the first input."""
    first = inputs[0].detach().clone().requires_grad_()
    result = function(first, *inputs[1:], **keywords)
    values = []
    for value in result if isinstance(result, tuple) else (result,):
        values += list(value.values()) if isinstance(value, dict) else [value]
    weights = torch.arange(
        1.0, values[0].numel() + 1, dtype=torch.float64
    )  # a plain sum may be constant
    (gradient,) = torch.autograd.grad(values[0].flatten() @ weights.to(values[0]), first)
    return [*values, gradient]


def calls(name, args):
    """[(function, inputs, keywords)] for every copied function, all options of the script's own."""
    mask = torch.arange(9) < torch.tensor([[9], [1], [4], [7], [9], [2]])
    old = -normal(6, 9, seed=0).abs()
    lp = old + 0.4 * normal(6, 9, seed=1)
    one_B1 = torch.tensor([[True], [False], [False], [True], [False], [False]])
    logits = torch.stack([normal(6, 9, 5, seed=5 + layer) for layer in range(2)])
    experts = logits.topk(2).indices.movedim(0, 2)
    scores = normal(6, 9, 2, 2, seed=7)
    baseline = (0.5,) if name == "more.reinforce" else ()
    inputs_of = {
        "masked_mean": (lp, mask),
        "compute_advantages": (normal(2, 3, seed=3), *baseline),
        "compute_gae": (normal(6, 9, seed=2), old, mask, 0.9, 0.8),
        "whiten": (lp, mask),
        "token_rewards": (normal(6, 1, seed=11), old, normal(6, 10, seed=12), one_B1, mask, 0.1, 0.9),
        "value_loss": (lp, old, normal(6, 9, seed=2), mask),
        "overlong_penalty": (torch.tensor([3.0, 12.5, 16.0, 20.0]), 20, 8),
        "positive_lm_loss": (lp, one_B1, mask),
        "expert_logprobs": (logits, experts),
        "router_shift": (scores, scores + 0.1 * normal(6, 9, 2, 2, seed=8)),
    }
    found = [(function, inputs_of[function], {}) for function in COPIED[name][:-1]]
    extra = {}
    if name == "grpo":
        extra["ref_logprobs_BT"] = old + 0.3 * normal(6, 9, seed=4)
    if name == "rspo":
        extra["router_shift_BT"] = 0.7 + 0.3 * normal(6, 9, seed=9).sigmoid()
    module, _ = script_args(name)
    parameters = inspect.signature(module.policy_loss).parameters
    required = {"max_new_tokens": 9} if "max_new_tokens" in parameters else {}
    changes = [{}]  # every choice of every option that is not a number
    for key, values in {
        "kl_is_corrected": (True,),
        "variant": ("gspo_token",),
        "ppo_mask": (True,),
        "clip_level": ("sequence",),
        "shift": ("literal", "before_clip"),
    }.items():
        if key in parameters:
            changes += [{key: value} for value in values]
    inputs = (lp, old, normal(6, 1, seed=10), mask)
    for change in changes:
        found.append(("policy_loss", inputs, {**required, **change}))
        full = keywords_of(module.policy_loss, args, **required, **change, **extra)
        found.append(("policy_loss", inputs, full))
    return found


@pytest.mark.parametrize("name", SIBLINGS)
def test_a_copy_needs_nothing_but_torch(name):
    """The same values and gradients as the script's own."""
    module, args = script_args(name)
    copy = copied(name)
    seen = set()
    for function, inputs, keywords in calls(name, args):
        seen.add(function)
        ours = outcome(getattr(module, function), *inputs, **keywords)
        theirs = outcome(getattr(copy, function), *inputs, **keywords)
        assert len(ours) == len(theirs)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), (function, keywords)
        assert ours[-1].abs().sum() > 0, f"{function} has no gradient here, so that little is compared"
    assert seen == set(COPIED[name])
    public = {key for key in vars(copy) if not key.startswith("__")}
    assert public == {"torch", *COPIED[name]}


@pytest.mark.parametrize("name, function", LOSSES)
def test_keywords_are_the_flags(name, function):
    """Their names and their defaults; what is no flag is the normaliser, or a tensor that may be left
    out."""
    module, args = script_args(name)
    parameters = inspect.signature(getattr(module, function)).parameters
    for keyword, parameter in parameters.items():
        if parameter.kind is not parameter.KEYWORD_ONLY:
            assert parameter.default is parameter.empty
        elif keyword in NORMALISERS or keyword.endswith("_BT"):
            assert parameter.default is None and not hasattr(args, keyword)
        elif keyword == "max_new_tokens":
            # The one without a default: L_max is the user's, not the paper's.
            assert name == "dr_grpo" and parameter.default is parameter.empty
        else:
            default = getattr(args, keyword)
            assert parameter.default == default and type(parameter.default) is type(default), keyword
    assert "args" not in parameters and len(NORMALISERS & set(parameters)) == 1


@pytest.mark.parametrize("name, function", LOSSES)
def test_main_passes_every_keyword(name, function):
    """Each one once, and a flag as it is: a loss whose flag is not passed on would ignore it."""
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


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name != "ppo"] + ["more.rloo"])
def test_main_computes_the_advantages_with_the_function_that_is_copied(name):
    text = path_of(name).read_text()
    assert text.count("compute_advantages(rewards_PG)") == 2  # its definition and its use
    assert list(inspect.signature(script_args(name)[0].compute_advantages).parameters) == ["rewards_PG"]
