"""Constants that a paper leaves open: the function's own number is as good as ours, if a default or a
config says it."""

import inspect
import math

RANGE = ["clip_eps_low", "clip_eps_high"]
OPEN = {  # section: [(names that share one number, limits within which it does its work)]
    "grpo": [(RANGE, 0, 1)],
    "dr_grpo": [(["max_new_tokens"], 1, math.inf)],
    "cispo": [(["is_weight_cap"], 1, 10)],
    "deepseek_v32": [(["kl_coef"], 0, 1), (["offpolicy_mask"], 0, 1), (RANGE, 0, 1)],
    "group_advantages": [(["eps"], 0, 0.01)],
    "value_loss": [(["value_clip"], 0, 1)],
}
IN_CODE = ["max_new_tokens", "eps"]  # they clip nothing, so a number in the code will do
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
    for names, low, high in OPEN.get(subject.section, []):
        things = [subject.function, getattr(subject.function, "__self__", None)]
        things += [x.default for x in subject.parameters.values()]
        seen = {}
        for _ in range(DEPTH):
            new = {id(x): x for x in things if id(x) not in seen}
            seen |= new
            things = [part for x in new.values() for part in parts_of(x, names[0] in IN_CODE)]
        numbers = [x for x in seen.values() if type(x) in (int, float)]
        if names is RANGE:
            numbers += [round(abs(1 - x), 9) for x in numbers]  # it may say 0.8 and 1.2
        found.append([dict.fromkeys(names, x) for x in sorted({*numbers}) if low < x < high])
    return found
