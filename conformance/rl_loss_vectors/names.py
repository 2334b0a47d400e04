"""Which parameter of a function gets what: by its name, wherever it stands."""

import re

from rl_loss_vectors.reference import LOSSES

COUNTS = ["num_sequences", "num_tokens"]
NEVER = (
    r"kl|ratio|entrop|value|reward|return|ids?$|index|temperature|logits|label|weight|model|loss|step"
)
LOSS_ROLES = [  # the first pattern that is in a name counts
    ("ref_logprobs", r"(^|_|pi)ref"),
    ("mask", "mask"),
    ("advantages", "adv"),
    ("never", NEVER),
    ("old_logprobs", r"old|prev|inference|behav|sampl|rollout|generat|(^|_)mu(_|$)"),
    ("logprobs", r"log_?p|(^|_)lp|^new|trainer|curr|policy|^pi(_|$)|theta"),
]
VALUE_ROLES = [("mask", "mask"), ("returns", "return|target"), ("advantages", "adv")]
VALUE_ROLES += [("old_values", "old|prev")]
CLIP = "clip|eps|ratio_m"
KEYWORDS = [
    ("never", "_c$|std|norm|grad|dual"),
    ("value_clip", "clip.*(val|vf)|(val|vf).*clip"),
    ("clip_eps_low", f"({CLIP}).*(low|min)|(low|min).*({CLIP})"),
    ("clip_eps_high", f"({CLIP}).*(high|upper|max)|(high|upper|max).*({CLIP})"),
    ("clip_eps", CLIP),
    ("is_weight_cap", "cap|weight_max|max_weight"),
    ("kl_coef", "beta|kl.*(coef|weight|lambda|penalty)|(coef|weight|lambda).*kl"),
    ("num_tokens", "num_items|(num|total|global).*tok"),
    ("max_new_tokens", "max.*(tok|len)|l_max"),
    ("num_sequences", "num_seq|global_batch|num_rows"),
    ("group_size", "num_gen|group_size|samples_per|num_samples|n_samples|rollouts?_per|^[gnk]$"),
    ("gamma", "gamma|discount"),
    ("lam", "^lam|^lm?bda?$|gae_lam"),
]
WIDTHS = {"clip_eps": "clip_eps_low", "lower_bound": "clip_eps_low", "upper_bound": "clip_eps_high"}
SAID = {  # of what is given under no name of ours
    "clip_eps": "the width clip_eps_low",
    "lower_bound": "the bound 1 - clip_eps_low",
    "upper_bound": "the bound 1 + clip_eps_high",
    "bundle": "whatever it asks for",
    "zero": "0",
    "no_kl": "0",
    "small": "1e-6",
}
BUNDLES = "batch|experience|^exp$|data|inputs|config|cfg|args"


def plain(name):
    """mask_BT is mask."""
    return re.sub("_[A-Z][A-Z0-9]*$", "", name)


def first_of(patterns, name):
    return next((ours for ours, pattern in patterns if re.search(pattern, name.lower())), None)


def keyword_of(name, section, known, default=None):
    """Our keyword for a name, or None. A clip whose default is near 1 or above is a bound, no width."""
    if plain(name) in known:
        return plain(name)
    found = None if isinstance(default, (bool, str)) else first_of(KEYWORDS, name)
    default = default if isinstance(default, (int, float)) else 0
    if found in ("clip_eps", "clip_eps_low", "clip_eps_high"):
        if section == "value_loss":
            found = "value_clip"
        elif section in ("gmpo", "rspo"):
            found = "log_ratio_clip"
        elif section == "cispo" and found != "clip_eps_low":
            found = "is_weight_cap"
        elif found == "clip_eps_low" and default >= 0.5:
            found = "lower_bound"
        elif found == "clip_eps_high" and default > 1:
            found = "upper_bound"
    return found if WIDTHS.get(found, found) in known else None


def role_of(name, section, arguments, has_predictions=False):
    """The argument that a name speaks of, "never" if it is none of them for sure, or None."""
    if section in LOSSES:
        return first_of(LOSS_ROLES, name)
    if section == "value_loss":
        # vpreds are the new values; then `values` are the old ones
        values = (
            [("values", "pred|new"), ("old_values", "val")] if has_predictions else [("values", "val")]
        )
        return first_of(VALUE_ROLES + values, name)
    old_first = sorted(arguments, key=lambda ours: not ours.startswith("old"))
    return next((ours for ours in old_first if ours[:3] in name.lower()), None)


def filler_of(name, role):
    """What a required parameter gets that the section knows nothing of, or None."""
    if role in ("ref_logprobs", "advantages", "old_logprobs", "mask"):
        return role
    if re.search(BUNDLES, name.lower()):
        return "bundle"
    if first_of(KEYWORDS, name) == "kl_coef" or re.search("ent.*coef", name):
        return "zero"
    if re.search("(^|_)kl", name):
        return "no_kl"
    return "small" if "eps" in name else None


def known_to(about):
    """The keywords of a section."""
    known = {*COUNTS, *about["defaults"]}.union(*(case["keywords"] for case in about["cases"]))
    return known | ({"group_size"} if "rewards" in about["arguments"] else set())


def assign(parameters, about, section, fixed):
    """({name of a parameter: what it gets}, names that get nothing though they are required)"""
    arguments = about["arguments"]
    known = known_to(about) | {*arguments}
    has_predictions = any(re.search("pred|new", name.lower()) for name in parameters)
    given = {}
    free = []
    left = []
    for name, parameter in parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or name in fixed:
            continue
        role = role_of(name, section, arguments, has_predictions)
        options = [keyword_of(name, section, known, parameter.default), role]
        options = [x for x in options if x in (*WIDTHS, *known) and x not in given.values()]
        is_required = parameter.default is parameter.empty
        if is_required:
            options.append(filler_of(name, role))
        if options and options[0]:
            given[name] = options[0]
        elif is_required and role == "never":
            left.append(name)
        elif is_required:
            free.append(name)
    rest = [argument for argument in arguments if argument not in given.values()]
    if len(free) >= len(rest) or not given:
        given |= dict(zip(free, rest, strict=False))
    return given, left + [name for name in free if name not in given]
