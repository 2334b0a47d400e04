"""Calls a function with the cases of vectors.json, and compares its answers with the expected ones."""

import inspect
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

VECTORS = json.loads((Path(__file__).parent / "vectors.json").read_text())
COUNTS = ("num_sequences", "num_tokens")
BOOLEAN = ("mask", "is_right")
INTEGER = ("indices", "group_ids", "rollout_ids")
# The name of a parameter that takes an argument contains this. "old" is looked for first, since
# old_log_prob contains "log" as well.
HINTS = {
    "old_logprobs": "old",
    "old_values": "old",
    "old_scores": "old",
    "rollout_logprobs": "roll|sampl",
    "logprobs": "log|lp",
    "advantages": "adv",
    "rewards": "rew",
    "values": "val",
    "returns": "ret",
}


class Answer(NamedTuple):
    """What a function answers in a case, as arrays of float64."""

    value: np.ndarray
    gradient: "np.ndarray | None"
    is_float32: bool  # the function computes in float32, or less


def array(x, name=""):
    if name in BOOLEAN:
        return np.array(x, dtype=bool)
    return np.array(x, dtype=np.int64 if name in INTEGER else np.float64)


def close(x, y, tolerance, is_float32=False):
    """Whether x is y. Where y is NaN, as some mistakes give it, any x will do."""
    size = np.abs(np.nan_to_num(y))
    if is_float32:
        size = size.max(initial=0)
    with np.errstate(invalid="ignore"):  # of infinities
        is_near = np.abs(x - y) <= tolerance * (1 + size)
    return bool((is_near | np.isnan(y) | (x == y)).all())


def same(answer, value, gradient, tolerance):
    """Whether an answer is (value, gradient), within the tolerance of its precision."""
    allowed = tolerance["float32" if answer.is_float32 else "float64"]
    if not close(answer.value, value, allowed, answer.is_float32):
        return False
    return gradient is None or close(answer.gradient, gradient, allowed, answer.is_float32)


class Misfit(Exception):
    """A function that cannot be called at all; the message is one line for its author."""


def parameters_of(function):
    """{name: parameter}; those of a module are in `forward`, which its __call__ hides."""
    if inspect.isclass(function):
        raise Misfit(f"{function.__name__} is a class: pass an instance of it, or a function")
    if not callable(function):
        raise Misfit(f"it is no function: {function!r}")
    return inspect.signature(getattr(function, "forward", function)).parameters


