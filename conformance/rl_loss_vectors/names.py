"""What a parameter is, by its name: one of the section's tensors, a constant, or nothing we know.

Every word of a name must be known. `prompt_mask`, `ppo_kl` or `config` are not in the tables. Nothing
is passed for them, and a function that requires them is refused with an adapter to complete.
"""

import re
from dataclasses import dataclass

from rl_loss_vectors.reference import LOSSES

SYNONYMS = {  # a word: what it stands for; "" if it adds nothing
    **dict.fromkeys("logprob logp logps lp lps logprobs".split(), "logprobs"),
    **dict.fromkeys("new current curr cur".split(), "new"),
    **dict.fromkeys("old prev previous behavior behaviour".split(), "old"),
    **dict.fromkeys("sampler sampling rollout inference generation vllm mu".split(), "sampler"),
    **dict.fromkeys("ref reference".split(), "ref"),
    **dict.fromkeys("adv advs advantage advantages a".split(), "advantages"),
    **dict.fromkeys("mask masks".split(), "mask"),
    **dict.fromkeys("reward rewards scores".split(), "rewards"),
    **dict.fromkeys("value values vpreds".split(), "values"),
    **dict.fromkeys("return returns target targets".split(), "returns"),
    **dict.fromkeys("policy actor trainer training pi theta model".split(), ""),
    **dict.fromkeys("per token tokens level action actions response responses completion".split(), ""),
    **dict.fromkeys("loss valid assistant selected batch all sequence seq".split(), ""),
}
RETURNS = "returns - old_values"  # the advantages of a value loss
LOSS_ROLES = {
    "logprobs": "logprobs",
    "new logprobs": "logprobs",
    "new": "logprobs",
    "old logprobs": "old_logprobs",
    "old": "old_logprobs",
    "sampler logprobs": "sampler_logprobs",
    "ref logprobs": "ref_logprobs",
    "ref": "ref_logprobs",
    "advantages": "advantages",
    "mask": "mask",
    "router shift": "router_shift",
    "gamma": "router_shift",
}
VALUE_ROLES = {
    "values": "values",
    "new values": "values",
    "old values": "old_values",
    "old": "old_values",
    "returns": "returns",
    "returns values": "returns",
    "advantages": RETURNS,
    "mask": "mask",
}
WHITEN_ROLES = dict.fromkeys(["advantages", "values", "x", "xs"], "advantages") | {"mask": "mask"}
OTHER_ROLES = {name: name for name in ("rewards", "values", "mask", "advantages", "bootstrap")}
EPS = "(eps|epsilon|clip_?ratio|clip_?range|clip_eps|clip_epsilon|eps_clip|epsilon_clip)"
CONSTANTS = [  # (a keyword of ours, what else it is called)
    ("value_clip", f"{EPS}(_value)?|value_{EPS}|vf_clip"),
    ("clip_eps_low", f"{EPS}|{EPS}_low|low_{EPS}|eps_low|clip|e_clip"),
    ("clip_eps_high", f"{EPS}_high|high_{EPS}|eps_high"),
    ("is_weight_cap", "cap|weight_cap|max_weight|weight_max|max_is_weight"),
    ("log_ratio_clip", f"{EPS}|clip"),
    ("kl_coef", "(kl_)?beta|kl_?(loss_)?(coef|coeff|weight|beta|lambda)|(coef|weight|lambda)_kl"),
    ("entropy_coef", "ent(ropy)?_?(loss_)?(coef|coeff|weight|bonus_coef)"),
    ("offpolicy_mask", "off_policy_(threshold|delta)|delta"),
    ("num_tokens", "(batch_|global_)num_tokens|num_items_in_batch|total_tokens"),
    ("max_new_tokens", "max_(new_|completion_|response_)?(tokens|len|length)|l_max"),
    ("num_sequences", "num_seqs|global_batch_size"),
    ("group_size", "num_generations|num_return_sequences|(num_)?samples_per_prompt|n|g"),
    ("gamma", "discount"),
    ("lam", "lambda_?|lambd|lmbda|gae_(lam|lambda)"),
]
COUNTS = ["num_sequences", "num_tokens"]  # of the whole step
ABSENT_IN_PAPER = {"kl_coef": 0.0, "entropy_coef": 0.0}  # where the section has no such term


def plain(name):
    """old_logprobs_BT -> old_logprobs"""
    return re.sub("_[A-Z][A-Z0-9]*$", "", name).lower()


