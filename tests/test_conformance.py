"""The test vectors against the scripts; the doctor on our own losses, on each known mistake, and on
losses that somebody else might bring; pytest suites, the README."""

import functools
import os
import re
import subprocess
import sys

import disagree
import numpy as np
import pytest
import torch
from conftest import MORE, ROOT, SCRIPTS, copied
from rl_loss_vectors import VECTORS, Subject, cases, doctor, mistakes, reference
from rl_loss_vectors import __main__ as command
from rl_loss_vectors.vectors import Answer, same

import common

README = (ROOT / "conformance" / "README.md").read_text()
SECTIONS = VECTORS["sections"]
ALL_CASES = [(section, case["id"]) for section in SECTIONS for case in SECTIONS[section]["cases"]]
LOSSES = [name.removeprefix("more.") for name in (*SCRIPTS, *MORE)]
MODULES = dict(zip(LOSSES, (*SCRIPTS, *MORE), strict=True))
ENTRIES = []
for kind, name, (first, *others), change in mistakes.ENTRIES:
    ENTRIES.append((f"{kind}: {name}", first, change))
    for section in others:
        ENTRIES.append(pytest.param(f"{kind}: {name}", section, change, marks=pytest.mark.slow))
OURS = {  # the project's functions for sections that have not the name of a script
    "grpo_offpolicy": "grpo:policy_loss",
    "value_loss": "ppo:value_loss",
    "positive_lm_loss": "more.vapo:positive_lm_loss",
    "group_advantages": "grpo:compute_advantages",
    "group_differences": "dr_grpo:compute_advantages",
    "leave_one_out": "more.rloo:compute_advantages",
    "gae": "ppo:compute_gae",
    "router_shift": "rspo:router_shift",
    "whiten": "ppo:whiten",
    "overlong_penalty": "dapo:overlong_penalty",
    "rollout_weights": "common:rollout_weights",
}
NOT_OF_SCRIPTS = ["grouped_advantages", "replayed_gate"]
OF_SCRIPTS = [pair for pair in ALL_CASES if pair[0] not in NOT_OF_SCRIPTS]
UNKNOWN = "unknown: no known mistake gives these numbers"


def case_of(section, id):
    return next(case for case in SECTIONS[section]["cases"] if case["id"] == id)


def function_of(section):
    """A script's function as it is copied, with nothing but torch around it."""
    module, name = OURS.get(section, f"{MODULES.get(section)}:policy_loss").split(":")
    return getattr(common if module == "common" else copied(module), name)


# ---------------------------------------------------------------------------------------- the vectors


@pytest.mark.parametrize("section, id", OF_SCRIPTS)
def test_the_scripts_agree(section, id):
    """Within 1e-12, and so no case depends on the clamp of log-ratios, which reference.py has not."""
    case = case_of(section, id)
    subject = Subject(function_of(section), section)
    why_not = subject.why_not(case)
    if "bootstrap" in case["keywords"]:  # ppo.py adds it to the last reward
        assert why_not == "it has no keyword bootstrap"
        return
    assert why_not is None and same(subject.answer(case), *subject.expected(case), 1e-12)


@pytest.mark.parametrize("section", SECTIONS)
def test_the_file_is_what_make_gives(section):
    """To the last bits, which may depend on the processor."""
    for case in SECTIONS[section]["cases"]:
        found = reference.with_results(section, case)
        for key in {"value", "gradient", "terms", "denominator"} & {*case}:
            assert np.allclose(found[key], case[key], rtol=1e-12, atol=1e-12)


# ----------------------------------------------------------------------------------------- the doctor


@pytest.mark.parametrize(
    "name, section, change", ENTRIES, ids=lambda x: x if isinstance(x, str) else ""
)
def test_an_entry_is_visible_and_diagnosed_as_itself_alone(name, section, change):
    answers = []
    for case in SECTIONS[section]["cases"]:
        value, gradient = reference.evaluate(section, case, change)
        answers.append((case, Answer(value.numpy(), None if gradient is None else gradient.numpy())))
    subject = Subject(lambda *given: None, section)
    assert not all(doctor.is_right(subject, *pair) for pair in answers)
    assert doctor.named(section, answers) == [name]


