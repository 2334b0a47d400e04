"""The flags that all scripts share, the ranges of their values, and the launch of a script."""

import argparse
import contextlib
import functools
import importlib.util
import io
import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

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
    dataset: str | Callable = flag("addition", "addition, a .jsonl file, or FILE.py:FUNCTION")
    eval_dataset: str | Callable = flag("", "the same for the held-out problems [part of the dataset]")
    chat_template_kwargs: dict | None = flag(None, 'JSON for the template: {"enable_thinking": false}')
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
    # run
    seed: int = flag(1, "seed for prompt order and sampling")
    device: str = flag("", "cpu, cuda or mps [cuda if available, else cpu, on a Mac too]")
    eval_every: int = flag(10, "evaluate every n iterations [0: only at the end]")
    eval_samples: int = flag(1, "samples per held-out problem, before and after training, for pass@k")
    save_every: int = flag(20, "save a checkpoint every n iterations [0: only at the end]")
    resume: bool = flag(False, "continue the run in --run_dir, with its flags")
    run_dir: str = flag("", "output folder [runs/<script>-seed<seed>]")

    # For scripts without these flags: one completion per prompt, one step per rollout, no resets, and a
    # sampler that is the policy.
    group_size = 1
    update_epochs = 1
    num_minibatches = 1
    ref_reset_every = 0
    rollout_refresh_every = 1

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
        value = getattr(self, other, None)  # None: this script has no such flag
        for name in names:
            is_given = getattr(self, name) != getattr(type(self), name)
            if is_given and value in values:
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
        """The script and all flags, as JSON has them. A function made in Python is module:name. Files
        have their whole paths, so that a run can be resumed from any folder."""
        values = {f.name: getattr(self, f.name) for f in flags_of(self)}
        for name in ("dataset", "eval_dataset", "reward"):
            value = values[name]
            if callable(value):
                function = getattr(value, "__qualname__", type(value).__name__)
                values[name] = f"{value.__module__}:{function}"
            elif isinstance(value, str) and value not in ("", "addition"):
                values[name] = str(Path(value).absolute())
        return json.loads(json.dumps({"script": self.script, **values}))

    def saved_settings(self):
        """What is in the settings.json of `--run_dir`; {} if there is none."""
        path = self.folder / "settings.json"
        if not os.path.lexists(path):
            return {}
        with one_line(f"{path} does not hold a run's settings"):
            saved = json_object(path.read_text())
            if "script" not in saved:
                raise UserError("it names no script")
            return saved


# ------------------------------------------------------------------------------------------- checks

# Lowest and highest values of flags that several scripts have. All other numbers must be finite and
# nonnegative; a script's check() may be stricter.
RANGES = [
    (1, 1e6, "prompts_per_iteration group_size max_new_tokens update_epochs num_minibatches"),
    (1, 1e9, "num_held_out"),
    (1, 1000, "eval_samples"),
    (0, 999_999, "iterations"),  # a checkpoint's name has six digits
    (1e-9, 1e9, "temperature lr critic_lr max_grad_norm"),
]
# (a flag, some of its values, the flags that are not read then); a script's check() may add some.
UNREAD = [
    ("kl_coef", [0], "ref_reset_every"),
]


def flags_of(args):
    """The fields of an `Args` that are flags. Other fields of a subclass are not."""
    return [f for f in fields(args) if "help" in f.metadata]


def kind_of(hint):
    """(type, choices) of a flag with this annotation: (dict, ()) for `dict | None`."""
    options = get_args(hint) or (hint,)
    if get_origin(hint) is Literal:
        return type(options[0]), options
    return options[0], ()


