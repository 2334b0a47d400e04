"""The test vectors against the scripts, and the doctor: on our own losses, on each known mistake, on what
somebody else might bring."""

import importlib
import inspect
import json

import pytest
import torch
from conftest import MORE, SCRIPTS

from conformance import check, make, mistakes

SECTIONS = json.loads(make.FILE.read_text())["sections"]
ALL_CASES = [(section, case["name"]) for section in SECTIONS for case in SECTIONS[section]["cases"]]
LOSSES = [name.removeprefix("more.") for name in (*SCRIPTS, *MORE)]
MODULES = dict(zip(LOSSES, (*SCRIPTS, *MORE), strict=True))
ENTRIES = []
for kind, entries in (("mistake", mistakes.MISTAKES), ("variant", mistakes.VARIANTS)):
    for name, sections, change in entries:
        ENTRIES += [(kind, name, section, change) for section in sections.split()]
# Where two entries have the same numbers, one with the other's name is right as well.


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
    values = values.scatter(1, mask.sum(1, keepdim=True), bootstrap)
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


def numbers_in(x):
    if isinstance(x, list | dict):
        for element in x.values() if isinstance(x, dict) else x:
            yield from numbers_in(element)
    elif isinstance(x, int | float):
        yield x


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
            for number in numbers_in(case["inputs"]):
                assert round(number, 2) == number
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


def test_counts_are_those_of_the_whole_step():
    for section, name in ALL_CASES:
        case = case_of(section, name)
        if "micro_batches" in case:
            b = make.batch_of(case)
            counted = b.mask & b.is_right if section == "positive_lm_loss" else b.mask
            assert case["num_tokens"] == counted.sum() and case["num_sequences"] == len(b.mask)
            assert sorted(sum(case["micro_batches"], [])) == list(range(len(b.mask)))


def test_what_the_cases_have_in_them():
    for section in LOSSES:
        cases = SECTIONS[section]["cases"]
        masks = [case["inputs"]["mask"] for case in cases]
        assert any(row[0] == 0 for mask in masks for row in mask)  # a prompt before it
        assert any(
            "101" in "".join(map(str, row)) or "1001" in "".join(map(str, row))
            for mask in masks
            for row in mask
        )
        assert {"NaN", 1e9} <= {case.get("masked_places_hold") for case in cases}
        largest = [
            (make.tensor(case["inputs"]["logprobs"]) - make.tensor(case["inputs"]["old_logprobs"]))
            .abs()
            .max()
            .item()
            for case in cases
        ]
        assert any(abs(x - 15) < 0.01 for x in largest)


# ----------------------------------------------------------------------------------------- the doctor


@pytest.mark.parametrize(
    "kind, name, section, change", ENTRIES, ids=lambda x: x if isinstance(x, str) else ""
)
def test_an_entry_is_not_the_objective_and_is_diagnosed_as_itself(kind, name, section, change):
    answers = [(case, make.evaluate(section, case, change)) for case in SECTIONS[section]["cases"]]
    agree = [check.same(found, expected_of(case), check_args()) for case, found in answers]
    assert not all(agree)
    found = check.diagnosis(section, answers, check_args())
    assert any(line == f"{kind}: {name}" for line in found), found
