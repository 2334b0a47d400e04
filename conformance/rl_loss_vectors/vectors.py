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
from rl_loss_vectors.names import Misfit
from rl_loss_vectors.reference import LOSSES, fields_of, with_results

VECTORS = json.loads((Path(__file__).parent / "vectors.json").read_text())
COUNTS = ["num_sequences", "num_tokens"]  # of the whole step
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
        self.keywords = {*COUNTS}.union(*(case["keywords"] for case in self.about["cases"]))
        # A module's parameters are in `forward`, which its __call__ hides.
        function = getattr(self.function, "forward", self.function)
        self.parameters = inspect.signature(function).parameters
        kinds = [parameter.kind for parameter in self.parameters.values()]
        self.takes_all = inspect.Parameter.VAR_KEYWORD in kinds
        wanted = self.about["arguments"]
        assigned = names.assign(self.parameters, self.section, wanted, self.keywords, self.fixed)
        self.given, self.by_order = assigned
        lacking = {*wanted} - {*self.given.values()}
        self.lacks_mask = "mask" in lacking
        self.lacks_old = "old_logprobs" in lacking and self.section not in ("reinforce", "rloo")
        self.has_ref = self.takes("ref_logprobs")  # then it gets one in each case
        if self.returns_terms:
            self.lacks_mask = False  # whoever averages the terms masks them

    def takes(self, key):
        return key in self.given.values()

    def ignores(self, case, keys):
        """Whether the answer is the same without these keywords."""
        return not self.takes_all or same(self.answer(case, keys), self.answer(case), 1e-9)

    def why_not(self, case):
        """The reason why a case does not apply, or None."""
        for key, value in case["keywords"].items():
            is_default = value == self.about["defaults"].get(key)
            is_known = is_default or key in self.constants or self.takes(key)
            if not is_known and self.ignores(case, {key}):
                return f"it has no keyword {key}"
        has_count = any(self.takes(key) for key in COUNTS)
        if "micro_batches" in case and not has_count and self.ignores(case, {*COUNTS}):
            return "it cannot be used in micro-batches: it has no count of the whole step"
        return None

    @functools.cached_property
    def returns_terms(self):
        """Whether a loss returns (B, T), of which we then take the mean of its section."""
        try:
            part = self.fields(self.adapted(self.about["cases"][0]))
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
        fields = fields_of(case) | {key: case[key] for key in COUNTS if key in case}
        if self.section == "value_loss":
            fields[names.RETURNS] = fields["returns"] - fields["old_values"]
        if self.about["arguments"] == ["rewards"]:
            fields["group_size"] = fields["rewards"].shape[1]
        if self.shape == "BT":
            fields["advantages"] = fields["advantages"].expand_as(fields["mask"]).clone()
        if self.shape == "B":  # an error, if there is one for each token
            fields["advantages"] = fields["advantages"].view(len(fields["mask"]))
        if self.shape == "N":
            fields["rewards"] = fields["rewards"].reshape(-1)
        if self.shape == "GP":
            fields["rewards"] = fields["rewards"].T
        for name, x in fields.items():
            if torch.is_tensor(x) and (x.is_floating_point() or (name, self.mask) == ("mask", "float")):
                fields[name] = x.to(self.dtype)
        return fields | {"zero": 0.0}

    def call(self, part):
        named = {key: x for key, x in self.fixed.items() if key in self.parameters}
        for name, key in self.given.items():
            if key in part or self.parameters[name].default is inspect.Parameter.empty:
                named[name] = part.get(key)
        if self.takes_all:
            named |= {key: x for key, x in part.items() if key in self.keywords and not self.takes(key)}
        result = self.function(**named)
        if self.section == "gae":  # advantages and returns, one above the other
            return torch.stack([torch.as_tensor(x) for x in result[:2]])
        return main_output(result)

    def output(self, part):
        """What it returns; if it takes one group of rewards, for one group after the other."""
        if self.shape == "G":
            return torch.stack([self.call(part | {"rewards": x}).reshape(-1) for x in part["rewards"]])
        found = self.call(part)
        return found.T if self.shape == "GP" else found

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
        if any(not theirs.startswith(ours) for theirs, ours in self.given.items()):
            lines.append(f"arguments: {', '.join(pairs)}")
        for key, x in self.constants.items():
            lines.append(f"{key} is {x:.4g}, as the paper allows: the cases are computed with it")
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
    if found.size == expected.size and 1 in (found.ndim, expected.ndim):
        found = found.reshape(expected.shape)
    found = np.broadcast_to(found, expected.shape)  # an error, if it cannot be
    mask = np.array(case["inputs"].get("mask", 1))
    return np.where(mask, found, 0) if expected.shape[-1:] == mask.shape[-1:] else found
