"""What TRL and verl do differently, measured: their losses, their steps and their defaults.

    pip install -r examples/requirements.txt && python conformance/engines.py trl
    pip install torch==2.13.0 verl==0.9.1 && python conformance/engines.py verl  # separate environment
    python conformance/engines.py page

The first two make the rows of one engine again, for the version that is installed; the last writes them
into the tables of README.md.
engines_losses.csv: what the doctor says of the functions in examples/doctor_trl.py and doctor_verl.py.
engines_defaults.csv: the defaults of settings that differ from the paper's.
engines_steps.csv: what the doctor cannot see: the gradient of a step that is split over processes and
micro-batches, as the optimizer receives it, against the script's on all completions of the step at
once. The error is relative to the norm of the latter; the smallest and the largest of a case are kept.
TRL: the real trainer makes four steps in two processes, at a learning rate so high that clips bind. In
float32, where 1e-5 is rounding. The rows of verl 0.9.1 are not made again: its `ppo_loss` was called as
one to four processes would, on the shares of 32 random completions, by this script at commit 43c304f.
"""

import copy
import csv
import importlib
import importlib.metadata
import inspect
import os
import subprocess
import sys
from pathlib import Path

import torch
from torch.nn.utils import parameters_to_vector

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(1, str(Path(__file__).parent))
from common import Completion, Problem, collate, token_logprobs
from plumbing.policy import Policy

HERE = Path(__file__).parent
TRL_JOB = """--output_dir runs/trainers --use_cpu True --max_steps 4 --learning_rate 2e-3
--per_device_train_batch_size 8 --gradient_accumulation_steps 2 --steps_per_generation 8
--max_grad_norm 0 --router_aux_loss_coef 0 --shuffle_dataset False --disable_tqdm True"""
PROCESSES = 2

# ----------------------------------------------------------------------------------- the steps of TRL


def completions_of(micro_batches):
    """The rows of TRL's padded tensors, without the padding."""
    completions = []
    for micro in micro_batches:
        for i in range(len(micro["prompt_ids"])):
            prompt_ids = micro["prompt_ids"][i][micro["prompt_mask"][i].bool()].tolist()
            ids = micro["completion_ids"][i][micro["completion_mask"][i].bool()].tolist()
            completions.append(Completion(Problem("", "", prompt_ids), ids, [0.0] * len(ids)))
    return completions


def measuring(trainer_class, name):
    """The trainer, with each step's gradient compared with the script's."""

    class MeasuringTrainer(trainer_class):
        errors = []
        micro_batches = []  # of the step at hand
        reference = None

        def policy(self):
            return Policy(self.accelerator.unwrap_model(self.model), self.processing_class)

        def _generate_and_score_completions(self, inputs):
            self.old_policy = copy.deepcopy(self.policy())
            self.reference = self.reference or self.old_policy
            return super()._generate_and_score_completions(inputs)

        def _compute_loss(self, model, inputs):
            self.micro_batches.append(inputs)
            return super()._compute_loss(model, inputs)

        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            if self.accelerator.sync_gradients:  # the optimizer is next
                self.errors.append(self.error_of_the_step())
                self.micro_batches.clear()
            return loss

        def error_of_the_step(self):
            shares = [None] * PROCESSES
            torch.distributed.all_gather_object(shares, self.micro_batches)
            micro_batches = sum(shares, [])
            batch = collate(completions_of(micro_batches), self.flags)
            advantages_B1 = torch.cat([micro["advantages"] for micro in micro_batches]).unsqueeze(1)
            policy = self.policy()
            logprobs_BT = token_logprobs(policy, batch, temperature=1.0).logprobs_BT
            with torch.no_grad():
                old_BT = token_logprobs(self.old_policy, batch, temperature=1.0).logprobs_BT
                ref_BT = token_logprobs(self.reference, batch, temperature=1.0).logprobs_BT
            policy_loss = importlib.import_module(name).policy_loss
            extras = {"ref_logprobs_BT": ref_BT, "max_new_tokens": self.flags.max_new_tokens}
            names = inspect.signature(policy_loss).parameters
            extras = {key: value for key, value in extras.items() if key in names}
            loss, _ = policy_loss(logprobs_BT, old_BT, advantages_B1, batch.mask_BT, **extras)
            weights = list(policy.parameters())
            expected = parameters_to_vector(torch.autograd.grad(loss, weights))
            gradient = parameters_to_vector([weight.grad for weight in weights])
            return ((gradient - expected).norm() / expected.norm()).item()

    return MeasuringTrainer


