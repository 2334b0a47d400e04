"""Calls a function with the cases of vectors.json: by the names of its parameters, or by their order.
Or it raises Refusal, and the author completes an adapter."""

import copy
import inspect
import itertools
import json
import math
import re
import traceback
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from rl_loss_vectors.reference import LOSSES, fields_of, with_results
from rl_loss_vectors.tables import is_separate

HERE = Path(__file__).parent
VECTORS = json.loads((HERE / "vectors.json").read_text())
COUNTS = ["num_sequences", "num_tokens"]  # of the whole step
BY_TOKENS = ["ppo", "dapo", "vapo", "cispo", "value_loss"]  # a mean over all tokens of the step
A_FOR_EACH_TOKEN = ["ppo", "vapo"]  # GAE's; in other papers all tokens of a completion share one A
SHAPES = ["B1", "BT", "B"]  # of advantages
KINDS = [*itertools.product([torch.float64, torch.float32], ["bool", "float"]), (np.float64, "bool")]
WORDS = {  # what a word of a parameter's name stands for; "" if it adds nothing
    "logprobs": "logprob logp logps lp lps logprobs",
    "new": "new current curr cur",
    "old": "old prev previous behavior behaviour",
    "ref": "ref reference",
    "advantages": "adv advs advantage advantages a",
    "mask": "mask masks",
    "rewards": "reward rewards scores",
    "values": "value values vpred vpreds",
    "returns": "return returns target targets",
    "": "policy actor trainer training pi theta model loss valid assistant batch b mb all sequence seq "
    "per token tokens level action actions resp response responses completion",
}
MEANINGS = {word: meaning for meaning, words in WORDS.items() for word in words.split()}
ROLES = ["logprobs", "old_logprobs", "ref_logprobs", "advantages", "mask", "rewards", "values"]
ROLES += ["old_values", "returns", "sampler_logprobs"]
ALIASES = {"new": "logprobs", "new_logprobs": "logprobs", "old": "old_logprobs", "ref": "ref_logprobs"}
ALIASES |= {"new_values": "values", "num_generations": "group_size", "num_items_in": "num_tokens"}
ALIASES |= {"lambd": "lam"}
RANGE = ["clip_eps_low", "clip_eps_high"]
OPEN = {  # constants for which a paper gives no number
    "grpo": RANGE,
    "dr_grpo": ["max_new_tokens"],
    "cispo": ["is_weight_cap"],
    "deepseek_v32": [*RANGE, "kl_coef", "offpolicy_mask"],
    "group_advantages": ["eps"],
    "value_loss": ["value_clip"],
}
NO_GRAPH = "no graph leads from its loss to {}: it is detached, not a tensor, or has called backward()"


class Refusal(Exception):
    """A function that cannot be called as it is; the message says why, for its author."""


def plain(name):
    """old_logprobs_BT -> old_logprobs"""
    return re.sub("_[A-Z][A-Z0-9]*$", "", name).lower()


def role_of(name, section):
    """Which of our tensors or numbers a parameter is; its own name, if we do not know."""
    name = re.sub("^(new|old|ref)(?=log|val)", r"\1_", plain(name))  # newlogprob
    words = re.sub(r"log_(probs?|ps?|probabilit(y|ies))(?![a-z])", "logprobs", name).split("_")
    meanings = [x for x in [MEANINGS.get(word, word) for word in words] if x]
    role = "_".join(sorted(meanings, key=lambda word: word not in ("new", "old", "ref")))
    if section == "whiten" and role in ("x", "values"):
        return "advantages"
    return ALIASES.get(role, role if role in ROLES else name)


def numbers_of(section):
    """{keyword: number} of the paper, or ours where it gives none"""
    about = VECTORS["sections"][section]
    keywords = about["cases"][0]["keywords"] | about["defaults"]
    return {name: x for name, x in keywords.items() if type(x) in (int, float)}


def optional_of(section):
    """The tensors that a function of this section may take beside its arguments."""
    more = {"deepseek_v32": ["sampler_logprobs"], "rspo": ["router_shift"]}
    return ["ref_logprobs", *more.get(section, [])] if section in LOSSES else []


