"""Trains on several GPUs: plugs an algorithm of this repository into TRL's GRPOTrainer.

    pip install -r examples/requirements.txt
    accelerate launch --multi_gpu --num_processes 2 examples/trl_trainer.py --algorithm gspo --use_cpu

Without --multi_gpu, accelerate starts a single process and does not say so: the last line of the output
names the number of processes.

Expect: greedy held-out accuracy rises from 0.43 to at least 0.9, and the model is in runs/trl-gspo.

It takes the script's flags (`python gspo.py --help`) for model, data, reward, rollouts, steps and loss,
and TRL's (GRPOConfig) for the rest, such as --output_dir, --resume_from_checkpoint, --use_cpu,
--use_vllm, --deepspeed or --report_to; --per_device_train_batch_size is by default a process's part of
a whole step. Any other flag of the script is an error, which names TRL's. So is a flag of TRL for the
loss or the size of a step. Each process grades its own completions, so a reward function that takes
lists gets only those. With --dtype bfloat16, TRL uses autocast. The model, in float32, has to fit on
one GPU, even if DeepSpeed or FSDP shards it later. A resumed run ends with the weights of one that was
not interrupted.

If dapo lacks groups after --max_sampling_rounds, the iteration has as many steps as ever, but fewer
tokens in each. With rspo, a process stores 6 bytes for each token, layer and active expert of its part
of a rollout.

Not supported: ppo (TRL's trainer has no critic), routing replay, corrections for vLLM's log-probs,
PEFT, --torch_compile, and expert, tensor or context parallelism. All algorithms have run in two
processes on a CPU, and grpo on one GPU. We have not tried several GPUs, vLLM or DeepSpeed.
"""

import argparse
import dataclasses
import importlib
import importlib.metadata
import inspect
import math
import os
import sys
from pathlib import Path

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from transformers import HfArgumentParser, TrainerCallback
from transformers.trainer_callback import ExportableState
from trl import GRPOConfig, GRPOTrainer

sys.path.insert(0, str(Path(__file__).parent.parent))
from common import Completion, Routing, UserError, evaluate, load_grader, load_policy, load_problems
from plumbing.args import add_flags, one_line

TRL = "1.16.0"
ALGORITHMS = ["grpo", "dr_grpo", "dapo", "gspo", "cispo", "gmpo", "rspo", "sapo"]
# Flags of the script that are used, in addition to those of its policy_loss
USED = """answer_column chat_template_kwargs dataset dataset_config dataset_split dtype eval_dataset
eval_samples eval_split group_size instruction iterations lr max_new_tokens max_sampling_rounds model
num_held_out num_minibatches overlong overlong_cache prompt_column prompts_per_iteration reward
rollout_batch_size router_aux_coef save_every system_prompt temperature update_epochs""".split()
# What to do instead of giving other flags of the script. TRL has nothing like the rest.
INSTEAD = {
    "device": "use --use_cpu, or nothing for the GPU",
    "eval_every": "held-out problems are answered only at the end",
    "micro_batch_tokens": "use --per_device_train_batch_size",
    "ref_reset_every": "use --sync_ref_model and --ref_model_sync_steps",
    "resume": "use --resume_from_checkpoint FOLDER",
    "run_dir": "use --output_dir",
}
# Prefixes of TRL's flags that have no effect here
UNUSED = """delta do_ entropy_ epsilon importance_sampling loss_type model_init multi_objective
num_train_epochs off_policy_mask restore_callback reward_weights router_aux sapo_ scale_rewards
shuffle_dataset steps_per_generation top_entropy trust_remote use_adaptive use_bias_correction vespo_
vllm_importance_sampling""".split()
DEFAULTS = """--seed 1 --disable_dropout True --gradient_checkpointing False --save_total_limit 1
--lr_scheduler_type constant --vllm_importance_sampling_correction False""".split()


class StreamPosition(TrainerCallback, ExportableState):
    """Saves how many problems a run has taken, so that a resumed run goes on with the next one."""

    def __init__(self, stream):
        self.stream = stream

    def state(self):
        return {"args": {}, "attributes": self.stream.state_dict()}

    def on_train_begin(self, args, state, control, **others):
        self.stream.load_state_dict(state.stateful_callbacks["StreamPosition"]["attributes"])


