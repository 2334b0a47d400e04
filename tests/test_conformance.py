"""The test vectors against the scripts; the doctor on our own losses, on each known mistake, and on
losses that somebody else might bring; the three ways in; the package; the data about TRL and verl."""

import ast
import functools
import importlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import venv

import engines
import make
import numpy as np
import pytest
import torch
from conftest import COPIED, MORE, ROOT, SCRIPTS, copied
from rl_loss_vectors import VECTORS, Subject, doctor, mistakes, reference
from rl_loss_vectors import __main__ as command
from rl_loss_vectors.vectors import Answer, same

import ppo
from plumbing import correction

PACKAGE = ROOT / "conformance" / "rl_loss_vectors"
README = (ROOT / "conformance" / "README.md").read_text()
SECTIONS = VECTORS["sections"]
ALL_CASES = [(section, case["id"]) for section in SECTIONS for case in SECTIONS[section]["cases"]]
LOSSES = [name.removeprefix("more.") for name in (*SCRIPTS, *MORE)]
MODULES = dict(zip(LOSSES, (*SCRIPTS, *MORE), strict=True))
ENTRIES = [
    (kind, name, section, change)
    for kind, name, sections, change in mistakes.ENTRIES
    for section in sections.split()
]
OURS = {  # the project's functions for sections that are no losses
    "value_loss": "ppo:value_loss",
    "positive_lm_loss": "more.vapo:positive_lm_loss",
    "group_advantages": "grpo:compute_advantages",
    "group_differences": "dr_grpo:compute_advantages",
    "leave_one_out": "more.rloo:compute_advantages",
    "gae": "ppo:compute_gae",
    "router_shift": "rspo:router_shift",
    "whiten": "ppo:whiten",
    "overlong_penalty": "dapo:overlong_penalty",
    "rollout_weights": "plumbing.correction:rollout_weights",
}
NOT_OURS = {"leave_one_out_std", "grouped_advantages", "weighted_mean", "replayed_gate"}


def case_of(section, id):
    return next(case for case in SECTIONS[section]["cases"] if case["id"] == id)


def function_of(section):
    """A script's function as it is copied, with nothing but torch around it."""
    module, name = OURS.get(section, f"{MODULES.get(section)}:policy_loss").split(":")
    return getattr(copied(module) if module in COPIED else correction, name)


def with_last_reward(case):
    """Completions that were cut off, as ppo.py tells compute_gae: by their last reward."""
    inputs = case["inputs"]
    mask = torch.tensor(inputs["mask"])
    bootstrap = reference.tensor(case["keywords"]["bootstrap"])
    rewards = reference.tensor(inputs["rewards"])
    values = torch.nn.functional.pad(reference.tensor(inputs["values"]), (0, 1))
    after_the_last = mask.cumsum(1).argmax(1, keepdim=True) + 1
    values = values.scatter(1, after_the_last, bootstrap)
    last = rewards.sum(1, keepdim=True)
    given = last, 0 * rewards, values, (bootstrap != 0).double(), mask, 0.0, inputs["gamma"]
    rewards = ppo.token_rewards(*given).tolist()
    return {**case, "inputs": {**inputs, "rewards": rewards}, "keywords": {}}


# ---------------------------------------------------------------------------------------- the vectors


STRICT = {"float64": 1e-12, "float32": 1e-12}


@pytest.mark.parametrize("section, id", [pair for pair in ALL_CASES if pair[0] not in NOT_OURS])
def test_the_scripts_agree(section, id):
    """Within 1e-12, and so no case depends on the clamp of log-ratios, which reference.py has not."""
    case = case_of(section, id)
    subject = Subject(function_of(section), section)
    given = with_last_reward(case) if "bootstrap" in case["keywords"] else case
    assert subject.why_not(given) is None
    assert same(subject.answer(given), *subject.expected(case), STRICT)


def test_every_section_is_ours_or_stands_alone():
    assert set(SECTIONS) == {*LOSSES, *OURS, *NOT_OURS}


