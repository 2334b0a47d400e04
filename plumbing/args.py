"""The flags that all scripts share, the ranges of their values, and the launch of a script."""

import argparse
import contextlib
import difflib
import json
import math
import os
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal, get_args, get_origin

import torch
import transformers
from tqdm import tqdm

from plumbing import UserError, one_line, ranks
from plumbing.folder import RunFolder, folder_of, saved_settings
from plumbing.screen import Stream


def flag(default, help):
    """A dataclass field that becomes a command-line flag."""
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata={"help": help})
    return field(default=default, metadata={"help": help})


@dataclass
class RunArgs:
    """The flags that every script's `Args` inherits."""

    # model
    model: str = flag("tiny-moe", "tiny-moe, or a folder or hub id of a causal LM")
    # data and reward
    dataset: str = flag("addition", "addition, a .jsonl, .csv or .parquet file, a folder, or a hub id")
    dataset_config: str = flag("", "config of a hub dataset, if it has several")
    dataset_split: str = flag("", "split of a folder or hub dataset [train]")
    prompt_column: str = flag("question", "column with the prompts: text or chat messages")
    answer_column: str = flag("answer", "column with the gold answers, or a path such as extra.gold")
    chat_template_kwargs: str = flag("", 'JSON for the chat template: {"enable_thinking": false}')
    system_prompt: str = flag("", "system message before each prompt; replaces the dataset's")
    instruction: str = flag("", "text to add after each prompt, on a new line")
    num_held_out: int = flag(256, "problems held out for evaluation")
    reward: list[str] = flag([], "FILE.py:FUNCTION ...; the first one also decides what is correct")
    reward_weights: list[float] = flag([], "one weight per reward function [1 each]")
    # precision and memory
    dtype: Literal["float32", "bfloat16"] = flag("float32", "precision; AdamW always uses float32")
    head_dtype: Literal["same", "float32"] = flag("same", "precision of the LM head's matrix product")
    micro_batch_size: int = flag(0, "completions per forward and backward pass [0: 16,384 tokens]")
    rollout_batch_size: int = flag(0, "completions sampled at a time [0: a whole iteration's]")
    gradient_checkpointing: bool = flag(False, "trade time for memory")
    # sampler
    rollout_dtype: Literal["same", "float32", "bfloat16", "int4"] = flag(
        "same", "precision of the model that samples"
    )
    rollout_refresh_every: int = flag(1, "refresh the sampler's weights every n iterations")
    old_logprobs: Literal["trainer", "sampler"] = flag("trainer", "where old log-probs come from")
    rollout_correction: Literal[
        "none", "token_tis", "sequence_tis", "sequence_mis", "geo_mask", "geo_filter", "icepop"
    ] = flag("none", "importance weights that correct for sampler/trainer mismatch")
    rollout_cap: float = flag(2.0, "cap on the correction weights (unused by icepop and geo_filter)")
    rollout_mask_low: float = flag(0.95, "geo_mask, geo_filter: lowest mean ratio that is kept")
    rollout_mask_high: float = flag(1.05, "geo_mask, geo_filter: highest mean ratio that is kept")
    routing_replay: Literal["none", "r2", "r3"] = flag(
        "none", "replay MoE routing in the update: r2 from the old policy, r3 from the sampler"
    )
    # run
    seed: int = flag(1, "seed for prompt order and sampling")
    device: str = flag("", "cpu, cuda or mps; the last two are untested [cuda if available]")
    eval_every: int = flag(10, "evaluate every n iterations [0: only at the end]")
    eval_samples: int = flag(1, "samples per held-out problem, before and after training, for pass@k")
    save_every: int = flag(20, "save a checkpoint every n iterations [0: only at the end]")
    resume: bool = flag(False, "continue the run in --run_dir, with its flags")
    run_dir: str = flag("", "output folder [runs/<script>-seed<seed>]")

    # For scripts without these flags: one completion per prompt, one step per rollout, no resets.
    group_size = 1
    update_epochs = 1
    num_minibatches = 1
    ref_reset_every = 0
    # What the --reward functions need
    reads_answers = True  # gold answers
    reward_columns = {}  # {column of the dataset: the flag that needs it}

    def check(self):
        """Scripts override this: UserError if one of their own flags has an invalid value."""

    def template_options(self):
        """`--chat_template_kwargs` as a dict."""
        with one_line(f"--chat_template_kwargs must be a JSON object, not {self.chat_template_kwargs}"):
            return dict(**json.loads(self.chat_template_kwargs or "{}"))

    def check_range(self, low, high, *names):
        """UserError if the value of one of these flags is outside the range."""
        for name in names:
            value = getattr(self, name)
            if not low <= value <= high:  # a NaN fails this too
                raise UserError(f"--{name} must be from {low:g} to {high:g}, not {value}")

    def check_used(self, is_used, condition, *names):
        """UserError if one of these flags was given but nothing uses it under this condition."""
        for name in names:
            if not is_used and getattr(self, name) != getattr(type(self), name):
                raise UserError(f"--{name} does nothing {condition}")


