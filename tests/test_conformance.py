"""The test vectors against the scripts; the doctor on our own losses, on each known mistake, and on
losses that somebody else might bring; pytest suites, the README."""

import math
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import MORE, ROOT, SCRIPTS, copied
from rl_loss_vectors import VECTORS, Subject, diagnose, doctor, mistakes, reference
from rl_loss_vectors import __main__ as command
from rl_loss_vectors.reference import clipped
from rl_loss_vectors.vectors import Answer, expected, same

import common

README = (ROOT / "conformance" / "README.md").read_text()
SECTIONS = VECTORS["sections"]
ALL_CASES = [(section, case["id"]) for section in SECTIONS for case in SECTIONS[section]["cases"]]
LOSSES = [name.removeprefix("more.") for name in (*SCRIPTS, *MORE)]
MODULES = dict(zip(LOSSES, (*SCRIPTS, *MORE), strict=True))
ENTRIES = []
for name, ((first, *others), change) in mistakes.ENTRIES.items():
    ENTRIES.append((name, first, change))
    for section in others:
        ENTRIES.append(pytest.param(name, section, change, marks=pytest.mark.slow))
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
NOT_OF_SCRIPTS = ["grouped_advantages", "replayed_gate"]
OF_SCRIPTS = [pair for pair in ALL_CASES if pair[0] not in NOT_OF_SCRIPTS]
# Its mask reads the sign of the first token's advantage; deepseek_v32.py's reads that of the sum.
OF_SCRIPTS.remove(("grpo_offpolicy", "grpo_offpolicy-012"))
UNKNOWN = "unknown: no known mistake gives these numbers"


def case_of(section, id):
    return next(case for case in SECTIONS[section]["cases"] if case["id"] == id)


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


def function_of(section):
    """A script's function as it is copied, with nothing but torch around it."""
    if section == "grpo_offpolicy":
        return grpo_offpolicy
    module, name = OURS.get(section, f"{MODULES.get(section)}:policy_loss").split(":")
    return getattr(common if module == "common" else copied(module), name)


# ---------------------------------------------------------------------------------------- the vectors


@pytest.mark.parametrize("section, id", OF_SCRIPTS)
def test_the_scripts_agree(section, id):
    """Within 1e-12, and so no case depends on the clamp of log-ratios, which reference.py has not."""
    case = case_of(section, id)
    is_corrected = case["keywords"].get("kl_is_corrected", False)
    function = grpo_offpolicy if is_corrected else function_of(section)
    subject = Subject(function, section)
    why_not = subject.why_not(case)
    if "bootstrap" in case["keywords"]:  # ppo.py adds it to the last reward
        assert why_not == "it has no keyword bootstrap"
        return
    assert why_not is None and same(subject.answer(case), expected(case), 1e-12)


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
        answers.append((case, Answer(*reference.evaluate(section, case, change))))
    assert not all(doctor.is_right(*pair) for pair in answers)
    assert doctor.named(section, answers) == [name]


@pytest.mark.parametrize("section", [*LOSSES, *OURS])
def test_a_function_that_computes_in_float32_is_healthy(section):
    subject = Subject(function_of(section), section, dtype=torch.float32)
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
    (dapo_of(lambda r, A, m: m.where(A > 0, -m)), "dapo", "where A < 0, by r:           1       0.5"),
    (dapo_of(lambda r, A, m: m + 0.01 * r), "dapo", "every A is 0 your gradient is up to 0.0025"),
    (from_the_maximum, "group_advantages", "group_advantages-001, group_advantages-002"),
]


@pytest.mark.parametrize("function, section, words", EXPLAINED)
def test_what_is_unknown_is_explained(function, section, words):
    text = "\n".join(diagnose(function, section))
    assert text.startswith(UNKNOWN) and words in text, text


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


