"""Decides by its name which argument a function's parameter gets, wherever it stands."""

import math
import re

from rl_loss_vectors.reference import LOSSES

RETURNS = "returns - old_values"  # an advantage of the value loss
NEVER = "kl|ratio|entrop|value|reward|return|ids?$|index|temperature|logit|label|weight|model|loss|step"
# In each list, the first match counts. Arguments and keywords that a section does not have are skipped.
LOSS_ROLES = [
    ("ref_logprobs", r"(^|_|pi)ref"),
    ("mask", "mask"),
    ("advantages", "adv"),
    ("never", NEVER),
    ("old_logprobs", r"old|prev|inference|behav|sampl|rollout|generat|(^|_)mu(_|$)"),
    ("logprobs", r"log_?p|(^|_)lp|^new|trainer|curr|policy|^pi(_|$)|theta"),
]
VALUE_ROLES = [
    ("mask", "mask"),
    ("returns", "return|target"),
    (RETURNS, "adv"),
    ("old_values", "old|prev"),
    ("values", "pred|new"),
]
CLIP = "clip|eps|ratio_m"
HIGH = f"({CLIP}).*(high|upper|max)|(high|upper|max).*({CLIP})"
KEYWORDS = [
    ("never", "_c$|std|norm|grad|dual"),
    ("value_clip", CLIP),
    ("never", "val|vf"),
    ("is_weight_cap", f"cap|weight_max|max_weight|{HIGH}"),
    ("clip_eps_high", HIGH),
    ("clip_eps_low", CLIP),
    ("log_ratio_clip", CLIP),
    ("kl_coef", "beta|kl.*(coef|weight|lambda|penalty)|(coef|weight|lambda).*kl"),
    ("num_tokens", "num_items|(num|total|global).*tok"),
    ("max_new_tokens", "max.*(tok|len)|l_max"),
    ("num_sequences", "num_seq|global_batch|num_rows"),
    ("group_size", "num_gen|group_size|samples_per|num_samples|n_samples|rollouts?_per|^[gnk]$"),
    ("gamma", "gamma|discount"),
    ("lam", "^lam|^lm?bda?$|gae_lam"),
]
ZERO = "(^|_)kl|beta|ent.*coef"  # parameters that the function requires, but the paper doesn't have


def first_of(patterns, name, known):
    """The first of the known names whose pattern matches, "never" or None."""
    for ours, pattern in patterns:
        if ours in (*known, "never") and re.search(pattern, name.lower()):
            return ours
    return None


def keyword_of(name, known, default):
    """Our keyword for a name, or None. A lower clip of 0.8 is a bound, not a width: None."""
    name = re.sub("_[A-Z][A-Z0-9]*$", "", name)  # mask_BT is mask
    if name in known:
        return name
    found = first_of(KEYWORDS, name, known)
    least_bound = {"clip_eps_low": 0.5, "clip_eps_high": 1}.get(found, math.inf)
    is_bound = isinstance(default, float) and default > least_bound
    return None if is_bound or isinstance(default, (bool, str)) else found


def roles_of(section, arguments, parameters):
    """[(an argument, or "never" for what is surely none, the pattern of its names)]"""
    if section in LOSSES:
        return LOSS_ROLES
    if section == "value_loss":
        # vpreds are the new values; then `values` are the old ones
        has_predictions = any(re.search("pred|new", name.lower()) for name in parameters)
        return [*VALUE_ROLES, ("old_values" if has_predictions else "values", "val")]
    old_first = sorted(arguments, key=lambda ours: not ours.startswith("old"))
    return [(ours, ours[:3]) for ours in old_first]


class Misfit(Exception):
    """A function that cannot be called at all; the message is one line for its author."""


def assign(parameters, section, arguments, keywords, fixed):
    """({name of a parameter: what it gets}, the names that get it only by their order)"""
    known = {*arguments, *keywords, "ref_logprobs", RETURNS}
    known |= {"group_size"} if "rewards" in arguments else set()
    roles = roles_of(section, arguments, parameters)
    given = {}
    free = []
    left = []
    for name, parameter in parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or name in fixed:
            continue
        role = first_of(roles, name, known)
        options = [keyword_of(name, known, parameter.default), role]
        options = [x for x in options if x in known and x not in given.values()]
        is_required = parameter.default is parameter.empty
        if options:
            given[name] = options[0]
        elif is_required and re.search(ZERO, name.lower()):
            given[name] = "zero"
        elif is_required and role == "never":
            left.append(name)
        elif is_required:
            free.append(name)
    got = {*given.values()}
    rest = [x for x in arguments if x not in got and (x != "returns" or RETURNS not in got)]
    by_order = dict(zip(free, rest, strict=False)) if len(free) >= len(rest) or not given else {}
    missing = {*rest} - {*by_order.values(), "mask", "old_logprobs"}
    if left or missing or len(by_order) < len(free):
        raise Misfit(
            f"its arguments ({', '.join(parameters)}) are not recognized as "
            f"{', '.join(arguments)}; --set NAME=VALUE sets others"
        )
    return given | by_order, [*by_order]
