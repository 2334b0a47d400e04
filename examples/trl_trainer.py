"""Trains on several GPUs: plugs an algorithm of this repository into TRL's GRPOTrainer.

    pip install -r examples/requirements.txt
    accelerate launch --multi_gpu --num_processes 2 examples/trl_trainer.py --algorithm gspo --use_cpu

Without --multi_gpu, accelerate silently starts a single process; the last line says how many ran.
Expect: greedy held-out accuracy rises from 0.43 to at least 0.9, and the model is in runs/trl-gspo.

It takes the script's flags for model, data, reward, rollouts, steps, loss and seed, and TRL's
(GRPOConfig) for the rest, such as --output_dir, --use_cpu, --use_vllm, --deepspeed or --report_to: see
`--algorithm gspo --help`. --per_device_train_batch_size is by default a process's part of a whole step.
Each process grades its own completions, so a reward function that takes lists gets only those. With
--dtype bfloat16, TRL uses autocast. The model, in float32, has to fit on one GPU, even if DeepSpeed or
FSDP shards it later.

Ctrl-C and SIGTERM save nothing: what came after the last checkpoint (--save_every) is lost. To go on,
repeat the command with --resume_from_checkpoint true: with as many processes, the weights will be those
of a run that was not interrupted. Several machines must share the disk of --output_dir. TRL removes
older checkpoints there, also a copy checkpoint-X. To evaluate one: `gspo.py --iterations 0 --model X`.

Not supported: ppo (TRL's trainer has no critic), routing replay, corrections for vLLM's log-probs,
--ref_reset_every, PEFT, --torch_compile, and expert, tensor or context parallelism. If dapo still lacks
groups after --max_sampling_rounds, the iteration has as many steps as ever, but fewer tokens in each.
Tried: all algorithms in two processes on a CPU, grpo on one GPU; not yet several GPUs, vLLM, DeepSpeed.
"""

import dataclasses
import importlib
import inspect
import math
import os
import sys
from pathlib import Path

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from filelock import FileLock
from transformers import HfArgumentParser, TrainerState
from transformers.trainer_utils import sort_checkpoints
from trl import GRPOConfig, GRPOTrainer, __version__

sys.path.insert(0, str(Path(__file__).parent.parent))
from common import Completion, Routing, UserError, evaluate, load_grader, load_policy, load_problems
from plumbing.args import Parser, add_flags, advise, fail, one_line
from plumbing.folder import check_same
from plumbing.model import load_weights
from plumbing.run import results_text

TRL = "1.16.0"
ALGORITHMS = ["grpo", "dr_grpo", "dapo", "gspo", "cispo", "gmpo", "rspo", "sapo"]
# The flags of the script, in addition to those of its policy_loss, and of TRL: any other is an error.
FLAGS = """chat_template_kwargs dataset dtype eval_dataset eval_samples gradient_checkpointing
group_size iterations lr max_grad_norm max_new_tokens max_sampling_rounds model num_held_out
num_minibatches overlong overlong_cache prompts_per_iteration reward rollout_batch_size router_aux_coef
save_every seed temperature update_epochs""".split()
TRL_FLAGS = """output_dir resume_from_checkpoint save_total_limit report_to run_name log_completions
disable_tqdm push_to_hub hub_model_id hub_private_repo hub_strategy use_cpu tf32
per_device_train_batch_size activation_checkpointing_kwargs ddp_timeout ddp_find_unused_parameters
deepspeed fsdp fsdp_config ds3_gather_for_generation use_vllm vllm_mode vllm_enable_sleep_mode
vllm_gpu_memory_utilization vllm_max_model_length vllm_tensor_parallel_size vllm_server_base_url
vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port""".split()
# Flags of TRL, too: a resumed run must have the same.
OPTIMIZER_FLAGS = """optim weight_decay adam_beta1 adam_beta2 adam_epsilon lr_scheduler_type
lr_scheduler_kwargs warmup_steps""".split()


def reward(known, **others):
    """TRL's reward function. Its rows come with their rewards."""
    return known


