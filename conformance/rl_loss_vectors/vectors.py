"""Calls a function with the cases of vectors.json, and compares what it answers. Needs numpy, and torch
for functions of tensors alone."""

import inspect
import itertools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

VECTORS = json.loads((Path(__file__).parent / "vectors.json").read_text())
COUNTS = ("num_sequences", "num_tokens")
BOOLEAN = ("mask", "is_right")
INTEGER = ("indices", "group_ids", "rollout_ids")


class Answer(NamedTuple):
    """Of a function in a case, as arrays of float64."""

    value: np.ndarray
    gradient: "np.ndarray | None"  # None if there is none to compare
    is_float32: bool  # the function computes in float32, or less
    is_difference: bool  # the gradient is made of finite differences


def array(x, name=""):
    if name in BOOLEAN:
        return np.array(x, dtype=bool)
    return np.array(x, dtype=np.int64 if name in INTEGER else np.float64)


def close(x, y, tolerance, is_float32=False):
    """Whether x is y. Where y is NaN (as what some mistakes give), any x will do."""
    size = np.abs(np.nan_to_num(y))
    if is_float32:
        size = size.max(initial=0)
    with np.errstate(invalid="ignore"):  # of infinities
        is_near = np.abs(x - y) <= tolerance * (1 + size)
    return bool((is_near | np.isnan(y) | (x == y)).all())


def same(answer, value, gradient, tolerance):
    """Whether an answer is (value, gradient), within the tolerance of its precision."""
    allowed = tolerance["float32" if answer.is_float32 else "float64"]
    is_near = close(answer.value, value, allowed, answer.is_float32)
    if not is_near or answer.gradient is None or gradient is None:
        return is_near
    rough = answer.is_float32 or answer.is_difference
    return close(answer.gradient, gradient, max(allowed, 1e-5 * answer.is_difference), rough)


