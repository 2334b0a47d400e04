"""The test vectors against the scripts; the doctor on our own losses, on each known mistake, and on
losses that somebody else might bring; the tables of conformance/README.md."""

import ast
import csv
import importlib
import inspect
import json
import re
import subprocess
import sys

import pytest
import torch
from conftest import MORE, ROOT, SCRIPTS

from conformance import check, make, mistakes

README = (ROOT / "conformance" / "README.md").read_text()
SECTIONS = json.loads(make.FILE.read_text())["sections"]
ALL_CASES = [(section, case["name"]) for section in SECTIONS for case in SECTIONS[section]["cases"]]
LOSSES = [name.removeprefix("more.") for name in (*SCRIPTS, *MORE)]
MODULES = dict(zip(LOSSES, (*SCRIPTS, *MORE), strict=True))
ENTRIES = []
for kind, entries in (("mistake", mistakes.MISTAKES), ("variant", mistakes.VARIANTS)):
    for name, sections, change in entries:
        ENTRIES += [(kind, name, section, change) for section in sections.split()]


def case_of(section, name):
    return next(case for case in SECTIONS[section]["cases"] if case["name"] == name)


def expected_of(case):
    return make.tensor(case["value"]), make.tensor(case["gradient"]) if "gradient" in case else None


def by_the_script(section, case):
    """(value, gradient) of the function of a script."""
    if section in LOSSES:
        function = importlib.import_module(MODULES[section]).policy_loss
    elif section in ("group_advantages", "group_differences", "leave_one_out"):
        name = {"group_differences": "dr_grpo", "leave_one_out": "more.rloo"}.get(section, "grpo")
        function = importlib.import_module(name).compute_advantages
    else:
        home = {"positive_lm_loss": "more.vapo", "router_shift": "rspo"}.get(section, "ppo")
        function = getattr(importlib.import_module(home), section.replace("gae", "compute_gae"))
    if "bootstrap" in case["keywords"]:
        case = with_last_reward(case)
    args = check_args(shape="as in the file")
    defaults = SECTIONS[section]["defaults"]
    keywords, why_not = check.keywords_for(function, case, defaults, args)
    assert not why_not
    return check.answer(function, case, SECTIONS[section]["arguments"], keywords, args)


def check_args(**changes):
    values = {"framework": "torch", "rename": [], "shape": "as in the file", **changes}
    return type("Args", (), values)()


def with_last_reward(case):
    """Completions that were cut off, as ppo.py tells compute_gae: by their last reward."""
    ppo = importlib.import_module("ppo")
    inputs = case["inputs"]
    mask = make.tensor(inputs["mask"]).long()
    bootstrap = make.tensor(case["keywords"]["bootstrap"])
    rewards = make.tensor(inputs["rewards"])
    values = torch.nn.functional.pad(make.tensor(inputs["values"]), (0, 1))
    after_the_last = mask.cumsum(1).argmax(1, keepdim=True) + 1
    values = values.scatter(1, after_the_last, bootstrap)
    last = rewards.sum(1, keepdim=True)
    given = last, 0 * rewards, values, (bootstrap != 0).double(), mask, 0.0, inputs["gamma"]
    rewards = ppo.token_rewards(*given).tolist()
    return {**case, "inputs": {**inputs, "rewards": rewards}, "keywords": {}}


def close(found, expected, tolerance=1e-12):
    for x, y in zip(found, expected, strict=True):
        assert (x is None) == (y is None)
        if y is not None:
            assert ((x - y).abs() <= tolerance * (1 + y.abs())).all(), (x, y)


# ---------------------------------------------------------------------------------------- the vectors


@pytest.mark.parametrize("section, name", ALL_CASES)
def test_the_scripts_agree(section, name):
    """Within 1e-12, and so no case depends on the clamp of log-ratios, which reference.py has not."""
    case = case_of(section, name)
    close(by_the_script(section, case), expected_of(case))


def test_the_file_is_what_make_gives():
    made = make.sections()
    assert list(made) == list(SECTIONS)
    for section, about in made.items():
        of_file = SECTIONS[section]
        assert {**about, "cases": []} == {**of_file, "cases": []}
        for case, in_file in zip(about["cases"], of_file["cases"], strict=True):
            close(expected_of(case), expected_of(in_file))
            results = dict.fromkeys(("value", "gradient"))
            assert json.loads(json.dumps(case | results)) == in_file | results


