"""The test vectors against the scripts; the doctor on our own losses and on functions of all kinds that
somebody might bring; pytest suites, the README."""

import dataclasses
import inspect
import math
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import MORE, ROOT, SCRIPTS, copied
from rl_loss_vectors import VECTORS, diagnose, doctor, mistakes, reference
from rl_loss_vectors import __main__ as command
from rl_loss_vectors.names import COUNTS, plain
from rl_loss_vectors.reference import clipped
from rl_loss_vectors.vectors import answer, expected, same

import common

README = (ROOT / "conformance" / "README.md").read_text()
SECTIONS = VECTORS["sections"]
ALL_CASES = [(section, case["id"]) for section in SECTIONS for case in SECTIONS[section]["cases"]]
LOSSES = [name.removeprefix("more.") for name in (*SCRIPTS, *MORE)]
MODULES = dict(zip(LOSSES, (*SCRIPTS, *MORE), strict=True))
OURS = {  # the project's functions for sections that have not the name of a script
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
ASKED = ["value_loss", "group_advantages", "group_differences", "leave_one_out", "gae", "whiten"]
NOT_OF_SCRIPTS = ["grouped_advantages", "replayed_gate"]
OF_SCRIPTS = [pair for pair in ALL_CASES if pair[0] not in NOT_OF_SCRIPTS]
# Its mask reads the sign of the first token's advantage; deepseek_v32.py's reads that of the sum.
OF_SCRIPTS.remove(("grpo_offpolicy", "grpo_offpolicy-012"))


def case_of(section, id):
    return next(case for case in SECTIONS[section]["cases"] if case["id"] == id)


def function_of(section):
    """A script's function as it is copied, with nothing but torch around it."""
    module, name = OURS.get(section, f"{MODULES.get(section)}:policy_loss").split(":")
    return getattr(common if module == "common" else copied(module), name)


def grpo_offpolicy(
    logprobs_BT,
    old_logprobs_BT,
    advantages_BT,
    mask_BT,
    *,
    clip_eps_low=0.2,
    clip_eps_high=0.2,
    kl_coef=0.04,
    kl_is_corrected=False,
    offpolicy_mask=0.0,
    ref_logprobs_BT=None,
    rollout_ratio_BT=None,
    num_sequences=None,
):
    """What DeepSeek-V3.2 adds to GRPO's loss, one by one, from its script and grpo's."""
    inputs = logprobs_BT, old_logprobs_BT, advantages_BT, mask_BT
    shared = {"clip_eps_low": clip_eps_low, "clip_eps_high": clip_eps_high, "kl_coef": kl_coef}
    shared |= {"num_sequences": num_sequences}
    own = {"offpolicy_mask": offpolicy_mask or math.inf}
    if rollout_ratio_BT is not None:
        own["sampler_logprobs_BT"] = old_logprobs_BT - rollout_ratio_BT.log()
    if kl_is_corrected:
        own["ref_logprobs_BT"] = ref_logprobs_BT
    loss, stats = copied("more.deepseek_v32").policy_loss(*inputs, **shared, **own)
    if not kl_is_corrected:
        with_kl, _ = copied("grpo").policy_loss(*inputs, **shared, ref_logprobs_BT=ref_logprobs_BT)
        without, _ = copied("grpo").policy_loss(*inputs, **shared)
        loss = loss + with_kl - without
    return loss, stats


def function_for(section, case):
    """The function that computes a case."""
    if section == "grpo_offpolicy" or case["keywords"].get("kl_is_corrected", False):
        return grpo_offpolicy
    return function_of(section)


# ---------------------------------------------------------------------------------------- the vectors


@pytest.mark.parametrize("section, id", OF_SCRIPTS)
def test_the_scripts_agree(section, id):
    """Within 1e-12, and so no case depends on the clamp of log-ratios, which reference.py has not."""
    case = case_of(section, id)
    function = function_for(section, case)
    if "bootstrap" in case["keywords"]:  # ppo.py adds it to the last reward
        return
    arguments = SECTIONS[section]["arguments"]
    names = {plain(name): name for name in inspect.signature(function).parameters}

    def call(part):
        keywords = {key: x for key, x in part.items() if key not in arguments}
        defaults = SECTIONS[section]["defaults"] | {key: case.get(key) for key in COUNTS}
        assert all(x == defaults[key] for key, x in keywords.items() if key not in names)
        keywords = {names[key]: x for key, x in keywords.items() if key in names}
        found = function(*(part[key] for key in arguments), **keywords)
        if section == "gae":
            return torch.stack(found)
        return found[0] if isinstance(found, tuple) else found

    assert same(answer(call, section, case), expected(case), 1e-12)


@pytest.mark.parametrize("section", SECTIONS)
def test_the_file_is_what_make_gives(section):
    """To the last bits, which may depend on the processor."""
    for case in SECTIONS[section]["cases"]:
        found = reference.with_results(section, case)
        for key in {"value", "gradient", "terms", "denominator"} & {*case}:
            assert np.allclose(found[key], case[key], rtol=1e-12, atol=1e-12)


# ----------------------------------------------------------------------------------------- the doctor

ENTRIES = []
for entry, ((first, *others), change) in mistakes.ENTRIES.items():
    ENTRIES.append((entry, first, change))
    for section in others:
        ENTRIES.append(pytest.param(entry, section, change, marks=pytest.mark.slow))


@pytest.mark.parametrize("entry, section, change", ENTRIES)
def test_an_entry_is_visible_and_explained_by_itself_alone(entry, section, change):
    tested = []
    for case in SECTIONS[section]["cases"]:
        tested.append((case, doctor.Answer(*reference.evaluate(section, case, change))))
    assert not all(doctor.is_right(section, *pair) for pair in tested)
    assert doctor.entries_that_give(section, tested, [(0, 1)]) == [entry]


@pytest.mark.parametrize("section", [*LOSSES, *ASKED])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_our_own_functions_are_right(section, dtype):
    subject = doctor.fitted(function_of(section), section)
    report = doctor.Report(dataclasses.replace(subject, dtype=dtype))
    assert report.lines == [] and report.notes == []
    assert [x.words for x in report.constants] == []


@pytest.fixture
def ask(tmp_path, capsys, monkeypatch):
    """(exit code, what it prints) of the doctor on the lines of a file, in this process."""

    def answer(text, flags="--algorithm dapo", name="loss", file="mine.py"):
        for module in ("mine", "theirs", "adapter"):
            sys.modules.pop(module, None)
        path = tmp_path / file
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"import torch\n{text}")
        monkeypatch.setattr(sys, "argv", ["check.py", f"{path}:{name}", *flags.split()])
        monkeypatch.chdir(ROOT)
        with pytest.raises(SystemExit) as ended:
            command.main("check.py")
        printed = capsys.readouterr()
        return int(ended.value.code), printed.out + printed.err

    return answer


