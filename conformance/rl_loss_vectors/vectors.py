"""Calls a function with the cases of vectors.json, and compares its answers with the expected ones."""

import copy
import functools
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from rl_loss_vectors import names
from rl_loss_vectors.reference import LOSSES, fields_of, with_results

VECTORS = json.loads((Path(__file__).parent / "vectors.json").read_text())
COUNTS = names.COUNTS
SHAPES = ["as in the file", "BT", "B"]  # of advantages
GROUPS = ["as in the file", "N", "GP", "G"]  # of rewards: "G" is one group at a time


class Answer(NamedTuple):
    """What a function returns for a case, as arrays of float64."""

    value: np.ndarray
    gradient: "np.ndarray | None"


def close(x, y, tolerance):
    """Whether x is y, up to float32's rounding error relative to the largest number. Where y is NaN, as
    in some mistakes, any x will do."""
    size = np.abs(np.nan_to_num(y)).max(initial=0)
    with np.errstate(invalid="ignore"):  # of infinities
        is_near = np.abs(x - y) <= tolerance * (1 + size)
    return bool((is_near | np.isnan(y) | (x == y)).all())


def same(answer, other, tolerance):
    if not close(answer.value, other.value, tolerance):
        return False
    return other.gradient is None or close(answer.gradient, other.gradient, tolerance)


def expected(case):
    gradient = np.array(case["gradient"]) if "gradient" in case else None
    return Answer(np.array(case["value"], float), gradient)


class Misfit(Exception):
    """A function that cannot be called at all; the message is one line for its author."""


