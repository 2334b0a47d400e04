"""Decides by its name which argument a function's parameter gets, wherever it stands."""

import re

from rl_loss_vectors.reference import LOSSES

COUNTS = ["num_sequences", "num_tokens"]
RETURNS = "returns - old_values"  # an advantage of the value loss
NEVER = "kl|ratio|entrop|value|reward|return|ids?$|index|temperature|logit|label|weight|model|loss|step"
# In each list, the first pattern that matches a name counts.
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
KEYWORDS = [
    ("never", "_c$|std|norm|grad|dual"),
    ("value_clip", "clip.*(val|vf)|(val|vf).*clip"),
    ("clip_eps_high", f"({CLIP}).*(high|upper|max)|(high|upper|max).*({CLIP})"),
    ("clip_eps_low", CLIP),
    ("is_weight_cap", "cap|weight_max|max_weight"),
    ("kl_coef", "beta|kl.*(coef|weight|lambda|penalty)|(coef|weight|lambda).*kl"),
    ("num_tokens", "num_items|(num|total|global).*tok"),
    ("max_new_tokens", "max.*(tok|len)|l_max"),
    ("num_sequences", "num_seq|global_batch|num_rows"),
    ("group_size", "num_gen|group_size|samples_per|num_samples|n_samples|rollouts?_per|^[gnk]$"),
    ("gamma", "gamma|discount"),
    ("lam", "^lam|^lm?bda?$|gae_lam"),
]
CLIPS = {  # what a section calls them
    "value_loss": {"clip_eps_low": "value_clip", "clip_eps_high": "value_clip"},
    "gmpo": {"clip_eps_low": "log_ratio_clip"},
    "rspo": {"clip_eps_low": "log_ratio_clip"},
    "cispo": {"clip_eps_high": "is_weight_cap"},
}
ZERO = "(^|_)kl|beta|ent.*coef"  # parameters that the function requires, but the paper doesn't have


def plain(name):
    """mask_BT is mask."""
    return re.sub("_[A-Z][A-Z0-9]*$", "", name)


def first_of(patterns, name):
    return next((ours for ours, pattern in patterns if re.search(pattern, name.lower())), None)


def keyword_of(name, section, known, default):
    """Our keyword for a name, or None. A lower clip of 0.8 is a bound, not a width: None."""
    if plain(name) in known:
        return plain(name)
    if isinstance(default, (bool, str)):
        return None
    found = first_of(KEYWORDS, name)
    found = CLIPS.get(section, {}).get(found, found)
    least_bound = {"clip_eps_low": 0.5, "clip_eps_high": 1}.get(found)
    if least_bound and isinstance(default, float) and default > least_bound:
        return None
    return found if found in known else None


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


def assign(parameters, about, section, fixed):
    """({name of a parameter: what it gets}, the names that get it only by their order, the required
    names that get nothing)"""
    arguments = about["arguments"]
    known = {*COUNTS, *arguments, *about["defaults"]}.union(*(x["keywords"] for x in about["cases"]))
    known |= {"ref_logprobs", RETURNS}
    known |= {"group_size"} if "rewards" in arguments else set()
    roles = roles_of(section, arguments, parameters)
    given = {}
    free = []
    left = []
    for name, parameter in parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or name in fixed:
            continue
        role = first_of(roles, name)
        options = [keyword_of(name, section, known, parameter.default), role]
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
    rest = [argument for argument in arguments if argument not in given.values()]
    by_order = {}
    if len(free) >= len(rest) or not given:
        by_order = dict(zip(free, rest, strict=False))
    left += [name for name in free if name not in by_order]
    return given | by_order, [*by_order], left