def measure_steps(row, engine):
    from trl import GRPOTrainer
    from trl.experimental.gmpo import GMPOTrainer

    from examples import trl_trainer

    name = row["algorithm"]
    engines_class = GMPOTrainer if name == "gmpo" else GRPOTrainer
    trainer = measuring(trl_trainer.PluggedTrainer if row["loss"] == "ours" else engines_class, name)
    trl_trainer.main(["--algorithm", name, *TRL_JOB.split(), *row["setting"].split()], trainer)
    row["smallest"] = f"{min(trainer.errors):.2g}"
    row["largest"] = f"{max(trainer.errors):.2g}"


# ----------------------------------------------------------------------------------------- the tables


def read(path):
    with open(path) as file:
        return list(csv.DictReader(file))


def write(path, rows):
    with open(path, "w") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def see_a_doctor(row, engine):
    from rl_loss_vectors import doctor

    functions = importlib.import_module(f"examples.doctor_{engine}")
    function = getattr(functions, row["function"])
    found = doctor.examine_shapes(function, row["section"])
    subject, results, diagnosis = doctor.diagnosed(found)
    tested = doctor.answered(results)
    wrong = [case["id"] for case, answer in tested if not doctor.is_right(subject, case, answer)]
    row["agree"] = f"{len(tested) - len(wrong)} of {len(tested)}"
    row["differ"] = " ".join(wrong)
    row["diagnosis"] = "; ".join(line.strip() for line in diagnosis) or "healthy"


def look_up_default(row, engine):
    if engine == "trl":
        from trl import GRPOConfig as Config
    else:
        from verl.trainer.config import AlgoConfig
        from verl.workers.config import ActorConfig

        Config = ActorConfig if row["setting"] in ActorConfig.__dataclass_fields__ else AlgoConfig
    row["default"] = str(Config.__dataclass_fields__[row["setting"]].default)


MEASURES = {"losses": see_a_doctor, "defaults": look_up_default, "steps": measure_steps}
COLUMNS = {  # in README.md
    "losses": "engine version function section setting agree differ diagnosis",
    "defaults": "engine version algorithm setting default paper",
    "steps": "engine version algorithm departure paper measure smallest largest remedy",
}


def tables():
    """{name: the lines of a table of README.md}"""
    result = {}
    for name, columns in COLUMNS.items():
        rows = [row for row in read(HERE / f"engines_{name}.csv") if row.get("departure") != ""]
        cells = [columns.split(), ["---"] * len(columns.split())]
        cells += [[row[column].replace("|", r"\|") for column in columns.split()] for row in rows]
        result[name] = [f"| {' | '.join(line)} |" for line in cells]
    return result


def page():
    path = HERE / "README.md"
    text = path.read_text()
    for name, lines in tables().items():
        start = text.index(f"<!-- {name} -->")
        end = text.index("<!-- end -->", start)
        text = text[:start] + "\n".join([f"<!-- {name} -->", *lines, ""]) + text[end:]
    path.write_text(text)


def main():
    engine = sys.argv[1]
    folder = Path(sys.argv[2]) if len(sys.argv) > 2 else HERE
    if engine == "page":
        return page()
    # The doctor needs TRL in one process, its trainer several.
    is_several = "RANK" in os.environ
    names = ["steps"] if is_several else ["losses", "defaults"]
    for name in names:
        path = folder / f"engines_{name}.csv"
        rows = read(path)
        for row in rows:
            if row["engine"].lower() == engine and row.get("seen_by", "engines.py") == "engines.py":
                row["version"] = importlib.metadata.version(engine)
                MEASURES[name](row, engine)
        if os.environ.get("RANK", "0") == "0":
            write(path, rows)
    if engine == "trl" and not is_several:
        torchrun = "-m torch.distributed.run --standalone --nproc-per-node".split()
        command = [sys.executable, *torchrun, str(PROCESSES), __file__, engine, folder]
        env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        sys.exit(subprocess.run(command, env=env).returncode)


if __name__ == "__main__":
    main()
