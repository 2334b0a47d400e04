"""One optimizer step of grpo's and dapo's losses in HF Trainer and accelerate: in float64, in W
processes with four accumulation steps each. Prints the length of the step's gradient over that of the
whole batch's in a plain loop, as "framework, script, divisor: ratio".

    torchrun --nproc-per-node 2 tests/accumulation.py
"""

import importlib
import sys
import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import Trainer, TrainingArguments

sys.path.insert(0, str(Path(__file__).parent.parent))
STEPS = 4
ROWS = 16
T = 6
F64 = torch.float64


class Table(torch.nn.Module):
    """A policy whose logits are a table: one row for each place in the response."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.logits_TV = torch.nn.Parameter(torch.randn(T, 5, generator=generator, dtype=F64))

    def forward(self, tokens_BT):
        logprobs_BTV = self.logits_TV.log_softmax(-1).expand(len(tokens_BT), -1, -1)
        return logprobs_BTV.gather(2, tokens_BT[..., None])[..., 0]


def batch():
    """Rows of different lengths, off-policy enough for clips to act."""
    g = torch.Generator().manual_seed(1)
    tokens_BT = torch.randint(5, (ROWS, T), generator=g)
    mask_BT = torch.arange(T) < torch.randint(1, T + 1, (ROWS, 1), generator=g)
    with torch.no_grad():
        old_BT = Table()(tokens_BT) + 0.2 * torch.randn(ROWS, T, generator=g, dtype=F64)
    advantages_B1 = torch.randn(ROWS, 1, generator=g, dtype=F64)
    return tokens_BT, old_BT, advantages_B1, mask_BT


def loss_of(name, model, rows, divisor):
    """The loss of some rows, for a step that is divided `divisor` times afterwards."""
    tokens_BT, *given = rows
    count = ("num_tokens", batch()[3].sum()) if name == "dapo" else ("num_sequences", ROWS)
    loss, _ = importlib.import_module(name).policy_loss(
        model(tokens_BT), *given, **{count[0]: count[1] / divisor}
    )
    return loss


def ratio(gradient, name):
    """Its length over that of the whole batch's; NaN if it has another direction."""
    model = Table()
    (whole,) = torch.autograd.grad(loss_of(name, model, batch(), 1), model.parameters())
    found = (gradient.norm() / whole.norm()).item()
    return found if torch.allclose(gradient, found * whole, rtol=1e-12, atol=1e-15) else float("nan")


def in_trainer(name, divisor, is_scaled):
    class OurTrainer(Trainer):
        loss_is_scaled_for_ga = is_scaled

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return loss_of(name, model, inputs["rows"], divisor)

    def collate(items):
        return {"rows": tuple(torch.stack(column) for column in zip(*items, strict=True))}

    gradients = []
    model = Table()
    hook = register_optimizer_step_pre_hook(lambda *_: gradients.append(model.logits_TV.grad.clone()))
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            use_cpu=True,
            max_steps=1,
            per_device_train_batch_size=ROWS // STEPS // Accelerator(cpu=True).num_processes,
            gradient_accumulation_steps=STEPS,
            max_grad_norm=0,
            remove_unused_columns=False,
            report_to="none",
            disable_tqdm=True,
        )
        rows = list(zip(*batch(), strict=True))
        OurTrainer(model, args, data_collator=collate, train_dataset=rows).train()
    hook.remove()
    return ratio(gradients[0], name)


def in_accelerate(name, divisor):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=STEPS)
    table = Table()
    model = accelerator.prepare(table)
    own = torch.arange(ROWS)[accelerator.process_index :: accelerator.num_processes]
    for rows in own.chunk(STEPS):
        with accelerator.accumulate(model):
            loss = loss_of(name, model, [x[rows] for x in batch()], divisor)
            accelerator.backward(loss)
    return ratio(table.logits_TV.grad, name)


def main():
    W = Accelerator(cpu=True).num_processes
    found = {}
    for name in ("grpo", "dapo"):
        found[f"trainer scaled, {name}, W"] = in_trainer(name, W, True)
        found[f"trainer, {name}, W"] = in_trainer(name, W, None)
        found[f"trainer, {name}, W steps"] = in_trainer(name, W * STEPS, None)
        found[f"accelerate, {name}, W"] = in_accelerate(name, W)
        found[f"accelerate, {name}, W steps"] = in_accelerate(name, W * STEPS)
    if Accelerator(cpu=True).is_main_process:
        for words, value in found.items():
            print(f"{words}: {value:.12f}")


if __name__ == "__main__":
    main()