PRELUDE = """
def surrogate(lp, old, A, low=0.8, high=1.2):
    r = (lp - old).exp()
    return -torch.min(r * A, r.clamp(low, high) * A)
def mean(x, mask):
    return (x * mask).sum() / mask.sum()
def grpo(lp, old, A, mask, penalty):
    return ((surrogate(lp, old, A) + penalty) * mask).sum(1).div(mask.sum(1)).mean()
def dual(lp, old, A, mask, low, high):
    return mean(torch.min(surrogate(lp, old, A, low, high), 3 * A.abs().where(A < 0, 1e9)), mask)
def k3(log_x):
    return log_x.exp() - log_x - 1
def s_of(lp, old, A, mask):
    return (((lp - old) * mask).sum(1) / mask.sum(1)).exp()
def standardized(R, eps, unbiased=True):
    return (R - R.mean(1, keepdim=True)) / (R.std(1, keepdim=True, unbiased=unbiased) + eps)
def right(lp, old, A, mask, low=0.8, high=1.28):
    losses = surrogate(torch.where(mask, lp - old, 0), 0, A, low, high)
    return torch.where(mask, losses, 0).sum() / mask.sum()
"""
BROUGHT = """
# exit code, flags | parameters | what is returned | what is printed, where ... is lp, old, A, mask
0 dapo | ... | right(...) | agree, 2 not tested
0 dapo | old, new, A, mask | right(new, old, A, mask) | arguments: old is old_logprobs, new is logprobs
0 dapo | ..., **others | right(...) | micro-batches of unequal size: it cannot
0 dapo | ... | {"loss": right(...)} | healthy
0 dapo | ... | right(...) if A.shape[1] == 1 else 1 / 0 | one advantage for each completion
1 dapo | ... | right(...) if lp.isfinite().all() else 1 / 0 | RAISES   dapo-005
0 dapo | ... | right(lp, old, A, 1 - mask < 0.5) | healthy
1 dapo | ... | right(lp.bfloat16(), old, A, mask) | computed in bfloat16
1 dapo | ... | -right(...) | mistake: wrong sign
1 dapo | ... | right(...) * mask.sum() / -mask.numel() | wrong sign and mistake: a mean
1 rspo | ... | right(...) | too few to tell
# constants of its own
1 ppo | ... | mean(surrogate(lp, old, A, 0.9, 1.1), mask) | the range is [0.9, 1.1], not [0.8
1 cispo | ... | -mean((lp - old).exp().clamp(max=1.28).detach() * A * lp, mask) | range is [0, 1.28]
0 gspo --allow-nan | ... | surrogate(s_of(...).log(), 0, A[:, 0], 0.9997, 1.0004).mean() | the paper's
0 dr_grpo --allow-nan | ... | (surrogate(lp, old, A) * mask).sum() / len(mask) / 1024 | tokens is 1024
1 dr_grpo | ... | (surrogate(lp, old, A) * mask).sum() / mask.numel() | mistake: a mean over the padded
1 dapo | ..., e_clip, clip_high | dual(..., 1 - e_clip, 1 + clip_high) | r > 3 [verl]\\nvariant: NaN
# required constants, and names anywhere
0 ppo --allow-nan | ..., eps | mean(surrogate(lp, old, A, 1 - eps, 1 + eps), mask) | alone
0 ppo --set x.range=(0.8,1.2) --allow-nan | ..., x | mean(surrogate(lp, old, A, *x.range), mask) | alone
2 ppo | ..., x | mean(surrogate(lp, old, A), mask) * x | --set NAME=VALUE sets others
0 ppo --allow-nan | ..., clip_low=0.8 | mean(surrogate(lp, old, A, clip_low), mask) | n/a      ppo-011
0 grpo --allow-nan | ref_logp, mask, A, old, lp | grpo(..., 0.04 * k3(ref_logp - lp)) | 13 of 14
1 ppo | x, y, A, z | mean(surrogate(x, y, A), z) | x is logprobs by order, y is old_logprobs by order
# the KL
1 grpo | ..., ref, beta | grpo(..., beta * k3(old - lp)) | the KL is k3, x = pi_old / pi
1 grpo | ..., ref | grpo(..., 0.1 * (ref - lp)) | k1, x = pi_ref / pi, coefficient 0.1, rewarded
1 grpo | ..., ref | grpo(..., 0.04 * k3(ref - lp).detach()) | k3 without gradient, x = pi_ref
1 grpo | ..., ref | grpo(..., 0.02 * (ref - lp) ** 2) | the KL is k2
1 grpo | ..., ref | grpo(..., 0) | there is no KL: the reference is not used
# several departures at once
1 grpo | ... | mean((lp - old).exp().clamp(0.8, 1.2) * A, mask) | wrong sign and mistake: token-mean
1 grpo | ... | mean((lp - old).exp().clamp(0.8, 1.2) * A, mask) | both sides, without the min
1 grpo | ... | ((surrogate(lp, old, A) * mask).sum(1) * mask.sum(1)).sum() / mask.numel() | its |o|
# clamps for safety, NaN
1 ppo | ... | mean(surrogate((lp - old).clamp(-10, 10), 0, A), mask) | |log r| > 10 (r = 2.2
0 ppo --allow-clamp --allow-nan | ... | mean(surrogate((lp - old).clamp(-10, 10), 0, A), mask) | alone
1 ppo | ... | torch.where(mask, surrogate(lp, old, A), 0).sum() / mask.sum() | mask the log-ratio before
# what is returned, float32, shapes
0 ppo --allow-nan | ... | surrogate(lp, old, A) | it returns terms, (B, T)
1 ppo | lp, old, adv | surrogate(lp, old, adv) | mask the log-ratio before
1 ppo | ... | mean(surrogate(lp, old, A), mask) if lp.dtype == torch.float32 else 1 / 0 | in float32
1 gspo | ... | -(s_of(...) * A.view(-1, 1)).mean() | (B,) times (B, 1)
# advantages
1 grpo --what advantages | rewards, n | standardized(rewards.view(-1, n), 1e-6).view(-1) | equal rewards
1 grpo --what advantages | rewards | standardized(rewards, 1e-8, unbiased=False) | population, eps 1e-8
1 grpo --what advantages | rewards | standardized(rewards[None], 1e-6)[0] | passed as G
# what cannot be called
2 dapo | ... | None | as dapo: it returns None: is a `return` missing?
2 dapo | new, x, y | new | its arguments (new, x, y) are not recognized as logprobs
2 dapo | a, b, c, d | a.nothing | has no attribute 'nothing' (/
2 dapo | a, b, c, d | a[0] | a loss is one number, not a tensor of shape (6,)
"""


