"""The flags that all scripts share, the ranges of their values, and how a script is started."""

import os
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import torch
import transformers
from tqdm import tqdm
from transformers.hf_argparser import HfArg

from plumbing import ranks

TINY_MOE = Path(__file__).parent.parent / "tiny_moe"  # the folder that --model tiny-moe means


class UserError(Exception):
    """What the user can mend, in one sentence that names the flag. `launch` prints it in one line."""


def flag(default, help):
    """A field of a dataclass that is a flag of the command line."""
    return HfArg(default=default, help=help)


@dataclass
class RunArgs:
    """What a script's `Args` inherit: model, data, device, precision, mismatch, output."""

    seed: int = flag(1, "seed of the prompts' order and of the sampling")
    device: str = flag("", "cuda, cpu, or mps (untried) [cuda if it is there]")
    dtype: Literal["float32", "bfloat16"] = flag(
        "float32", "of the model that computes; AdamW moves float32 weights"
    )
    model: str = flag("tiny-moe", "tiny-moe, or a folder or hub id of a language model")
    dataset: str = flag("addition", "addition, a .jsonl, .json or .parquet file, a folder, or a hub id")
    dataset_config: str = flag("", "configuration of a hub dataset, if it has several")
    dataset_split: str = flag("train", "split of a hub dataset")
    prompt_column: str = flag("question", "column of the prompts: text or chat messages")
    answer_column: str = flag("answer", "column of the gold answers, after '####' or alone")
    num_held_out: int = flag(256, "problems kept apart for evaluation")
    reward: str = flag("", "FILE.py:FUNCTION in place of common.verify")
    system_prompt: str = flag("", "system message before each prompt")
    instruction: str = flag("", "text on a line of its own after each prompt")
    rollout_batch_size: int = flag(0, "completions sampled at a time [0: all]")
    micro_batch_size: int = flag(0, "completions per update pass [0: 16,384 tokens]")
    gradient_checkpointing: bool = flag(False, "less memory, more time")
    rollout_dtype: Literal["same", "float32", "bfloat16", "int8", "int4"] = flag(
        "same", "precision of the model that samples"
    )
    rollout_refresh_every: int = flag(1, "iterations between refreshes of the weights that sample")
    old_logprobs: Literal["trainer", "sampler"] = flag(
        "trainer", "whose log-probs of the sampled tokens are the old ones in every ratio"
    )
    rollout_correction: Literal[
        "none", "token_tis", "sequence_tis", "sequence_mis", "geo_mask", "geo_filter", "icepop"
    ] = flag("none", "importance weights for the mismatch of sampler and trainer")
    rollout_cap: float = flag(2.0, "where these weights are cut off; not icepop's, nor geo_filter's")
    rollout_mask_low: float = flag(0.95, "the two geo rules drop completions of a lower mean ratio")
    rollout_mask_high: float = flag(1.05, "the two geo rules drop completions of a higher mean ratio")
    routing_replay: Literal["none", "r2", "r3"] = flag(
        "none", "experts of an MoE in an update: r2 the old policy's, r3 the sampler's"
    )
    eval_every: int = flag(10, "iterations between evaluations [0: only at the end]")
    eval_samples: int = flag(1, "completions per held-out problem, before and after, for pass@k")
    save_every: int = flag(20, "iterations between checkpoints [0: only at the end]")
    resume: bool = flag(False, "continue the run in --run_dir")
    run_dir: str = flag("", "output folder [runs/<script>-seed<seed>]")
    tensorboard: bool = flag(False, "also write the metrics for TensorBoard")

    # A script without these flags has one completion per prompt, or one step per rollout.
    group_size = 1
    update_epochs = 1
    num_minibatches = 1

    def check(self):
        """What a script requires of its own flags; overridden there."""

    @property
    def has_rollout_copy(self):
        """Whether a copy of the weights samples, which may differ from those that are trained."""
        return self.rollout_dtype != "same" or self.rollout_refresh_every > 1

    def check_range(self, low, high, *names):
        """UserError if the value of one of these flags lies outside."""
        for name in names:
            value = getattr(self, name)
            if not low <= value <= high:  # a NaN fails this too
                raise UserError(f"--{name} must be from {low:g} to {high:g}, not {value}")