def plain(value):
    """numpy's and torch's numbers as Python's, and a path as text, as settings.json has them."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value.tolist() if hasattr(value, "tolist") else value


def check_flags(args):
    """UserError if a flag has an invalid value, or flags contradict each other."""
    hints = get_type_hints(type(args))
    for f in flags_of(args):
        value = plain(getattr(args, f.name))
        setattr(args, f.name, value)
        _, choices = kind_of(hints[f.name])
        if choices and value not in choices:
            raise UserError(f"--{f.name} must be {' or '.join(map(str, choices))}, not {value}")
    for low, high, names in RANGES:
        args.check_range(low, high, *[name for name in names.split() if hasattr(args, name)])
    args.check_range(0, 1e9, *[f.name for f in flags_of(args) if type(f.default) in (int, float)])
    args.check()
    for other, values, names in UNREAD:
        args.check_unread(other, values, *names.split())
    completions = args.prompts_per_iteration * args.group_size
    if completions % args.num_minibatches > 0:
        raise UserError(f"--num_minibatches does not divide {completions} completions into equal parts")
    if args.device:
        with one_line(f"--device {args.device} is not available"):
            torch.zeros(1, device=args.device).item()  # fails on meta, which cannot compute


# ---------------------------------------------------------------------------------------- functions

imported = {}  # {path: module}, of the current run: `load_grader` empties it


def import_function(value):
    """FILE.py:FUNCTION -> the function. The file is a module under its own name, so that a pool's
    processes can import it too. A run imports a file once. The next run compiles the source again:
    importlib.reload would keep names that were deleted from the file."""
    file, _, name = value.rpartition(":")
    if not file:
        raise UserError("it names no function")
    path = Path(file).resolve()
    if not path.exists():
        raise UserError(f"there is no file {path}; if it was a function made in Python, pass it again")
    if path not in imported:
        sys.path.append(str(path.parent))
        importlib.invalidate_caches()  # the file may be new
        spec = importlib.util.find_spec(path.stem)
        found = spec and spec.origin
        if not found or Path(found).resolve() != path:
            raise ImportError(f"rename {path.name}: `import {path.stem}` finds {found}")
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        exec(compile(path.read_bytes(), path, "exec"), module.__dict__)
        imported[path] = module
    return getattr(imported[path], name)


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
    hints = get_type_hints(args_class)
    shared = {f.name for f in fields(RunArgs)}
    for f in sorted(flags_of(args_class), key=lambda f: f.name in shared):
        if names is not None and f.name not in names:
            continue
        kind, choices = kind_of(hints[f.name])
        help = f.metadata["help"].replace("%", "%%")
        options = {"type": json_object if kind is dict else kind, "metavar": "X"}
        if kind is bool:
            options = {"action": argparse.BooleanOptionalAction}
        elif choices:
            options["choices"] = choices
            help += f" ({', '.join(map(str, choices))})"
        if f.default not in ("", None) and f.default is not False:
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
    if not given.get("resume"):
        return args_class(**given)
    named = args_class(**{name: given[name] for name in given.keys() & {"run_dir", "seed"}})
    saved = named.saved_settings()
    names = {f.name for f in flags_of(args_class)} - {"resume", "run_dir", "device"}
    kept = {name: saved[name] for name in names & saved.keys()}
    with one_line(f"--resume: the flags in {named.folder / 'settings.json'} cannot be used"):
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
    is_cuda = args.torch_device.startswith("cuda")
    is_emulated = is_cuda and not torch.cuda.is_bf16_supported(including_emulation=False)
    if is_emulated and args.dtype == "bfloat16":
        print("note: this GPU only emulates bfloat16, which is slow", file=sys.stderr)
    elif args.torch_device != "cpu" and args.dtype == "float32" and not is_emulated:
        message = "float32 is slow on a GPU; --dtype bfloat16 keeps float32 weights for AdamW"
        print(f"note: {message}", file=sys.stderr)


class Messages:
    """A standard stream that never ends a run: text that cannot be written is dropped. Ctrl-C, for
    example, also ends the tee that reads it, and a disk may be full for a while."""

    def __init__(self, stream):
        # None if it is closed, as by >&-
        self.stream = stream or open(os.devnull, "w")  # noqa: SIM115
        if not isinstance(self.stream, io.TextIOWrapper):
            return  # a notebook's, for example
        with contextlib.suppress(OSError, ValueError):  # it has no file, or is closed
            # Unbuffered, as with python -u: a buffer would keep what could not be written, and fail
            # again when Python ends. Some encodings lack characters.
            file = open(self.stream.fileno(), "wb", buffering=0, closefd=False)  # noqa: SIM115
            self.stream.flush()
            self.stream = io.TextIOWrapper(
                file, self.stream.encoding, errors="backslashreplace", write_through=True
            )

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text):
        with contextlib.suppress(OSError, ValueError):
            self.stream.write(text)

    def flush(self):
        with contextlib.suppress(OSError, ValueError):
            self.stream.flush()


@functools.cache  # once: it cannot be undone
def leave_ctrl_c_to_this_process():
    """From now on, forked processes, such as a reward function's pool, ignore Ctrl-C, which goes to
    them, too. SIGTERM, with which a pool ends them, acts at once. (A Python handler runs between two
    bytecodes, so a process that gets the signal just before it waits for a lock would wait
    forever.)"""

    def reset_signals():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    if hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(after_in_child=reset_signals)


def launch(main, args_class):
    """Calls `main` with the command line as `args_class`. A UserError ends the program with one line on
    stderr and exit code 2; anything else is a bug and shows its traceback."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    leave_ctrl_c_to_this_process()  # before the reward's file is imported: it may make a pool
    script = Path(sys.argv[0]).name
    with redirect_stdout(Messages(sys.stdout)), redirect_stderr(Messages(sys.stderr)):
        try:
            args = parse_args(args_class, sys.argv[1:])
            check_folder(args)  # before any work is done; Run checks it again
            advise(args)
            main(args)
        except KeyboardInterrupt:  # during an iteration: see Run.on_signal
            fail("stopped", 130)
        except UserError as error:
            fail(f"{script}: error: {' '.join(str(error).split())}", 2)
        except Exception as error:
            # The CPU allocator has no exception class of its own.
            if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
                flags = "--gradient_checkpointing, --micro_batch_tokens, --rollout_batch_size, --dtype"
                fail(f"{script}: error: out of memory; these flags can help: {flags}", 2)
            raise


def fail(line, code):
    tqdm.write(line, file=sys.stderr)  # above the progress bar
    sys.exit(code)