def in_order(arguments, parameters):
    """The arguments of a section in the order in which a function takes them, which the names of its
    parameters tell. Those whose names tell nothing are taken in our order."""
    kinds = [parameter.kind for parameter in parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return list(arguments)
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [name for name, parameter in parameters.items() if parameter.kind in by_position]
    if len(names) < len(arguments):
        raise Misfit(
            f"it takes {len(names)} arguments ({', '.join(names)}), not {len(arguments)}: "
            f"{', '.join(arguments)}"
        )
    found = {}
    for argument in sorted(arguments, key=lambda argument: HINTS.get(argument) != "old"):
        for name in names[: len(arguments)]:
            if name not in found and re.search(HINTS.get(argument, argument), name.lower()):
                found[name] = argument
                break
    rest = iter([argument for argument in arguments if argument not in found.values()])
    return [found[name] if name in found else next(rest) for name in names[: len(arguments)]]


@dataclass(eq=False)
class Subject:
    """A function under test."""

    function: Callable  # of its section's arguments and of keywords; names may end in _BT and the like
    section: str  # of vectors.json: "grpo", "gae" ...
    dtype: str = "float64"  # or "float32": of the tensors that it gets
    rename: dict = field(default_factory=dict)  # {our keyword: its own}
    advantages: str = "as in the file"  # or "BT", "B1", "B": their shape
    mask: str = "bool"  # or "float": 0 and 1 in the dtype
    diagnosis: "list | None" = None  # once it has been asked for

    def __post_init__(self):
        self.about = VECTORS["sections"][self.section]
        self.parameters = parameters_of(self.function)
        self.arguments = in_order(self.about["arguments"], self.parameters)

    def names(self, case):
        """{our keyword: theirs} of what a case sets and the function takes."""
        theirs = {
            re.sub("_[A-Z][A-Z0-9]*$", "", name): name for name in self.parameters
        }  # mask_BT -> mask
        given = [*case["keywords"], *(key for key in COUNTS if key in case)]
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in self.parameters.values()):
            theirs |= {key: key for key in given}
        theirs |= self.rename
        return {key: theirs[key] for key in given if key in theirs}

    def why_not(self, case):
        """The reason why a case does not apply, or None."""
        names = self.names(case)
        values = {}
        for key, value in case["keywords"].items():
            if key not in names and value != self.about["defaults"].get(key):
                return f"it has no keyword {key}"
            if key in names and values.setdefault(names[key], value) != value:
                return f"it has one keyword {names[key]} for two"
        if "micro_batches" in case and not set(COUNTS) & set(names):
            return "it cannot be used in micro-batches: it has no count of the whole step"
        if self.advantages in ("B", "B1") and len(case["inputs"].get("advantages", [[0]])[0]) > 1:
            return "it takes one advantage for each completion"
        return None

    def fields(self, case):
        """What a case gives a function: tensors and numbers, by name."""
        given = case["inputs"] | case["keywords"] | {key: case[key] for key in COUNTS if key in case}
        fields = {
            key: torch.tensor(array(x, key)) if isinstance(x, list) else x for key, x in given.items()
        }
        if "logprobs" in fields and "advantages" in fields:
            if self.advantages == "BT":
                fields["advantages"] = fields["advantages"].expand_as(fields["logprobs"]).clone()
            elif self.advantages == "B":
                fields["advantages"] = fields["advantages"][:, 0]
        if "masked_places_hold" in case:
            for key, x in fields.items():
                if np.shape(x) == fields["mask"].shape and key != "mask":
                    fields[key] = torch.where(fields["mask"], x, float(case["masked_places_hold"]))
        return {key: self.cast(x) for key, x in fields.items()}

    def cast(self, x):
        if not torch.is_tensor(x):
            return x
        is_mask_of_numbers = x.dtype == torch.bool and self.mask == "float"
        return x.to(getattr(torch, self.dtype)) if x.is_floating_point() or is_mask_of_numbers else x

    def expected(self, case):
        """(value, gradient or None)"""
        return array(case["value"]), array(case["gradient"]) if "gradient" in case else None

    def answer(self, case):
        fields = self.fields(case)
        expected, expected_gradient = self.expected(case)
        gradient = None if expected_gradient is None else np.zeros(expected_gradient.shape)
        outputs = []
        for rows in case.get("micro_batches", [slice(None)]):
            part = {key: x[rows] if torch.is_tensor(x) else x for key, x in fields.items()}
            given = {name: part[key] for key, name in self.names(case).items()}
            first = part[self.about["arguments"][0]]
            first.requires_grad_(gradient is not None)
            result = self.function(*(part[key] for key in self.arguments), **given)
            output = gae_output(result) if self.section == "gae" else main_output(result)
            if gradient is not None:
                gradient[rows] = gradient_of(output, first, case.get("coefficients", 1))
            outputs.append(output.detach().cpu())
        is_float32 = self.dtype == "float32" or outputs[0].dtype != torch.float64
        value = sum(output.double() for output in outputs).numpy()
        if expected.size > 1:
            value = shaped(value, expected, case)
        elif value.size != 1:
            raise ValueError(f"a loss is one number, not a tensor of shape {value.shape}")
        return Answer(value.reshape(expected.shape), gradient, is_float32)


def main_output(result):
    """What a function returns, or the first of a tuple, or the "loss" of a dict, as a tensor."""
    if isinstance(result, Mapping):
        if "loss" not in result:
            raise ValueError(f'it returns a dict without "loss": {", ".join(map(str, result))}')
        result = result["loss"]
    return torch.as_tensor(result[0] if isinstance(result, tuple) else result)


def gae_output(result):
    """Advantages and returns, one above the other."""
    return torch.stack([torch.as_tensor(x) for x in result[:2]])


def gradient_of(output, first, coefficients):
    total = (output * torch.tensor(coefficients)).sum()
    if not total.requires_grad:
        return 0
    (gradient,) = torch.autograd.grad(total, first, allow_unused=True)
    return 0 if gradient is None else gradient.double().numpy()


def shaped(found, expected, case):
    """An array of answers in the shape of those that are expected, 0 in masked places."""
    if found.squeeze().shape == expected.squeeze().shape:
        found = found.reshape(expected.shape)
    found = np.broadcast_to(found, expected.shape)  # an error, if it cannot be
    mask = array(case["inputs"].get("mask", 1), "mask")
    return np.where(mask, found, 0) if expected.shape[-1:] == mask.shape[-1:] else found
