"""Trains on several GPUs: plugs a loss of this repository into TRL's GRPOTrainer.

    pip install -r examples/requirements.txt
    accelerate launch --multi_gpu --num_processes 2 examples/trl_trainer.py --algorithm gspo --use_cpu

Without --multi_gpu, accelerate starts a single process and does not say so. Each process prints a line
that begins with "problems:", and the last line of the output names their number.

Expect: greedy held-out accuracy rises from 0.43 to at least 0.9, and the model is in runs/trl-gspo.

It takes the script's flags (`python gspo.py --help`) for model, data, reward, rollouts, steps and loss,
and TRL's (GRPOConfig) for the rest, such as --output_dir, --use_cpu, --use_vllm, --deepspeed or
--report_to; --per_device_train_batch_size is by default a process's part of a whole step. Any other
flag of the script is an error, and so is a flag of TRL for the loss or the size of a step.
Each process grades its own completions, so a reward function that takes lists gets only those. With
--dtype bfloat16, TRL uses autocast. The model, in float32, has to fit on one GPU, even if DeepSpeed or
FSDP shards it later.

Not supported: ppo (its critic), rspo (the old policy's router scores), dapo's dynamic sampling and
overlong penalty, and any correction for vLLM's log-probs. This has run on one GPU, but not
on several.
"""

import argparse
import dataclasses
import importlib
import importlib.metadata
import inspect
import os
import sys
from pathlib import Path

import torch
from datasets import Dataset
from transformers import HfArgumentParser
from trl import GRPOConfig, GRPOTrainer

sys.path.insert(0, str(Path(__file__).parent.parent))
from common import Completion, UserError, evaluate, load_grader, load_policy, load_problems
from plumbing.args import add_flags, one_line

TRL = "1.16.0"
ALGORITHMS = ["grpo", "dr_grpo", "dapo", "gspo", "cispo", "gmpo", "sapo"]
# Flags of the script that are used, in addition to those of its policy_loss
USED = """answer_column chat_template_kwargs dataset dataset_config dataset_split dtype eval_dataset
eval_samples eval_split group_size instruction iterations lr max_new_tokens model num_held_out
num_minibatches prompt_column prompts_per_iteration reward rollout_batch_size router_aux_coef save_every
system_prompt temperature update_epochs""".split()
# Prefixes of TRL's flags that have no effect here
UNUSED = """delta do_ entropy_ epsilon importance_sampling loss_type model_init multi_objective
num_train_epochs off_policy_mask reward_weights router_aux sapo_ scale_rewards steps_per_generation
top_entropy trust_remote use_adaptive use_bias_correction vespo_ vllm_importance_sampling""".split()
DEFAULTS = """--seed 1 --disable_dropout True --gradient_checkpointing False
--lr_scheduler_type constant --vllm_importance_sampling_correction False""".split()


class PluggedTrainer(GRPOTrainer):
    """Uses `policy_loss` and `compute_advantages` of `script`, with the flags in `values`."""

    def _tokenize_prompts(self, prompts):
        # A rendered prompt may begin with BOS already, and TRL would add another.
        return [self.prompt_ids[prompt] for prompt in prompts], None, {}

    def _calculate_rewards(self, *args):
        rewards = super()._calculate_rewards(*args)  # from all processes
        self.rewards_PG = rewards.view(-1, self.num_generations)
        return rewards

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        first = self.accelerator.process_index * len(inputs)
        advantages_N = self.script.compute_advantages(self.rewards_PG).flatten()
        return {**output, "advantages": advantages_N[first : first + len(inputs)]}

    def step_counts(self):
        """The normalizers N / W, where N is the number of completions or tokens in the whole optimizer
        step, over its micro-batches and all W processes. Each process sums the gradients of its
        micro-batches; then DDP, FSDP and DeepSpeed average over processes, which divides by W."""
        accumulation = self.current_gradient_accumulation_steps
        first = self._step % self.args.steps_per_generation // accumulation * accumulation
        micro_batches = self._buffered_inputs[first : first + accumulation]
        masks = [micro_batch["completion_mask"] for micro_batch in micro_batches]
        num_tokens = sum(mask.sum() for mask in masks).float()
        return {
            "num_sequences": sum(len(mask) for mask in masks),  # the same in every process
            "num_tokens": self.accelerator.reduce(num_tokens, "mean").clamp(min=1),
        }

    def _compute_loss(self, model, inputs):
        mask_BT = inputs["completion_mask"]
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attention = torch.cat([inputs["prompt_mask"], mask_BT], dim=1)
        logprobs_BT, _, aux_loss = self._get_per_token_logps_and_entropies(
            model, ids, attention, mask_BT.shape[1], compute_aux_loss=self.aux_loss_enabled
        )
        # None with one optimizer step per rollout: TRL does not compute them then.
        old_logprobs_BT = inputs.get("old_per_token_logps")
        values = self.values | self.step_counts()
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