class PluggedTrainer(GRPOTrainer):
    """TRL samples, steps, logs and saves. Prompts, rewards, advantages and loss are the script's."""

    def __init__(self, script, args, config, policy, stream, grade, settings):
        # TRL's data loader only counts: one epoch is one iteration. Problems come from the stream.
        rows = Dataset.from_list([{"prompt": ""}] * args.prompts_per_iteration)
        tokenizer = policy.tokenizer
        super().__init__(policy.master, reward, config, train_dataset=rows, processing_class=tokenizer)
        self.script = script
        self.script_args = args
        self.policy = policy
        self.stream = stream
        self.grade = grade
        self.settings = settings
        self.rollout_func = self.known_rollout
        self.has_router_shift = hasattr(script, "router_shift")

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

    def rollout(self):
        """(All processes' completions of an iteration, how many count in the loss: the first ones)."""
        args = self.script_args
        G = self.num_generations
        missing = args.prompts_per_iteration
        num_rows = missing * G
        if not hasattr(self.script, "mixed_groups"):
            return self.sampled(self.stream.take(missing)), num_rows
        # dapo's dynamic sampling, as in its main, but a round may draw a few prompts more, so that each
        # process gets an equal part. All know all completions, so they make the same rounds.
        even = math.lcm(G, self.accelerator.num_processes) // G  # fewest groups in equal parts
        generated = []
        rounds = 0
        while missing > 0 and rounds < args.max_sampling_rounds:
            generated += self.sampled(self.stream.take(math.ceil(missing / even) * even))
            kept, counts = self.script.mixed_groups(generated, G)
            missing = args.prompts_per_iteration - len(kept) // G
            rounds += 1
        counts["rollout/groups_sampling_rounds"] = rounds
        for name, count in counts.items():
            self._metrics["train"][name].append(count)
        if not kept:
            self.accelerator.print("training ends: too few mixed groups")
            self.control.should_training_stop = True
            # TRL still takes this step, which would move the weights by Adam's momentum.
            for group in self.optimizer.param_groups:
                group["lr"] = 0.0
        # TRL needs as many rows as ever. Where groups are missing, any completions fill their place.
        return [*kept, *generated][:num_rows], len(kept)

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
        # TRL writes this into trainer_state.json. A resumed run reads it: `saved_by`.
        self.state.stateful_callbacks["script"] = self.settings | self.stream.state_dict()
        args = self.script_args
        overlong = getattr(args, "overlong", "none")  # dapo's
        rewards_B = torch.tensor([c.reward for c in rollout])
        if overlong == "soft":
            lengths_B = torch.tensor([len(c.ids) for c in rollout])
            options = (args.max_new_tokens, args.overlong_cache_tokens)
            rewards_B += self.script.overlong_penalty(lengths_B, *options)
        is_counted_B = torch.arange(len(rollout)) < num_counted
        if overlong == "filter":
            is_counted_B &= torch.tensor([not c.truncated for c in rollout])
        rewards_PG = rewards_B.view(-1, self.num_generations)
        advantages_B = self.script.compute_advantages(rewards_PG).flatten()

        pairs = zip(self.own_rollout, self.own_part(rewards_B).tolist(), strict=True)
        rows = [{"prompt": c.problem.prompt, "known": R} for c, R in pairs]
        output = super()._generate_and_score_completions(rows)
        # TRL shuffles and splits all tensors of `output` that have a row for each completion.
        device = self.accelerator.device
        is_counted_B1 = self.own_part(is_counted_B)[:, None].to(device)
        output["loss_mask"] = output["completion_mask"] * is_counted_B1
        output["advantages"] = self.own_part(advantages_B).to(device)
        self._logs["advantages"].extend(advantages_B.tolist())  # of as many rows, so TRL's own drop out
        if self.has_router_shift and "old_per_token_logps" in output:
            output["old_experts_BTLK"], output["old_scores_BTLK"] = self.routers
        return output

    def _get_per_token_logps_and_entropies(self, model, *inputs, experts_BTLK=None, **options):
        """TRL calls this for the old policy with a whole rollout, which it splits. For rspo, `routers`
        gets the experts where each token is predicted (by default those that this forward uses) and
        their scores, both (B, T, L, K)."""
        _, _, num_tokens = inputs
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

    def _get_grad_norm(self, *args, **options):
        """TRL calls this before each step, in all processes. A NaN would end up in the weights."""
        grad_norm = super()._get_grad_norm(*args, **options)
        if not math.isfinite(grad_norm or 0.0):  # DeepSpeed may have none
            raise UserError(f"step {self.state.global_step + 1}: grad_norm is not finite: lower --lr")
        return grad_norm


