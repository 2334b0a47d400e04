"""A loss of this repository in TRL's GRPOTrainer, to use TRL's DeepSpeed, FSDP and vLLM.

    pip install -r examples/requirements.txt
    torchrun --nproc-per-node 2 examples/trl_trainer.py --algorithm gspo --use_cpu True

Expect: greedy held-out accuracy rises from 0.43 to at least 0.9. Flags are TRL's (GRPOConfig); those
that TRL does not know are the script's (--model, --reward, --kl_coef). Loss, advantages and KL are the
script's: --loss_type, --epsilon, --beta and --scale_rewards do nothing. dapo has no dynamic sampling
and no overlong shaping here. ppo is missing because it has a critic, rspo because it needs the old
policy's router scores. This overrides private methods of TRL 1.16.0, and stops with any other version.
"""

import importlib.metadata
import inspect
import sys
from pathlib import Path

import torch
from datasets import Dataset
from transformers import HfArgumentParser
from trl import GRPOConfig, GRPOTrainer

sys.path.insert(0, str(Path(__file__).parent.parent))
from common import Completion, evaluate, graded, load_policy, load_problems, load_verifier
from plumbing.models import end_ids

TRL = "1.16.0"
ALGORITHMS = ["grpo", "dr_grpo", "dapo", "gspo", "cispo", "gmpo", "sapo"]
# The default job: 60 rollouts of 256 completions, 4 steps of 64 = 2 processes x 2 micro-batches x 16
DEFAULTS = """--output_dir runs/trl --max_steps 240 --num_generations 8 --max_completion_length 48
--per_device_train_batch_size 16 --gradient_accumulation_steps 2 --steps_per_generation 8 --top_k 0
--learning_rate 2e-4 --lr_scheduler_type constant --bf16 False --gradient_checkpointing False
--save_strategy no --logging_steps 40 --vllm_importance_sampling_correction False"""


class PluggedTrainer(GRPOTrainer):
    """Takes `policy_loss` and `compute_advantages` from `script`, with the values of its flags."""

    def _calculate_rewards(self, *args):
        rewards = super()._calculate_rewards(*args)  # of all processes, a column for each function
        self.rewards_PG = rewards.nansum(1).view(-1, self.num_generations)
        return rewards

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        first = self.accelerator.process_index * len(inputs)
        advantages_N = self.script.compute_advantages(self.rewards_PG).flatten()
        return {**output, "advantages": advantages_N[first : first + len(inputs)]}

    def step_counts(self):
        """The normalisers N / W, where N is the number of completions or tokens of the whole optimizer
        step, over its accumulation steps and all W processes.
        A step's loss is a sum over all its tokens, divided by N. A process adds up the gradients of its
        micro-batches; the Trainer does not divide them by their number, because TRL sets
        loss_is_scaled_for_ga. Then DDP, FSDP and DeepSpeed average over processes, which divides by W.
        (If each process divided by its own count, tokens would weigh more where answers are short.)"""
        accumulation = self.current_gradient_accumulation_steps
        slices = self.args.steps_per_generation  # micro-batches that a rollout is cut into
        assert slices % accumulation == 0, "a step needs more than one rollout"
        first = self._step % slices // accumulation * accumulation
        micro_batches = self._buffered_inputs[first : first + accumulation]
        masks = [micro_batch["completion_mask"] for micro_batch in micro_batches]
        num_tokens = self.accelerator.reduce(sum(mask.sum() for mask in masks).float(), "mean")
        return {"num_sequences": sum(map(len, masks)), "num_tokens": num_tokens}

    def _compute_loss(self, model, inputs):
        mask_BT = inputs["completion_mask"]
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attention = torch.cat([inputs["prompt_mask"], mask_BT], dim=1)
        logprobs_BT, _, aux_loss = self._get_per_token_logps_and_entropies(
            model, ids, attention, mask_BT.shape[1], compute_aux_loss=self.aux_loss_enabled
        )
        # With one optimizer step per rollout, TRL does not compute them: None.
        old_logprobs_BT = inputs.get("old_per_token_logps")
        values = vars(self.flags) | self.step_counts()
        values["ref_logprobs_BT"] = inputs.get("ref_per_token_logps")
        names = inspect.signature(self.script.policy_loss).parameters
        keywords = {name: values[name] for name in names if name in values}
        A_B = inputs["advantages"]
        loss, stats = self.script.policy_loss(logprobs_BT, old_logprobs_BT, A_B, mask_BT, **keywords)
        for name, value in stats.items():
            self._metrics["train"][name].append(self.accelerator.gather(value).mean().item())
        if self.aux_loss_enabled:
            loss += self.router_aux_loss_coef * aux_loss / self.current_gradient_accumulation_steps
        return loss


def main(argv, trainer_class=PluggedTrainer):
    installed = importlib.metadata.version("trl")
    if installed != TRL:
        sys.exit(f"it overrides private methods of TRL {TRL}, not {installed}: pip install trl=={TRL}")
    parser = HfArgumentParser(GRPOConfig, allow_abbrev=False)
    parser.add_argument("--algorithm", choices=ALGORITHMS, default="grpo")
    config, choice, rest = parser.parse_args_into_dataclasses([*DEFAULTS.split(), *argv], True)
    script = importlib.import_module(choice.algorithm)
    (flags,) = HfArgumentParser(script.Args, allow_abbrev=False).parse_args_into_dataclasses(rest)
    flags.device = str(config.device)
    flags.max_new_tokens = config.max_completion_length
    flags.temperature = config.temperature
    config.beta = getattr(flags, "kl_coef", 0.0)  # above 0, TRL makes a reference
    verify = load_verifier(flags)
    policy = load_policy(flags)
    stream, held_out = load_problems(flags, policy)
    ends = end_ids(policy.model, policy.tokenizer)

    def reward(completions, completion_ids, number, **kwargs):
        rows = zip(number, completion_ids, completions, strict=True)
        parts = [(stream.problems[i], ids, [], ids[-1] not in ends, text) for i, ids, text in rows]
        results = graded(verify, [Completion(*part) for part in parts])
        return [result["reward"] for result in results]

    data = Dataset.from_list([{"prompt": p.prompt, "number": i} for i, p in enumerate(stream.problems)])
    trainer = trainer_class(
        policy.master, reward, config, train_dataset=data, processing_class=policy.tokenizer
    )
    trainer.script = script
    trainer.flags = flags
    trainer.train()
    trainer.save_model()
    trainer.accelerator.wait_for_everyone()
    flags.model = config.output_dir  # what was saved is whole, even where FSDP has spread it
    after = evaluate(load_policy(flags), held_out, verify, flags, sampled=True)
    accuracy = {way: after[way]["accuracy"] for way in ("greedy", "sampled")}
    if trainer.accelerator.is_main_process:
        print(f"held-out accuracy: {accuracy}; the model is in {config.output_dir}")


if __name__ == "__main__":
    main(sys.argv[1:])
