import dataclasses
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

ROOT = Path(__file__).parent.parent
SCRIPTS = ["ppo", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "gmpo", "rspo", "sapo"]
torch.set_num_threads(2)
transformers.utils.logging.disable_progress_bar()


def script_args(name, **changes):
    """(module of the script, its default Args with changes)."""
    module = importlib.import_module(name)
    return module, dataclasses.replace(module.Args(), **changes)


def run(name, *flags, cwd=ROOT, timeout=300):
    """Runs a script as a user would, without a network."""
    command = [sys.executable, str(ROOT / f"{name}.py"), *map(str, flags)]
    env = os.environ | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout)


@pytest.fixture(scope="session")
def tiny_model():
    """A tiny MoE after a few supervised steps, with its tokenizer: not a good one, but not random either."""
    import common

    cwd = os.getcwd()
    os.chdir(ROOT)
    try:
        folder = common.base_model_folder(60)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        return model, transformers.AutoTokenizer.from_pretrained(folder)
    finally:
        os.chdir(cwd)