def test_the_file_is_what_make_gives():
    made = make.sections()
    assert list(made) == list(SECTIONS)
    for section, about in made.items():
        of_file = SECTIONS[section]
        assert {**about, "cases": []} == {**of_file, "cases": []}
        for case, in_file in zip(about["cases"], of_file["cases"], strict=True):
            results = ("value", "gradient", "terms")
            for key in results:
                if key in case:
                    found, expected = (np.array(x[key]) for x in (case, in_file))
                    assert (abs(found - expected) <= 1e-12 * (1 + abs(expected))).all()
            plain = dict.fromkeys(results)
            assert json.loads(json.dumps(case | plain)) == in_file | plain


def test_terms_over_denominators_are_the_value():
    for section, id in ALL_CASES:
        case = case_of(section, id)
        if "terms" in case:
            total = (np.array(case["terms"]) / np.array(case["denominator"])).sum()
            assert abs(total - case["value"]) <= 1e-12 * (1 + abs(case["value"])), id
    assert all("terms" in case for name in LOSSES for case in SECTIONS[name]["cases"])


def test_the_file_is_small_and_plain():
    def refuse(constant):
        raise AssertionError(constant)

    text = make.FILE.read_text()
    assert json.loads(text, parse_constant=refuse)["version"] == make.VERSION  # no NaN, no Infinity
    ids = [id for _, id in ALL_CASES]
    assert len(set(ids)) == len(ids)
    for section, about in SECTIONS.items():
        names = [case["name"] for case in about["cases"]]
        assert 5 <= len(names) <= 15 and len(set(names)) == len(names)
        for case in about["cases"]:
            assert case["id"].startswith(f"{section}-")
            inputs = json.dumps(case["inputs"])
            assert re.search(r"\.\d{3}|\de", inputs) is None  # at most two decimals
            for rows in case["inputs"].values():
                if isinstance(rows, list) and isinstance(rows[0], list):
                    assert len(rows) <= 4 and len(rows[0]) <= 6


@pytest.mark.parametrize("section", LOSSES)
def test_defaults_are_those_of_the_scripts(section):
    parameters = inspect.signature(importlib.import_module(MODULES[section]).policy_loss).parameters
    defaults = SECTIONS[section]["defaults"]
    of_script = {name: parameter.default for name, parameter in parameters.items()}
    assert defaults == {name: of_script[name] for name in defaults}
    others = set(of_script) - set(defaults) - {"max_new_tokens", "rollout_ratio_BT"}
    assert all(name.endswith(("_BT", "_B1")) or name.startswith("num_") for name in others)


@pytest.mark.parametrize("section, id", ALL_CASES)
def test_no_case_is_at_a_bound(section, id):
    """A little to either side the gradient is the same: nobody has to guess what is due at a tie."""
    case = case_of(section, id)
    if "gradient" not in case:
        return
    first = SECTIONS[section]["arguments"][0]
    _, gradient = reference.evaluate(section, case)
    for step in (1e-8, -1e-8):
        rows = (reference.tensor(case["inputs"][first]) + step).tolist()
        _, moved = reference.evaluate(section, {**case, "inputs": case["inputs"] | {first: rows}})
        assert ((moved - gradient).abs() <= 1e-6 * (1 + gradient.abs())).all()


@pytest.mark.parametrize("section", LOSSES)
def test_the_cases_have_holes_and_large_log_ratios(section):
    cases = SECTIONS[section]["cases"]
    rows = ["".join(map(str, row)) for case in cases for row in case["inputs"]["mask"]]
    assert any(row.startswith("0") for row in rows)  # a prompt
    assert any(re.search("10+1", row) for row in rows)  # tool output
    assert {"NaN", 1e9} <= {case.get("masked_places_hold") for case in cases}
    pairs = [(case["inputs"]["logprobs"], case["inputs"]["old_logprobs"]) for case in cases]
    largest = [abs(np.array(new) - np.array(old)).max() for new, old in pairs]
    assert any(abs(x - 15) < 0.01 for x in largest)