def to_trl(args, processes, micro_batch):
    """{TRL's flag: value} for the rollouts, steps and KL that the script's flags describe."""
    rollout = args.prompts_per_iteration * args.group_size
    step = rollout // args.num_minibatches
    if step % processes > 0:
        raise UserError(f"--num_minibatches: {processes} processes cannot share a step of {step}")
    share = step // processes
    micro_batch = min(micro_batch or share, share)
    if share % micro_batch > 0:
        name = f"--per_device_train_batch_size {micro_batch}"
        raise UserError(f"{name} does not divide {share}, a process's part of a step")
    steps = args.update_epochs * args.num_minibatches
    return {
        "generation_batch_size": rollout,
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": share // micro_batch,
        "max_steps": args.iterations * steps,
        "logging_steps": steps,
        "save_strategy": "steps" if args.save_every > 0 else "no",
        "save_steps": max(1, args.save_every * steps),
        "num_iterations": args.update_epochs,
        "num_generations": args.group_size,
        "max_completion_length": args.max_new_tokens,
        "temperature": args.temperature,
        "learning_rate": args.lr,
        "bf16": args.dtype == "bfloat16",
        "beta": getattr(args, "kl_coef", 0.0),  # above 0, TRL creates a reference model
    }


def parse(argv):
    """The command line -> (the script, its Args, TRL's config)."""
    parser = argparse.ArgumentParser(usage=__doc__, allow_abbrev=False)
    parser.add_argument("--algorithm", choices=ALGORITHMS, default="grpo")
    parser.add_argument("--per_device_train_batch_size", type=int, default=0)  # 0: a whole step
    choice, argv = parser.parse_known_args(argv)
    script = importlib.import_module(choice.algorithm)

    options = {"add_help": False, "allow_abbrev": False, "exit_on_error": False}
    parser = argparse.ArgumentParser(**options)
    add_flags(parser, script.Args, {*USED, *inspect.signature(script.policy_loss).parameters})
    given, argv = parser.parse_known_args(argv)
    args = script.Args(**vars(given))

    processes = int(os.environ.get("WORLD_SIZE", 1))
    ours = to_trl(args, processes, choice.per_device_train_batch_size)
    for word in argv:
        name = word.partition("=")[0].removeprefix("--").replace("-", "_")
        if word.startswith("--") and (name in ours or name.startswith(tuple(UNUSED))):
            raise UserError(f"--{name} has no effect here: use the flags of {choice.algorithm}.py")
    parser = HfArgumentParser(GRPOConfig, **options)
    words = [*DEFAULTS, f"--output_dir=runs/trl-{choice.algorithm}", *argv]
    words += [f"--{name}={value}" for name, value in ours.items()]
    with one_line("TRL"):
        config, rest = parser.parse_args_into_dataclasses(words, return_remaining_strings=True)
    if rest:
        raise UserError(f"unknown argument {rest[0]}")
    return script, dataclasses.replace(args, device=str(config.device)), config


def main(argv):
    if importlib.metadata.version("trl") != TRL:
        raise UserError(f"it overrides private methods of TRL {TRL}: pip install trl=={TRL}")
    script, args, config = parse(argv)
    grade = load_grader(args)
    policy = load_policy(dataclasses.replace(args, dtype="float32"))  # TRL casts
    stream, held_out = load_problems(args, policy, grade)
    problems = stream.problems
    if len(problems) < args.prompts_per_iteration:
        raise UserError(f"--prompts_per_iteration: there are only {len(problems)} training problems")
    is_moe = hasattr(policy.master.config.get_text_config(), "output_router_logits")
    config.router_aux_loss_coef = args.router_aux_coef if is_moe else 0.0

    def reward(number, completion_ids, **others):
        completions = []
        for i, ids in zip(number, completion_ids, strict=True):
            is_truncated = ids[-1] not in policy.end_ids
            text = policy.tokenizer.decode(ids if is_truncated else ids[:-1])
            completions.append(Completion(problems[i], ids, [], is_truncated, text))
        return [c.reward for c in grade(completions)]

    data = Dataset.from_list([{"prompt": p.prompt, "number": i} for i, p in enumerate(problems)])
    trainer = PluggedTrainer(
        policy.master, reward, config, train_dataset=data, processing_class=policy.tokenizer
    )
    trainer.script = script
    trainer.values = vars(args)
    trainer.prompt_ids = {p.prompt: p.prompt_ids for p in problems}
    trainer.train(resume_from_checkpoint=config.resume_from_checkpoint)
    trainer.save_model()  # complete, even if FSDP has sharded it
    if trainer.accelerator.is_main_process:
        trained = load_policy(dataclasses.replace(args, model=config.output_dir))
        after = evaluate(trained, held_out, grade, args, sampled=True)
        ways = ("greedy", "sampled")
        has_verdicts = all("accuracy" in after[way] for way in ways)
        name = "accuracy" if has_verdicts else "reward_mean"
        found = {way: after[way][name] for way in ways}
        print(f"{config.world_size} processes, held-out {name} {found}: {config.output_dir}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (UserError, argparse.ArgumentError) as error:
        print(f"{Path(__file__).name}: error: {error}", file=sys.stderr)
        sys.exit(2)