def roles_of(parameters, section, settings):
    """({parameter: which of our tensors or numbers it is}, {second parameter of one: the first}). Each
    is passed once, first where a setting says. Single letters mean nothing without a longer name."""
    known = [*VECTORS["sections"][section]["arguments"], *optional_of(section), "group_size", *COUNTS]
    words = {x: name for name, x in settings.items() if isinstance(x, str)}
    firsts = dict(words)
    seconds = {}
    for name, parameter in parameters.items():
        role = role_of(name, section)
        if role not in known or name in settings:
            continue
        first = firsts.setdefault(role, name)
        if first != name and parameter.default is parameter.empty:
            seconds[name] = first
    roles = {name: role for role, name in firsts.items() if role not in words}
    if not words and all(len(plain(name)) == 1 for name in roles):
        return {}, {}
    return roles, seconds


def parameters_of(function):
    if inspect.isclass(function):
        raise Refusal("it is a class, and which instance you mean is yours to say")
    try:  # a module's parameters are in `forward`, which its __call__ hides
        found = inspect.signature(getattr(function, "forward", function)).parameters
    except (TypeError, ValueError) as error:
        raise Refusal(f"its parameters cannot be read: {error}") from error
    return {name: x for name, x in found.items() if x.kind not in (x.VAR_POSITIONAL, x.VAR_KEYWORD)}


def main_output(result):
    """What a function returns, the first of a tuple, or the "loss" of a dict or object, as a tensor."""
    result = result["loss"] if isinstance(result, Mapping) else getattr(result, "loss", result)
    result = result[0] if isinstance(result, (tuple, list)) else result
    if not isinstance(result, (torch.Tensor, np.ndarray, np.number, int, float)):
        raise Refusal(f"it returns {type(result).__name__}, not a tensor")
    if isinstance(result, float):  # torch would round it to float32
        result = np.float64(result)
    return torch.as_tensor(result)