def reward(known, **others):
    """TRL's reward function. Its rows come with their rewards."""
    return known


class PluggedTrainer(GRPOTrainer):
    """TRL samples, steps, logs and saves. Prompts, rewards, advantages and loss are the script's."""

    def __init__(self, script, args, config, policy, stream, grade):
        # TRL's data loader only counts: one epoch is one iteration. Problems come from the stream.
        rows = Dataset.from_list([{"prompt": ""}] * args.prompts_per_iteration)
        super().__init__(
            policy.master,
            reward,
            config,
            train_dataset=rows,
            processing_class=policy.tokenizer,
            callbacks=[StreamPosition(stream)],
        )
        self.script = script
        self.script_args = args
        self.policy = policy
        self.stream = stream
        self.grade = grade
        self.rollout_func = self.known_rollout
        self.has_router_shift = hasattr(script, "router_shift")

    # --------------------------------------------------------------------------------- rollout

    def own_part(self, rows):
        """This process's part of the rows of all processes."""
        share = len(rows) // self.accelerator.num_processes
        first = self.accelerator.process_index * share
        return rows[first : first + share]

    def sampled(self, problems):
        """A group of completions for each problem, graded: each process samples and grades its part,
        and gets all."""
        G = self.num_generations
        own = self.own_part([problem for problem in problems for _ in range(G)])
        prompt_ids = [problem.prompt_ids for problem in own]
        sampled_ids, _ = self._generate_single_turn(prompt_ids, None, {}, G)
        completions = []
        for problem, ids in zip(own, sampled_ids, strict=True):
            is_truncated = ids[-1] not in self.policy.end_ids
            text = self.policy.tokenizer.decode(ids if is_truncated else ids[:-1])
            completions.append(Completion(problem, ids, [], is_truncated, text))
        return gather_object(self.grade(completions))

    def mixed(self):
        """dapo's dynamic sampling, as in its main: each round draws one prompt for every mixed group
        still missing, or a few more, so that processes get equal parts. All know all completions, so
        they make the same rounds. Returns (completions of the mixed groups, all completions)."""
        args = self.script_args
        G = self.num_generations
        even = math.lcm(G, self.accelerator.num_processes) // G  # fewest groups in equal parts
        generated = []
        rounds = 0
        missing = args.prompts_per_iteration
        while missing > 0 and rounds < args.max_sampling_rounds:
            generated += self.sampled(self.stream.take(math.ceil(missing / even) * even))
            kept, counts = self.script.mixed_groups(generated, G)
            missing = args.prompts_per_iteration - len(kept) // G
            rounds += 1
        counts["rollout/groups_sampling_rounds"] = rounds
        for name, count in counts.items():
            self._metrics["train"][name].append(count)
        if missing > 0:
            self.accelerator.print(f"{missing} mixed groups missing after {rounds} rounds")
        return kept, generated

    def rollout(self):
        """The completions of an iteration, of all processes, and how many of them, from the first one
        on, count in the loss."""
        args = self.script_args
        num_rows = args.prompts_per_iteration * args.group_size
        if not hasattr(self.script, "mixed_groups"):
            return self.sampled(self.stream.take(args.prompts_per_iteration)), num_rows
        kept, generated = self.mixed()
        if not kept:
            self.accelerator.print("training ends: too few mixed groups")
            self.control.should_training_stop = True
            # TRL still takes this step, which would move the weights by Adam's momentum.
            for group in self.optimizer.param_groups:
                group["lr"] = 0.0
        # TRL needs as many rows as ever. Where groups are missing, any completions fill their place.
        return [*kept, *generated][:num_rows], len(kept)

    def rewards_of(self, completions):
        """R, (B,), with dapo's soft penalty, as in its main."""
        args = self.script_args
        rewards_B = torch.tensor([c.reward for c in completions])
        if getattr(args, "overlong", "none") == "soft":
            lengths_B = torch.tensor([len(c.ids) for c in completions])
            options = (args.max_new_tokens, args.overlong_cache_tokens)
            rewards_B += self.script.overlong_penalty(lengths_B, *options)
        return rewards_B

    def known_rollout(self, prompts, trainer):
        """TRL calls this to sample. A rendered prompt is not tokenized again: it may begin with BOS
        already, and TRL would add another."""
        prompt_ids = [c.problem.prompt_ids for c in self.own_rollout]
        completion_ids = [c.ids for c in self.own_rollout]
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": None}

    def _generate_and_score_completions(self, inputs):
        """TRL calls this once per iteration, with rows of its own, which we replace. It makes tensors,
        runs the old policy and logs; advantages are the script's."""
        rollout, num_counted = self.rollout()
        self.own_rollout = self.own_part(rollout)
        rewards_B = self.rewards_of(rollout)
        rewards_PG = rewards_B.view(-1, self.num_generations)
        advantages_B = self.script.compute_advantages(rewards_PG).flatten()
        is_counted_B = torch.arange(len(rollout)) < num_counted
        if getattr(self.script_args, "overlong", "none") == "filter":
            is_counted_B &= torch.tensor([not c.truncated for c in rollout])

        own_rewards = self.own_part(rewards_B).tolist()
        rows = []
        for completion, R in zip(self.own_rollout, own_rewards, strict=True):
            rows.append({"prompt": completion.problem.prompt, "known": R})
        output = super()._generate_and_score_completions(rows)
        # TRL shuffles and splits all tensors of `output` that have a row for each completion.
        device = self.accelerator.device
        is_counted_B1 = self.own_part(is_counted_B)[:, None].to(device)
        output["loss_mask"] = output["completion_mask"] * is_counted_B1
        output["advantages"] = self.own_part(advantages_B).to(device)
        if self.has_router_shift and "old_per_token_logps" in output:
            output["old_experts_BTLK"], output["old_scores_BTLK"] = self.routers
        return output

    # ----------------------------------------------------------------- rspo's router scores

    def _get_per_token_logps_and_entropies(
        self, model, ids, attention, num_tokens, experts_BTLK=None, **options
    ):
        """TRL calls this for the old policy with a whole rollout, which it splits. For rspo, `routers`
        gets the experts where each token is predicted (by default those that this forward uses) and
        their scores, both (B, T, L, K)."""
        inputs = (ids, attention, num_tokens)
        if not self.has_router_shift:
            return super()._get_per_token_logps_and_entropies(model, *inputs, **options)
        parts = []

        def forward(input_ids, **others):
            with Routing(self.policy.routers) as routing:
                outputs = model(input_ids=input_ids, **others)

            def where_predicted(x):
                return x.detach().unflatten(0, input_ids.shape)[:, -num_tokens - 1 : -1]

            logits = [where_predicted(layer) for layer in routing.token_logits()]
            experts = experts_BTLK
            if experts is None:
                experts = where_predicted(routing.choices())
            parts.append((experts, self.script.expert_logprobs(logits, experts)))
            return outputs

        outputs = super()._get_per_token_logps_and_entropies(forward, *inputs, **options)
        self.routers = [torch.cat(tensors) for tensors in zip(*parts, strict=True)]
        return outputs

    # ------------------------------------------------------------------------------------ loss

    def step_counts(self):
        """The normalizers N / W, where N is the number of completions or tokens in the whole optimizer
        step, over its micro-batches and all W processes. Each process sums the gradients of its
        micro-batches; then DDP, FSDP and DeepSpeed average over processes, which divides by W."""
        accumulation = self.current_gradient_accumulation_steps
        first = self._step % self.args.steps_per_generation // accumulation * accumulation
        micro_batches = self._buffered_inputs[first : first + accumulation]
        masks = [micro_batch["loss_mask"] for micro_batch in micro_batches]
        num_tokens = sum(mask.sum() for mask in masks).float()
        return {
            "num_sequences": sum(len(mask) for mask in masks),  # the same in every process
            "num_tokens": self.accelerator.reduce(num_tokens, "mean").clamp(min=1),
        }

    def _compute_loss(self, model, inputs):
        """The script's instead of TRL's."""
        mask_BT = inputs["loss_mask"]
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        options = {"compute_aux_loss": self.aux_loss_enabled}
        options["experts_BTLK"] = inputs.get("old_experts_BTLK")
        logprobs_BT, _, aux_loss = self._get_per_token_logps_and_entropies(
            model, ids, attention, mask_BT.shape[1], **options
        )
        values = vars(self.script_args) | self.step_counts()
        values["ref_logprobs_BT"] = inputs.get("ref_per_token_logps")
        if self.has_router_shift:
            _, scores_BTLK = self.routers
            old_scores_BTLK = inputs.get("old_scores_BTLK", scores_BTLK)
            values["router_shift_BT"] = self.script.router_shift(scores_BTLK, old_scores_BTLK)
        # None with one optimizer step per rollout: TRL does not compute them then.
        old_logprobs_BT = inputs.get("old_per_token_logps")
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