# ----------------------------------------------------------------------------------------- the doctor


def answers_of(section, change, dtype=torch.float64):
    answers = []
    for case in SECTIONS[section]["cases"]:
        value, gradient = reference.evaluate(section, case, change, dtype=dtype)
        gradient = None if gradient is None else gradient.double().numpy()
        value = value.detach().double().numpy()
        answers.append((case, Answer(value, gradient, dtype == torch.float32, False)))
    return answers


def is_healthy(section, answers):
    subject = Subject(None, section)
    return all(doctor.is_right(subject, case, answer) for case, answer in answers)


@pytest.mark.parametrize(
    "kind, name, section, change", ENTRIES, ids=lambda x: x if isinstance(x, str) else ""
)
def test_an_entry_is_visible_in_both_precisions_and_diagnosed_as_itself_alone(
    kind, name, section, change
):
    answers = answers_of(section, change)
    assert not is_healthy(section, answers)
    assert not is_healthy(section, answers_of(section, change, torch.float32))
    assert doctor.named(section, answers) == [f"{kind}: {name}"]


@pytest.mark.parametrize("section", SECTIONS)
def test_the_objective_in_float32_is_healthy(section):
    assert is_healthy(section, answers_of(section, None, torch.float32))


def run(capsys, monkeypatch, *arguments):
    """(exit code, what it prints) of the doctor, in this process."""
    monkeypatch.setattr(sys, "argv", ["check.py", *map(str, arguments)])
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as ended:
        command.main()
    return int(ended.value.code), capsys.readouterr().out


UNKNOWN = "unknown: no known mistake gives these numbers"


@pytest.mark.parametrize("algorithm, what", [("grpo", "advantages"), ("ppo", "gae")])
def test_functions_that_are_no_losses(algorithm, what, capsys, monkeypatch):
    target = f"{algorithm}.py:compute_{what}"
    code, text = run(capsys, monkeypatch, target, "--algorithm", algorithm, "--what", what)
    assert code == 0 and "DIFFERS" not in text
    not_applicable = [line for line in text.splitlines() if line.startswith("  n/a")]
    # ppo's caller adds the value after a completion that was cut off to its last reward.
    bootstrap = "  n/a      gae-008 two completions cut off: V after them: it has no keyword bootstrap"
    assert not_applicable == ([bootstrap] if what == "gae" else [])