PRELUDE = """
import numpy as np
def surrogate(lp, old, A, low=0.8, high=1.2):
    r = (lp - old).exp()
    return -torch.min(r * A, r.clamp(low, high) * A)
def mean(x, mask):
    return (x * mask).sum() / mask.sum()
def per_row(x, mask):
    return ((x * mask).sum(1) / mask.sum(1)).mean()
def k3(log_x):
    return log_x.exp() - log_x - 1
def s_of(lp, old, A, mask):
    return (((lp - old) * mask).sum(1) / mask.sum(1)).exp()
def dual(lp, old, A):
    return torch.min(surrogate(lp, old, A), 3 * A.abs().where(A < 0, 1e9))
def standardized(R, eps, **more):
    return (R - R.mean(1, keepdim=True)) / (R.std(1, keepdim=True, **more) + eps)
def right(lp, old, A, mask, low=0.8, high=1.28):
    losses = surrogate(torch.where(mask, lp - old, 0), 0, A, low, high)
    return torch.where(mask, losses, 0).sum() / mask.sum()
def score(lp, old, A, mask):
    r = torch.where(mask, lp - old, 0).exp().detach()
    M = ~((A > 0) & (r > 1.28) | (A < 0) & (r < 0.8))
    return -torch.where(mask, M * r * A * lp, 0).sum() / mask.sum()
def tv(lp, old, A, mask):
    M = (A * (lp - old) < 0) | ((lp.exp() - old.exp()).abs() < 0.2)
    return -mean(M * (lp - old).exp() * A, mask)
def gate(lp, old, A, mask, pos, neg):
    tau = torch.where(A > 0, pos, neg)
    return -per_row(4 / tau * torch.sigmoid(tau * ((lp - old).exp() - 1)) * A, mask)
def v32(lp, old, A, mask, ref, delta):
    drop = ((old - lp) * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True) > delta
    drop = drop & ((A * mask).sum(1, keepdim=True) < 0)
    kl = 0.04 * (lp - old).exp() * k3(ref - lp)
    return per_row(torch.where(drop, 0, surrogate(lp, old, A)) + kl, mask)
def gmpo(lp, old, A, mask, gamma):
    l = torch.where(A > 0, (lp - old).clamp(max=0.4), (lp - old).clamp(min=-0.4))
    shift = A.sign() * gamma.clamp(min=0.8).log()
    return -(A[:, 0] * (((l + shift) * mask).sum(1) / mask.sum(1)).exp()).mean()
def gae(rewards, values, mask, gamma, lam):
    A, last, next_V = torch.zeros_like(rewards), 0, 0
    for t in reversed(range(rewards.shape[1])):
        now = rewards[:, t] + gamma * next_V - values[:, t] + gamma * lam * last
        last = torch.where(mask[:, t], now, last)
        next_V = torch.where(mask[:, t], values[:, t], next_V)
        A[:, t] = last
    return A
def value(V, old, R, mask, clip, worse=torch.max):
    near = old + (V - old).clamp(-clip, clip)
    return mean(worse((V - R) ** 2, (near - R) ** 2), mask)
"""
BROUGHT = (ROOT / "tests" / "brought.txt").read_text().splitlines()


