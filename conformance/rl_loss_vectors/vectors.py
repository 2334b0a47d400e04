"""Calls a function with the cases of vectors.json, and compares its answers with the expected ones."""

import inspect
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from rl_loss_vectors.reference import LOSSES, fields_of

VECTORS = json.loads((Path(__file__).parent / "vectors.json").read_text())
COUNTS = ["num_sequences", "num_tokens"]


class Answer(NamedTuple):
    """What a function answers in a case, as arrays of float64."""

    value: np.ndarray
    gradient: "np.ndarray | None"


def close(x, y, tolerance):
    """Whether x is y, up to the rounding of float32 next to its largest number. Where y is NaN, as some
    mistakes give it, any x will do."""
    size = np.abs(np.nan_to_num(y)).max(initial=0)
    with np.errstate(invalid="ignore"):  # of infinities
        is_near = np.abs(x - y) <= tolerance * (1 + size)
    return bool((is_near | np.isnan(y) | (x == y)).all())


def same(answer, value, gradient, tolerance):
    """Whether an answer is (value, gradient)."""
    if not close(answer.value, value, tolerance):
        return False
    return gradient is None or close(answer.gradient, gradient, tolerance)


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
    """The arguments of a section in the order in which a function takes them. A parameter takes the
    argument that begins with three letters of its name; the others are taken in our order."""
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
    # "old" is looked for first, since old_log_prob contains "log" as well.
    for argument in sorted(arguments, key=lambda argument: not argument.startswith("old")):
        for name in names[: len(arguments)]:
            if name not in found and argument[:3] in name.lower():
                found[name] = argument
                break
    rest = iter([argument for argument in arguments if argument not in found.values()])
    return [found[name] if name in found else next(rest) for name in names[: len(arguments)]]


@dataclass(eq=False)
class Subject:
    """A function under test."""

    function: Callable  # of its section's arguments and of keywords; names may end in _BT and the like
    section: str  # of vectors.json: "grpo", "gae" ...
    advantages: str = "as in the file"  # or "BT", "B1", "B": their shape
    mask: str = "bool"  # or "float": 0 and 1

    def __post_init__(self):
        self.about = VECTORS["sections"][self.section]
        self.parameters = parameters_of(self.function)
        self.arguments = in_order(self.about["arguments"], self.parameters)

    def names(self, case):
        """{our keyword: theirs} of what a case sets and the function takes; mask_BT is mask."""
        theirs = {re.sub("_[A-Z][A-Z0-9]*$", "", name): name for name in self.parameters}
        given = [*case["keywords"], *(key for key in COUNTS if key in case)]
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in self.parameters.values()):
            theirs |= {key: key for key in given}
        return {key: theirs[key] for key in given if key in theirs}

    def why_not(self, case):
        """The reason why a case does not apply, or None."""
        names = self.names(case)
        for key, value in case["keywords"].items():
            if key not in names and value != self.about["defaults"].get(key):
                return f"it has no keyword {key}"
        if "micro_batches" in case and not set(COUNTS) & set(names):
            return "it cannot be used in micro-batches: it has no count of the whole step"
        if self.advantages in ("B", "B1") and "token_advantages" in case["tags"]:
            return "it takes one advantage for each completion"
        return None

    def fields(self, case):
        """What a case gives a function: tensors and numbers, by name."""
        fields = fields_of(case)
        if self.section in LOSSES and self.advantages == "BT":
            fields["advantages"] = fields["advantages"].expand_as(fields["mask"]).clone()
        if self.section in LOSSES and self.advantages == "B":
            fields["advantages"] = fields["advantages"][:, 0]
        if "mask" in fields and self.mask == "float":
            fields["mask"] = fields["mask"].double()
        return fields | {key: case[key] for key in COUNTS if key in case}

    def expected(self, case):
        """(value, gradient or None)"""
        gradient = np.array(case["gradient"]) if "gradient" in case else None
        return np.array(case["value"], float), gradient

    def answer(self, case):
        fields = self.fields(case)
        expected, expected_gradient = self.expected(case)
        gradient = None if expected_gradient is None else np.zeros(expected_gradient.shape)
        value = 0
        for rows in case.get("micro_batches", [slice(None)]):
            part = {key: x[rows] if torch.is_tensor(x) else x for key, x in fields.items()}
            given = {name: part[key] for key, name in self.names(case).items()}
            first = part[self.about["arguments"][0]]
            first.requires_grad_(gradient is not None)
            result = self.function(*(part[key] for key in self.arguments), **given)
            output = gae_output(result) if self.section == "gae" else main_output(result)
            if gradient is not None:
                gradient[rows] = gradient_of(output, first, case.get("coefficients", 1))
            value = value + output.detach().cpu().double().numpy()
        if expected.size > 1:
            value = shaped(value, expected, case)
        elif value.size != 1:
            raise ValueError(f"a loss is one number, not a tensor of shape {value.shape}")
        return Answer(value.reshape(expected.shape), gradient)


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
    mask = np.array(case["inputs"].get("mask", 1))
    return np.where(mask, found, 0) if expected.shape[-1:] == mask.shape[-1:] else found