def test_the_file_is_small_and_plain():
    def refuse(constant):
        raise AssertionError(constant)

    text = make.FILE.read_text()
    assert len(text.encode()) <= 300_000
    assert json.loads(text, parse_constant=refuse)["version"] == make.VERSION  # no NaN, no Infinity
    assert set(LOSSES) < set(SECTIONS)
    for about in SECTIONS.values():
        names = [case["name"] for case in about["cases"]]
        assert 5 <= len(names) <= 12 and len(set(names)) == len(names)
        for case in about["cases"]:
            inputs = json.dumps(case["inputs"])
            assert re.search(r"\.\d{3}|\de", inputs) is None  # at most two decimals
            for rows in case["inputs"].values():
                if isinstance(rows, list):
                    assert len(rows) <= 4 and (not isinstance(rows[0], list) or len(rows[0]) <= 6)


@pytest.mark.parametrize("section", LOSSES)
def test_defaults_are_those_of_the_scripts(section):
    parameters = inspect.signature(importlib.import_module(MODULES[section]).policy_loss).parameters
    defaults = SECTIONS[section]["defaults"]
    of_script = {name: parameter.default for name, parameter in parameters.items()}
    assert defaults == {name: of_script[name] for name in defaults}
    others = set(of_script) - set(defaults) - {"max_new_tokens", "rollout_ratio_BT"}
    assert all(name.endswith(("_BT", "_B1")) or name.startswith("num_") for name in others)


@pytest.mark.parametrize("section, name", ALL_CASES)
def test_no_case_is_at_a_bound(section, name):
    """A little to either side the gradient is the same: nobody has to guess what is due at a tie."""
    case = case_of(section, name)
    if "gradient" not in case:
        return
    first = SECTIONS[section]["arguments"][0]
    _, gradient = make.evaluate(section, case)
    for step in (1e-8, -1e-8):
        rows = (make.tensor(case["inputs"][first]) + step).tolist()
        _, moved = make.evaluate(section, {**case, "inputs": case["inputs"] | {first: rows}})
        assert ((moved - gradient).abs() <= 1e-6 * (1 + gradient.abs())).all()


@pytest.mark.parametrize("section", LOSSES)
def test_the_cases_have_holes_and_large_log_ratios(section):
    cases = SECTIONS[section]["cases"]
    rows = ["".join(map(str, row)) for case in cases for row in case["inputs"]["mask"]]
    assert any(row.startswith("0") for row in rows)  # a prompt
    assert any(re.search("10+1", row) for row in rows)  # tool output
    assert {"NaN", 1e9} <= {case.get("masked_places_hold") for case in cases}
    pairs = [(case["inputs"]["logprobs"], case["inputs"]["old_logprobs"]) for case in cases]
    largest = [(make.tensor(new) - make.tensor(old)).abs().max().item() for new, old in pairs]
    assert any(abs(x - 15) < 0.01 for x in largest)


# ----------------------------------------------------------------------------------------- the doctor


@pytest.mark.parametrize(
    "kind, name, section, change", ENTRIES, ids=lambda x: x if isinstance(x, str) else ""
)
def test_an_entry_is_not_the_objective_and_is_diagnosed_as_itself(kind, name, section, change):
    answers = [(case, make.evaluate(section, case, change)) for case in SECTIONS[section]["cases"]]
    agree = [check.same(found, expected_of(case)) for case, found in answers]
    assert not all(agree)
    found = check.diagnosis(section, answers)
    assert any(line == f"{kind}: {name}" for line in found), found


def doctor(capsys, monkeypatch, *arguments):
    """(exit code, what it prints) of the doctor, in this process."""
    monkeypatch.setattr(sys, "argv", ["check.py", *map(str, arguments)])
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as ended:
        check.main()
    return int(ended.value.code), capsys.readouterr().out


HEALTHY = [("policy_loss", algorithm, "loss") for algorithm in LOSSES]
HEALTHY += [
    ("compute_advantages", algorithm, "advantages")
    for algorithm in LOSSES
    if algorithm not in ("ppo", "reinforce", "vapo")
]
HEALTHY += [
    ("compute_gae", "ppo", "gae"),
    ("compute_gae", "vapo", "gae"),
    ("value_loss", "ppo", "value_loss"),
    ("positive_lm_loss", "vapo", "positive_lm_loss"),
    ("router_shift", "rspo", "router_shift"),
]


@pytest.mark.parametrize("function, algorithm, what", HEALTHY)
def test_the_functions_of_the_scripts_are_healthy(function, algorithm, what, capsys, monkeypatch):
    target = f"{MODULES[algorithm].replace('.', '/')}.py:{function}"
    code, text = doctor(capsys, monkeypatch, target, "--algorithm", algorithm, "--what", what)
    assert code == 0 and "DIFFERS" not in text
    not_applicable = [line for line in text.splitlines() if line.startswith("  n/a")]
    if (
        what == "gae"
    ):  # ppo's caller adds the value after a completion that was cut off to its last reward
        assert not_applicable == [
            "  n/a      two completions cut off: V after them: it has no bootstrap"
        ]
    else:
        assert not_applicable == []