# Lowest and highest values of flags that several scripts have. All other numbers must be finite and
# nonnegative; a script's check() may be stricter.
RANGES = [
    (1, 1e6, "prompts_per_iteration group_size max_new_tokens update_epochs num_minibatches"),
    (1, 1e9, "num_held_out rollout_mask_high rollout_refresh_every"),
    (1, 1000, "eval_samples"),
    (1, 999_999, "iterations"),  # a checkpoint's name has six digits
    (1e-9, 1e9, "temperature lr max_grad_norm rollout_cap"),
    (0, 1, "rollout_mask_low"),
]


def check_flags(args):
    """UserError if a flag has an invalid value, or flags contradict each other."""
    ranges = {f.name: (0, 1e9) for f in fields(args) if f.type in (int, float)}
    for low, high, names in RANGES:
        ranges |= dict.fromkeys(names.split(), (low, high))
    for name, (low, high) in ranges.items():
        args.check_range(low, high, name)
    args.check()
    args.template_options()
    is_finite = all(map(math.isfinite, args.reward_weights))
    if args.reward_weights and not (is_finite and len(args.reward_weights) == len(args.reward)):
        raise UserError("--reward_weights must be finite numbers, one for each function of --reward")
    completions = args.prompts_per_iteration * args.group_size
    if completions % args.num_minibatches > 0:
        raise UserError(f"--num_minibatches does not divide {completions} completions into equal parts")
    if completions // args.num_minibatches < ranks.WORLD:
        message = f"leaves fewer completions per minibatch than the {ranks.WORLD} processes"
        raise UserError(f"--prompts_per_iteration {args.prompts_per_iteration} {message}")
    if args.old_logprobs == "sampler" and args.routing_replay == "r2":
        raise UserError("--old_logprobs sampler skips the forward pass that r2 takes experts from")
    has_splits = args.dataset != "addition" and not os.path.isfile(args.dataset)
    args.check_used(has_splits, f"with --dataset {args.dataset}", "dataset_config", "dataset_split")
    is_measured = args.old_logprobs == "trainer"
    args.check_used(is_measured, "with --old_logprobs sampler", "rollout_correction")
    rule = f"with --rollout_correction {args.rollout_correction}"
    has_cap = args.rollout_correction not in ("none", "icepop", "geo_filter")
    args.check_used(has_cap, rule, "rollout_cap")
    has_bounds = args.rollout_correction in ("geo_mask", "geo_filter")
    args.check_used(has_bounds, rule, "rollout_mask_low", "rollout_mask_high")


class Parser(argparse.ArgumentParser):
    """Raises a UserError where argparse would print usage and exit."""

    def error(self, message):
        raise UserError(message)


def make_parser(args_class):
    """A parser whose flags are the fields of a script's `Args`."""
    title = (sys.modules[args_class.__module__].__doc__ or "").partition("\n")[0]
    parser = Parser(
        description=f"Trains a language model with {title}",
        usage="%(prog)s [--flag value ...]",
        allow_abbrev=False,
    )
    flags = {f.name: f for f in fields(args_class)}
    for owner, group in ((args_class, "flags of this script"), (RunArgs, "flags of all scripts")):
        group = parser.add_argument_group(group)
        for name in owner.__annotations__:
            add_flag(group, flags[name])
    return parser


