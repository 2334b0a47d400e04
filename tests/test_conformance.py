"""The test vectors against the scripts; the doctor on our own losses and on functions of all kinds that
somebody might bring; pytest suites, the README."""

import inspect
import re
import runpy
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import MORE, ROOT, SCRIPTS, copied, functions_of, loss_of
from rl_loss_vectors import VECTORS, diagnose, doctor, mistakes, reference
from rl_loss_vectors import __main__ as command
from rl_loss_vectors.call import COUNTS, Subject, plain
from rl_loss_vectors.reference import clipped, fields_of

README = (ROOT / "conformance" / "README.md").read_text()
SECTIONS = VECTORS["sections"]
MODULES = {name.removeprefix("more."): name for name in (*SCRIPTS, *MORE)}
LOSSES = [name for name in MODULES if name in SECTIONS]
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
    "rollout_weights": "more.mismatch:rollout_weights",
}
ASKED = ["value_loss", "group_advantages", "group_differences", "leave_one_out", "gae", "whiten"]


def function_of(section):
    """A script's function as it is copied, with nothing but torch around it."""
    module, name = OURS.get(section, f"{MODULES.get(section)}:policy_loss").split(":")
    return getattr(copied(module), name)


# ---------------------------------------------------------------------------------------- the vectors


def test_every_script_has_vectors():
    known = {loss_of(MODULES[name]) for name in LOSSES}
    missing = [name for name in MODULES if loss_of(MODULES[name]) not in known]
    assert not missing, f"{missing}: .github/CONTRIBUTING.md, To contribute it, says how to add vectors"


OF_SCRIPTS = []
for section in SECTIONS:
    for case in SECTIONS[section]["cases"]:
        OF_SCRIPTS.append(pytest.param(section, case, id=case["id"]))


@pytest.mark.parametrize("section, case", OF_SCRIPTS)
def test_the_scripts_agree(section, case):
    """Within 1e-12, and so no case depends on the clamp of log-ratios, which reference.py has not."""
    function = function_of(section)
    arguments = SECTIONS[section]["arguments"]
    names = {plain(name): name for name in inspect.signature(function).parameters}
    fields = fields_of(case) | {name: case[name] for name in COUNTS if name in case}
    value = 0
    gradient = np.zeros(np.shape(case.get("gradient", 0)))
    for rows in case.get("micro_batches", [slice(None)]):
        part = {name: x[rows] if torch.is_tensor(x) else x for name, x in fields.items()}
        first = part[arguments[0]].requires_grad_("gradient" in case)
        keywords = {key: x for key, x in part.items() if key not in arguments}
        defaults = SECTIONS[section]["defaults"] | {key: case.get(key) for key in COUNTS}
        assert all(x == defaults[key] for key, x in keywords.items() if key not in names)
        keywords = {names[key]: x for key, x in keywords.items() if key in names}
        found = function(*(part[key] for key in arguments), **keywords)
        if section == "gae":
            found = torch.stack(found)
        elif isinstance(found, tuple):
            found = found[0]
        if "gradient" in case:
            (gradient[rows],) = torch.autograd.grad(found.sum(), first)
        value = value + found.detach().numpy()
    exact = case | {"tolerance": {"float32": 1e-12}}
    if "mask" in case["inputs"] and np.shape(value) != ():  # only its places are compared
        kept = np.array(case["inputs"]["mask"], bool)
        value = np.where(kept, value, 0)
        exact["value"] = np.where(kept, case["value"], 0)
    assert doctor.is_right(exact, (value, gradient))


@pytest.mark.parametrize("script", ["ppo", "more.vapo"])
def test_gae_and_whitening_give_0_outside_the_mask(script):
    mask = torch.tensor([[True, True, False], [True, False, True]])
    x = torch.where(mask, torch.arange(6.0).view(2, 3), torch.nan)
    for result in (*copied(script).compute_gae(x, x, mask, 1, 0.9), copied(script).whiten(x, mask)):
        assert (result[~mask] == 0).all()


@pytest.mark.parametrize("section", SECTIONS)
def test_the_file_is_what_make_gives(section):
    """To the last bits, which may depend on the processor."""
    for case in SECTIONS[section]["cases"]:
        found = reference.with_results(section, case)
        for key in {"value", "gradient", "terms", "denominator"} & {*case}:
            assert np.allclose(found[key], case[key], rtol=1e-12, atol=1e-12)


# ----------------------------------------------------------------------------------------- the doctor

OF_SOME_PAPERS = [  # mistakes elsewhere
    "a token-mean",
    "a sequence-mean: divided by each |o|",
    "sums of completions, not divided by a length",
    "holes counted in |o|",
    "the ratio is always 1",
    "the ratio upside down",
    "the range is [0.8, 1.2]",
]
ENTRIES = []
for section in [*LOSSES, *ASKED]:
    for entry, change in mistakes.known_for(section):
        marks = [pytest.mark.slow] if section not in ("grpo", "gspo", *ASKED) else []
        ENTRIES.append(pytest.param(section, entry, change, marks=marks))