def with_tensors(function, change):
    """The function of changed tensors."""

    @functools.wraps(function)
    def loss(*given, **keywords):
        tensors = {key: change(x) for key, x in keywords.items() if torch.is_tensor(x)}
        given = [change(x) if torch.is_tensor(x) else x for x in given]
        return function(*given, **(keywords | tensors))

    return loss


@pytest.mark.parametrize("section", [*LOSSES, *OURS])
def test_a_function_that_computes_in_float32_is_healthy(section):
    in_float32 = with_tensors(function_of(section), lambda x: x.float() if x.is_floating_point() else x)
    subject = Subject(in_float32, section)
    assert doctor.diagnosis(subject, doctor.examine(subject)) == []


def dapo_of(terms):
    """DAPO with different terms of r, A and the smaller product."""

    def loss(logprobs, old_logprobs, advantages, mask):
        r = torch.where(mask, logprobs - old_logprobs, 0).exp()
        smaller = torch.min(r * advantages, r.clamp(0.8, 1.28) * advantages)
        return -torch.where(mask, terms(r, advantages, smaller), 0).sum() / mask.sum()

    return loss


def from_the_maximum(rewards):
    return rewards - rewards.max(1, keepdim=True).values


EXPLAINED = [  # (a function whose mistake has no entry, its section, what the doctor says of it)
    (
        dapo_of(lambda r, A, m: m.where(A > 0, -m)),
        "dapo",
        "where A < 0, by r:           1       0.5       0.9",
    ),
    (dapo_of(lambda r, A, m: m.detach() + (r - r.detach()) * A), "dapo", "every value is right"),
    (dapo_of(lambda r, A, m: m + 0.01 * r), "dapo", "every A is 0 your gradient is up to 0.0025"),
    (from_the_maximum, "group_advantages", "3, 3, 3, 7 your A is 1 (R - 7), not 0.5 (R - 4)"),
]


@pytest.mark.parametrize("function, section, expected", EXPLAINED)
def test_what_is_unknown_is_explained(function, section, expected):
    subject = Subject(function, section)
    text = "\n".join(doctor.diagnosis(subject, doctor.examine(subject)))
    assert text.startswith(UNKNOWN) and expected in text, text


# ---------------------------------------------------------------------------------- what users bring


@pytest.fixture
def ask(tmp_path, capsys, monkeypatch):
    """(exit code, what it prints) of the doctor on the lines of a file, in this process."""

    def answer(text, flags="--algorithm dapo", name="loss"):
        path = tmp_path / "mine.py"
        path.write_text(f"import torch\n{text}")
        monkeypatch.setattr(sys, "argv", ["check.py", f"{path}:{name}", *flags.split()])
        monkeypatch.chdir(ROOT)
        with pytest.raises(SystemExit) as ended:
            command.main("check.py")
        printed = capsys.readouterr()
        return int(ended.value.code), printed.out + printed.err

    return answer


DAPO = """
def loss(new, old, A, mask, *, {eps}_low=0.2, {eps}_high=0.28{more}):
    {first}
    r = {log_r}.exp()
    smaller = torch.min(r * A, r.clamp(1 - {eps}_low, 1 + {eps}_high) * A)
    return {sign}torch.where(mask, smaller, 0).sum() / {divisor}
class Loss(torch.nn.Module):
    def __call__(self, *given, **keywords):
        return super().__call__(*given, **keywords)
    def forward(self, new, old, A, mask, clip_eps_low=0.2, clip_eps_high=0.28):
        return loss(new, old, A, mask, clip_eps_low=clip_eps_low, clip_eps_high=clip_eps_high)
instance = Loss()
"""
PARTS = {
    "eps": "clip_eps",
    "more": "",  # keywords
    "first": "",  # what is done before anything else
    "log_r": "torch.where(mask, new - old, 0)",
    "sign": "-",
    "divisor": "mask.sum()",
}
MULTIPLIED = "((new - old) * mask)"
VARIATIONS = [  # (parts that are different, exit code, what is printed)
    ({}, 0, "14 of 14 applicable cases agree, 1 not tested\nhealthy\n"),
    ({"eps": "bound"}, 0, "n/a      dapo-011 other bounds: it has no keyword clip_eps_low"),
    (
        {"more": ", **others"},
        0,
        "n/a      dapo-007 a step in two micro-batches of unequal size: it cannot",
    ),
    ({"sign": ""}, 1, "\nmistake: wrong sign\n"),
    ({"divisor": "-mask.numel()"}, 1, "mistake: wrong sign and mistake: a mean over the"),
    ({"first": "assert A.shape[1] == 1"}, 0, "it takes one advantage for each completion"),
    ({"first": "assert not new.isnan().any(), 'no'"}, 1, "it raises AssertionError no"),
    ({"first": "mask = 1 - mask < 0.5"}, 0, "14 of 14 applicable cases agree"),
    ({"log_r": MULTIPLIED}, 1, "--allow-nan accepts it\n"),
    ({"log_r": "torch.where(mask, new.bfloat16() - old, 0)"}, 1, "computed in bfloat16"),
]


