"""The flags that all scripts share, the ranges of their values, and the launch of a script."""

import argparse
import contextlib
import io
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Literal, Union, get_args, get_origin, get_type_hints

import torch
import transformers
from tqdm import tqdm

from plumbing.errors import UserError, one_line
from plumbing.folder import check_folder


def flag(default, help):
    """A dataclass field that becomes a command-line flag."""
    return field(default=default, metadata={"help": help})


@dataclass
class RunArgs:
    """The flags that every script's `Args` inherits. Creating one checks them: UserError."""

    # model
    model: str = flag("tiny-moe", "tiny-moe, or a folder or hub id of a causal LM")
    # data and reward
    dataset: str = flag("addition", "addition, a file (.jsonl, .csv, ...), a folder, or a hub id")
    dataset_config: str = flag("", "config of a hub dataset, if it has several")
    dataset_split: str = flag("train", "split of a folder or hub dataset")
    prompt_column: str = flag("question", "column with the prompts: text or chat messages")
    answer_column: str = flag("answer", "column with the gold answers, or a path such as extra.gold")
    chat_template_kwargs: dict | None = flag(None, 'JSON for the template: {"enable_thinking": false}')
    system_prompt: str = flag("", "system message before each prompt; replaces the dataset's")
    instruction: str = flag("", "text to add after each prompt, on a new line")
    eval_dataset: str = flag("", "like dataset, but for the held-out problems [part of the dataset]")
    eval_split: str = flag("test", "split of the eval dataset")
    num_held_out: int = flag(256, "problems held out for evaluation")
    reward: str | Callable = flag("", "FILE.py:FUNCTION that replaces the verifier")
    # precision and memory
    dtype: Literal["float32", "bfloat16"] = flag("float32", "precision; AdamW always uses float32")
    micro_batch_tokens: int = flag(
        0,
        "most tokens in a forward and backward pass, padding included, unless one completion has more "
        "[0: 1,024 on a CPU; 8,192 on a GPU, or 32,768 with --gradient_checkpointing]",
    )
    rollout_batch_size: int = flag(
        0, "completions sampled at a time [0: as many as 131,072 tokens of prompt and answer allow]"
    )
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
    device: str = flag("", "cpu, cuda or mps [cuda if available, else cpu, on a Mac too]")
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

    def __init_subclass__(cls):
        # Under `from __future__ import annotations` types are text.
        hints = get_type_hints(cls)
        cls.__annotations__ = {name: hints[name] for name in cls.__annotations__}

    def __post_init__(self):
        check_flags(self)

    def check(self):
        """Scripts override this: UserError if one of their own flags has an invalid value."""

    def check_range(self, low, high, *names):
        """UserError if the value of one of these flags is outside the range."""
        for name in names:
            value = getattr(self, name)
            if not low <= value <= high:  # a NaN fails this too
                raise UserError(f"--{name} must be from {low:g} to {high:g}, not {value}")

    def check_unread(self, other, values, *names):
        """UserError if one of these flags is given although it is not read: the flag `other` has one of
        these values."""
        value = str(getattr(self, other, ""))
        for name in names:
            is_given = getattr(self, name) != getattr(type(self), name)
            if is_given and value in values.split():
                raise UserError(f"--{name} has no effect if --{other} is {value}")

    @property
    def torch_device(self):
        """The name of the device that `--device` means. cpu:0 is the CPU, too."""
        device = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        return "cpu" if device.startswith("cpu:") else device

    @property
    def max_micro_batch_tokens(self):
        """The number that `--micro_batch_tokens` means."""
        if self.micro_batch_tokens > 0:
            return self.micro_batch_tokens
        if self.torch_device == "cpu":
            return 1_024
        return 32_768 if self.gradient_checkpointing else 8_192

    @property
    def script(self):
        """The name of the file that defines this class; "notebook" if there is none."""
        module = sys.modules.get(type(self).__module__)
        return Path(getattr(module, "__file__", None) or "notebook").stem

    @property
    def folder(self):
        """The absolute path that `--run_dir` means."""
        return Path(self.run_dir or f"runs/{self.script}-seed{self.seed}").absolute()

    def settings(self):
        """The script and all fields, as JSON has them. A function made in Python is module:name."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        if callable(self.reward):
            name = getattr(self.reward, "__qualname__", type(self.reward).__name__)
            values["reward"] = f"{self.reward.__module__}:{name}"
        return json.loads(json.dumps({"script": self.script, **values}, default=str))

    def saved_settings(self):
        """What is in the settings.json of `--run_dir`; {} if there is none. UserError if a flag is
        missing, or has a value of the wrong type."""
        path = self.folder / "settings.json"
        if not os.path.lexists(path):
            return {}
        with one_line(f"{path} does not hold a run's settings"):
            saved = json_object(path.read_text())
            if saved["script"] == self.script:
                for f in flags_of(self):
                    typed(f, saved[f.name])
            return saved


# ------------------------------------------------------------------------------------------- checks

# Lowest and highest values of flags that several scripts have. All other numbers must be finite and
# nonnegative; a script's check() may be stricter.
RANGES = [
    (1, 1e6, "prompts_per_iteration group_size max_new_tokens update_epochs num_minibatches"),
    (1, 1e9, "num_held_out rollout_mask_high rollout_refresh_every"),
    (1, 1000, "eval_samples"),
    (0, 999_999, "iterations"),  # a checkpoint's name has six digits
    (1e-9, 1e9, "temperature lr critic_lr max_grad_norm rollout_cap"),
    (0, 1, "rollout_mask_low"),
]
# (a flag, some of its values, the flags that are not read then); a script's check() may add some.
UNREAD = [
    ("old_logprobs", "sampler", "rollout_correction"),
    ("rollout_correction", "none geo_filter icepop", "rollout_cap"),
    (
        "rollout_correction",
        "none token_tis sequence_tis sequence_mis icepop",
        "rollout_mask_low rollout_mask_high",
    ),
    ("kl_coef", "0.0", "ref_reset_every"),
]


FILES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")


def has_splits(dataset):
    if dataset in ("", "addition") or Path(dataset).suffix.lower() in FILES:
        return False
    return not Path(dataset, "state.json").exists()  # written by save_to_disk


def allowed_in(f):
    """What a field may be, by its annotation: types, or choices."""
    has_several = get_origin(f.type) in (Literal, Union, UnionType)
    return get_args(f.type) if has_several else (f.type,)


def kind_of(f):
    """The type of a flag on the command line, or None: a subclass may have fields that are no flags,
    such as a list. They are left alone."""
    allowed = allowed_in(f)
    has_choices = get_origin(f.type) is Literal
    kinds = {type(choice) for choice in allowed} if has_choices else {*allowed}
    kinds -= {Callable, NoneType}
    is_flag = "help" in f.metadata and len(kinds) == 1 and kinds <= {str, int, float, bool, dict}
    return kinds.pop() if is_flag else None


def flags_of(args):
    """The fields of an `Args` that are flags."""
    return [f for f in fields(args) if kind_of(f) is not None]


def typed(f, value):
    """The value of a flag, as its type. UserError if that would change it: 4.0 is an int; 2.5, "4" and
    NaN are not. True is not taken for a number."""
    allowed = allowed_in(f)
    if (Callable in allowed and callable(value)) or (NoneType in allowed and value is None):
        return value
    kind = kind_of(f)
    found = value
    with contextlib.suppress(Exception):  # such as int([7])
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
        if hasattr(value, "tolist"):  # numpy's and torch's
            value = value.tolist()
        if kind is dict:
            value = json.loads(json.dumps(value))
        is_bool = isinstance(value, bool) and kind is not bool
        is_choice = value in allowed if get_origin(f.type) is Literal else True
        if kind(value) == value and is_choice and not is_bool:
            return kind(value)
    names = " or ".join(getattr(x, "__name__", str(x)) for x in allowed if x is not NoneType)
    raise UserError(f"--{f.name} must be {names}, not {found!r:.100}")


def check_flags(args):
    """UserError if a flag has an invalid value, or flags contradict each other."""
    for f in flags_of(args):
        setattr(args, f.name, typed(f, getattr(args, f.name)))
    for low, high, names in RANGES:
        args.check_range(low, high, *[name for name in names.split() if hasattr(args, name)])
    args.check_range(0, 1e9, *[f.name for f in flags_of(args) if f.type in (int, float)])
    args.check()
    for other, values, names in UNREAD:
        args.check_unread(other, values, *names.split())
    completions = args.prompts_per_iteration * args.group_size
    if completions % args.num_minibatches > 0:
        raise UserError(f"--num_minibatches does not divide {completions} completions into equal parts")
    if args.old_logprobs == "sampler" and args.routing_replay == "r2":
        raise UserError("--old_logprobs sampler skips the forward pass that r2 takes experts from")
    for name in ("model", "dataset", "eval_dataset"):
        path = getattr(args, name)
        with one_line(f"--{name} {path:.100} cannot be used"):
            Path(path, "config.json").exists()  # fails if its name is too long, or it may not be read
    for name, dataset in (("dataset_split", args.dataset), ("eval_split", args.eval_dataset)):
        if getattr(args, name) != getattr(RunArgs, name) and not has_splits(dataset):
            raise UserError(f"--{name} is for a folder or hub id, and there is none that it applies to")
    if args.device:
        with one_line(f"--device {args.device} is not available"):
            torch.zeros(1, device=args.device).item()  # fails on meta, which cannot compute


# ------------------------------------------------------------------------------------- command line


class Parser(argparse.ArgumentParser):
    """Raises a UserError where argparse would print the usage and exit."""

    def error(self, message):
        raise UserError(message)


def json_object(text):
    return dict(**json.loads(text))  # fails if it is no object


def add_flags(parser, args_class, names=None):
    """Adds the flags of an `Args` (all, or those with these names) to a parser, the script's own first.
    What the parser returns has only the flags that were given."""
    shared = {f.name for f in fields(RunArgs)}
    for f in sorted(flags_of(args_class), key=lambda f: f.name in shared):
        if names is not None and f.name not in names:
            continue
        kind = kind_of(f)
        help = f.metadata["help"].replace("%", "%%")
        options = {"type": json_object if kind is dict else kind, "metavar": "X"}
        if kind is bool:
            options = {"action": argparse.BooleanOptionalAction}
        elif get_origin(f.type) is Literal:
            options["choices"] = allowed_in(f)
            help += f" ({', '.join(map(str, options['choices']))})"
        if f.default not in ("", False, None):
            help += f" (default: {f.default})"
        parser.add_argument(f"--{f.name}", help=help, default=argparse.SUPPRESS, **options)


def parse_args(args_class, words):
    """A command line as `args_class`. A resumed run keeps its flags, except --device, unless they are
    given again."""
    title = (sys.modules[args_class.__module__].__doc__ or "").partition("\n")[0]
    parser = Parser(
        description=f"Trains a language model with {title}",
        usage="%(prog)s [--flag value ...]",
        allow_abbrev=False,
    )
    add_flags(parser, args_class)
    given = vars(parser.parse_args(words))
    if [word.partition("=")[0] for word in words].count("--reward") > 1:
        example = "examples/format_and_accuracy.py adds several up"
        raise UserError(f"--reward names one function, and was given more than once; {example}")
    saved = {}
    if given.get("resume"):
        named = args_class(**{name: given[name] for name in given.keys() & {"run_dir", "seed"}})
        saved = named.saved_settings()
    names = {f.name for f in flags_of(args_class)} - {"resume", "run_dir", "device"}
    kept = {name: saved[name] for name in names & saved.keys()}
    return args_class(**kept | given)


def advise(args):
    """Prints advice on flags for a user's own model."""
    if args.model == RunArgs.model:
        return
    typical = {"max_new_tokens": "512"}
    if args.iterations > 0:
        typical |= {"lr": "1e-6", "critic_lr": "1e-5"}
    for name, value in typical.items():
        default = getattr(type(args), name, None)  # None: this script has no such flag
        if default is not None and getattr(args, name) == default:
            message = f"--{name} {default:g} suits {RunArgs.model}"
            print(f"warning: {message}; for your own model {value} is typical", file=sys.stderr)
    if args.torch_device != "cpu" and args.dtype == "float32":
        message = "float32 is slow on a GPU; --dtype bfloat16 keeps float32 weights for AdamW"
        print(f"note: {message}", file=sys.stderr)


def launch(main, args_class):
    """Calls `main` with the command line as `args_class`. A UserError ends the program with one line on
    stderr and exit code 2; anything else is a bug and shows its traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Some encodings lack characters. A file should show each line at once.
            stream.reconfigure(errors="backslashreplace", line_buffering=True)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        args = parse_args(args_class, sys.argv[1:])
        check_folder(args)  # before any work is done; Run checks it again
        advise(args)
        main(args)
    except KeyboardInterrupt:  # during an iteration: see Run.on_signal
        fail("stopped", 130)
    except UserError as error:
        fail(f"{Path(sys.argv[0]).name}: error: {' '.join(str(error).split())}", 2)
    except Exception as error:
        # The CPU allocator has no exception class of its own.
        if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            flags = "--gradient_checkpointing, --micro_batch_tokens, --rollout_batch_size, --dtype"
            fail(f"{Path(sys.argv[0]).name}: error: out of memory; these flags can help: {flags}", 2)
        raise


def fail(line, code):
    tqdm.write(line, file=sys.stderr)  # above the progress bar
    sys.exit(code)