@pytest.mark.parametrize("section, entry, change", ENTRIES)
def test_an_entry_is_given_by_itself_alone(section, entry, change):
    """Unless it is what the section's paper has."""
    cases = SECTIONS[section]["cases"]
    answers = [reference.evaluate(section, case, change) for case in cases]
    if all(map(doctor.is_right, cases, answers)):
        assert entry in OF_SOME_PAPERS
        return
    names = []
    for name, other in mistakes.known_for(section):
        found = (reference.evaluate(section, case, other) for case in cases)
        if all(map(doctor.is_right, cases, answers, found)):
            names.append(name)
    assert names == [entry]


@pytest.mark.parametrize("section", [*LOSSES, *ASKED])
def test_our_own_functions_are_right_in_float32(section):
    subject = Subject(function_of(section), section, {})
    subject.kind = (torch.float32, "bool")
    report = doctor.Report(subject)
    assert report.lines == [] and report.errors == []


@pytest.fixture
def typed(capsys, monkeypatch):
    """(exit code, what is printed) of `python conformance/check.py ...`, in this process."""

    def answer(line):
        monkeypatch.setattr(sys, "argv", ["conformance/check.py", *line.split()])
        monkeypatch.chdir(ROOT)
        with pytest.raises(SystemExit) as ended:
            command.main()
        printed = capsys.readouterr()
        return int(ended.value.code), printed.out + printed.err

    return answer


WHAT = {"policy_loss": "--algorithm {}", "compute_advantages": "--algorithm {} --what advantages"}
WHAT |= {"compute_gae": "--what gae", "value_loss": "--what value_loss", "whiten": "--what whiten"}
SHIPPED = []
for algorithm, script in MODULES.items():
    algorithm = algorithm if algorithm in LOSSES else "grpo"  # mismatch has GRPO's
    for name in WHAT.keys() & functions_of(script).keys():
        line = f"{script.replace('.', '/')}.py:{name} {WHAT[name].format(algorithm)}"
        if line != "more/reinforce.py:compute_advantages --algorithm reinforce --what advantages":
            SHIPPED.append(line)  # REINFORCE's baseline is a moving mean, of which there are no cases


@pytest.mark.parametrize("line", sorted(SHIPPED))
def test_what_we_ship_is_right_by_the_command_that_a_reader_types(line, typed):
    code, text = typed(line)
    assert code == 0 and text.endswith("\nright\n"), text


@pytest.fixture
def ask(tmp_path, typed):
    """As typed, on a function in the lines of a file."""

    def answer(text, flags="--algorithm dapo", name="loss", file="mine.py"):
        for module in ("mine", "theirs", "adapter"):
            sys.modules.pop(module, None)
        path = tmp_path / file
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"import torch\n{text}")
        return typed(f"{path}:{name} {flags}")

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
def v32(lp, old, A, mask, ref, delta, eps=0.2, beta=0.04, mu=None):
    mu = old if mu is None else mu
    drop = ((mu - lp) * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True) > delta
    drop = drop & ((A * mask).sum(1, keepdim=True) < 0)
    kl = beta * (lp - mu).exp() * k3(ref - lp)
    return per_row(torch.where(drop, 0, surrogate(lp, old, A, 1 - eps, 1 + eps)) + kl, mask)
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
ANSWERS = (ROOT / "tests" / "doctor_answers.txt").read_text().splitlines()


@pytest.mark.parametrize("row", [row for row in ANSWERS if not row.startswith("#")])
def test_a_function_gets_the_answer_that_it_deserves(row, ask):
    start, parameters, result, expected = row.replace("...", "lp, old, A, mask").split(" | ")
    code, flags = start.split(" ", 1)
    flags = flags if flags.startswith("--") else f"--algorithm {flags}"
    found, text = ask(f"{PRELUDE}\ndef loss({parameters}): return {result}", flags)
    assert found == int(code) and expected.replace("\\n", "\n") in text, text


CLASSES = """
class Loss:
    def __init__(self, clip_eps, scale=1.0):
        self.eps, self.scale = clip_eps, scale
    def forward(self, lp, old, A, mask):
        return self.scale * right(lp, old, A, mask, 1 - self.eps, 1 + self.eps)
bound = Loss(0.2)
class Static:
    loss = staticmethod(right)
module = torch.nn.Module()
module.forward = right
unreadable = torch.exp
"""
LOADED = [  # (name of the function, flags, exit code, what is printed)
    ("Loss", "ppo", 2, "    return Loss(clip_eps=...)(...)\n"),
    ("Loss.forward", "ppo", 2, "    return Loss(clip_eps=...).forward(lp=logprobs, "),
    ("bound.forward", "ppo", 0, "\nright\n"),
    ("Static.loss", "dapo", 0, "\nright\n"),
    ("module", "dapo", 0, "\nright\n"),
    ("unreadable", "dapo", 2, "    return unreadable(...)\n"),
    ("nothing", "dapo", 2, "has no attribute 'nothing'. The target is FILE.py:FUNCTION"),
]


