"""The flags that all scripts share, the ranges of their values, and how a script is started."""

import json
import os
import re
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
    """An error that the user can fix, in one sentence that names the flag. `launch` prints it."""


def flag(default, help):
    """A dataclass field that becomes a command-line flag."""
    return HfArg(default=default, help=help)


@dataclass
class RunArgs:
    """The flags that every script's `Args` inherits."""

    # model
    model: str = flag("tiny-moe", "tiny-moe, or a folder or hub id of a language model")
    # data and reward
    dataset: str = flag(
        "addition", "addition, a .jsonl, .json, .csv or .parquet file, a folder, a hub id"
    )
    dataset_config: str = flag("", "configuration of a hub dataset, if it has several")
    dataset_split: str = flag("", "split of a folder or a hub dataset [default: train]")
    prompt_column: str = flag("question", "column of the prompts: text or chat messages")
    answer_column: str = flag("answer", "column of the gold answers, or a path such as extra.gold")
    chat_template_kwargs: str = flag("{}", 'JSON for the chat template: {"enable_thinking": false}')
    system_prompt: str = flag("", "system message before each prompt, in place of the dataset's")
    instruction: str = flag("", "text added on a separate line after each prompt")
    num_held_out: int = flag(256, "problems held out for evaluation")
    reward: list[str] = HfArg(
        default_factory=list,
        help="FILE.py:FUNCTION ...; correct is what the first one says or, as in TRL, values above 0.5",
    )
    reward_weights: list[float] = HfArg(default_factory=list, help="weights of their values [1 each]")
    # precision and memory
    dtype: Literal["float32", "bfloat16"] = flag(
        "float32", "precision of the model that computes; AdamW always updates float32 weights"
    )
    head_dtype: Literal["same", "float32"] = flag(
        "same", "precision of the head's product, the logits, in sampler and update alike"
    )
    micro_batch_size: int = flag(0, "completions per update pass [0: 16,384 tokens]")
    rollout_batch_size: int = flag(0, "completions sampled at a time [0: all]")
    gradient_checkpointing: bool = flag(False, "less memory, more time")
    # sampler
    rollout_dtype: Literal["same", "float32", "bfloat16", "int8", "int4"] = flag(
        "same", "precision of the model that samples"
    )
    rollout_refresh_every: int = flag(1, "iterations between refreshes of the sampler's weights")
    old_logprobs: Literal["trainer", "sampler"] = flag(
        "trainer", "where the old log-probs of every ratio come from"
    )
    rollout_correction: Literal[
        "none", "token_tis", "sequence_tis", "sequence_mis", "geo_mask", "geo_filter", "icepop"
    ] = flag("none", "importance weights for the mismatch of sampler and trainer")
    rollout_cap: float = flag(2.0, "cap on these weights (not used by icepop and geo_filter)")
    rollout_mask_low: float = flag(0.95, "geo rules drop completions with a lower mean ratio")
    rollout_mask_high: float = flag(1.05, "geo rules drop completions with a higher mean ratio")
    routing_replay: Literal["none", "r2", "r3"] = flag(
        "none", "experts that an update of an MoE uses: r2 the old policy's, r3 the sampler's"
    )
    # run
    seed: int = flag(1, "seed of the order of the prompts and of the sampling")
    device: str = flag("", "cuda, cpu, or mps (untried) [default: cuda if available]")
    eval_every: int = flag(10, "iterations between evaluations [0: only at the end]")
    eval_samples: int = flag(1, "completions per held-out problem, before and after, for pass@k")
    save_every: int = flag(20, "iterations between checkpoints [0: only at the end]")
    resume: bool = flag(False, "continue the run in --run_dir")
    run_dir: str = flag("", "output folder [default: runs/<script>-seed<seed>]")

    # A script without these flags has one completion per prompt, or one step per rollout.
    group_size = 1
    update_epochs = 1
    num_minibatches = 1
    # Known once the functions of --reward are loaded:
    reads_answers = True  # False if none of them reads gold answers
    reward_columns = {}  # {column of the dataset: the flag that needs it}

    def check(self):
        """Overridden by scripts: UserError if one of their own flags has an impossible value."""

    def template_options(self):
        """`--chat_template_kwargs` as a dict."""
        try:
            return dict(**json.loads(self.chat_template_kwargs))
        except (ValueError, TypeError) as error:
            message = f"must be a JSON object, not {self.chat_template_kwargs}"
            raise UserError(f"--chat_template_kwargs {message}") from error

    @property
    def has_rollout_copy(self):
        """Whether a separate copy of the weights samples, which may differ from the trained weights."""
        return self.rollout_dtype != "same" or self.rollout_refresh_every > 1

    @property
    def reads_sampler_experts(self):
        """Whether an update replays a rollout's experts, or compares them with the trainer's."""
        are_compared = self.has_rollout_copy and self.old_logprobs == "trainer"
        return are_compared or self.routing_replay == "r3"

    def check_range(self, low, high, *names):
        """UserError if the value of one of these flags is outside the range."""
        for name in names:
            value = getattr(self, name)
            if not low <= value <= high:  # a NaN fails this too
                raise UserError(f"--{name} must be from {low:g} to {high:g}, not {value}")