class Subject:
    """A function under test. settings: {name: value} of its own parameters, where a word is the name of
    a tensor, and of the paper's constants, if its author means others. paper: constants that the paper
    prints, where vectors.json has others."""

    kind = KINDS[0]  # how tensors are passed; `fitted` finds out
    shape = SHAPES[0]
    has_graph = False  # from an output to the first argument

    def __init__(self, function, section, settings, paper=()):
        self.function = function
        self.section = section
        self.settings = settings
        self.about = VECTORS["sections"][section]
        self.arguments = self.about["arguments"]
        self.is_loss = section in LOSSES
        self.parameters = parameters_of(function)
        self.numbers = numbers_of(section)
        names = [*self.numbers, *(x for x in ("gamma", "lam") if x in self.arguments)]
        set_to = {k: x for k, x in settings.items() if k in names and type(x) in (int, float)}
        numeric = {k: x.default for k, x in self.parameters.items() if type(x.default) in (int, float)}
        defaults = {role_of(name, section): x for name, x in numeric.items()}
        self.defaults = {name: x for name, x in defaults.items() if name in self.numbers}
        is_one_eps = defaults.get(RANGE[0]) == defaults.get(RANGE[1])  # the papers have one
        self.open = [x for x in OPEN.get(section, []) if is_one_eps or x not in RANGE]
        own = {k: x for k, x in self.defaults.items() if k in self.open}
        self.constants = self.numbers | dict(paper) | own | set_to
        self.bind(set_to)

    def bind(self, set_to):
        """Finds out what each parameter gets. set_to: the constants that its author has set."""
        self.bound, seconds = roles_of(self.parameters, self.section, self.settings)
        unknown = []
        for name, parameter in self.parameters.items():
            has_value = parameter.default is not parameter.empty or name in self.settings
            if has_value or name in self.bound or name in seconds:
                continue
            role = role_of(name, self.section)
            if role in self.constants:
                self.settings = self.settings | {name: self.constants[role]}
            else:
                unknown.append(name)
        self.is_by_order = len(unknown) == len(self.arguments) and not self.bound
        if self.is_by_order:
            self.bound = dict(zip(unknown, self.arguments, strict=True))
            unknown = []
        needed = [x for x in self.arguments if x not in ("mask", "old_logprobs", "old_values")]
        given = [*self.bound.values(), *self.settings.values(), *set_to]
        meant = [*self.parameters, *set_to]
        problems = {
            "look like the same tensor": [f"{first} and {name}" for name, first in seconds.items()],
            "unknown parameters": unknown,
            "no parameter is known as": [x for x in needed if x not in given],
            "no parameter and no constant": [x for x in self.settings if x not in meant],
        }
        found = [f"{problem}: {', '.join(names)}" for problem, names in problems.items() if names]
        if found:
            raise Refusal("; ".join(found))

    def takes(self, role):
        return role in [*self.bound.values(), *self.settings.values()]

    def needs(self, role):
        names = [name for name, x in self.bound.items() if x == role]
        is_required = any(self.parameters[x].default is inspect.Parameter.empty for x in names)
        return is_required or role in self.settings.values()

    def call(self, part):
        """The function's output for {our name: tensor or number}, as a tensor."""
        part = dict(part)
        if self.is_loss:
            A = part["advantages"]
            mask = part["mask"]
            counts = {"num_sequences": torch.tensor(len(mask)), "num_tokens": mask.sum()}
            part = {name: x for name, x in counts.items() if self.needs(name)} | part
            part["advantages"] = {"B1": A, "BT": A.expand_as(mask).clone(), "B": A[:, 0]}[self.shape]
        elif self.takes("group_size"):
            part |= {"rewards": part["rewards"].flatten(), "group_size": part["rewards"].shape[1]}
        part = {name: self.native(x, name) for name, x in part.items()}
        values = {name: part[role] for name, role in self.bound.items() if role in part}
        for name in [x for x in self.settings if x in self.parameters]:
            x = self.settings[name]
            values[name] = part.get(x) if isinstance(x, str) and x in [*part, *ROLES] else x
        result = self.function(**values)
        if self.section != "gae":
            return main_output(result)
        pair = result if isinstance(result, (tuple, list)) else [result, result + part["values"]]
        return torch.stack([main_output(x) for x in pair[:2]])

    def native(self, x, name):
        """A tensor or number as the function takes it."""
        dtype, mask = self.kind
        x = torch.as_tensor(x) if name in COUNTS else x  # as trainers pass it
        if torch.is_tensor(x) and dtype is np.float64:
            return x.numpy().copy()  # which raises an error if a gradient is needed
        is_float = torch.is_tensor(x) and x.is_floating_point()
        return x.to(dtype) if is_float or (name, mask) == ("mask", "float") else x

    def answer(self, case):
        """(value, gradient or None) as arrays, summed over the case's micro-batches."""
        fields = fields_of(case) | {name: case[name] for name in COUNTS if name in case}
        has_gradient = "gradient" in case
        value = 0.0
        gradient = np.zeros(np.shape(case["gradient"])) if has_gradient else None
        for rows in case.get("micro_batches", [slice(None)]):
            part = {name: x[rows] if torch.is_tensor(x) else x for name, x in fields.items()}
            first = part[self.arguments[0]].requires_grad_(has_gradient)
            output = self.call(part)
            # Without a graph there is no gradient, and a backward() inside uses the graph up.
            is_joined = output.requires_grad and first.grad is None
            if self.is_loss and output.shape == part["mask"].shape:  # terms
                divisors = torch.tensor(case["denominator"])[rows]
                output = (torch.where(part["mask"], output, 0) / divisors).sum()
            elif self.is_loss and output.numel() != 1:
                raise Refusal(f"a loss is one number, not a tensor of shape {tuple(output.shape)}")
            found = None
            if has_gradient and is_joined:
                (found,) = torch.autograd.grad(output.sum(), first, allow_unused=True)
            if found is not None:
                gradient[rows] = found.double().numpy()
                self.has_graph = True
            value = value + output.detach().double().numpy()
        value = value.reshape(np.shape(case["value"]))
        is_by_token = not has_gradient and "mask" in case["inputs"]
        return np.where(case["inputs"]["mask"], value, 0) if is_by_token else value, gradient

    def adapted(self, case):
        """The case with the author's constants, without what the function does not take, and with the
        paper's results."""
        case = copy.deepcopy(case)
        inputs = case["inputs"]
        keywords = case["keywords"]
        for name, x in self.constants.items():
            place = inputs if name in inputs else keywords
            place[name] = x
        if "mask" in inputs and not self.takes("mask"):
            inputs["mask"] = [[1 for _ in row] for row in inputs["mask"]]
            case.pop("masked_places_hold", None)
        if self.is_loss and not self.takes("old_logprobs"):
            inputs["old_logprobs"] = inputs["logprobs"]
        for name, same_as in (("ref_logprobs", "logprobs"), ("sampler_logprobs", "old_logprobs")):
            if self.needs(name):
                keywords.setdefault(name, inputs[same_as])
        if self.constants != self.numbers and "id" in case and "gradient" in case:
            # The file's inputs have two decimals, and so may a bound: no token may be exactly there.
            rows = enumerate(inputs[self.arguments[0]])
            moved = [[x + 1e-5 * math.sin(1 + 7 * n + t) for t, x in enumerate(row)] for n, row in rows]
            inputs[self.arguments[0]] = moved
        return with_results(self.section, case)

    def why_not(self, case):
        """Why a case does not apply, or None."""
        for name, x in case["keywords"].items():
            if isinstance(x, list) and not self.takes(name):
                return f"no {name}"
            if isinstance(x, (bool, str)) and x != self.about["defaults"].get(name):
                return f"{name}={x}"
        count = "num_tokens" if self.section in BY_TOKENS else "num_sequences"
        if "micro_batches" in case and not self.takes(count):
            return f"no {count} of the whole step"
        if "token_advantages" in case["tags"] and self.has_one_A(case):
            return "one advantage for each completion"
        return None

    def has_one_A(self, case):
        """Whether it takes, or reads, one advantage for each completion: a token's gradient depends on
        other tokens' advantages."""
        if self.section in A_FOR_EACH_TOKEN:
            return self.shape == "B"
        case = self.adapted(case)
        _, expected = self.answer(case)
        A = np.array(case["inputs"]["advantages"])
        for t in range(A.shape[1]):
            moved = 1.01 * A
            moved[:, t] = A[:, t]
            inputs = case["inputs"] | {"advantages": moved.tolist()}
            _, gradient = self.answer(case | {"inputs": inputs})
            if not np.allclose(gradient[:, t], expected[:, t], rtol=1e-4, atol=1e-6):
                return True
        return False