def role_of(name, section):
    """The tensor that a parameter is, or None."""
    words = re.sub(r"log_(probs?|ps?|probabilit(y|ies))(?![a-z])", "logprobs", plain(name)).split("_")
    meanings = [SYNONYMS.get(word, word) for word in words if SYNONYMS.get(word, word)]
    order = ["new", "old", "sampler", "ref"]
    meanings = sorted(meanings, key=lambda word: word not in order)
    roles = OTHER_ROLES
    if section in LOSSES:
        roles = LOSS_ROLES
    elif section in ("value_loss", "whiten"):
        roles = VALUE_ROLES if section == "value_loss" else WHITEN_ROLES
    return roles.get(" ".join(meanings))


def constant_of(name, known):
    """Our keyword for a constant, or None."""
    name = plain(name)
    for keyword, pattern in CONSTANTS:
        if keyword in known and re.fullmatch(pattern, name):
            return keyword
    return name if name in known else None


class Misfit(Exception):
    """A function that cannot be called as it is; the message says why, for its author."""

    unknown = ()  # its parameters that we do not know
    known = {}  # {parameter: what it would get}
    parameters = None  # all of them, as inspect gives them


def listed(names):
    *most, last = [f"`{name}`" for name in names]
    return f"{', '.join(most)} and {last}" if most else last


def is_required(parameter):
    variable = (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return parameter.default is parameter.empty and parameter.kind not in variable


@dataclass
class Binding:
    """What a function's parameters get."""

    tensors: dict  # {parameter: one of our names}, or a count of the whole step
    constants: dict  # {parameter: value}: required, filled with our numbers
    by_order: bool = False


def optional_of(section):
    """The tensors that a function of this section may take beside its arguments."""
    if section in LOSSES:
        more = {"deepseek_v32": ["sampler_logprobs"], "rspo": ["router_shift"]}
        return ["ref_logprobs", *more.get(section, [])]
    return {"value_loss": [RETURNS], "gae": ["bootstrap"]}.get(section, [])


def bind(parameters, arguments, section, defaults, fixed):
    """By name, or by order if no name is known, or not at all: then it raises Misfit."""
    optional = optional_of(section)
    constants = {name: x for name, x in defaults.items() if not isinstance(x, (list, bool, str))}
    if section in LOSSES:
        constants = ABSENT_IN_PAPER | constants
    if section == "cispo":  # a name with clip or eps may be a width or the cap itself
        constants = {name: x for name, x in constants.items() if "clip" not in name}
    per_case = [*COUNTS, *({"gamma", "lam"} & {*arguments})]
    per_case += ["group_size"] if arguments == ["rewards"] else []
    found = Binding({}, {})
    unknown = []
    for name, parameter in parameters.items():
        if name in fixed:
            continue
        role = role_of(name, section)
        keyword = constant_of(name, [*constants, *per_case])
        if role == "sampler_logprobs" and role not in optional:
            role = "old_logprobs"
        is_free = parameter.default in (None, parameter.empty)
        if role in [*arguments, *optional] and role not in found.tensors.values():
            found.tensors[name] = role
        elif keyword in per_case and (is_free or keyword not in COUNTS):
            found.tensors[name] = keyword
        elif is_required(parameter) and keyword in constants:
            found.constants[name] = constants[keyword]
        elif is_required(parameter):
            unknown.append(name)
    if unknown and len(unknown) == len(arguments) and not found.tensors and not found.constants:
        return Binding(dict(zip(unknown, arguments, strict=True)), {}, by_order=True)
    given = {*found.tensors.values(), *words_in(fixed)}
    needed = {*arguments} - {"mask", "old_logprobs", "old_values", "gamma", "lam"}
    needed |= {"router_shift"} if section == "rspo" and arguments else set()
    needed -= {"returns"} if RETURNS in given else set()
    lacking = sorted(needed - given)
    if unknown or lacking:
        if unknown:
            error = Misfit(f"{listed(unknown)} {'is' if len(unknown) == 1 else 'are'} unknown")
        else:
            error = Misfit(f"nothing is known as {listed(lacking)}")
        error.unknown, error.parameters = unknown, parameters
        error.known = found.tensors | found.constants
        raise error
    return found


def words_in(settings):
    """The strings in settings: the tensors that somebody has set."""
    words = []
    for value in settings.values():
        words += [value] if isinstance(value, str) else []
        words += words_in(value) if isinstance(value, Settings) else []
    return words


class Settings(dict):
    """What --set config.eps=0.2 makes: config.eps, config["eps"] and config.get("eps") are 0.2."""

    def __getattr__(self, name):
        if name not in self:
            raise AttributeError(f"--set gives no {name}")
        return self[name]


def resolved(value, part):
    """A setting with tensors in place of their names."""
    if isinstance(value, Settings):
        return Settings({name: resolved(x, part) for name, x in value.items()})
    return part.get(value, value) if isinstance(value, str) else value