# Lowest and highest values of flags that several scripts have. All other numbers must be finite and not
# negative; a script's check() may be stricter.
RANGES = [
    (1, 1e6, "prompts_per_iteration group_size max_new_tokens update_epochs num_minibatches"),
    (1, 1e9, "num_held_out rollout_mask_high rollout_refresh_every"),
    (1, 1000, "eval_samples"),
    (1, 999_999, "iterations"),  # a checkpoint's name has six digits
    (1e-9, 1e9, "temperature lr max_grad_norm rollout_cap"),
    (0, 1, "rollout_mask_low"),
]


def check_ranges(args):
    """UserError if a number is outside its range."""
    ranges = {field.name: (0, 1e9) for field in fields(args) if field.type in (int, float)}
    for low, high, names in RANGES:
        ranges |= dict.fromkeys(names.split(), (low, high))
    for name, (low, high) in ranges.items():
        args.check_range(low, high, name)


# The groups of --help: {first flag: title}, in the order of a script's Args and then of RunArgs. The
# algorithm's own flags follow those of the loop.
GROUPS = {
    "iterations": "loop",
    "model": "model",
    "dataset": "data and reward",
    "dtype": "precision and memory",
    "rollout_dtype": "sampler",
    "seed": "run",
}
LAST_OF_LOOP = "router_aux_coef"


def group_flags(parser, args_class):
    """Sorts the flags in --help into groups; argparse itself would list RunArgs first."""
    parser.usage = "%(prog)s [--flag value ...]"
    actions = {action.dest: action for action in parser._actions}
    parser._optionals._group_actions = [actions["help"]]
    for name in [*args_class.__annotations__, *RunArgs.__annotations__]:
        if name in GROUPS:
            group = parser.add_argument_group(GROUPS[name])
        group._group_actions.append(actions[name])
        if name == LAST_OF_LOOP:
            group = parser.add_argument_group("algorithm")


def parse_args(args_class):
    """The command line as `args_class`, its values checked before any work is done."""

    def refuse(message):
        raise UserError(message)

    parser = transformers.HfArgumentParser(args_class, allow_abbrev=False)
    parser.error = refuse
    group_flags(parser, args_class)
    args = args_class(**vars(parser.parse_args()))
    check_ranges(args)
    args.check()
    if os.fsencode(args.run_dir) != args.run_dir.encode(errors="replace"):  # safetensors needs UTF-8
        raise UserError(f"--run_dir {args.run_dir} is not UTF-8 in this locale: set PYTHONUTF8=1")
    args.template_options()
    if args.dataset == "addition" or os.path.isfile(args.dataset):
        for name in ("dataset_config", "dataset_split"):
            if getattr(args, name):
                raise UserError(f"--{name} is for a folder or a hub dataset, not {args.dataset}")
    for name in args.reward:
        if not re.fullmatch(r".+\.py:\w+", name):
            raise UserError(f"--reward {name} must be FILE.py:FUNCTION")
    completions = args.prompts_per_iteration * args.group_size
    if completions % args.num_minibatches > 0:
        raise UserError(f"--num_minibatches does not divide {completions} completions into equal parts")
    is_weight = [abs(weight) <= 1000 for weight in args.reward_weights]
    if is_weight and (len(is_weight) != len(args.reward) or not all(is_weight)):
        raise UserError(
            "--reward_weights must be numbers up to 1000, one for each function of --reward"
        )
    if args.old_logprobs == "sampler" and args.rollout_correction != "none":
        raise UserError("--old_logprobs sampler makes --rollout_correction useless: its ratio is 1")
    if args.old_logprobs == "sampler" and args.routing_replay == "r2":
        raise UserError("--old_logprobs sampler skips the forward whose experts r2 would replay")
    if completions // args.num_minibatches < ranks.WORLD:
        message = f"leaves fewer completions in a minibatch than {ranks.WORLD} ranks"
        raise UserError(f"--prompts_per_iteration {args.prompts_per_iteration} {message}")
    args.device = resolve_device(args.device)
    is_own_model = ranks.RANK == 0 and args.model != args_class.model
    if is_own_model and args.lr == args_class.lr:
        message = f"--lr {args.lr:g} suits {args_class.model}; for your own model 1e-6 is typical"
        print(f"warning: {message}", file=sys.stderr)
    if is_own_model and args.device.startswith("cuda") and args.dtype == "float32":
        print("warning: float32 is slow on a GPU; faster: --dtype bfloat16", file=sys.stderr)
    return args


def resolve_device(name):
    """The device's full name ("cuda:0"). If `name` is empty: CUDA if available, else the CPU."""
    default = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.zeros(1, device=name or default).device
        if device.type == "cuda":
            torch.cuda.set_device(device)  # pinned memory belongs to the current one
        return str(device)
    except Exception as error:  # each backend has its own exceptions
        raise UserError(f"--device {name} is not available; the default here is {default}") from error


def launch(main, args_class):
    """Calls `main` with the command line as `args_class`. A UserError ends the program with one line on
    stderr and exit code 2; anything else is a bug and shows its traceback."""
    for stream in (sys.stdout, sys.stderr):
        # A prompt may contain characters that the terminal cannot show; printing it must not end a run.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace", line_buffering=True)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        ranks.init()
        main(parse_args(args_class))
        ranks.destroy()
    except (UserError, ranks.LostRank) as error:
        line = f"{Path(sys.argv[0]).name}: error: {ranks.describe(error)}"
        if ranks.is_first_to_fail():
            tqdm.write(line, file=sys.stderr)
        sys.exit(2)