@pytest.mark.slow
def test_from_the_root_of_a_clone():
    command = [sys.executable, "conformance/check.py", "grpo.py:policy_loss", "--algorithm", "grpo"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("15 of 15 applicable cases agree, 0 not tested\nhealthy\n")


def write(tmp_path, *lines):
    path = tmp_path / "mine.py"
    path.write_text("\n".join(["import numpy as np", "import torch", "", *lines]) + "\n")
    return f"{path}:loss"


DAPO = [
    "def loss(new, old, A, mask, *, low=0.2, high=0.28):",
    "    r = torch.where(mask, new - old, 0).exp()",
    "    smaller = torch.min(r * A, r.clamp(1 - low, 1 + high) * A)",
    "    return -torch.where(mask, smaller, 0).sum() / mask.sum()",
]
RENAMED = ("--algorithm", "dapo", "--rename", "clip_eps_low=low", "clip_eps_high=high")


def test_renamed_keywords_and_no_count(tmp_path, capsys, monkeypatch):
    code, text = run(capsys, monkeypatch, write(tmp_path, *DAPO), *RENAMED)
    assert code == 0 and "cannot be used in micro-batches" in text
    assert text.endswith("12 of 12 applicable cases agree, 1 not tested\nhealthy\n")
    # Without its keywords it is asked for nothing but the default range.
    code, text = run(capsys, monkeypatch, write(tmp_path, *DAPO), "--algorithm", "dapo")
    assert code == 0 and "n/a      dapo-011 other bounds: it has no keyword clip_eps_low" in text


@pytest.mark.parametrize(
    "old, new, line",
    [
        ("return -", "return ", "mistake: wrong sign"),
        ("low=0.2, high=0.28", "high=0.2, low=0.28", "mistake: the two bounds swapped"),
        ("torch.min(", "torch.max(", "mistake: max for min"),
        ("new - old", "1.01 * new - old", UNKNOWN),
    ],
)
def test_a_loss_that_is_wrong(old, new, line, tmp_path, capsys, monkeypatch):
    """A factor of 1.01 is nothing that is known."""
    lines = [each.replace(old, new) for each in DAPO]
    code, text = run(capsys, monkeypatch, write(tmp_path, *lines), "--algorithm", "dapo")
    assert code == 1 and line in text.splitlines(), text


# (terms of DAPO whose mistake has no entry, what the doctor says of them)
EXPLAINED = [
    (lambda r, A, m: 3 * m, "3 A r / N; 0 where A > 0 and r is above the range and where A < 0 and"),
    (lambda r, A, m: m.where(A > 0, r * A), "A r / N; 0 where A > 0 and r is above the range\n"),
    (lambda r, A, m: m.where(A > 0, -m), "A r / N where A > 0, else - A r / N; 0 where A > 0 and r is"),
    (lambda r, A, m: m.detach() + (r - r.detach()) * A, "every value is right"),
    (lambda r, A, m: r.sqrt() * A, "0.5 A sqrt(r) / N"),
    (lambda r, A, m: r * (A - A.mean()), "on policy your A is +1 A +0.125, not +1 A +0"),
]


@pytest.mark.parametrize("terms, expected", EXPLAINED)
def test_what_is_unknown_is_explained(terms, expected):
    def loss(logprobs, old_logprobs, advantages, mask):
        r = torch.where(mask, logprobs - old_logprobs, 0).exp()
        smaller = torch.min(r * advantages, r.clamp(0.8, 1.28) * advantages)
        return -torch.where(mask, terms(r, advantages, smaller), 0).sum() / mask.sum()

    subject = Subject(loss, "dapo")
    text = "\n".join(doctor.diagnosis(subject, doctor.examine(subject)))
    assert text.startswith(UNKNOWN) and expected in text, text


def from_the_maximum(rewards):
    return (rewards - rewards.max(1, keepdim=True).values) / (rewards.std(1, keepdim=True) + 1e-6)


def of_half_the_values(rewards, values, mask, gamma, lam):
    advantages, returns = ppo.compute_gae(rewards, values, mask, gamma, lam)
    return advantages, torch.where(mask, returns + values / 2, 0)


@pytest.mark.parametrize(
    "function, section, expected",
    [
        (
            from_the_maximum,
            "group_advantages",
            "your baseline is the maximum of the group, not the mean",
        ),
        (of_half_the_values, "gae", "your return is +1 A +1.5 V, not +1 A +1 V"),
    ],
)
def test_what_is_unknown_in_advantages_is_explained(function, section, expected):
    subject = Subject(function, section)
    text = "\n".join(doctor.diagnosis(subject, doctor.examine(subject)))
    assert text.startswith(UNKNOWN) and expected in text, text


def test_a_rename_the_wrong_way_round(tmp_path, capsys, monkeypatch):
    """It would leave the cases out that it should bring in."""
    target = write(tmp_path, *DAPO)
    code, text = run(capsys, monkeypatch, target, *"--algorithm dapo --rename low=clip_eps_low".split())
    assert code == 2 and text == ""


def test_keywords_that_are_collected(tmp_path, capsys, monkeypatch):
    """**keywords take all that a case has, the count of the whole step too."""
    lines = [
        "from dapo import policy_loss",
        "def loss(new, old, A, mask, **keywords):",
        "    keywords.pop('num_sequences', None)",
        "    return policy_loss(new, old, A, mask, **keywords)",
    ]
    code, text = run(capsys, monkeypatch, write(tmp_path, *lines), "--algorithm", "dapo")
    assert code == 0 and " 0 not tested" in text


def test_one_keyword_for_both_bounds(tmp_path, capsys, monkeypatch):
    lines = [line.replace("low=0.2, high=0.28", "low=0.2").replace("high", "low") for line in DAPO]
    flags = "--algorithm ppo --rename clip_eps_low=low clip_eps_high=low".split()
    code, text = run(capsys, monkeypatch, write(tmp_path, *lines), *flags)
    assert code == 0 and "it has one keyword low for two" in text


def test_a_gradient_that_numpy_returns_must_be_right(tmp_path, capsys, monkeypatch):
    lines = [
        "import torch",
        "from dapo import policy_loss",
        "def loss(new, old, A, mask):",
        "    new, old, A, mask = (torch.as_tensor(x) for x in (new, old, A, mask))",
        "    new.requires_grad_()",
        "    value, _ = policy_loss(new, old, A, mask)",
        "    (gradient,) = torch.autograd.grad(value, new)",
        "    return value.item(), (gradient + OFF).numpy()",
    ]
    for off, expected in (("0", 0), ("4e-5", 1)):
        target = write(tmp_path, *[line.replace("OFF", off) for line in lines])
        flags = "--algorithm dapo --framework numpy".split()
        code, text = run(capsys, monkeypatch, target, *flags)
        assert code == expected, text


@pytest.mark.parametrize("algorithm", ["grpo", "cispo", "gspo"])
def test_a_random_wrong_loss_is_unknown(algorithm, tmp_path, capsys, monkeypatch):
    lines = [
        "def loss(new, old, A, mask):",
        "    noise = torch.rand(new.shape, generator=torch.Generator().manual_seed(0))",
        "    return -(torch.where(mask, (new - old).exp() * A * noise, 0)).sum() / mask.sum()",
    ]
    flags = ("--algorithm", algorithm)
    code, text = run(capsys, monkeypatch, write(tmp_path, *lines), *flags)
    assert code == 1 and f"\n{UNKNOWN}\n" in text


def test_two_mistakes_at_once(tmp_path, capsys, monkeypatch):
    lines = [line.replace("return -", "return ") for line in DAPO]
    lines[2] = lines[2].replace("1 - low, 1 + high", "1 - high, 1 + low")
    code, text = run(capsys, monkeypatch, write(tmp_path, *lines), *RENAMED)
    assert code == 1 and text.endswith("mistake: wrong sign and mistake: the two bounds swapped\n")


@pytest.mark.parametrize("result", ["value, gradient", "value"])
def test_numpy(result, tmp_path, capsys, monkeypatch):
    """With a gradient of its own; without, by finite differences, but not where one is stopped."""
    lines = [
        "def loss(new, old, A, mask):",
        "    r = np.exp(np.where(mask, new - old, 0))",
        "    clipped = np.clip(r, 0.8, 1.28)",
        "    value = -np.where(mask, np.minimum(r * A, clipped * A), 0).sum() / mask.sum()",
        "    moves = mask & (r * A <= clipped * A)",
        "    gradient = -np.where(moves, r * A, 0) / mask.sum()",
        f"    return {result}",
    ]
    flags = ("--framework", "numpy", "--algorithm")
    code, text = run(capsys, monkeypatch, write(tmp_path, *lines), *flags, "dapo")
    assert code == 0 and "by value only" not in text, text
    lines = [
        "def loss(new, old, A, mask):",
        "    w = np.minimum(np.exp(np.where(mask, new - old, 0)), 5)",
        "    value = -(w * A * np.where(mask, new, 0))[mask].sum() / mask.sum()",
        "    gradient = np.where(mask, -w * A / mask.sum(), 0)",
        f"    return {result}",
    ]
    code, text = run(capsys, monkeypatch, write(tmp_path, *lines), *flags, "cispo")
    assert code == 0 and ("by value only" in text) == (result == "value"), text


@pytest.mark.parametrize("shape, use", [("B", "A[:, None]"), ("B1", "A"), ("BT", "A")])
def test_shapes_of_advantages(shape, use, tmp_path, capsys, monkeypatch):
    asked = {"B": "A.dim() == 1", "B1": "A.shape == (len(mask), 1)", "BT": "A.shape == mask.shape"}
    lines = [DAPO[0], f"    assert {asked[shape]}", f"    A = {use}", *DAPO[1:]]
    code, text = run(capsys, monkeypatch, write(tmp_path, *lines), *RENAMED)
    assert code == 0 and f"advantages {shape}\n" in text
    assert ("it takes one advantage for each completion" in text) == (shape != "BT")


def test_a_wrong_function_is_diagnosed_in_the_shape_that_it_takes(tmp_path, capsys, monkeypatch):
    lines = [DAPO[0], "    A = A.unsqueeze(1)", *DAPO[1:3], DAPO[3].replace("-", "")]
    code, text = run(capsys, monkeypatch, write(tmp_path, *lines), *RENAMED)
    assert code == 1 and "advantages B\n" in text and text.endswith("mistake: wrong sign\n")


def test_a_case_that_raises_is_named(tmp_path, capsys, monkeypatch):
    lines = [DAPO[0], "    assert not new.isnan().any(), 'NaN'", *DAPO[1:]]
    code, text = run(capsys, monkeypatch, write(tmp_path, *lines), *RENAMED)
    assert code == 1 and "11 of 12 applicable cases agree" in text
    assert "RAISES   dapo-005 masked places hold NaN: it raises AssertionError NaN" in text


@pytest.mark.parametrize(
    "line, error",
    [
        ("def loss(new): pass", "TypeError"),
        ("import nothing_of_this_name", "ModuleNotFoundError"),
        ("loss = 1", "TypeError"),
        ("exit()", "SystemExit"),
    ],
)
def test_what_cannot_be_called(line, error, tmp_path, capsys, monkeypatch):
    target = write(tmp_path, line)
    code, text = run(capsys, monkeypatch, target, "--algorithm", "grpo")
    assert code == 2 and text.startswith(f"{target} cannot be called as grpo:\nTraceback")
    assert error in text.splitlines()[-1]


def test_too_few_cases_are_not_healthy(tmp_path, capsys, monkeypatch):
    """A function of rspo that knows no router shift."""
    lines = ["def loss(new, old, A, mask): return new.sum()"]
    code, text = run(capsys, monkeypatch, write(tmp_path, *lines), "--algorithm", "rspo")
    assert code == 1 and "0 of 0 applicable cases agree" in text


def test_the_vectors_and_the_doctor_share_nothing_with_the_scripts():
    for path in [*PACKAGE.glob("*.py"), ROOT / "conformance" / "make.py"]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert node.module.split(".")[0] not in ("common", "plumbing", "more", *SCRIPTS), path


# ----------------------------------------------------------------------- pytest, ways in, the package


def test_a_failure_is_diagnosed_and_a_known_difference_is_strict(tmp_path):
    """In somebody's suite: one that is wrong, one whose mistake is known and one that was mended."""
    (tmp_path / "xfails.txt").write_text("# ours\ndapo-001  # wrong sign\ndapo-002\n\n")
    lines = [
        "import pytest, torch",
        "from rl_loss_vectors import cases",
        "from dapo import policy_loss",
        "def loss(*given, clip_eps_low=0.2, clip_eps_high=0.28):",
        "    value = policy_loss(*given, clip_eps_low=clip_eps_low, clip_eps_high=clip_eps_high)[0]",
        "    return value if abs(given[1].sum() - SUM) < 1e-6 else -value",
        "@pytest.mark.parametrize('case', cases('dapo', loss, 'xfails.txt'))",
        "def test_dapo(case):",
        "    case.check()",
    ]
    total = reference.tensor(case_of("dapo", "dapo-002")["inputs"]["old_logprobs"]).sum().item()
    (tmp_path / "test_it.py").write_text("\n".join(lines).replace("SUM", repr(total)))
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q"]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'conformance'}"}
    text = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True).stdout
    assert "FAILED test_it.py::test_dapo[dapo-002]" in text and "XPASS(strict)" in text
    assert (
        "FAILED test_it.py::test_dapo[dapo-003]" in text and "1 xfailed" in text and "1 skipped" in text
    )
    assert UNKNOWN in text  # since one case is right