@pytest.mark.parametrize("row", [row for row in BROUGHT.splitlines()[1:] if not row.startswith("#")])
def test_what_public_code_does(row, ask):
    start, parameters, result, expected = row.replace("...", "lp, old, A, mask").split(" | ")
    code, flags = start.split(" ", 1)
    found, text = ask(f"{PRELUDE}\ndef loss({parameters}): return {result}", f"--algorithm {flags}")
    assert found == int(code) and expected.replace("\\n", "\n") in text, text
    assert code != "2" or text.count("\n") == 1


LOADED = [  # (lines, name of the function, exit code, what is printed)
    ("exit()", "loss", 2, "cannot be called as dapo: SystemExit"),
    ("x = 1", "loss", 2, "no function loss; it has: surrogate, "),
    ("class A:\n def __init__(self, model): 0", "A", 2, "required positional argument: 'model'"),
    ("class A:\n loss = staticmethod(right)", "A.loss", 0, "healthy"),
    ("class A(torch.nn.Module):\n forward = staticmethod(right)", "A", 0, "healthy"),
    ("a = torch.nn.Module()\na.forward = right", "a", 0, "healthy"),
]


@pytest.mark.parametrize("lines, name, code, expected", LOADED)
def test_what_is_loaded(lines, name, code, expected, ask):
    found, text = ask(f"{PRELUDE}\n{lines}", name=name)
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
    def __init__(self, clip_eps=0.2, **others):
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
    ask(PRELUDE)
    monkeypatch.setattr(sys, "argv", ["check.py", "mine:right", "--algorithm", "dapo"])
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
    (diagnosis,) = re.findall(r"^mistake: .*", README, re.MULTILINE)
    for arguments, code in (
        (f"{ROOT}/conformance/check.py mine.py:loss --algorithm grpo", 1),
        ("-m pytest -p no:cacheprovider test_mine.py", 1),
        ("read.py", 0),
    ):
        result = run(*arguments.split(), cwd=tmp_path)
        assert result.returncode == code, result.stdout + result.stderr
        assert code == 0 or diagnosis in result.stdout
