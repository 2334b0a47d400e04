"""Calls a function with the cases of vectors.json, and compares its answers with the expected ones."""

import copy
import inspect
import json
import linecache
import math
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from rl_loss_vectors.names import COUNTS, RETURNS, Binding, Misfit, bind, constant_of
from rl_loss_vectors.names import is_required, plain, resolved, words_in
from rl_loss_vectors.reference import LOSSES, fields_of, with_results

VECTORS = json.loads((Path(__file__).parent / "vectors.json").read_text())
BY_TOKENS = ["ppo", "dapo", "vapo", "cispo", "value_loss"]  # a mean over all tokens of the step
SHAPES = {"B1": "(B, 1)", "BT": "(B, T)", "B": "(B,)"}  # of advantages
LAYOUTS = ["PG", "N", "GP", "G"]  # of rewards: N is flat, G is one group at a time
KINDS = [(torch.float64, "bool"), (torch.float64, "float"), (torch.float32, "bool")]
KINDS += [(torch.float32, "float"), (np.float64, "bool")]


class Answer(NamedTuple):
    """What a function returns for a case, as arrays of float64."""

    value: np.ndarray
    gradient: "np.ndarray | None"


def close(x, y, tolerance):
    """Whether x is y, up to float32's rounding error relative to the largest number."""
    size = np.abs(np.nan_to_num(y)).max(initial=0)
    with np.errstate(invalid="ignore"):  # of infinities
        is_near = np.abs(x - y) <= tolerance * (1 + size)
    return bool((is_near | (x == y) | (np.isnan(x) & np.isnan(y))).all())


def same(answer, other, tolerance, parts=(0, 1)):
    """parts: 0 for the value, 1 for the gradient."""
    return all(close(answer[k], other[k], tolerance) for k in parts if other[k] is not None)


def expected(case):
    gradient = np.array(case["gradient"]) if "gradient" in case else None
    return Answer(np.array(case["value"], float), gradient)


def answer(call, section, case, returns_terms=False):
    """What call({name: tensor or number}) gives in a case: its value and gradient, summed over the
    case's micro-batches."""
    fields = fields_of(case) | {key: case[key] for key in COUNTS if key in case}
    ours = expected(case)
    gradient = None if ours.gradient is None else np.zeros(ours.gradient.shape)
    value = 0
    for rows in case.get("micro_batches", [slice(None)]):
        part = {key: x[rows] if torch.is_tensor(x) else x for key, x in fields.items()}
        first = part[VECTORS["sections"][section]["arguments"][0]]
        first.requires_grad_(gradient is not None)
        output = call(part)
        if returns_terms:
            divisors = torch.tensor(case["denominator"])[rows]
            output = (torch.where(part["mask"].bool(), output, 0) / divisors).sum()
        if gradient is not None:
            gradient[rows] = gradient_of(output, first, case.get("coefficients", 1))
        value = value + output.detach().cpu().double().numpy()
    if ours.value.size > 1:
        value = shaped(value, ours.value, case)
    elif value.size != 1:
        raise Misfit(f"a loss is one number, not a tensor of shape {value.shape}")
    return Answer(value.reshape(ours.value.shape), gradient)


def gradient_of(output, first, coefficients):
    total = (output * torch.tensor(coefficients)).sum()
    if not total.requires_grad:
        return 0
    (gradient,) = torch.autograd.grad(total, first, allow_unused=True)
    return 0 if gradient is None else gradient.double().numpy()


def shaped(found, expected, case):
    """An array of answers in the shape of the expected ones, 0 in masked places."""
    is_row = 1 in (found.squeeze().ndim, expected.squeeze().ndim)
    if found.size == expected.size and is_row:
        found = found.reshape(expected.shape)
    found = np.broadcast_to(found, expected.shape)  # an error, if it cannot be
    mask = np.array(case["inputs"].get("mask", 1))
    return np.where(mask, found, 0) if expected.shape[-1:] == mask.shape[-1:] else found


def main_output(result):
    """What a function returns, the first of a tuple, or the "loss" of a dict or object, as a tensor."""
    if isinstance(result, Mapping):
        result = result["loss"]
    result = getattr(result, "loss", result)
    is_pair = isinstance(result, list) and not all(isinstance(x, type(result[0])) for x in result)
    result = result[0] if isinstance(result, tuple) or is_pair else result
    if isinstance(result, list) and torch.is_tensor(result[0]):
        result = torch.stack(result)
    if result is None:
        raise Misfit("it returns None: is a `return` missing?")
    if not isinstance(result, (torch.Tensor, np.ndarray, np.number, int, float, list)):
        raise Misfit(f"it returns an object of type {type(result).__name__}")
    return torch.as_tensor(result)