# Lowest and highest value of the flags that several scripts have. All other numbers are finite and not
# negative; a script's check() may ask for more.
RANGES = [
    (1, 1e9, "prompts_per_iteration group_size max_new_tokens update_epochs num_minibatches"),
    (1, 1e9, "num_held_out rollout_mask_high rollout_refresh_every"),
    (1, 1000, "eval_samples"),
    (1, 999_999, "iterations"),  # a checkpoint's name has six digits
    (1e-9, 1e9, "temperature lr max_grad_norm rollout_cap"),
    (0, 1, "rollout_mask_low"),
]


def check_ranges(args):
    """UserError if a number is not in its range."""
    ranges = {field.name: (0, 1e9) for field in fields(args) if field.type in (int, float)}
    for low, high, names in RANGES:
        ranges |= dict.fromkeys(names.split(), (low, high))
    for name, (low, high) in ranges.items():
        args.check_range(low, high, name)


def parse_args(args_class):
    """The command line as `args_class`, its values checked before any work is done."""

    def refuse(message):
        raise UserError(message)

    parser = transformers.HfArgumentParser(args_class, allow_abbrev=False)
    parser.error = refuse
    args = args_class(**vars(parser.parse_args()))
    check_ranges(args)
    args.check()
    completions = args.prompts_per_iteration * args.group_size
    if completions > 1_000_000:
        raise UserError(f"--prompts_per_iteration x --group_size is {completions}, more than a million")
    if completions % args.num_minibatches > 0:
        raise UserError(f"--num_minibatches does not divide {completions} completions into equal parts")
    if args.old_logprobs == "sampler" and args.rollout_correction != "none":
        raise UserError("--old_logprobs sampler leaves nothing to --rollout_correction: its ratio is 1")
    if args.old_logprobs == "sampler" and args.routing_replay == "r2":
        raise UserError("--old_logprobs sampler makes no forward whose experts r2 could replay")
    if completions // args.num_minibatches < ranks.WORLD:
        message = f"leaves fewer completions in a minibatch than {ranks.WORLD} ranks"
        raise UserError(f"--prompts_per_iteration {args.prompts_per_iteration} {message}")
    args.device = resolve_device(args.device)
    if ranks.RANK == 0 and args.model != args_class.model and args.lr == args_class.lr:
        message = f"--lr {args.lr:g} suits {args_class.model}; for a model of your own 1e-6 is typical"
        print(f"warning: {message}", file=sys.stderr)
    return args


def resolve_device(name):
    """The device's full name ("cuda:0"); CUDA if it is there, else the CPU, if `name` is empty."""
    default = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return str(torch.zeros(1, device=name or default).device)
    except Exception as error:  # each backend has exceptions of its own
        raise UserError(f"--device {name} is not there; the default here is {default}") from error


def nowhere():
    """A stream that forgets what is written to it."""
    return os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")


class Output:
    """In place of stdout or stderr, which may be closed, end as a pipe, or stand on a full disk: then
    what is printed is lost, and the run goes on. Its metrics and checkpoints are in files."""

    def __init__(self, stream):
        self.stream = stream or nowhere()  # Python has None for one that is closed
        # A prompt may hold letters that the terminal cannot show; printing it must not end a run.
        if hasattr(self.stream, "reconfigure"):
            self.stream.reconfigure(errors="backslashreplace")

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text):
        try:
            self.stream.write(text)
            self.stream.flush()
        except OSError:
            self.stream = nowhere()

    def flush(self):
        """Nothing is left to be done."""


def launch(main, args_class):
    """Calls `main` with the command line as `args_class`. A UserError ends the program with one line on
    stderr and exit code 2; anything else is a bug and shows its traceback."""
    sys.stdout = Output(sys.stdout)
    sys.stderr = Output(sys.stderr)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        ranks.init()
        main(parse_args(args_class))
        ranks.destroy()
    except (UserError, ranks.LostRank) as error:
        message = str(error)
        if error.__cause__ is not None:
            message += f": {type(error.__cause__).__name__} {error.__cause__}"
        line = f"{Path(sys.argv[0]).name}: error: {' '.join(message.split())}"
        if ranks.is_first_to_fail():
            tqdm.write(line, file=sys.stderr)
        sys.exit(2)
