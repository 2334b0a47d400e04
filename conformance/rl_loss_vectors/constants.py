"""Constants that a paper leaves open: the function's own number is as good as ours, if a default or a
config says it."""

import inspect
import math

OPEN = {  # section: [names that share one number]
    "grpo": [["clip_eps_low", "clip_eps_high"]],
    "dr_grpo": [["max_new_tokens"]],
    "cispo": [["is_weight_cap"]],
    "deepseek_v32": [["kl_coef"], ["offpolicy_mask"], ["clip_eps_low", "clip_eps_high"]],
    "group_advantages": [["eps"]],
    "value_loss": [["value_clip"]],
}
IN_CODE = {"max_new_tokens": (1, math.inf), "eps": (0, 0.01)}  # they clip nothing: a literal will do
DEPTH = 5  # an adapter, a class, its method, a config, a number
GSPO = {"clip_eps_low": 3e-4, "clip_eps_high": 4e-4}  # the paper's range, a tenth of ours


def parts_of(thing, with_code):
    """A function's defaults, what it reads and, if asked for, its code's numbers; an object's fields"""
    thing = getattr(thing, "__func__", thing)  # of a method
    if inspect.ismodule(thing) or str(getattr(thing, "__module__", "")).startswith(("torch", "numpy")):
        return []
    parts = thing if isinstance(thing, dict) else getattr(thing, "__dict__", {})
    parts = list(parts.values())
    if inspect.isfunction(thing):
        names = thing.__code__.co_names
        read = [thing.__globals__.get(name) for name in names]
        modules = [x for x in read if inspect.ismodule(x)]
        parts += read + [getattr(x, name, None) for x in modules for name in names]
        parts += [cell.cell_contents for cell in thing.__closure__ or ()]
        parts += [*(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values()]
        parts += thing.__code__.co_consts if with_code else []
    return parts


def candidates(subject):
    """[[{name: number}]]: for each open constant, the numbers that the function says."""
    found = [[GSPO]] if subject.section == "gspo" else []
    for names in OPEN.get(subject.section, []):
        things = [subject.function, getattr(subject.function, "__self__", None)]
        things += [x.default for x in subject.parameters.values()]
        seen = {}
        for _ in range(DEPTH):
            new = {id(x): x for x in things if id(x) not in seen}
            seen |= new
            things = [part for x in new.values() for part in parts_of(x, names[0] in IN_CODE)]
        numbers = [x for x in seen.values() if type(x) in (int, float)]
        if names[0] == "clip_eps_low":
            numbers += [round(abs(1 - x), 9) for x in numbers]  # it may say 0.8 and 1.2
        low, high = IN_CODE.get(names[0], (0, math.inf))
        found.append([dict.fromkeys(names, x) for x in sorted({*numbers}) if low < x < high])
    return found