def to_trl(args, processes, micro_batch):
    """{TRL's flag: value}: what the script's flags mean, and two that must not be different."""
    rollout = args.prompts_per_iteration * args.group_size
    step = rollout // args.num_minibatches
    micro_batch = micro_batch or max(1, step // processes)
    if micro_batch < 1 or step % (processes * micro_batch) > 0:
        flag = f"--per_device_train_batch_size {micro_batch}"
        raise UserError(f"{processes} processes with {flag} cannot share a step of {step} completions")
    steps = args.update_epochs * args.num_minibatches
    return {
        "output_dir": str(args.folder),
        "generation_batch_size": rollout,
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": step // (processes * micro_batch),
        "max_steps": args.iterations * steps,
        "logging_steps": steps,
        "save_steps": max(1, (args.save_every or args.iterations) * steps),  # and after the last one
        "num_iterations": args.update_epochs,
        "num_generations": args.group_size,
        "max_completion_length": args.max_new_tokens,
        "temperature": args.temperature,
        "learning_rate": args.lr,
        "max_grad_norm": args.max_grad_norm,
        "bf16": args.dtype == "bfloat16",
        "activation_checkpointing": args.gradient_checkpointing,
        "beta": getattr(args, "kl_coef", 0.0),  # above 0, TRL creates a reference model
        "seed": args.seed,
        "disable_dropout": True,
        "vllm_importance_sampling_correction": False,
    }


def open_folder(folder, checkpoint):
    """(The checkpoint to resume from or None, the folder's lock). UserError if TRL would remove the
    checkpoints of a different run, or if a run is using the folder."""
    lock = FileLock(folder / "lock", is_singleton=True)  # a failed run in this process may hold it
    with one_line(f"--output_dir {folder} cannot be used"):
        folder.mkdir(parents=True, exist_ok=True)
        if os.environ.get("RANK", "0") == "0":
            lock.acquire(timeout=0)
        # TRL writes this file last, so a checkpoint without it is of a run that was killed meanwhile.
        saved = [path for path in sort_checkpoints(folder) if Path(path, "trainer_state.json").exists()]
        if checkpoint == "true" and saved:
            checkpoint = saved[-1]
        is_own = checkpoint and Path(checkpoint).resolve().parent == folder.resolve()
        if saved and not is_own:
            raise UserError("a new run needs an empty one; to continue: --resume_from_checkpoint true")
        if not saved and (checkpoint == "true" or {*os.listdir(folder)} - {"lock"}):
            raise UserError("it has no checkpoint to continue from: empty it, or name a different one")
    return checkpoint, lock


def parse(argv):
    """The command line -> (the script, its Args, {TRL's flag: value})."""
    parser = Parser(usage=__doc__, add_help=False, allow_abbrev=False)
    parser.add_argument("--algorithm", choices=ALGORITHMS, default="grpo")
    choice, argv = parser.parse_known_args(argv)
    script = importlib.import_module(choice.algorithm)

    parser.add_argument("--help", action="help")
    used = {*FLAGS, *inspect.signature(script.policy_loss).parameters}
    add_flags(parser, script.Args, used)
    allowed = {*TRL_FLAGS, *OPTIMIZER_FLAGS}
    for field in dataclasses.fields(GRPOConfig):
        if field.name in allowed:
            HfArgumentParser._parse_dataclass_field(parser, field)
    parser.set_defaults(output_dir=f"runs/trl-{choice.algorithm}", save_total_limit=1)
    parser.set_defaults(lr_scheduler_type="constant", per_device_train_batch_size=0)  # 0: a whole step
    given, rest = parser.parse_known_args(argv)
    if rest:
        instead = "--output_dir, --resume_from_checkpoint, --use_cpu, --per_device_train_batch_size"
        raise UserError(f"not used here: {' '.join(rest)}. TRL has {instead} and others: see --help")
    if [word.partition("=")[0] for word in argv].count("--reward") > 1:
        raise UserError("--reward was given twice: examples/format_and_accuracy.py adds rewards up")

    values = vars(given)
    known = {name: values[name] for name in used & values.keys()}
    args = script.Args(**known, run_dir=given.output_dir)
    ours = to_trl(args, int(os.environ.get("WORLD_SIZE", 1)), given.per_device_train_batch_size)
    return script, args, {name: values[name] for name in allowed} | ours


def saved_by(checkpoint, args, others):
    """What the run of a checkpoint had saved. UserError if these flags or other settings differ."""
    with one_line(f"--resume_from_checkpoint {checkpoint} cannot be read"):
        state = TrainerState.load_from_json(Path(checkpoint, "trainer_state.json"))
        saved = state.stateful_callbacks["script"]
    check_same(dataclasses.replace(args, run_dir=checkpoint), saved)
    for name, value in others.items():
        if saved.get(name) != value:
            raise UserError(f"--resume: {checkpoint} has {name} {saved.get(name)}, not {value}")
    return saved


def main(argv):
    if __version__ != TRL:
        raise UserError(f"it overrides private methods of TRL {TRL}: pip install trl=={TRL}")
    script, args, flags = parse(argv)
    checkpoint, _lock = open_folder(args.folder, flags["resume_from_checkpoint"])
    os.environ["ACCELERATE_MIXED_PRECISION"] = "no"  # --dtype decides, not accelerate's own settings
    with one_line("TRL"):
        config = GRPOConfig(**flags)  # waits for the other processes
    is_main = config.process_index == 0
    args = dataclasses.replace(args, device=str(config.device))
    if is_main:
        advise(args)
    grade = load_grader(args)
    plain = dataclasses.replace(args, dtype="float32", gradient_checkpointing=False)  # TRL does both
    policy = load_policy(plain)
    if hasattr(script, "router_shift") and not policy.routers.has_softmax:
        raise UserError(f"--model {args.model} has no experts chosen by a softmax: use gmpo.py")
    stream, held_out = load_problems(args, policy, grade)
    others = {name: str(flags[name]) for name in OPTIMIZER_FLAGS}
    others |= {"problems_hash": stream.hash, "model_hash": policy.hash()}
    if checkpoint:
        stream.load_state_dict(saved_by(checkpoint, args, others))
    is_moe = hasattr(policy.master.config.get_text_config(), "output_router_logits")
    config.router_aux_loss_coef = args.router_aux_coef if is_moe else 0.0
    with one_line("TRL"):
        trainer = PluggedTrainer(script, args, config, policy, stream, grade, args.settings() | others)

    if is_main:
        results = {"before": evaluate(policy, held_out, grade, args, sampled=True)}
    if checkpoint and list(Path(checkpoint).glob("*.safetensors")):
        # Trainer warns and skips an MoE's experts: in the file they are one by one, in the model fused.
        policy.load_pretrained(checkpoint)
    if args.iterations > 0:  # TRL takes 0 steps for "not set"
        trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model()  # complete, even if FSDP has sharded it
    if is_main:
        trained = policy.with_model(load_weights(args.folder).to(args.device).eval())
        results["after"] = evaluate(trained, held_out, grade, args, sampled=True)
        print(results_text(results))
        print(f"trained in {config.world_size} processes: {config.output_dir}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        fail(f"{Path(__file__).name}: error: {error}", 2)