@pytest.mark.parametrize("section", LOSSES)
def test_the_three_ways_agree(section):
    """The script's terms are not at hand, but those of the vectors are: their own reduction."""
    about = SECTIONS[section]
    width_one = {case["id"] for case in about["cases"] if len(case["terms"][0]) == 1}

    def reduced(terms, mask, num_sequences=None, num_tokens=None, max_new_tokens=None):
        rows = mask.sum(1, keepdim=True)
        divisor = {
            "grpo": len(mask) * rows,
            "sapo": len(mask) * rows,
            "gspo": len(mask) * rows,  # GSPO-token
            "dr_grpo": len(mask) * torch.tensor(max_new_tokens or 1),
            "reinforce": torch.tensor(len(mask)),
            "rloo": torch.tensor(len(mask)),
        }.get(section, mask.sum())
        return torch.where(mask, terms, 0).div(divisor).sum()

    subject = Subject(reduced, section, way="reduction")
    tested = 0
    for case in about["cases"]:
        if subject.why_not(case) is None and "micro_batches" not in case:
            assert case["id"] not in width_one
            assert doctor.is_right(subject, case, subject.answer(case)), case["id"]
            tested += 1
    assert tested >= 5 or section in ("gspo", "gmpo", "rspo")


@pytest.mark.parametrize("wrong", [False, True])
def test_terms(wrong):
    def terms(logprobs, old_logprobs, advantages, mask, clip_eps_low=0.2, clip_eps_high=0.2):
        r = torch.exp(logprobs - old_logprobs)
        pick = torch.min if wrong else torch.max
        return pick(-r * advantages, -r.clamp(1 - clip_eps_low, 1 + clip_eps_high) * advantages)

    subject = Subject(terms, "ppo", way="terms")
    diagnosis = doctor.diagnosis(subject, doctor.examine(subject))
    assert ("0 where A > 0 and r is below the range and" in " ".join(diagnosis)) == wrong, diagnosis
    assert wrong or diagnosis == []


