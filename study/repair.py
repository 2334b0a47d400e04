"""A repair shop: writes a script that has one of the bugs of bugs.toml, and says whether it is mended.

python study/repair.py 7            # writes runs/repair/bug_7.py
python -m runs.repair.bug_7         # run it, read it and its metrics, mend it
python study/repair.py 7 --hint
python study/repair.py 7 --check    # does it behave as the original?
"""

import argparse
import contextlib
import importlib.util
import io
import sys
import tempfile
import tomllib
import zlib
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
SHOP = ROOT / "runs" / "repair"
sys.path += [str(ROOT), str(ROOT / "conformance")]
from rl_loss_vectors import VECTORS, Subject, doctor  # noqa: E402

# Two iterations, since some bugs only show in the next rollout; several micro-batches in a step.
JOB = {"iterations": 2, "prompts_per_iteration": 6, "num_minibatches": 2, "micro_batch_size": 5}
JOB |= {"lr": 1e-3, "num_held_out": 2, "device": "cpu"}


def load_bugs():
    """{number: bug}. The order of the numbers gives nothing away."""
    kinds = tomllib.loads((ROOT / "study" / "bugs.toml").read_text())
    bugs = sorted(sum(kinds.values(), []), key=lambda bug: zlib.crc32(bug["title"].encode()))
    for bug in bugs:
        bug["original"] = ROOT / f"{bug['script']}.py"
        bug["broken"] = bug["original"].read_text().replace(bug["old"], bug["new"])
    return dict(enumerate(bugs, start=1))


def numbers_of_a_run(module):
    """{name: [tensors]} of a small run with a fixed seed, in float32."""
    seen = {"rewards": [], "advantages": []}
    policy_loss = module.policy_loss
    iteration_metrics = module.iteration_metrics

    def watched_loss(logprobs_BT, old_logprobs_BT, advantages_BT, mask_BT, **keywords):
        seen["advantages"].append(torch.where(mask_BT, advantages_BT, 0))
        return policy_loss(logprobs_BT, old_logprobs_BT, advantages_BT, mask_BT, **keywords)

    def watched_metrics(meter, completions, rewards, args):
        seen["rewards"].append(rewards)
        for name in ("losses/policy_loss", "losses/value_loss", "charts/grad_norm"):
            seen.setdefault(name, []).extend(value for value, _ in meter.pairs.get(name, []))
        return iteration_metrics(meter, completions, rewards, args)

    module.policy_loss = watched_loss
    module.iteration_metrics = watched_metrics
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        module.main(module.Args(**JOB, run_dir=folder))
    return seen


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def functions_of(module, script):
    """Yields (name, function, section of the test vectors)."""
    sections = {name: name for name in VECTORS["sections"]} | {"policy_loss": script}
    sections |= {"compute_advantages": "group_advantages", "compute_gae": "gae"}
    for name, section in sections.items():
        if hasattr(module, name):
            yield name, getattr(module, name), section


def behavior(path, script):
    """{name: [values]}: a script's flags, its answers to the test vectors, the numbers of a run."""
    module = load(path)
    found = {"defaults of the flags": list(vars(module.Args()).items())}
    for name, function, section in functions_of(module, script):
        subject = Subject(function, section)
        answers = doctor.answered(doctor.examine(subject))
        found[f"test vectors for {name}"] = [doctor.is_right(subject, *pair) for pair in answers]
    return found | numbers_of_a_run(module)


def is_same(x, y, tolerance):
    if torch.is_tensor(x):
        return x.shape == y.shape and torch.allclose(x, y, rtol=tolerance, atol=tolerance)
    return x == y


def differences(found, expected):
    """Yields a line for each name under which a script does not behave as the original."""
    for name, values in expected.items():
        others = found.get(name, [])
        tolerance = 1e-5 if name in ("rewards", "advantages") else 1e-4
        same = sum(is_same(x, y, tolerance) for x, y in zip(others, values, strict=False))
        if same < max(len(others), len(values)):
            yield f"{name}: {same} of {len(values)} as in the original"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    bugs = load_bugs()
    parser.add_argument("number", type=int, choices=bugs, metavar=f"1..{len(bugs)}")
    parser.add_argument("--hint", action="store_true", help="where to look")
    parser.add_argument("--check", action="store_true", help="does it behave as the original?")
    args = parser.parse_args()
    bug = bugs[args.number]
    path = SHOP / f"bug_{args.number}.py"
    if args.hint:
        print(bug["hint"])
    elif args.check:
        original = behavior(bug["original"], bug["script"])
        lines = list(differences(behavior(path, bug["script"]), original))
        if lines:
            sys.exit("\n".join(["not mended:", *lines]))
        print(f"mended: {bug['title']}. {bug['wrong']}\nRemedy: {bug['remedy']} {bug.get('seen', '')}")
    elif path.exists():
        sys.exit(f"{path} exists: remove it to start again")
    else:
        SHOP.mkdir(parents=True, exist_ok=True)
        path.write_text(bug["broken"])
        print(f"{path} has a bug. To run it: python -m runs.repair.{path.stem}")


if __name__ == "__main__":
    main()