def ours(section):
    """Our numbers and options in a section."""
    about = VECTORS["sections"][section]
    keywords = about["cases"][0]["keywords"] | about["defaults"]
    return {key: x for key, x in keywords.items() if not isinstance(x, list)}


def parameters_of(function):
    try:  # a module's parameters are in `forward`, which its __call__ hides
        return inspect.signature(getattr(function, "forward", function)).parameters
    except (TypeError, ValueError) as error:
        misfit = Misfit(f"its parameters cannot be read: {error}")
        misfit.parameters = {} if callable(function) else None
        raise misfit from error


class ByDifferences(torch.autograd.Function):
    """The gradient of a numpy function: central differences."""

    @staticmethod
    def forward(ctx, x, function):
        steps = 1e-5 * torch.eye(x.numel(), dtype=x.dtype).view(-1, *x.shape)
        both = [[float(function(y)) for y in (x + step, x - step)] for step in steps]
        ctx.gradient = torch.tensor(both, dtype=x.dtype).diff(dim=1).view(x.shape) / -2e-5
        return torch.tensor(float(function(x)), dtype=x.dtype)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.gradient, None


@dataclass(eq=False)
class Subject:
    """A function under test, and how it is called."""

    function: Callable
    section: str  # of vectors.json: "grpo", "gae" ...
    binding: Binding
    fixed: dict  # {parameter: value, Settings, or the name of one of our tensors}
    shape: str  # of advantages
    layout: str  # of rewards
    dtype: object  # of torch or numpy
    mask: str  # "bool", or "float": 0 and 1
    # The share of what one row's A moves that is that row's own gradient; None if there is no gradient,
    # NaN if two calls with the same arguments differ.
    separation: "float | None" = 1.0

    def __post_init__(self):
        self.about = VECTORS["sections"][self.section]
        self.is_loss = self.section in LOSSES
        self.parameters = parameters_of(self.function)
        self.lacks_mask = "mask" in self.about["arguments"] and not self.takes("mask")
        needs_old = self.is_loss and self.section not in ("reinforce", "rloo")
        self.lacks_old = needs_old and not self.takes("old_logprobs")
        self.returns_terms = False
        if self.is_loss:  # it may return terms, (B, T), of which we then take the mean of its section
            part = fields_of(self.adapted(self.about["cases"][1], {}))
            self.returns_terms = self.call(part).shape == part["mask"].shape
        self.lacks_mask &= not self.returns_terms  # whoever averages the terms masks them

    @property
    def is_separate(self):
        return self.separation is None or self.separation > 0.999

    def names_of(self, key):
        """The parameters that get one of our tensors or numbers."""
        return [name for name, role in self.binding.tensors.items() if role == key]

    def takes(self, key):
        return bool(self.names_of(key)) or key in words_in(self.fixed)

    def needs(self, key):
        is_set = key in words_in(self.fixed)
        return is_set or any(is_required(self.parameters[name]) for name in self.names_of(key))

    def default(self, key):
        """The default of the parameter that gets this tensor or number, or None."""
        defaults = [self.parameters[name].default for name in self.names_of(key)]
        return next((x for x in defaults if x is not inspect.Parameter.empty), None)

    def is_off(self, keyword):
        """Whether a parameter that its name says is this constant is 0."""
        values = {name: x.default for name, x in self.parameters.items()} | self.fixed
        return any(x == 0 and constant_of(name, [keyword]) for name, x in values.items())

    def why_not(self, case):
        """The reason why a case does not apply, or None."""
        for key, value in case["keywords"].items():
            if isinstance(value, list) and not self.takes(key):
                return f"it takes no {key}"
            if isinstance(value, (bool, str)) and value != self.about["defaults"].get(key):
                return f"it needs {key}={value}"
        count = "num_tokens" if self.section in BY_TOKENS else "num_sequences"
        if "micro_batches" in case and not self.takes(count):
            return f"it takes no {count} of the whole step, so it cannot be used in micro-batches"
        if "token_advantages" in case["tags"] and not self.reads_each_advantage():
            return "it takes one advantage for each completion"
        return None

    def reads_each_advantage(self):
        """Whether the A of a later token counts."""
        new = np.array([[-1.3, -0.4]])
        answers = []
        for A in (1.0, 3.0):
            inputs = {"logprobs": new, "old_logprobs": new, "advantages": np.array([[1.0, A]])}
            answers.append(self.probe(**inputs).gradient)
        return not np.array_equal(*answers)

    def adapted(self, case, settings):
        """A case adapted to the function: with our numbers, or its author's, which are the settings;
        without padding if it takes no mask; with ratios of 1 if it takes no old log-probs."""
        changed = copy.deepcopy(case)
        inputs, keywords = changed["inputs"], changed["keywords"]
        numbers = {key: x for key, x in ours(self.section).items() if not isinstance(x, (bool, str))}
        keywords |= {key: numbers[key] for key in {*numbers} & {*keywords}}
        if self.lacks_mask:
            inputs["mask"] = [[1 for _ in row] for row in inputs["mask"]]
            changed.pop("masked_places_hold", None)
        if self.lacks_old:
            inputs["old_logprobs"] = inputs["logprobs"]
        for key, same_as in (("ref_logprobs", "logprobs"), ("sampler_logprobs", "old_logprobs")):
            if self.needs(key):
                keywords.setdefault(key, inputs[same_as])
        if settings and "gradient" in case:
            # Inputs have two decimals, and so may an author's bound: no token may be exactly there.
            first = self.about["arguments"][0]
            for n, row in enumerate(inputs[first]):
                inputs[first][n] = [x + 1e-5 * math.sin(1 + 7 * n + t) for t, x in enumerate(row)]
        for key, x in settings.items():
            place = inputs if key in inputs else keywords
            place[key] = x
        return case if changed == case else with_results(self.section, changed)

    def call(self, part):
        """The function's output for {name: tensor or number}, as a tensor."""
        if self.is_loss and self.dtype is np.float64:
            return ByDifferences.apply(part["logprobs"], lambda x: self.output(part | {"logprobs": x}))
        if self.about["arguments"] != ["rewards"]:
            return self.output(part)
        R = part["rewards"]
        if self.layout == "G":
            return torch.stack([self.output({"rewards": x, "group_size": len(x)}).view(-1) for x in R])
        shaped = {"PG": R, "N": R.reshape(-1), "GP": R.T}[self.layout]
        found = self.output({"rewards": shaped, "group_size": R.shape[1]})
        return found.T if self.layout == "GP" else found

    def output(self, part):
        part = dict(part)
        if self.is_loss:
            A, mask = part["advantages"], part["mask"]
            counts = {"num_sequences": len(mask), "num_tokens": mask.sum().item()}
            part = {key: x for key, x in counts.items() if self.needs(key)} | part
            part["advantages"] = self.in_shape(A, mask)
        if self.section == "value_loss":
            part[RETURNS] = part["returns"] - part["old_values"]
        part = {name: self.native(x, name) for name, x in part.items()}
        values = {name: resolved(x, part) for name, x in self.fixed.items() if name in self.parameters}
        values |= self.binding.constants
        for name, role in self.binding.tensors.items():
            if role in part or is_required(self.parameters[name]):
                values[name] = part.get(role)
        kinds = {name: x.kind for name, x in self.parameters.items() if name in values}
        first = [name for name, kind in kinds.items() if kind == inspect.Parameter.POSITIONAL_ONLY]
        positional = [values.pop(name) for name in first]
        result = self.function(*positional, **values)
        if self.section != "gae":
            return main_output(result)
        pair = result[:2] if isinstance(result, (tuple, list)) else [result, result + part["values"]]
        return torch.stack([main_output(x) for x in pair])

    def in_shape(self, A, mask):
        if self.shape == "BT":
            return A.expand_as(mask).clone()
        return A.view(len(mask)) if self.shape == "B" else A

    def native(self, x, name):
        """As the function takes it: a dtype, or numpy."""
        if name in COUNTS and self.dtype is not np.float64:
            return torch.as_tensor(x)  # as trainers pass it
        if not torch.is_tensor(x):
            return x
        if self.dtype is np.float64:
            return x.detach().numpy().copy()
        is_number = x.is_floating_point() or (name, self.mask) == ("mask", "float")
        return x.to(self.dtype) if is_number else x

    def answer(self, case):
        return answer(self.call, self.section, case, self.returns_terms)

    def probe(self, **inputs):
        """Its answer for arrays of our own and numbers. Without a word about them, the mask is 1, the
        reference is the policy, and the sampler the old policy; None leaves the reference out."""
        first = next(iter(inputs.values()))
        inputs = {"mask": np.ones(first.shape), "router_shift": np.ones(first.shape)} | inputs
        if self.is_loss:
            same = {"ref_logprobs": inputs["logprobs"], "sampler_logprobs": inputs["old_logprobs"]}
            inputs = same | inputs
        lists = {name: np.asarray(x).tolist() for name, x in inputs.items() if x is not None}
        case = {"inputs": lists, "keywords": {}, "denominator": np.ones((len(first), 1))}
        zeros = 0.0 * first
        if self.is_loss or self.section == "value_loss":
            return self.answer(case | {"value": 0.0, "gradient": zeros})
        return self.answer(case | {"value": [zeros, zeros] if self.section == "gae" else zeros})

    def notes(self, constants):
        """Lines: which parameter got what, and how. constants: those of the constructor."""
        tensors = self.binding.tensors
        given = [f"{name} is {role}" for name, role in tensors.items() if plain(name) != role]
        filled = [f"{name}={x}" for name, x in (constants | self.binding.constants).items()]
        order = "by their order, since no name is known: " if self.binding.by_order else ""
        numpy_note = "it is called with numpy arrays"
        numpy_note += "; gradients are differences of its values" if self.is_loss else ""
        no_kl = "kl_coef" in ours(self.section) and not self.takes("ref_logprobs")
        left = [name for name, x in self.parameters.items() if x.default is None]
        left = [name for name in left if name not in tensors and name not in self.fixed]
        facts = {
            f"{order}{', '.join(given)}": given,
            f"not passed, since their names say nothing: {', '.join(left)}": left,
            f"filled in: {', '.join(filled)}": filled,
            "it takes no reference: no KL was tested": no_kl,
            "it takes no mask: tested without padding": self.lacks_mask,
            "it takes no old log-probs: tested where every ratio is 1": self.lacks_old,
            "it returns terms, (B, T): tested after the paper's mean": self.returns_terms,
            "tested in float32, since float64 fails": self.dtype is torch.float32,
            numpy_note: self.dtype is np.float64,
            f"advantages are passed as {SHAPES[self.shape]}": self.shape != "B1",
            f"rewards are passed as {self.layout}": self.layout != "PG",
        }
        return [line for line, is_so in facts.items() if is_so]