@dataclass(eq=False)
class Subject:
    """A function under test."""

    function: Callable  # of its section's arguments and of keywords; names may end in _BT and the like
    section: str  # of vectors.json: "grpo", "gae" ...
    shape: str = "as in the file"  # one of SHAPES or GROUPS
    mask: str = "bool"  # or "float": 0 and 1
    dtype: torch.dtype = torch.float64
    fixed: dict = field(default_factory=dict)  # {parameter: value}
    constants: dict = field(default_factory=dict)  # of its own, instead of our keywords

    def __post_init__(self):
        self.about = VECTORS["sections"][self.section]
        # A module's parameters are in `forward`, which its __call__ hides.
        function = getattr(self.function, "forward", self.function)
        self.parameters = inspect.signature(function).parameters
        kinds = [parameter.kind for parameter in self.parameters.values()]
        self.takes_all = inspect.Parameter.VAR_KEYWORD in kinds
        assigned = names.assign(self.parameters, self.about, self.section, self.fixed)
        self.given, self.by_order, left = assigned
        wanted = self.about["arguments"]
        got = {*self.given.values()}
        if names.RETURNS in got:
            got.add("returns")
        missing = {*wanted} - got
        if left or missing - {"mask", "old_logprobs"}:
            raise Misfit(
                f"its arguments ({', '.join(self.parameters)}) are not recognized as "
                f"{', '.join(wanted)}; --set NAME=VALUE sets others"
            )
        self.lacks_mask = "mask" in missing
        self.lacks_old = "old_logprobs" in missing and self.section not in ("reinforce", "rloo")
        self.has_ref = "ref_logprobs" in got  # then it gets one in each case

    def takes(self, key):
        return key in self.given.values()

    def ignores(self, case, keys):
        """Whether the answer is the same without these keywords."""
        return not self.takes_all or same(self.answer(case, keys), self.answer(case), 1e-9)

    def why_not(self, case):
        """The reason why a case does not apply, or None."""
        for key, value in case["keywords"].items():
            # A reference whose log-probs are those of the policy gives a KL of 0.
            is_default = value in (self.about["defaults"].get(key), case["inputs"].get("logprobs"))
            is_known = is_default or key in self.constants or self.takes(key)
            if not is_known and self.ignores(case, {key}):
                return f"it has no keyword {key}"
        has_count = any(self.takes(key) for key in COUNTS)
        if "micro_batches" in case and not has_count and self.ignores(case, {*COUNTS}):
            return "it cannot be used in micro-batches: it has no count of the whole step"
        if self.shape == "B" and "token_advantages" in case["tags"]:
            return "it takes one advantage for each completion"
        return None

    @functools.cached_property
    def returns_terms(self):
        """Whether a loss returns (B, T), of which we then take the mean of its section."""
        try:
            part = self.fields(self.cases[0])
            return self.section in LOSSES and self.output(part).shape == part["mask"].shape
        except Exception:
            return False

    @functools.cached_property
    def cases(self):
        return [self.adapted(case) for case in self.about["cases"]]

    def adapted(self, case):
        """A case adapted to the function: with the function's own constants, without padding if it
        takes no mask, with ratios of 1 if it takes no old log-probs."""
        changed = copy.deepcopy(case)
        inputs = changed["inputs"]
        if self.lacks_mask:
            inputs["mask"] = [[1 for _ in row] for row in inputs["mask"]]
            changed.pop("masked_places_hold", None)
        if self.lacks_old:
            inputs["old_logprobs"] = inputs["logprobs"]
        changed["keywords"] |= self.constants
        if self.has_ref:
            changed["keywords"].setdefault("ref_logprobs", inputs["logprobs"])  # a KL of 0
        return case if changed == case else with_results(self.section, changed)

    def fields(self, case):
        """What a function gets in a case: tensors and numbers, by name."""
        fields = fields_of(case)
        if self.shape == "BT":
            fields["advantages"] = fields["advantages"].expand_as(fields["mask"]).clone()
        if self.shape == "B":
            fields["advantages"] = fields["advantages"][:, 0]
        for name, x in fields.items():
            if torch.is_tensor(x) and (x.is_floating_point() or (name, self.mask) == ("mask", "float")):
                fields[name] = x.to(self.dtype)
        return fields | {key: case[key] for key in COUNTS if key in case}

    def call(self, part):
        mine = {*self.given.values(), *self.about["arguments"], "group_size"}
        others = {key: x for key, x in part.items() if self.takes_all and key not in mine}
        part = part | {"zero": 0.0}
        if self.section == "value_loss":
            part[names.RETURNS] = part["returns"] - part["old_values"]
        named = {key: x for key, x in self.fixed.items() if key in self.parameters}
        for name, key in self.given.items():
            if key in part or self.parameters[name].default is inspect.Parameter.empty:
                named[name] = part.get(key)
        result = self.function(**named, **others)
        if self.section == "gae":  # advantages and returns, one above the other
            return torch.stack([torch.as_tensor(x) for x in result[:2]])
        return main_output(result)

    def output(self, part):
        """What it returns; groups of rewards may have to be passed in a different arrangement."""
        if self.about["arguments"] != ["rewards"]:
            return self.call(part)
        rewards = part["rewards"]
        part = part | {"group_size": rewards.shape[1]}
        if self.shape == "G":
            return torch.stack([self.call(part | {"rewards": row}).reshape(-1) for row in rewards])
        if self.shape == "GP":
            return self.call(part | {"rewards": rewards.T}).T
        if self.shape == "N":
            part["rewards"] = rewards.reshape(-1)
        found = self.call(part)
        return found.reshape(rewards.shape) if found.shape == (rewards.numel(),) else found

    def answer(self, case, without=()):
        """Its answer in a case, `without` some of the keywords."""
        fields = self.fields(case)
        ours = expected(case)
        gradient = None if ours.gradient is None else np.zeros(ours.gradient.shape)
        value = 0
        for rows in case.get("micro_batches", [slice(None)]):
            part = {key: x[rows] if torch.is_tensor(x) else x for key, x in fields.items()}
            part = {key: x for key, x in part.items() if key not in without}
            first = part[self.about["arguments"][0]]
            first.requires_grad_(gradient is not None)
            output = self.output(part)
            if self.returns_terms:
                divisors = torch.tensor(case["denominator"])[rows]
                output = (torch.where(part["mask"].bool(), output, 0) / divisors).sum()
            if gradient is not None:
                gradient[rows] = gradient_of(output, first, case.get("coefficients", 1))
            value = value + output.detach().cpu().double().numpy()
        if ours.value.size > 1:
            value = shaped(value, ours.value, case)
        elif value.size != 1:
            raise ValueError(f"a loss is one number, not a tensor of shape {value.shape}")
        return Answer(value.reshape(ours.value.shape), gradient)

    def notes(self):
        """Lines: which parameter got what, and what was adapted to the function."""
        lines = []
        pairs = []
        for theirs, ours in self.given.items():
            pairs.append(f"{theirs} is {ours}{' by order' if theirs in self.by_order else ''}")
        if any(names.plain(theirs) != ours for theirs, ours in self.given.items()):
            lines.append(f"arguments: {', '.join(pairs)}")
        first = self.about["cases"][0]["keywords"]
        for key, x in self.constants.items():
            if first[key] != x:
                whose = "the paper's" if self.section == "gspo" else "yours"
                lines.append(f"{key} is {x:.4g}, {whose}: the cases are computed with it")
        what = "rewards" if self.shape in GROUPS else "advantages"
        facts = {
            "it takes no mask: tested without padding; set what follows the end to 0": self.lacks_mask,
            "it takes no old log-probs: tested where every ratio is 1": self.lacks_old,
            "it returns terms, (B, T): tested after the paper's mean": self.returns_terms,
            "tested in float32, since float64 fails": self.dtype == torch.float32,
            f"{what} are passed as {self.shape}": self.shape != SHAPES[0],
        }
        return lines + [line for line, is_so in facts.items() if is_so]


def main_output(result):
    """What a function returns, the first of a tuple, or the "loss" of a dict or object, as a tensor."""
    if result is None:
        raise Misfit("it returns None: is a `return` missing?")
    if isinstance(result, Mapping):
        result = result["loss"]
    result = getattr(result, "loss", result)
    return torch.as_tensor(result[0] if isinstance(result, (tuple, list)) else result)


def gradient_of(output, first, coefficients):
    total = (output * torch.tensor(coefficients)).sum()
    if not total.requires_grad:
        return 0
    (gradient,) = torch.autograd.grad(total, first, allow_unused=True)
    return 0 if gradient is None else gradient.double().numpy()


def shaped(found, expected, case):
    """An array of answers in the shape of the expected ones, 0 in masked places."""
    if found.squeeze().shape == expected.squeeze().shape:
        found = found.reshape(expected.shape)
    found = np.broadcast_to(found, expected.shape)  # an error, if it cannot be
    mask = np.array(case["inputs"].get("mask", 1))
    return np.where(mask, found, 0) if expected.shape[-1:] == mask.shape[-1:] else found