def dapo(**parts):
    return DAPO.format(**(PARTS | parts))


@pytest.mark.parametrize("parts, code, expected", VARIATIONS)
def test_variations_of_a_loss(parts, code, expected, ask):
    found, text = ask(dapo(**parts))
    assert found == code and expected in text, text


def test_nan_in_masked_places_alone_can_be_allowed(ask):
    assert ask(dapo(log_r=MULTIPLIED), "--algorithm dapo --allow-nan")[0] == 0


def test_a_loss_of_which_no_case_applies_is_not_healthy(ask):
    code, text = ask(dapo(), "--algorithm rspo")
    assert code == 1 and "0 of 0 applicable cases agree" in text


@pytest.mark.parametrize("name", ["instance", "in_a_dict"])
def test_a_module_and_a_dict(name, ask):
    code, text = ask(f"{dapo()}\ndef in_a_dict(*given): return {{'loss': loss(*given)}}", name=name)
    assert code == 0 and "healthy" in text


def test_arguments_in_another_order_are_passed_by_name(ask):
    wrapper = "\ndef ordered(old, new, A, mask): return loss(new, old, A, mask)\n"
    code, text = ask(dapo() + wrapper, name="ordered")
    assert code == 0 and "arguments by name: old is old_logprobs, new is logprobs, " in text


CANNOT = [  # (lines, name of the function, what is printed)
    ("def loss(lp, old, A, mask): A + lp", "loss", "as dapo: it returns None: is a `return` missing?"),
    ("def loss(new, A): pass", "loss", "it takes 2 arguments (new, A), not 4: logprobs, "),
    ("exit()", "loss", "cannot be called as dapo: SystemExit"),
    ("def loss(a, b, c, d):\n    return a.nothing", "loss", "has no attribute 'nothing' (/"),
    ("def loss(a, b, c, d): return a[0]", "loss", "a loss is one number, not a tensor of shape (6,)"),
    (
        "class Loss:\n    def __init__(self, model): pass",
        "Loss",
        "Loss needs model: pass --set model=...",
    ),
]


@pytest.mark.parametrize("lines, name, expected", CANNOT)
def test_what_cannot_be_called_is_one_line(lines, name, expected, ask):
    code, text = ask(lines, name=name)
    assert code == 2 and expected in text and text.count("\n") == 1, text