@pytest.mark.slow
def test_from_the_root_of_a_clone():
    command = [sys.executable, "conformance/check.py", "grpo.py:policy_loss", "--algorithm", "grpo"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("12 of 12 applicable cases agree, 0 not tested\n")


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
    code, text = doctor(capsys, monkeypatch, write(tmp_path, *DAPO), *RENAMED)
    assert code == 0 and "cannot be used in micro-batches" in text
    assert text.endswith("10 of 10 applicable cases agree, 1 not tested\n")
    # Without its keywords it is asked for nothing but the default range.
    code, text = doctor(capsys, monkeypatch, write(tmp_path, *DAPO), "--algorithm", "dapo")
    assert code == 0 and "n/a      other bounds: it has no clip_eps_low" in text


@pytest.mark.parametrize(
    "old, new, line",
    [
        ("return -", "return ", "mistake: wrong sign"),
        ("low=0.2, high=0.28", "high=0.2, low=0.28", "mistake: the two bounds swapped"),
        ("torch.min(", "torch.max(", "mistake: max for min"),
        ("new - old", "1.01 * new - old", "unknown: no entries of mistakes.py give these numbers"),
    ],
)
def test_a_loss_that_is_wrong(old, new, line, tmp_path, capsys, monkeypatch):
    """A factor of 1.01 is nothing that is known."""
    lines = [each.replace(old, new) for each in DAPO]
    code, text = doctor(capsys, monkeypatch, write(tmp_path, *lines), "--algorithm", "dapo")
    assert code == 1 and text.splitlines()[-1] == line, text


def test_a_rename_the_wrong_way_round(tmp_path, capsys, monkeypatch):
    """It would leave the cases out that it should bring in."""
    target = write(tmp_path, *DAPO)
    code, text = doctor(
        capsys, monkeypatch, target, *"--algorithm dapo --rename low=clip_eps_low".split()
    )
    assert code == 2 and text == ""


def test_keywords_that_are_collected(tmp_path, capsys, monkeypatch):
    """**keywords take all that a case has, the count of the whole step too."""
    lines = [
        "from dapo import policy_loss",
        "def loss(new, old, A, mask, **keywords):",
        "    keywords.pop('num_sequences', None)",
        "    return policy_loss(new, old, A, mask, **keywords)",
    ]
    code, text = doctor(capsys, monkeypatch, write(tmp_path, *lines), "--algorithm", "dapo")
    assert code == 0 and " 0 not tested" in text


def test_one_keyword_for_both_bounds(tmp_path, capsys, monkeypatch):
    lines = [line.replace("low=0.2, high=0.28", "low=0.2").replace("high", "low") for line in DAPO]
    flags = "--algorithm ppo --rename clip_eps_low=low clip_eps_high=low".split()
    code, text = doctor(capsys, monkeypatch, write(tmp_path, *lines), *flags)
    assert code == 0 and "it has one low for two keywords" in text


def test_a_gradient_that_numpy_returns_must_be_right(tmp_path, capsys, monkeypatch):
    """The tolerance of finite differences is not for it."""
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
    for off, expected in (("0", 0), ("4e-6", 1)):
        target = write(tmp_path, *[line.replace("OFF", off) for line in lines])
        flags = "--algorithm dapo --framework numpy".split()
        code, text = doctor(capsys, monkeypatch, target, *flags)
        assert code == expected, text


@pytest.mark.parametrize("algorithm", ["grpo", "cispo", "gspo"])
def test_a_random_wrong_loss_is_unknown(algorithm, tmp_path, capsys, monkeypatch):
    lines = [
        "def loss(new, old, A, mask):",
        "    noise = torch.rand(new.shape, generator=torch.Generator().manual_seed(0))",
        "    return -(torch.where(mask, (new - old).exp() * A * noise, 0)).sum() / mask.sum()",
    ]
    flags = ("--algorithm", algorithm)
    code, text = doctor(capsys, monkeypatch, write(tmp_path, *lines), *flags)
    assert code == 1 and text.endswith("\nunknown: no entries of mistakes.py give these numbers\n")


def test_two_mistakes_at_once(tmp_path, capsys, monkeypatch):
    lines = [line.replace("return -", "return ") for line in DAPO]
    lines[2] = lines[2].replace("1 - low, 1 + high", "1 - high, 1 + low")
    code, text = doctor(capsys, monkeypatch, write(tmp_path, *lines), *RENAMED)
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
    code, text = doctor(capsys, monkeypatch, write(tmp_path, *lines), *flags, "dapo")
    assert code == 0 and "by value only" not in text, text
    lines = [
        "def loss(new, old, A, mask):",
        "    w = np.minimum(np.exp(np.where(mask, new - old, 0)), 5)",
        "    value = -(w * A * np.where(mask, new, 0))[mask].sum() / mask.sum()",
        "    gradient = np.where(mask, -w * A / mask.sum(), 0)",
        f"    return {result}",
    ]
    code, text = doctor(capsys, monkeypatch, write(tmp_path, *lines), *flags, "cispo")
    assert code == 0 and ("by value only" in text) == (result == "value"), text


@pytest.mark.parametrize("shape, use", [("B", "A[:, None]"), ("B1", "A"), ("BT", "A")])
def test_shapes_of_advantages(shape, use, tmp_path, capsys, monkeypatch):
    asked = {"B": "A.dim() == 1", "B1": "A.shape == (len(mask), 1)", "BT": "A.shape == mask.shape"}
    lines = [DAPO[0], f"    assert {asked[shape]}", f"    A = {use}", *DAPO[1:]]
    code, text = doctor(capsys, monkeypatch, write(tmp_path, *lines), *RENAMED)
    assert code == 0 and f"advantages {shape}\n" in text
    assert ("it takes one advantage for each completion" in text) == (shape != "BT")
    other = "BT" if shape == "B" else "B"
    code, text = doctor(capsys, monkeypatch, write(tmp_path, *lines), *RENAMED, "--advantages", other)
    assert code == 2 and "Traceback" in text and "AssertionError" in text


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
    code, text = doctor(capsys, monkeypatch, target, "--algorithm", "grpo")
    assert code == 2 and text.startswith(f"{target} cannot be called as grpo:\nTraceback")
    assert error in text.splitlines()[-1]


def test_too_few_cases_are_not_healthy(tmp_path, capsys, monkeypatch):
    """A function of rspo that knows no router shift."""
    lines = ["def loss(new, old, A, mask): return new.sum()"]
    code, text = doctor(capsys, monkeypatch, write(tmp_path, *lines), "--algorithm", "rspo")
    assert code == 1 and "0 of 0 applicable cases agree" in text


def test_the_vectors_and_the_doctor_share_nothing_with_the_scripts():
    for path in (ROOT / "conformance").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and path.name != "trainers.py":
                assert node.module.split(".")[0] not in ("common", "plumbing", "more", *SCRIPTS), path


# ------------------------------------------------------------------------------------ TRL and verl


def test_the_table_of_departures_is_that_of_the_data():
    found = README.split("| gradient off by |")[1].split("\n\n")[0].splitlines()[2:]
    expected = []
    with open(ROOT / "conformance" / "engines.csv") as file:
        for row in csv.DictReader(file):
            engine = f"{row['engine']} {row['version']}"
            if row["loss"].startswith("ours"):
                engine = "(neither)"
            error = " to ".join(dict.fromkeys([row["smallest"], row["largest"]]))
            if row["measure"] == "advantage":
                error = f"A: {error}"
            cells = [engine, row["algorithm"], row["departure"], row["paper"], error, row["remedy"]]
            if row["departure"]:
                expected.append(f"| {' | '.join(cells)} |")
            else:
                assert float(row["largest"]) < (1e-4 if row["engine"] == "TRL" else 1e-12), row
    assert found == expected


ROWS_OF_TRL = re.findall(
    r"^\| TRL `(\w+)`.*?\| (\w+) \| (\d+ of \d+) \| (.*) \|$", README, re.MULTILINE
)
DIAGNOSES = {
    "NaN in masked places spreads": "variant: NaN in masked places spreads [TRL, verl]",
    "k3 times the ratio, and NaN": "variant: k3 times r, unasked [TRL: default] and variant: NaN in "
    "masked places spreads [TRL, verl]",
}


@pytest.mark.extras
@pytest.mark.parametrize("name, algorithm, cases, diagnosis", ROWS_OF_TRL)
def test_what_the_doctor_says_of_trl(name, algorithm, cases, diagnosis, capsys, monkeypatch):
    target = f"examples/doctor_trl.py:{name}"
    code, text = doctor(capsys, monkeypatch, target, "--algorithm", algorithm)
    assert code == 1 and f"\n{cases} applicable cases agree" in text
    assert text.splitlines()[-1] == DIAGNOSES[diagnosis]