# ---------------------------------------------------------------------------- how a function is called


def fitted(function, section, fixed=None, layout=None):
    """The Subject of a function: in float64 if it takes that, or else float32 or numpy; advantages in
    the shape for which changing one row's A moves that row's gradient alone, or else as (B, 1)."""
    fixed = fixed or {}
    arguments = VECTORS["sections"][section]["arguments"]
    parameters = parameters_of(function)
    binding = bind(parameters, arguments, section, ours(section), fixed)
    layout = layout or ("N" if "group_size" in binding.tensors.values() else "PG")
    errors = []
    for kind in KINDS:
        found = []
        for shape in SHAPES if section in LOSSES else ["B1"]:
            try:
                subject = Subject(function, section, binding, fixed, shape, layout, *kind)
                subject.separation = separation(subject)
                found.append(subject)
            except (Exception, SystemExit) as error:
                errors.append((rank(error, kind), error))
        with_gradient = [subject for subject in found if subject.separation is not None]
        separate = [subject for subject in with_gradient if subject.is_separate]
        if found:
            return [*separate, *with_gradient, *found][0]
    _, error = min(errors, key=lambda pair: pair[0])
    if not isinstance(error, Misfit):
        place = traceback.extract_tb(error.__traceback__)[-1]
        line = linecache.getline(place.filename, place.lineno).strip()
        why = f"{type(error).__name__}: {str(error) or line}"
        error = Misfit(f"it raises {why} ({place.filename}, line {place.lineno})")
    error.known, error.parameters = binding.tensors | binding.constants, parameters
    raise error


def rank(error, kind):
    """The most telling error comes first: what is not about a dtype, since some functions take no bool
    mask, some nothing else, and few take numpy; and a Misfit, since the function has returned."""
    is_about_dtype = any(hint in str(error) for hint in ("bool", "indices", "numpy"))
    return is_about_dtype, kind[0] is np.float64, not isinstance(error, Misfit)


def separation(subject):
    """How much of what one row's advantage moves is that row's own gradient. It is 1 for all that is no
    loss."""
    if not subject.is_loss:
        subject.answer(subject.adapted(subject.about["cases"][0], {}))
        return 1.0
    new = np.array([[-1.3, -0.4, -2.1, -0.7], [-0.2, -1.1, -0.6, -3.0], [-0.9, -0.3, -1.7, -0.5]])
    first, again, second = (
        subject.probe(logprobs=new, old_logprobs=new, advantages=np.array([[1.0], [A], [2.0]])).gradient
        for A in (-0.5, -0.5, -0.8)
    )
    if not np.array_equal(first, again, equal_nan=True):
        return math.nan
    if np.abs(first).max() < 1e-12:
        return None
    moved = np.abs(second - first).sum(1)
    return float(moved[1] / moved.sum()) if moved.sum() > 0 else 1.0