@pytest.mark.parametrize("row", [row for row in BROUGHT if not row.startswith("#")])
def test_what_is_brought(row, ask):
    start, parameters, result, expected = row.replace("...", "lp, old, A, mask").split(" | ")
    code, flags = start.split(" ", 1)
    flags = flags if flags.startswith("--") else f"--algorithm {flags}"
    found, text = ask(f"{PRELUDE}\ndef loss({parameters}): return {result}", flags)
    assert found == int(code) and expected.replace("\\n", "\n") in text, text
    assert "unknown with" not in text and "not all was measured" not in text, text
    assert "mistake:  differ" not in text, text


CLASSES = """
class Loss:
    def __init__(self, clip_eps, scale=1.0):
        self.eps, self.scale = clip_eps, scale
    def forward(self, lp, old, A, mask):
        return self.scale * right(lp, old, A, mask, 1 - self.eps, 1 + self.eps)
class Broken:
    def __init__(self, model):
        self.loss = model.loss
class Static:
    loss = staticmethod(right)
module = torch.nn.Module()
module.forward = right
"""
LOADED = [  # (name of the function, flags, exit code, what is printed)
    ("Loss", "ppo", 0, "filled in: clip_eps=0.2"),
    ("Loss.forward", "ppo --set scale=2.0", 1, "the paper's mean, times 2"),
    ("Broken", "ppo", 2, "the constructor of Broken: `model` is unknown"),
    ("Broken", "ppo --set model=1", 2, "AttributeError: 'int' object has no attribute 'loss'"),
    ("Static.loss", "dapo", 0, "right: DAPO"),
    ("module", "dapo", 0, "right: DAPO"),
    ("nothing", "dapo", 2, "no function nothing; it has: surrogate, "),
    ("Static", "dapo", 2, "Static cannot be called; it has: loss"),
]


@pytest.mark.parametrize("name, flags, code, expected", LOADED)
def test_what_is_loaded(name, flags, code, expected, ask):
    found, text = ask(PRELUDE + CLASSES, f"--algorithm {flags}", name)
    assert found == code and expected in text, text


PACKAGE = """
from dataclasses import dataclass
from .near import right as loss
@dataclass
class Batch:
    mask: "torch.Tensor"
"""


def test_a_file_is_imported_as_python_imports_it(ask, tmp_path, monkeypatch, capsys):
    """In its package; with annotations of a dataclass; by a module's name. An error takes one line."""
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("")
    (tmp_path / "pack" / "near.py").write_text(f"import torch\n{PRELUDE}")
    assert ask(PACKAGE, file="pack/mine.py")[0] == 0
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", ["check.py", "pack.near:right", "--algorithm", "dapo"])
    with pytest.raises(SystemExit, match="False"):
        command.main("check.py")
    capsys.readouterr()
    for line, error in (
        ("import nowhere", "ModuleNotFoundError: No module named"),
        ("exit()", "SystemExit"),
    ):
        code, text = ask(f"{line}\n{PRELUDE}", name="right")
        assert (
            code == 2 and error in text and "into a file of its own" in text and text.count("\n") == 1
        )


ADAPTED = [  # (a function that is refused, what completes its adapter)
    ("def loss(lp, old, A, mask, config, labels): return right(lp, old, A, labels)", ["None", "mask"]),
    ("def loss(batch): return right(*batch)", ["(logprobs, old_logprobs, advantages, mask)"]),
    ("class Loss:\n def __init__(self, x): 0\n forward = staticmethod(right)", []),
    ("def loss(x, A, /, *, y, mask): return right(x, y, A, mask)", ["logprobs", "old_logprobs"]),
    ("class loss:\n def __init__(self, x): 0\n forward = staticmethod(right)", []),
    ("def Loss(batch): return right(*batch)", ["(logprobs, old_logprobs, advantages, mask)"]),
    ("def loss(lp, old, A, mask):\n assert len(lp) == 0\n return right(lp, old, A, mask)", None),
]