@pytest.mark.parametrize("name, flags, code, expected", LOADED)
def test_a_class_a_method_or_a_module_is_called_or_gets_an_adapter(name, flags, code, expected, ask):
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
    for line, error in [("import nowhere", "ModuleNotFoundError: No module"), ("exit()", "SystemExit")]:
        code, text = ask(f"{line}\n{PRELUDE}", name="right")
        assert code == 2 and error in text and "copy it to a file of its own" in text
        assert text.count("\n") == 1


INPUTS = "logprobs, old_logprobs, advantages, mask"
KL = "per_row(surrogate(lp, old, A) + beta * k3(ref - lp), mask)"
V32 = "v32(lp, old, A, mask, ref, 0.05, mu=sampler_lp)"
ADAPTED = [  # (algorithm, a function that is refused, what completes its adapter)
    ("dapo", "def loss(lp, old, A, mask, cfg, m): return right(lp, old, A, m)", ["0", "mask"]),
    ("dapo", "def loss(batch): return right(*batch)", [f"({INPUTS})"]),
    ("dapo", "def f(x, A, /, *, y, mask): return right(x, y, A, mask)", ["logprobs", "old_logprobs"]),
    ("dapo", "class Loss:\n def __init__(self, x): 0\n __call__ = staticmethod(right)", ["0", INPUTS]),
    ("grpo", f"def loss(lp, old, A, mask, ref, beta): return {KL}", ["0.04"]),
    ("dapo", "def f(newlogprob, logprob, A, mask): return right(*locals().values())", ["old_logprobs"]),
    ("deepseek_v32", f"def loss(lp, old, A, mask, ref, sampler_lp, cfg): return {V32}", ["0"]),
]


@pytest.mark.parametrize("algorithm, text, completions", ADAPTED)
def test_an_adapter_runs_when_it_is_completed(algorithm, text, completions, ask):
    name = re.search(r"(?:def|class) (\w+)", text)[1]
    flags = f"--algorithm {algorithm} --allow nan"
    code, printed = ask(f"{PRELUDE}\n{text}", flags, name, "theirs.py")
    assert code == 2
    lines = re.findall(r"^    (.*)$|^$", printed, re.MULTILINE)
    adapter = "\n".join(lines)
    for completion in completions:
        adapter = adapter.replace("...", completion, 1)
    code, printed = ask(adapter, flags, "adapter", "adapter.py")
    assert code == 0 and printed.endswith("\nright\n"), printed


# ------------------------------------------------------------------------- in pytest, as a process


def test_the_lines_for_an_assertion():
    """None for a right function; one for a mistake, one for errors."""

    def loss(logprobs, old_logprobs, advantages, mask, sign=1):
        if len(mask) == 5:
            raise ValueError
        return -sign * torch.where(mask, logprobs * advantages, 0).sum() / len(mask)

    def lines(**settings):
        return [line for line in diagnose(loss, "reinforce", **settings) if "it " in line]

    assert diagnose(function_of("ppo"), "dapo", clip_eps_high=0.2) == []
    error = f"it raises an error in reinforce-013: ValueError: raise ValueError ({__file__}, line "
    (line,) = lines()
    assert line.startswith(error)
    assert lines(sign=-1) == ["it is: wrong sign", line]


def dual_clip(r, a, low, high):
    return torch.max(clipped(r, a, low, high), -3 * abs(a))


GRPO = {
    "paper": None,
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
    keywords = {"clip_eps_low": 0.2, "clip_eps_high": 0.2, "kl_coef": 0.04}
    case = {"inputs": inputs, "keywords": keywords | {"ref_logprobs": rows[:2]}, "gradient": None}
    value, gradient = reference.evaluate("grpo", case, GRPO[name])
    long, short = np.abs(gradient).sum(1)
    assert f"\n{name:7} {value:7.3f} {long:25.3f} {short:25.3f}\n" in README


def test_the_three_examples_of_the_readme(tmp_path, monkeypatch):
    """The loss gets the diagnosis that is printed there, the assertion fails, and the reader reads."""
    for name, text in re.findall(r"```python\n(?:# (\S+)\n)?(.*?)```", README, re.DOTALL):
        (tmp_path / (name or "read.py")).write_text(text)
    (tmp_path / "rl_loss_vectors").symlink_to(ROOT / "conformance" / "rl_loss_vectors")
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, ROOT / "conformance" / "check.py", "mine.py:loss", "--algorithm", "grpo"]
    result = subprocess.run(command, capture_output=True, text=True)
    diagnosis = re.findall(r"^it is: .*|^  (?:token|yours|paper) .*", README, re.MULTILINE)
    assert result.returncode == 1 and diagnosis
    assert all(line in result.stdout for line in diagnosis), result.stdout
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(AssertionError):
        runpy.run_path("test_mine.py")["test_grpo"]()
    runpy.run_path("read.py")