def add_flag(group, field):
    help = field.metadata["help"].replace("%", "%%")
    if field.type is bool:
        group.add_argument(f"--{field.name}", help=help, action="store_true")
        return
    options = {"type": field.type, "default": field.default}
    if get_origin(field.type) is list:
        options = {"type": get_args(field.type)[0], "default": field.default_factory(), "nargs": "+"}
    elif get_origin(field.type) is Literal:
        options = {"choices": get_args(field.type), "default": field.default}
        help += f" ({', '.join(options['choices'])})"
    if options["default"] not in ("", []):
        help += f" (default: {field.default})"
    group.add_argument(f"--{field.name}", help=help, metavar="X", **options)


def parse_args(args_class):
    """The command line as `args_class`. Values are checked before any work is done."""
    parser = make_parser(args_class)
    values, unknown = parser.parse_known_args()
    if unknown:
        name = unknown[0].partition("=")[0]
        known = [f"--{f.name}" for f in fields(args_class)]
        nearest = difflib.get_close_matches(name, known, n=1)
        hint = f": did you mean {nearest[0]}?" if nearest else "; --help lists all flags"
        raise UserError(f"unknown argument {name}{hint}")
    args = args_class(**vars(values))
    if args.resume:
        saved = saved_settings(folder_of(args))
        names = {f.name for f in fields(args)} - {"resume", "run_dir", "device"}
        parser.set_defaults(**{name: saved[name] for name in names & saved.keys()})
        args = args_class(**vars(parser.parse_args()))
    check_flags(args)
    args.device = resolve_device(args.device)
    if ranks.RANK == 0 and args.model != args_class.model:
        for name, typical in (("lr", "1e-6"), ("critic_lr", "1e-5")):
            if hasattr(args, name) and getattr(args, name) == getattr(args_class, name):
                message = f"--{name} {getattr(args, name):g} suits {args_class.model}"
                print(f"warning: {message}; for your own model {typical} is typical", file=sys.stderr)
    return args


def resolve_device(name):
    """The device's full name ("cuda:0"). If `name` is empty: CUDA if available, else the CPU."""
    default = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name or default)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", ranks.LOCAL_RANK)
        torch.zeros(1, device=device).item()  # fails on meta, which cannot compute
        if device.type == "cuda":
            torch.cuda.set_device(device)  # for NCCL, and for the peak of memory
        return str(device)
    except Exception as error:  # each backend has its own exceptions
        message = f"--device {name or default} is not available; the default here is {default}"
        raise UserError(message) from error


def launch(main, args_class):
    """Calls `main` with the command line as `args_class`. A UserError ends the program with one line on
    stderr and exit code 2; anything else is a bug and shows its traceback."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with (
        contextlib.redirect_stdout(Stream(sys.stdout)),
        contextlib.redirect_stderr(Stream(sys.stderr)),
    ):
        try:
            args = parse_args(args_class)
            ranks.init(args.device)
            RunFolder(args)  # opened and locked before a model is loaded
            main(args)
            ranks.destroy()
        except KeyboardInterrupt:  # during an iteration: see Run.on_signal
            if ranks.RANK == 0:
                tqdm.write("stopped", file=sys.stderr)
            sys.exit(130)
        except UserError as error:
            fail(error, error.__cause__)
        except Exception as error:
            # The CPU allocator has no exception class of its own.
            if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
                flags = "--micro_batch_size, --rollout_batch_size, --gradient_checkpointing, --dtype"
                fail(UserError(f"out of memory on {args.device}; these flags can help: {flags}"), error)
            ranks.let_others_report(is_user_error=False)
            raise


def fail(error, cause):
    """Exits with one line: the error and its cause."""
    message = str(error)
    if cause is not None:
        message += f": {type(cause).__name__} {cause}"
    ranks.let_others_report(is_user_error=True)
    line = " ".join(message.split())
    tqdm.write(f"{Path(sys.argv[0]).name}: error: {line}", file=sys.stderr)
    sys.exit(2)
