"""Plugs a loss of this repository into TRL's GRPOTrainer, so you can use DeepSpeed, FSDP and vLLM.

    pip install -r examples/requirements.txt
    torchrun --nproc-per-node 2 examples/trl_trainer.py --algorithm gspo --use_cpu True

Expect: greedy held-out accuracy rises from 0.43 to at least 0.9. You can use TRL's flags
(GRPOConfig), and the script's flags for model, data, reward and loss (--model, --kl_coef). Loss,
advantages and KL are the script's, so TRL's flags for them are refused, and so are the script's flags
for the loop. dapo has no dynamic sampling and no overlong shaping here. ppo is missing because it has
a critic, rspo because it needs the old policy's router scores. This overrides private methods of TRL
1.16.0, and stops with any other version.
"""

import argparse
import dataclasses
import importlib.metadata
import inspect
import sys
from pathlib import Path

import torch
from datasets import Dataset
from transformers import HfArgumentParser
from trl import GRPOConfig, GRPOTrainer

sys.path.insert(0, str(Path(__file__).parent.parent))
from common import Completion, UserError, evaluate, load_grader, load_policy, load_problems
from plumbing import ranks
from plumbing.args import add_flag, check_flags
from plumbing.model import end_ids

TRL = "1.16.0"
ALGORITHMS = ["grpo", "dr_grpo", "dapo", "gspo", "cispo", "gmpo", "sapo"]
# 60 rollouts of 256 completions, 4 steps of 64 = 2 processes x 2 micro-batches x 16
DEFAULTS = """--output_dir runs/trl --max_steps 240 --num_generations 8 --max_completion_length 48
--per_device_train_batch_size 16 --gradient_accumulation_steps 2 --steps_per_generation 8 --top_k 0
--learning_rate 2e-4 --lr_scheduler_type constant --bf16 False --gradient_checkpointing False
--save_strategy no --logging_steps 40 --vllm_importance_sampling_correction False"""
# Replaced by the script's loss, advantages and KL
IGNORED_OF_TRL = """beta delta entropy_coef entropy_coef_delta entropy_coef_max entropy_coef_min
entropy_target epsilon epsilon_high importance_sampling_level loss_type multi_objective_aggregation
off_policy_mask_threshold sapo_temperature_neg sapo_temperature_pos scale_rewards top_entropy_quantile
use_adaptive_entropy use_bias_correction_kl vespo_k_neg vespo_k_pos vespo_lambda_neg vespo_lambda_pos
vllm_importance_sampling_cap vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min
vllm_importance_sampling_correction vllm_importance_sampling_mode""".split()
USED_OF_SCRIPT = """model dataset dataset_config dataset_split prompt_column answer_column system_prompt
instruction chat_template_kwargs num_held_out reward reward_weights head_dtype rollout_batch_size
eval_samples kl_coef""".split()


class PluggedTrainer(GRPOTrainer):
    """Uses `policy_loss` and `compute_advantages` from `script`, with the values of its flags."""

    def _calculate_rewards(self, *args):
        rewards = super()._calculate_rewards(*args)  # from all processes, one column per function
        self.rewards_PG = rewards.nansum(1).view(-1, self.num_generations)
        return rewards

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        first = self.accelerator.process_index * len(inputs)
        advantages_N = self.script.compute_advantages(self.rewards_PG).flatten()
        return {**output, "advantages": advantages_N[first : first + len(inputs)]}

    def step_counts(self):
        """The normalizers N / W, where N is the number of completions or tokens in the whole optimizer
        step, over its accumulation steps and all W processes.
        A step's loss is a sum over all its tokens, divided by N. Each process adds up the gradients of
        its micro-batches. The Trainer does not divide by the number of micro-batches, because TRL sets
        loss_is_scaled_for_ga. Then DDP, FSDP and DeepSpeed average over processes, which divides by W.
        (If each process divided by its own count, tokens would weigh more where answers are short.)"""
        accumulation = self.current_gradient_accumulation_steps
        slices = self.args.steps_per_generation  # number of micro-batches in a rollout
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
        # None with one optimizer step per rollout: TRL does not compute them then.
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


def names_of(words):
    """The names of the flags in a command line."""
    return [word.partition("=")[0][2:].replace("-", "_") for word in words if word.startswith("--")]


def parse(argv):
    """(TRL's config, the script, its flags). A flag that would do nothing is a UserError."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--algorithm", choices=ALGORITHMS, default="grpo")
    choice, argv = first.parse_known_args(argv)
    script = importlib.import_module(choice.algorithm)
    used = {*USED_OF_SCRIPT, *inspect.signature(script.policy_loss).parameters} - {"max_new_tokens"}
    second = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for field in dataclasses.fields(script.Args):
        if field.name in used:
            add_flag(second, field)
    values, argv = second.parse_known_args(argv)
    flags = script.Args(**vars(values))
    check_flags(flags)
    third = HfArgumentParser(GRPOConfig, allow_abbrev=False)
    config, rest = third.parse_args_into_dataclasses([*DEFAULTS.split(), *argv], True)
    dropped = [name for name in names_of(argv) if name in IGNORED_OF_TRL] + names_of(rest)
    if dropped:
        raise UserError(f"--{dropped[0]} does nothing here: the header says which flags do")
    if rest:
        raise UserError(f"{rest[0]} belongs to no flag")
    flags.device = str(config.device)
    flags.max_new_tokens = config.max_completion_length
    flags.temperature = config.temperature
    config.beta = getattr(flags, "kl_coef", 0.0)  # above 0, TRL creates a reference model
    return config, script, flags


def main(argv):
    installed = importlib.metadata.version("trl")
    if installed != TRL:
        sys.exit(f"it overrides private methods of TRL {TRL}, not {installed}: pip install trl=={TRL}")
    config, script, flags = parse(argv)
    grade = load_grader(flags)
    policy = load_policy(flags)
    stream, held_out = load_problems(flags, policy)
    ends = end_ids(policy.model, policy.tokenizer)

    def reward(completions, completion_ids, number, **kwargs):
        mine = []
        for i, ids, text in zip(number, completion_ids, completions, strict=True):
            mine.append(Completion(stream.problems[i], ids, [], ids[-1] not in ends, text))
        # All processes have the same number. One process grades each completion; all get all grades.
        graded = grade(ranks.all_gather_list(mine))
        return [c.reward for c in ranks.local_slice(graded)]

    data = Dataset.from_list([{"prompt": p.prompt, "number": i} for i, p in enumerate(stream.problems)])
    trainer = PluggedTrainer(
        policy.master, reward, config, train_dataset=data, processing_class=policy.tokenizer
    )
    trainer.script = script
    trainer.flags = flags
    trainer.train()
    trainer.save_model()
    trainer.accelerator.wait_for_everyone()
    flags.model = config.output_dir  # the saved model is complete, even if FSDP has sharded it
    after = evaluate(load_policy(flags), held_out, grade, flags, sampled=True)
    accuracy = {way: after[way]["accuracy"] for way in ("greedy", "sampled")}
    if trainer.accelerator.is_main_process:
        print(f"held-out accuracy: {accuracy}; the model is in {config.output_dir}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(f"{Path(__file__).name}: error: {error}")
