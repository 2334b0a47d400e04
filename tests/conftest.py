import contextlib
import dataclasses
import importlib
import io
import os
import signal
import subprocess
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything reads it

import pytest  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

ROOT = Path(__file__).parent.parent
SCRIPTS = ["ppo", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "gmpo", "rspo", "sapo"]
torch.set_num_threads(2)
transformers.utils.logging.disable_progress_bar()


def script_args(name, **changes):
    """(module of the script, its default Args with changes)."""
    module = importlib.import_module(name)
    return module, dataclasses.replace(module.Args(), **changes)


def run_process(name, *flags, timeout=600):
    """A script as a user runs it: a process of its own, on the CPU, without a network."""
    command = [sys.executable, f"{name}.py", *map(str, flags)]
    env = os.environ | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout)


def run(name, *flags, held_out=256):
    """The same in this process, which saves the imports, and with fewer held-out problems if that is enough;
    what a user would see as a traceback fails."""
    import common

    module, out, err, code = importlib.import_module(name), io.StringIO(), io.StringIO(), 0
    argv, cwd = sys.argv, os.getcwd()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    few = () if "--num_held_out" in flags else ("--num_held_out", held_out)
    sys.argv = [f"{name}.py", *map(str, (*flags, *few))]
    os.chdir(ROOT)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            module.main(common.parse_args(module.Args))
    except SystemExit as exit:
        code = exit.code
    finally:
        sys.argv = argv
        os.chdir(cwd)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return subprocess.CompletedProcess(name, code or 0, out.getvalue(), err.getvalue())


def pytest_collection_finish(session):
    """Trains the default base model, if it is not cached, beside the tests that do not need it."""
    if any("base_model" in item.fixturenames for item in session.items):
        code = "import tasks, grpo; tasks.base_model(grpo.Args().warm_start_steps)"
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        session.base_model = subprocess.Popen(
            [sys.executable, "-c", code], cwd=ROOT, env=env, stderr=subprocess.DEVNULL
        )


@pytest.fixture(scope="session")
def base_model(request):
    """Waits until the default base model is there."""
    assert request.session.base_model.wait(timeout=600) == 0


@pytest.fixture(scope="session")
def tiny_model():
    """A tiny MoE after a few supervised steps, with its tokenizer: not a good one, but not random either."""
    import tasks

    cwd = os.getcwd()
    os.chdir(ROOT)
    try:
        folder = tasks.base_model(60)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        return model, transformers.AutoTokenizer.from_pretrained(folder)
    finally:
        os.chdir(cwd)
