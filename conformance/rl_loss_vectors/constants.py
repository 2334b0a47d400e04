"""Constants that a paper leaves open: the function's own number is as good as ours, if a default or a
config says it."""

import inspect
import math
from types import CodeType

OPEN = {  # section: [names that share one number]
    "grpo": [["clip_eps_low", "clip_eps_high"]],
    "dr_grpo": [["max_new_tokens"]],
    "cispo": [["is_weight_cap"]],
    "deepseek_v32": [["kl_coef"], ["offpolicy_mask"], ["clip_eps_low", "clip_eps_high"]],
    "group_advantages": [["eps"]],
    "value_loss": [["value_clip"]],
}
IN_CODE = {"max_new_tokens": (1, math.inf), "eps": (0, 0.01)}  # they clip nothing: a literal will do
GSPO = {"clip_eps_low": 3e-4, "clip_eps_high": 4e-4}  # the paper's range, a tenth of ours


def numbers_in(thing, with_code, depth=4):
    """Numbers that a function has been given: defaults, what it closes over, the globals that it reads;
    in the fields of these, to a depth; and, if asked for, those in its code."""
    if type(thing) in (int, float):
        return [thing]
    if depth == 0 or inspect.isclass(thing) or inspect.ismodule(thing):
        return []
    parts = thing if isinstance(thing, dict) else getattr(thing, "__dict__", {})
    parts = list(parts.values())
    if inspect.isfunction(thing):
        parts += [x.default for x in inspect.signature(thing).parameters.values()]
        parts += [cell.cell_contents for cell in thing.__closure__ or ()]
        inner = [x for x in thing.__code__.co_consts if isinstance(x, CodeType)]
        for code in [thing.__code__, *inner]:
            parts += [thing.__globals__.get(name) for name in code.co_names]
            parts += code.co_consts if with_code else []
    return [x for part in parts for x in numbers_in(part, with_code, depth - 1)]


def candidates(subject):
    """[[{name: number}]]: for each open constant, the numbers that the function says."""
    given = [subject.function, getattr(subject.function, "__self__", None)]
    given += [x.default for x in subject.parameters.values()]
    found = [[GSPO]] if subject.section == "gspo" else []
    for names in OPEN.get(subject.section, []):
        numbers = numbers_in(dict(enumerate(given)), with_code=names[0] in IN_CODE)
        if names[0] == "clip_eps_low":
            numbers += [round(abs(1 - x), 9) for x in numbers]  # it may say 0.8 and 1.2
        low, high = IN_CODE.get(names[0], (0, math.inf))
        found.append([dict.fromkeys(names, x) for x in sorted({*numbers}) if low < x < high])
    return found