SURROGATE = """
def surrogate(lp, old, A, low=0.8, high=1.2):
    r = (lp - old).exp()
    return -torch.min(r * A, r.clamp(low, high) * A)
def mean(x, mask):
    return (x * mask).sum() / mask.sum()
def k3(log_x):
    return log_x.exp() - log_x - 1
def loss({}):
    return {}
"""
FOUR = "lp, old, A, mask"
GRPO = "((surrogate(lp, old, A) + {}) * mask).sum(1).div(mask.sum(1)).mean()"
WITH_REF = f"{FOUR}, ref_logp=None, beta=0.04"
SUM = "(surrogate(lp, old, A) * mask).sum()"
S = "(((lp - old) * mask).sum(1) / mask.sum(1)).exp()"
GROUP = "((R := rewards.view(-1, {n})) - R.mean(1, keepdim=True)) / (R.std(1, keepdim=True{}) + {})"
BROUGHT = [  # (parameters, what is returned, flags, exit code, what is printed): kinds of public code
    # constants of its own
    (
        FOUR,
        "mean(surrogate(lp, old, A, 0.9, 1.1), mask)",
        "ppo",
        1,
        "the range is [0.9, 1.1], not [0.8",
    ),
    (
        FOUR,
        "-mean((lp - old).exp().clamp(max=1.28).detach() * A * lp, mask)",
        "cispo",
        1,
        "a cap of 1.28",
    ),
    (
        FOUR,
        f"surrogate({S}.log(), 0, A[:, 0], 1 - 3e-4, 1 + 4e-4).mean()",
        "gspo --allow-nan",
        0,
        "the paper's",
    ),
    (FOUR, f"{SUM} / (len(mask) * 1024)", "dr_grpo --allow-nan", 0, "max_new_tokens is 1024"),
    (FOUR, f"{SUM} / mask.numel()", "dr_grpo", 1, "mistake: a mean over the padded width"),
    # required constants, and names anywhere
    (
        f"{FOUR}, eps_clip",
        "mean(surrogate(lp, old, A, 1 - eps_clip, 1 + eps_clip), mask)",
        "ppo --allow-nan",
        0,
        "",
    ),
    (
        f"{FOUR}, x",
        "mean(surrogate(lp, old, A, *x.range), mask)",
        "ppo --set x.range=(0.8,1.2) --allow-nan",
        0,
        "",
    ),
    (
        f"{FOUR}, x",
        "mean(surrogate(lp, old, A), mask) * x",
        "ppo",
        2,
        "what is not known is set by --set",
    ),
    (
        f"{FOUR}, clip_low=0.8",
        "mean(surrogate(lp, old, A, clip_low), mask)",
        "ppo --allow-nan",
        0,
        "n/a      ppo-011",
    ),
    (
        "ref_logp, mask, A, old, lp",
        GRPO.format("0.04 * k3(ref_logp - lp)"),
        "grpo --allow-nan",
        0,
        "is ref_logprobs",
    ),
    (
        "x, y, A, z",
        "mean(surrogate(x, y, A), z)",
        "ppo",
        1,
        "no name was recognized; passed in this order",
    ),
    # the KL
    (
        WITH_REF,
        GRPO.format("beta * k3(old - lp)"),
        "grpo",
        1,
        "the KL is k3, x = pi_old / pi, coefficient 0.04",
    ),
    (
        WITH_REF,
        GRPO.format("-0.1 * (lp - ref_logp)"),
        "grpo",
        1,
        "k1, x = pi_ref / pi, coefficient 0.1, rewarded",
    ),
    (
        WITH_REF,
        GRPO.format("beta * k3(ref_logp - lp).detach()"),
        "grpo",
        1,
        "k3 without gradient, x = pi_ref",
    ),
    (WITH_REF, GRPO.format("beta * (lp - ref_logp) ** 2 / 2"), "grpo", 1, "the KL is k2"),
    # several departures at once
    (
        FOUR,
        "mean((lp - old).exp().clamp(0.8, 1.2) * A, mask)",
        "grpo",
        1,
        "both sides, without the min",
    ),
    (
        FOUR,
        "mean((lp - old).exp().clamp(0.8, 1.2) * A, mask)",
        "grpo",
        1,
        "wrong sign and mistake: token-mean",
    ),
    (
        FOUR,
        f"({SUM[:-6]}.sum(1) * mask.sum(1)).sum() / mask.numel()",
        "grpo",
        1,
        "each completion times its |o|",
    ),
    # clamps for safety, NaN
    (
        FOUR,
        "mean(surrogate((lp - old).clamp(-10, 10), 0, A), mask)",
        "ppo",
        1,
        "|log r| > 10: a clamp of log r",
    ),
    (
        FOUR,
        "mean(surrogate((lp - old).clamp(-10, 10), 0, A), mask)",
        "ppo --allow-clamp --allow-nan",
        0,
        "",
    ),
    (
        FOUR,
        "torch.where(mask, surrogate(lp, old, A), 0).sum() / mask.sum()",
        "ppo",
        1,
        "mask the log-ratio before",
    ),
    # what is returned, float32, shapes
    (FOUR, "surrogate(lp, old, A)", "ppo --allow-nan", 0, "it returns terms, (B, T)"),
    (
        FOUR,
        "mean(surrogate(lp, old, A), mask if lp.dtype == torch.float32 else 1 / 0)",
        "ppo",
        1,
        "in float32",
    ),
    (FOUR, f"-({S} * A.view(-1, 1)).mean()", "gspo", 1, "(B,) times (B, 1)"),
    # advantages
    (
        "rewards, n",
        f"({GROUP.format('', 1e-6, n='n')}).view(-1)",
        "grpo --what advantages",
        1,
        "no rule for equal",
    ),
    (
        "rewards",
        f"{GROUP.format(', unbiased=False', 1e-8, n='rewards.shape[1]')}",
        "grpo --what advantages",
        1,
        "population, eps 1e-8",
    ),
    (
        "rewards",
        "(rewards - rewards.mean()) / (rewards.std() + 1e-6)",
        "grpo --what advantages",
        1,
        "passed as G",
    ),
]