def fields_of(kind):
    return {field.name for field in dataclasses.fields(kind)}


def parse(argv):
    """The command line -> (the script, its Args, TRL's config)."""
    options = {"allow_abbrev": False, "exit_on_error": False}
    parser = argparse.ArgumentParser(usage=__doc__, **options)
    parser.add_argument("--algorithm", choices=ALGORITHMS, default="grpo")
    parser.add_argument("--per_device_train_batch_size", type=int, default=0)  # 0: a whole step
    choice, argv = parser.parse_known_args(argv)
    script = importlib.import_module(choice.algorithm)

    parser = argparse.ArgumentParser(add_help=False, **options)
    add_flags(parser, script.Args, {*USED, *inspect.signature(script.policy_loss).parameters})
    given, argv = parser.parse_known_args(argv)
    args = script.Args(**vars(given))

    processes = int(os.environ.get("WORLD_SIZE", 1))
    ours = to_trl(args, processes, choice.per_device_train_batch_size)
    for word in argv:
        name = word.partition("=")[0].removeprefix("--").replace("-", "_")
        if not word.startswith("--"):
            continue
        if name in ours or name.startswith(tuple(UNUSED)):
            raise UserError(f"--{name} has no effect here: use the flags of {choice.algorithm}.py")
        if name in fields_of(script.Args) - fields_of(GRPOConfig):
            advice = INSTEAD.get(name, "TRL has nothing like it")
            raise UserError(f"--{name} has no effect here: {advice}")
    parser = HfArgumentParser(GRPOConfig, add_help=False, **options)
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
    if hasattr(script, "router_shift") and not policy.routers.has_softmax:
        raise UserError(f"--model {args.model} has no experts chosen by a softmax: use gmpo.py")
    stream, held_out = load_problems(args, policy, grade)
    is_moe = hasattr(policy.master.config.get_text_config(), "output_router_logits")
    config.router_aux_loss_coef = args.router_aux_coef if is_moe else 0.0

    trainer = PluggedTrainer(script, args, config, policy, stream, grade)
    folder = config.resume_from_checkpoint
    if folder and list(Path(folder).glob("*.safetensors")):
        # Trainer skips an MoE's experts: in the file they are one by one, in the model they are fused.
        saved = load_policy(dataclasses.replace(args, dtype="float32", model=folder))
        policy.master.load_state_dict(saved.master.state_dict())
    trainer.train(resume_from_checkpoint=folder)
    trainer.save_model()  # complete, even if FSDP has sharded it
    if trainer.accelerator.is_main_process:
        trained = load_policy(dataclasses.replace(args, model=config.output_dir))
        after = evaluate(trained, held_out, grade, args, sampled=True)
        for way in ("greedy", "sampled"):
            print(f"held-out problems, {way}: {after[way]}")
        print(f"trained in {config.world_size} processes: {config.output_dir}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (UserError, argparse.ArgumentError) as error:
        print(f"{Path(__file__).name}: error: {error}", file=sys.stderr)
        sys.exit(2)