@pytest.mark.parametrize("text, completions", ADAPTED)
def test_an_adapter_runs_when_it_is_completed(text, completions, ask, tmp_path):
    name = re.search(r"(?:def|class) (\w+)", text)[1]
    code, printed = ask(f"{PRELUDE}\n{text}", name=name, file="theirs.py")
    assert code == 2
    lines = re.findall(r"^    (.*)$|^$", printed, re.MULTILINE)
    adapter = "\n".join(lines)
    if completions is None:  # a blank assertion shows its line
        assert "AssertionError: assert len(lp) == 0" in printed
        return
    call = f"{name}(0).forward(logprobs, old_logprobs, advantages, mask)"
    adapter = adapter.replace(f"{name}(...)(...)", call)
    for completion in completions:
        adapter = adapter.replace("...", completion, 1)
    code, printed = ask(adapter, name="adapter", file="adapter.py")
    assert code == 0 and "right: DAPO" in printed, printed


# ------------------------------------------------------------------------- in pytest, as a process


def run(*command, **options):
    env = {**os.environ, "PYTHONPATH": str(ROOT / "conformance")}
    command = [sys.executable, *map(str, command)]
    return subprocess.run(command, env=env, capture_output=True, text=True, **options)


def test_the_lines_for_an_assertion():
    """None for a right function; one for a mistake, one for errors."""

    def loss(logprobs, old_logprobs, advantages, mask, sign=1):
        assert len(mask) != 5
        return -sign * torch.where(mask, logprobs * advantages, 0).sum() / len(mask)

    error = "it raises an error in reinforce-013"
    assert diagnose(function_of("dapo"), "dapo") == []
    assert diagnose(loss, "reinforce") == [error]
    assert diagnose(loss, "reinforce", sign=-1) == ["mistake: wrong sign", error]


def dual_clip(r, a, low, high):
    return torch.max(clipped(r, a, low, high), -3 * abs(a))


GRPO = {
    "paper": mistakes.unchanged,
    "TRL": lambda J, b: reference.ppo(b),  # a token-mean without KL
    "verl": lambda J, b: mistakes.pieces(clipped=dual_clip)(reference.ppo, b),
}


@pytest.mark.parametrize("name", GRPO)
def test_the_table_of_the_readme(name):
    old, new, *_ = re.findall(r"^(?:old|new) +(-.*)", README, re.MULTILINE)
    old, new = ([[float(x) for x in row.split()] for row in text.split("|")] for text in (old, new))
    rows = [row + [0] * (8 - len(row)) for row in (*old, *new)]
    inputs = {"logprobs": rows[2:], "old_logprobs": rows[:2], "advantages": [[1.0], [-1.0]]}
    inputs["mask"] = [[1] * 8, [1, 1, 0, 0, 0, 0, 0, 0]]
    keywords = {"clip_eps_low": 0.2, "clip_eps_high": 0.2, "kl_coef": 0.04, "kl_is_corrected": False}
    case = {"inputs": inputs, "keywords": keywords | {"ref_logprobs": rows[:2]}, "gradient": None}
    value, gradient = reference.evaluate("grpo", case, GRPO[name])
    long, short = np.abs(gradient).sum(1)
    assert f"\n{name:7} {value:7.3f} {long:25.3f} {short:25.3f}\n" in README


def test_the_three_examples_of_the_readme(tmp_path):
    """The loss gets the diagnosis that is printed there, also in pytest, and the reader reads."""
    for name, text in re.findall(r"```python\n(?:# (\S+)\n)?(.*?)```", README, re.DOTALL):
        (tmp_path / (name or "read.py")).write_text(text)
    (tmp_path / "rl_loss_vectors").symlink_to(ROOT / "conformance" / "rl_loss_vectors")
    diagnosis = re.findall(r"^mistake: .*", README, re.MULTILINE)
    for arguments, code in (
        (f"{ROOT}/conformance/check.py mine.py:loss --algorithm grpo", 1),
        ("-m pytest -vv -p no:cacheprovider test_mine.py", 1),
        ("read.py", 0),
    ):
        result = run(*arguments.split(), cwd=tmp_path)
        assert result.returncode == code, result.stdout + result.stderr
        assert code == 0 or all(line in result.stdout for line in diagnosis) and diagnosis