@pytest.mark.parametrize("parameters, result, flags, code, expected", BROUGHT)
def test_what_public_code_does(parameters, result, flags, code, expected, ask):
    found, text = ask(SURROGATE.format(parameters, result), f"--algorithm {flags}")
    assert found == code and expected in text, text


FILE = """
from .near import masked_mean
from nowhere import Trainer, register
import nowhere.config as config
LIMIT = config.get("limit")
@register("ppo")
def loss(logp, old_logp, advantages, mask: config.Tensor = None, eps=0.2):
    r = (logp - old_logp).exp()
    return -masked_mean(torch.min(r * advantages, r.clamp(1 - eps, 1 + eps) * advantages), mask)
class Loss(Trainer):
    def __init__(self, clip_eps, **others):
        super().__init__(**others)
        self.eps = clip_eps
    def forward(self, logp, old_logp, advantages, response_mask):
        return loss(logp, old_logp, advantages, response_mask, self.eps)
"""


@pytest.mark.parametrize("name", ["loss", "Loss", "Loss.forward"])
def test_a_file_that_cannot_be_imported(name, ask, tmp_path):
    (tmp_path / "near.py").write_text(
        "import nowhere\ndef masked_mean(x, m): return (x * m).sum() / m.sum()"
    )
    code, text = ask(FILE, "--algorithm ppo --allow-nan", name=name)
    assert code == 0 and "is taken from it" in text, text


def test_a_module_by_its_name(ask, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    ask(dapo())
    monkeypatch.setattr(sys, "argv", ["check.py", "mine:loss", "--algorithm", "dapo"])
    with pytest.raises(SystemExit, match="False"):
        command.main("check.py")


def test_a_function_that_is_no_loss(ask):
    code, text = ask("from ppo import compute_gae", "--algorithm ppo --what gae", name="compute_gae")
    assert code == 0 and "DIFFERS" not in text


# ------------------------------------------------------------------------- in pytest, as a process


def run(*command, **options):
    env = {**os.environ, "PYTHONPATH": str(ROOT / "conformance")}
    command = [sys.executable, *map(str, command)]
    return subprocess.run(command, env=env, capture_output=True, text=True, **options)


def test_the_cases_of_a_pytest_suite():
    """A failure is diagnosed, a known difference is strict, what does not apply is skipped."""

    def loss(*given):
        return -copied("dapo").policy_loss(*given)[0]

    parameters = {parameter.id: parameter for parameter in cases("dapo", loss, ["dapo-002"])}
    with pytest.raises(AssertionError, match="mistake: wrong sign"):
        parameters["dapo-001"].values[0].check()
    (mark,) = parameters["dapo-002"].marks
    assert mark.name == "xfail" and mark.kwargs["strict"]
    (mark,) = parameters["dapo-007"].marks
    assert mark.name == "skip" and "micro-batches" in mark.kwargs["reason"]


def test_the_table_of_the_readme(capsys):
    disagree.main()
    assert capsys.readouterr().out in README


def test_the_three_examples_of_the_readme(tmp_path):
    """The loss gets the diagnosis that is printed there, also in pytest, and the reader reads."""
    for name, text in re.findall(r"```python\n(?:# (\S+)\n)?(.*?)```", README, re.DOTALL):
        (tmp_path / (name or "read.py")).write_text(text)
    (tmp_path / "rl_loss_vectors").symlink_to(ROOT / "conformance" / "rl_loss_vectors")
    (diagnosis,) = re.findall(r"^mistake: .*", README, re.MULTILINE)
    for arguments, code in (
        (f"{ROOT}/conformance/check.py mine.py:loss --algorithm grpo", 1),
        ("-m pytest -p no:cacheprovider test_mine.py", 1),
        ("read.py", 0),
    ):
        result = run(*arguments.split(), cwd=tmp_path)
        assert result.returncode == code, result.stdout + result.stderr
        assert code == 0 or diagnosis in result.stdout