@pytest.mark.parametrize("section", LOSSES)
def test_a_healthy_loss_is_not_accused(section):
    """In float32, whether it is given it or casts itself; with a mask of floats, with advantages of
    shape (B,), and with another order of summation."""
    function = function_of(section)
    for subject in (
        Subject(function, section, dtype="float32"),
        Subject(in_float32(function), section),
        Subject(function, section, mask="float"),
        Subject(function, section, advantages="B"),
        Subject(from_the_end(function), section),
    ):
        assert doctor.diagnosis(subject, doctor.examine(subject)) == []


def from_the_end(function):
    """Rows and tokens in the opposite order."""

    @functools.wraps(function)
    def loss(*given, **keywords):
        def flipped(x):
            return x.flip(0, 1) if torch.is_tensor(x) else x

        given = [flipped(x) for x in given]
        return function(*given, **{key: flipped(x) for key, x in keywords.items()})

    return loss


def in_float32(function):
    @functools.wraps(function)
    def loss(*given, **keywords):
        def single(x):
            return x.float() if torch.is_tensor(x) and x.is_floating_point() else x

        given = [single(x) for x in given]
        return function(*given, **{key: single(x) for key, x in keywords.items()})[0].double()

    return loss


@pytest.mark.extras
def test_the_package_without_torch(tmp_path):
    """Built and installed into an empty environment: a numpy loss, a wrong one, and the schema."""
    source = tmp_path / "conformance"
    shutil.copytree(ROOT / "conformance", source, ignore=shutil.ignore_patterns("build", "*.egg-info"))
    wheels = tmp_path / "wheels"
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", wheels, source]
    subprocess.run(pip, check=True)
    (wheel,) = wheels.glob("rl_loss_vectors-2.0-py3-none-any.whl")
    assert wheel.stat().st_size <= 300_000
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", wheel, "jsonschema"], check=True)
    lines = [
        "import json, sys",
        "import numpy as np",
        "def loss(new, old, A, mask):",
        "    r = np.exp(np.where(mask, new - old, 0))",
        "    smaller = np.minimum(r * A, np.clip(r, 0.8, 1.28) * A)",
        "    return -np.where(mask, smaller, 0).sum() / mask.sum()",
        "def wrong(new, old, A, mask):",
        "    return 4 * loss(new, old, A, mask)",
        "if __name__ == '__main__':",
        "    import jsonschema, rl_loss_vectors",
        "    assert 'torch' not in sys.modules",
        "    folder = rl_loss_vectors.__path__[0]",
        "    schema = json.load(open(folder + '/schema.json'))",
        "    jsonschema.Draft202012Validator.check_schema(schema)",
        "    jsonschema.Draft202012Validator(schema).validate(rl_loss_vectors.VECTORS)",
    ]
    path = tmp_path / "mine.py"
    path.write_text("\n".join(lines))
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    subprocess.run([python, path], check=True, cwd=tmp_path, env=env)
    texts = {}
    for name, code in (("loss", 0), ("wrong", 1)):
        doctor = [python, "-m", "rl_loss_vectors", f"{path}:{name}", "--algorithm", "dapo"]
        result = subprocess.run(
            [*doctor, "--framework", "numpy"], capture_output=True, text=True, cwd=tmp_path, env=env
        )
        assert result.returncode == code, result.stdout + result.stderr
        texts[name] = result.stdout
    assert "11 of 11 applicable cases agree" in texts["loss"]
    assert "install torch" in texts["wrong"]
    assert "your gradient of J: 4 A r / N; 0 where A > 0 and r is above the range" in texts["wrong"]