@dataclass(eq=False)
class Subject:
    """A function under test."""

    function: Callable  # of its section's arguments and of keywords; names may end in _BT and the like
    section: str  # of vectors.json: "grpo", "gae" ...
    # "loss": it returns the loss; "terms": what the loss averages, (B, T) or (B, 1);
    # "reduction": it gets such terms and the mask, and returns the loss
    way: str = "loss"
    framework: str = "torch"  # or "numpy": of what it takes. In numpy it may return (value, gradient)
    dtype: str = "float64"  # or "float32": of what it takes
    rename: dict = field(default_factory=dict)  # {our keyword: its own}
    advantages: str = "as in the file"  # or "BT", "B1", "B": their shape
    mask: str = "bool"  # or "float": 0 and 1 in the dtype
    diagnosis: "list | None" = None  # once it has been asked for

    def __post_init__(self):
        self.about = VECTORS["sections"][self.section]
        self.arguments = ["terms", "mask"] if self.way == "reduction" else self.about["arguments"]

    def names(self, case):
        """{our keyword: theirs} of what a case sets and the function takes."""
        parameters = inspect.signature(self.function).parameters
        theirs = {re.sub("_[A-Z][A-Z0-9]*$", "", name): name for name in parameters}  # mask_BT -> mask
        given = [*self.keywords(case), *(key for key in COUNTS if key in case)]
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            theirs |= {key: key for key in given}
        theirs |= self.rename
        return {key: theirs[key] for key in given if key in theirs}

    def keywords(self, case):
        keywords = case["keywords"]
        if self.way == "reduction":  # which has no other settings
            return {key: value for key, value in keywords.items() if key == "max_new_tokens"}
        return keywords

    def why_not(self, case):
        """The reason why a case does not apply, or None."""
        names = self.names(case)
        if self.way != "loss" and "terms" not in case:
            return "its section has no terms"
        if self.way == "terms" and "masked_places_hold" in case:
            return "masked places are left to the reduction"
        if self.way == "reduction" and len(case["terms"][0]) != len(case["inputs"]["mask"][0]):
            return "it has one term for each completion"
        values = {}
        for key, value in self.keywords(case).items():
            if key not in names and value != self.about["defaults"].get(key):
                return f"it has no keyword {key}"
            if key in names and values.setdefault(names[key], value) != value:
                return f"it has one keyword {names[key]} for two"
        if "micro_batches" in case and self.way != "terms" and not set(COUNTS) & set(names):
            return "it cannot be used in micro-batches: it has no count of the whole step"
        if self.advantages in ("B", "B1") and len(case["inputs"].get("advantages", [[0]])[0]) > 1:
            return "it takes one advantage for each completion"
        return None

    def fields(self, case):
        """What a case gives a function, as arrays of numpy."""
        given = case["inputs"] | case["keywords"] | {key: case[key] for key in COUNTS if key in case}
        given |= {"terms": case["terms"]} if self.way == "reduction" else {}
        fields = {key: array(x, key) if isinstance(x, list) else x for key, x in given.items()}
        if "logprobs" in fields and "advantages" in fields:
            if self.advantages == "BT":
                shape = fields["logprobs"].shape
                fields["advantages"] = np.broadcast_to(fields["advantages"], shape).copy()
            elif self.advantages == "B":
                fields["advantages"] = fields["advantages"][:, 0]
        if "masked_places_hold" in case:
            for key, x in fields.items():
                if np.shape(x) == fields["mask"].shape and key != "mask":
                    fields[key] = np.where(fields["mask"], x, float(case["masked_places_hold"]))
        return {key: self.cast(x) for key, x in fields.items()}

    def cast(self, x):
        if not isinstance(x, np.ndarray):
            return x
        if x.dtype == np.float64 or x.dtype == bool and self.mask == "float":
            x = x.astype(self.dtype)
        if self.framework == "numpy":
            return x
        import torch

        return torch.from_numpy(x)

    def expected(self, case):
        """(value, gradient or None)"""
        if self.way == "reduction":
            return array(case["value"]), array(case["inputs"]["mask"]) / array(case["denominator"])
        value = case["terms"] if self.way == "terms" else case["value"]
        return array(value), array(case["gradient"]) if "gradient" in case else None

    def weights(self, case):
        """Of what is returned, whose weighted sum has the gradient of the case."""
        if self.way != "terms":
            return array(case.get("coefficients", 1))
        weights = 1 / array(case["denominator"])
        return weights * array(case["inputs"]["mask"]) if len(case["terms"][0]) > 1 else weights

    def answer(self, case):
        fields = self.fields(case)
        weights = self.weights(case)
        expected, expected_gradient = self.expected(case)
        micro_batches = [slice(None)]
        if self.way != "terms":
            micro_batches = case.get("micro_batches", micro_batches)
        outputs = []
        gradient = None if expected_gradient is None else np.zeros(expected_gradient.shape)
        is_difference = False
        for rows in micro_batches:
            part = {key: x[rows] if hasattr(x, "shape") else x for key, x in fields.items()}
            first, *others = [part[key] for key in self.arguments]
            given = {name: part[key] for key, name in self.names(case).items()}
            if expected_gradient is None:
                output = without_gradient(self.function(first, *others, **given), self.section)
                found = None
            elif self.framework == "torch":
                output, found = of_torch(self.function, first, others, given, weights)
            else:
                result = of_numpy(self.function, first, others, given, weights, case)
                output, found, is_difference = result
            outputs.append(output)
            if found is None or gradient is None:
                gradient = None
            else:
                gradient[rows] = found
        is_float32 = self.dtype == "float32" or outputs[0].dtype == np.float32
        value = sum(x.astype(np.float64) for x in outputs)
        if expected.size > 1:
            value = shaped(value, expected, case)
        elif value.size != 1:
            raise ValueError(f"a loss is one number, not an array of shape {value.shape}")
        return Answer(value.reshape(expected.shape), gradient, is_float32, is_difference)


def without_gradient(result, section):
    """The array, or GAE's two, that a function returns."""
    outputs = result if isinstance(result, tuple) else (result,)
    if section == "gae":
        return np.stack([numbers(x) for x in outputs[:2]])
    return numbers(outputs[0])


def shaped(found, expected, case):
    """An array of answers in the shape of those that are expected, 0 in masked places."""
    if found.squeeze().shape == expected.squeeze().shape:
        found = found.reshape(expected.shape)
    found = np.broadcast_to(found, expected.shape)  # an error, if it cannot be
    mask = array(case["inputs"].get("mask", 1), "mask")
    return np.where(mask, found, 0) if expected.shape[-1:] == mask.shape[-1:] else found