def fitted(subject):
    """The subject in the first dtype that it takes, with advantages in the first shape that keeps rows
    apart, or else in the first that it takes."""
    case = subject.adapted(subject.about["cases"][0])
    errors = []
    for kind in KINDS:
        found = {}
        for shape in SHAPES if subject.is_loss else SHAPES[:1]:
            subject.kind = kind
            subject.shape = shape
            try:
                subject.answer(case)
                if "gradient" in case and not subject.has_graph:
                    raise Refusal(NO_GRAPH.format(subject.arguments[0]))
                found[shape] = not subject.is_loss or is_separate(subject)
            except (Exception, SystemExit) as error:
                errors.append(error)
        if found:
            subject.shape = max(found, key=found.get)
            return subject
    # Some functions take no bool mask, and few take numpy: such errors say little.
    error = min(errors, key=lambda x: any(hint in str(x) for hint in ("bool", "indices", "numpy")))
    if "Tensor that requires grad" in str(error):  # numpy has been given tensors
        error = Refusal(NO_GRAPH.format(subject.arguments[0]))
    raise error if isinstance(error, Refusal) else Refusal(said(error)) from error


def said(error):
    """What was raised, and by which line of its author's."""
    words = " ".join(str(error).split())
    theirs = [x for x in traceback.extract_tb(error.__traceback__) if str(HERE) not in x.filename]
    if not theirs:
        return f"{type(error).__name__}: {words}"
    last = theirs[-1]
    return f"{type(error).__name__}: {words or last.line} ({last.filename}, line {last.lineno})"