# ------------------------------------------------------------------------------- README, TRL and verl


def test_the_three_examples_of_the_readme(tmp_path):
    """The loss gets the diagnosis that is printed there, also in pytest, and the reader reads."""
    blocks = re.findall(r"```python\n(?:# (\S+)\n)?(.*?)```", README, re.DOTALL)
    for name, text in blocks:
        (tmp_path / (name or "read.py")).write_text(text)
        assert len(text.strip().splitlines()) <= 10
    (tmp_path / "rl_loss_vectors").symlink_to(PACKAGE)
    env = {**os.environ, "PYTHONPATH": str(ROOT / "conformance")}
    for arguments, code in (
        ("-m rl_loss_vectors mine.py:loss --algorithm grpo", 1),
        ("-m pytest -p no:cacheprovider test_mine.py", 1),
        ("read.py", 0),
    ):
        command = [sys.executable, *arguments.split()]
        result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert result.returncode == code, result.stdout + result.stderr
        if code == 1:
            (diagnosis,) = re.findall(r"^mistake: .*", README, re.MULTILINE)
            assert diagnosis in result.stdout


def test_the_tables_of_the_readme_are_those_of_the_data():
    for name, lines in engines.tables().items():
        assert "\n".join([f"<!-- {name} -->", *lines, "<!-- end -->"]) in README
    for row in engines.read(ROOT / "conformance" / "engines_steps.csv"):
        if not row["departure"]:
            assert float(row["largest"]) < (1e-4 if row["engine"] == "TRL" else 1e-12), row


def test_what_verl_and_trl_do_names_cases_that_there_are():
    ids = {id for _, id in ALL_CASES}
    for row in engines.read(ROOT / "conformance" / "engines_losses.csv"):
        assert set(row["differ"].split()) <= ids