def numbers(x):
    """As an array of numpy, in its own precision, except that bfloat16 becomes float32."""
    if hasattr(x, "detach"):
        x = x.detach()
        x = x.float() if x.element_size() < 4 else x
        return x.cpu().numpy()
    return np.asarray(x)


def of_torch(function, first, others, given, weights):
    """(value, gradient)"""
    import torch

    first.requires_grad_()
    result = function(first, *others, **given)
    output = torch.as_tensor(result[0] if isinstance(result, tuple) else result)
    weights = torch.from_numpy(weights)
    if output.dim() == 1 and weights.dim() == 2:
        weights = weights.squeeze(1)
    total = (torch.where(weights != 0, output, 0) * weights).sum()
    gradient = None
    if total.requires_grad:
        (gradient,) = torch.autograd.grad(total, first, allow_unused=True)
    if gradient is None:
        gradient = torch.zeros(first.shape)
    return numbers(output), numbers(gradient).astype(np.float64)


def of_numpy(function, first, others, given, weights, case):
    """(value, gradient or None, whether it is made of finite differences)"""

    def output_of(x):
        copies = [np.copy(y) for y in others]  # it may change what it is given
        result = function(x, *copies, **given)
        first, *rest = result if isinstance(result, tuple) else (result,)
        has_gradient = bool(rest) and np.shape(rest[0]) == x.shape
        return np.asarray(first), np.asarray(rest[0]) if has_gradient else None

    def total_of(x):
        return (np.where(weights != 0, output_of(x)[0], 0) * weights).sum()

    output, gradient = output_of(first.copy())
    if gradient is not None:
        return output, gradient, False
    if case.get("stop_gradient") or output.dtype == np.float32:
        return output, None, False  # there is none, or too little precision for differences
    gradient = np.zeros(first.shape)
    for place in itertools.product(*map(range, first.shape)):
        step = np.zeros(first.shape)
        step[place] = 1e-5
        gradient[place] = (total_of(first + step) - total_of(first - step)) / 2e-5
    return output, gradient, True


# --------------------------------------------------------------------------------------------- pytest


class Check(NamedTuple):
    """A case and the function that is to pass it: `check()` in the body of a test."""

    subject: Subject
    case: dict

    def __repr__(self):
        return self.case["id"]

    def check(self):
        """An AssertionError with the diagnosis of all cases, if the function does not agree."""
        answer = self.subject.answer(self.case)
        value, gradient = self.subject.expected(self.case)
        if same(answer, value, gradient, self.case["tolerance"]):
            return
        from rl_loss_vectors import doctor

        if self.subject.diagnosis is None:
            self.subject.diagnosis = doctor.diagnosis(self.subject, doctor.examine(self.subject))
        healthy = ["all cases agree within the tolerance of float32: pass dtype='float32'"]
        lines = [doctor.difference(self.case, answer, value, gradient)]
        lines += self.subject.diagnosis or healthy
        raise AssertionError("\n".join(lines))


def cases(section, call, xfails=None, **how):
    """The cases of a section for `pytest.mark.parametrize`, each with its id; `how`: as of Subject.

    Cases that do not apply are skipped. xfails: a file with the ids of known differences, one a line,
    and a reason after #. They are strict: a case of the file that passes is a failure. Ids of other
    sections are ignored.
    """
    import pytest

    subject = Subject(call, section, **how)
    known = {}
    lines = Path(xfails).read_text().splitlines() if xfails else []
    for line in lines:
        id, _, words = line.partition("#")
        if id.strip():
            known[id.strip()] = words.strip()
    parameters = []
    for case in subject.about["cases"]:
        why_not = subject.why_not(case)
        marks = []
        if case["id"] in known and not why_not:
            reason = known.pop(case["id"])
            marks = [pytest.mark.xfail(strict=True, reason=reason, raises=AssertionError)]
        elif why_not:
            marks = [pytest.mark.skip(reason=why_not)]
        parameters.append(pytest.param(Check(subject, case), id=case["id"], marks=marks))
    strangers = [id for id in known if id.rsplit("-", 1)[0] == section]
    if strangers:
        raise ValueError(f"{xfails}: no such case, or it does not apply: {', '.join(strangers)}")
    return parameters
