"""The plumbing of a run: command line, metrics, run folder, checkpoint and resume.

To study an algorithm you need not read this file, and a loss that you copy does not need it: nothing
here computes with tokens, rewards or policies. Functions stand in the order in which a run uses them.
"""

import hashlib
import json
import math
import re
import shlex
import shutil
import signal
import sys
import zipfile
from decimal import Decimal
from pathlib import Path

import torch
import transformers
from filelock import FileLock
from tqdm import tqdm

import ranks


TINY_MOE = Path(__file__).parent / "tiny_moe"  # the folder that --model tiny-moe means


class UserError(Exception):
    """What the user can mend, in one sentence that names the flag. `launch` prints it in one line."""


def launch(main, args_class):
    """Calls `main` with the command line as `args_class`. A UserError ends the program with one line on
    stderr and exit code 2; anything else is a bug and shows its traceback."""
    # A prompt may hold letters that the terminal cannot show; printing it must not end a run.
    sys.stdout.reconfigure(errors="backslashreplace")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        ranks.join()
        main(parse_args(args_class))
        ranks.leave()
    except (UserError, ranks.LostRank) as error:
        message = str(error)
        if error.__cause__ is not None:
            message += f": {type(error.__cause__).__name__} {error.__cause__}"
        line = f"{Path(sys.argv[0]).name}: error: {' '.join(message.split())}"
        if ranks.is_first_to_fail():
            tqdm.write(line, file=sys.stderr)
        sys.exit(2)


# --------------------------------------------------------------------------- command line and data

# Lowest and highest value of the scripts' numbers. A script has some of the names, not all.
RANGES = [
    (1, 1e9, "prompts_per_iteration group_size max_new_tokens update_epochs num_minibatches"),
    (1, 1e9, "num_held_out max_sampling_rounds rollout_mask_high"),
    (1, 999_999, "iterations"),  # a checkpoint's name has six digits
    (0, 1e9, "seed rollout_batch_size micro_batch_size eval_every save_every"),
    (0, 1e9, "ref_reset_every kl_coef router_aux_coef value_coef entropy_coef clip_eps_high"),
    (0, 1e9, "value_clip pretraining_iterations positive_lm_coef"),
    (1e-9, 1e9, "temperature lr critic_lr max_grad_norm lambda_alpha"),
    (1e-9, 1e9, "is_weight_cap log_ratio_clip tau_pos tau_neg rollout_cap"),
    (0, 1, "clip_eps_low gamma gae_lambda gamma_min baseline_decay rollout_mask_low"),
]


def parse_args(args_class):
    """The command line as `args_class`, its values checked before any work is done."""

    def refuse(message):
        raise UserError(message)

    parser = transformers.HfArgumentParser(args_class, allow_abbrev=False)
    parser.error = refuse
    args = args_class(**vars(parser.parse_args()))
    for low, high, names in RANGES:
        for name in names.split():
            value = getattr(args, name, low)
            if not low <= value <= high:  # a NaN fails this too
                raise UserError(f"--{name} must be from {low:g} to {high:g}, not {value}")
    completions = args.prompts_per_iteration * args.group_size
    if completions > 1_000_000:
        raise UserError(f"--prompts_per_iteration x --group_size is {completions}, more than a million")
    if completions % args.num_minibatches > 0:
        raise UserError(f"--num_minibatches does not divide {completions} completions into equal parts")
    if completions // args.num_minibatches < ranks.WORLD:
        raise UserError(f"--num_minibatches leaves fewer completions in one than {ranks.WORLD} ranks")
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


def read_rows(name, config, split):
    """`--dataset` -> its rows as dicts: a JSON-lines file, a parquet file, or a hub id. Files are read
    directly: a name means nothing but itself, numbers keep their digits, no cache is in between."""
    path = Path(name)
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet  # here and below: 80 MB that few runs need

            rows = pyarrow.parquet.read_table(path).to_pylist()
        elif path.suffix in (".json", ".jsonl") or path.is_file():
            rows = read_json_lines(path)
        else:
            import datasets

            datasets.logging.set_verbosity(datasets.logging.CRITICAL)
            rows = datasets.load_dataset(name, config or None, split=split).to_list()
        if not rows:
            raise ValueError("there are no rows")
        return rows
    except Exception as error:  # the libraries have exceptions of their own for each kind of damage
        raise UserError(f"--dataset {name} cannot be read") from error


def read_json_lines(path):
    """[dict]; ValueError with the number of a line that is no JSON object."""
    rows = []
    text = path.read_text(encoding="utf-8")
    for number, line in enumerate(text.split("\n"), 1):  # other separators are allowed inside a string
        if line.strip():
            try:
                rows.append({**json.loads(line, parse_float=Decimal)})
            except (ValueError, TypeError) as error:
                raise ValueError(f"line {number}: {error}") from error
    return rows


# ------------------------------------------------------------------------------------------ metrics


class Meter:
    """Averages what the updates of an iteration report. Values stay on the device until `means`."""

    def __init__(self):
        self.pairs = {}  # key: [(value, weight), ...]

    def add(self, prefix, values, weight):
        """`values`: {name: number or tensor}; `weight`: how many tokens or sequences they speak for."""
        for name, value in values.items():
            pairs = self.pairs.setdefault(f"{prefix}/{name}", [])
            pairs.append((torch.as_tensor(value).detach(), weight))

    def add_once(self, prefix, values, weight):
        """The same for values that all ranks have in common, which count once."""
        if ranks.RANK == 0:
            self.add(prefix, values, weight)

    def means(self):
        """{key: weighted mean}, or the maximum for keys ending in "_max". A vector gives two keys, for
        the largest and the smallest of its means."""
        means = {}
        for key, pairs in ranks.interleave(self.pairs).items():
            total_weight = max(1, sum(weight for _, weight in pairs))  # 0 where no token counts
            mean = sum(value * weight for value, weight in pairs) / total_weight
            if key.endswith("_max"):
                means[key] = max(value for value, _ in pairs).item()
            elif mean.dim() == 0:
                means[key] = mean.item()
            else:
                means[f"{key}_max"] = mean.max().item()
                means[f"{key}_min"] = mean.min().item()
        return means


# ----------------------------------------------------------------------- run folder and checkpoints

STATE = "trainer_state.pt"  # in a checkpoint: all that is not the policy
CHECKPOINT = re.compile(r"checkpoint-\d{6}")  # a copy such as checkpoint-best-2 belongs to the user
MAY_CHANGE = "iterations eval_every save_every device resume run_dir tensorboard".split()  # on resuming


def file_hash(path):
    """SHA-256 of a file's content, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checkpoint_hashes(folder):
    """{file name: hash} of a checkpoint, without the state, which holds them and its own checksums."""
    return {path.name: file_hash(path) for path in folder.iterdir() if path.name != STATE}


def read_checkpoint(folder):
    """What `Run.save` saved besides the policy. ValueError if a file is not as it was written."""
    damaged = zipfile.ZipFile(folder / STATE).testzip()
    if damaged is not None:
        raise ValueError(f"{STATE} is damaged at {damaged}")
    saved = torch.load(folder / STATE, weights_only=True, map_location="cpu")
    hashes = checkpoint_hashes(folder)
    for name in sorted(hashes.keys() | saved["hashes"].keys()):
        if hashes.get(name) != saved["hashes"].get(name):
            raise ValueError(f"{name} is not as it was written")
    return saved


class Run:
    """The folder of a run, `--run_dir`. Only one process at a time may hold it.

    settings.json      the arguments; a resumed run must have the same
    metrics.jsonl      a line for each iteration
    samples.jsonl      some completions of each iteration
    checkpoint-NNNNNN  the newest checkpoint: a transformers folder with the rest of the state in it,
                       renamed into place before its predecessor is removed: one is always whole
    """

    def __init__(self, args):
        self.args = args
        self.script = Path(sys.argv[0]).stem
        self.folder = Path(args.run_dir or f"runs/{self.script}-seed{args.seed}")
        self.signalled = False
        self.stop = False  # one of the ranks was signalled
        self.uniform_iterations = 0
        if ranks.RANK == 0:
            self.open_folder()
        ranks.gather("the folder is there")
        signal.signal(signal.SIGINT, self.on_signal)
        signal.signal(signal.SIGTERM, self.on_signal)

    def open_folder(self):
        """Locks the folder; UserError if it is in use or holds another run."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.lock = FileLock(self.folder / "lock")
            self.lock.acquire(timeout=0)
            has_begun = self.has_begun()
            if not has_begun:
                write_whole(self.folder / "settings.json", json.dumps(self.settings(), indent=1))
        except (OSError, TimeoutError) as error:
            message = f"--run_dir {self.folder} cannot be written, or is in use by another process"
            raise UserError(message) from error
        if has_begun and not self.args.resume:
            raise UserError(
                f"{self.folder} holds a run: --resume continues it, --run_dir starts another"
            )
        if has_begun:
            self.compare_settings()
        if self.args.tensorboard:
            self.tensorboard = self.open_tensorboard()

    def has_begun(self):
        """Whether an iteration was logged or saved. A run that broke off before has nothing to lose."""
        metrics = self.folder / "metrics.jsonl"
        return bool(self.checkpoints()) or (metrics.exists() and metrics.stat().st_size > 0)

    def checkpoints(self):
        """The checkpoints in the folder, oldest first."""
        return sorted(path for path in self.folder.iterdir() if CHECKPOINT.fullmatch(path.name))

    def settings(self):
        """{name: value} of the arguments that shape a run, and hashes of the files that they name."""
        settings = {"script": self.script, **vars(self.args)}
        for name in MAY_CHANGE:
            del settings[name]
        reward_file, _, _ = self.args.reward.rpartition(":")  # FILE.py:FUNCTION
        for name, path in (("dataset", self.args.dataset), ("reward", reward_file)):
            if Path(path).is_file():
                settings[f"{name}'s content"] = file_hash(path)
        if self.args.model == "tiny-moe":
            for path in sorted(TINY_MOE.glob("*")):
                if path.suffix in (".json", ".safetensors"):
                    settings[f"tiny-moe's {path.name}"] = file_hash(path)
        return settings

    def compare_settings(self):
        """UserError if the folder's run was started with other settings."""
        try:
            theirs = dict(json.loads((self.folder / "settings.json").read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise UserError(f"--resume: settings.json in {self.folder} cannot be read") from error
        ours = self.settings()
        for name in [*ours, *theirs]:
            if ours.get(name) != theirs.get(name):
                raise UserError(
                    f"--resume: {self.folder} has {name} {theirs.get(name)}, not {ours.get(name)}"
                )

    def open_tensorboard(self):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError("--tensorboard needs a package (pip install tensorboard)") from error
        return SummaryWriter(self.folder)

    def on_signal(self, number, frame):
        """The first signal ends the run after its iteration and a checkpoint, the second at once."""
        signal.signal(number, signal.SIG_DFL)
        spec = sys.modules["__main__"].__spec__  # python -m more.rloo has one
        program = ["-m", spec.name] if spec else sys.argv[:1]
        flags = sys.argv[1:] if "--resume" in sys.argv else [*sys.argv[1:], "--resume"]
        command = shlex.join(["python", *program, *flags])
        message = f"stopping after this iteration; to resume: {command}"
        if ranks.WORLD == 1:  # of several, see exit_if_stopped
            tqdm.write(message, file=sys.stderr)
        self.signalled = True

    def restore(self, model, generator, **parts):
        """Loads the newest checkpoint, if any, into model, generator and parts (by their state_dict).
        Returns the state: iterations done, position in the data, and what the script put there."""
        state = {"iteration": 0, "position": 0}
        checkpoints = self.checkpoints()
        if checkpoints:
            folder = checkpoints[-1]
            try:
                saved = read_checkpoint(folder)
                state = saved["state"]
                policy = transformers.AutoModelForCausalLM.from_pretrained(
                    folder, dtype=torch.float32, use_safetensors=True, trust_remote_code=False
                )
                model.load_state_dict(policy.state_dict())
                generator.set_state(saved["generator"])
                for name, part in parts.items():
                    part.load_state_dict(saved["parts"][name])
            except Exception as error:  # a damaged file may raise anything
                raise UserError(f"--resume: {folder} cannot be read") from error
        if ranks.RANK == 0:
            self.cut_lines("metrics.jsonl", state["iteration"])
            self.cut_lines("samples.jsonl", state["iteration"])
        sizes = {"initial": state["iteration"], "total": self.args.iterations}
        self.bar = tqdm(desc=self.script, disable=ranks.RANK > 0, **sizes)
        self.bar.leave = False  # it makes room for the results, or for an error
        return state

    def cut_lines(self, name, iteration):
        """Drops the lines after `iteration`: they belong to work that will be done again."""
        path = self.folder / name
        if not path.exists():
            return
        try:
            *lines, _ = path.read_text().split("\n")  # what has no newline after it was cut off
            kept = [line for line in lines if json.loads(line)["iteration"] <= iteration]
            write_whole(path, "".join(line + "\n" for line in kept))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"--resume: {path} cannot be used") from error

    def say(self, message):  # above the progress bar
        if ranks.RANK == 0:
            tqdm.write(message)

    def is_due(self, every, iteration):
        """True after each `every` iterations (0: never) and after the last one."""
        return iteration == self.args.iterations or (every > 0 and iteration % every == 0)

    def check_finite(self, iteration, **scalars):
        """UserError before a NaN or an infinity reaches the weights."""
        values = torch.stack(list(scalars.values())).tolist()  # a GPU is waited for once
        for name, value in zip(scalars, values, strict=True):
            if not math.isfinite(value):
                raise UserError(f"iteration {iteration}: {name} is not finite")

    def log(self, iteration, metrics, samples):
        """Appends a line of metrics and the samples (dicts), moves the bar on, reports a collapse."""
        self.stop = any(ranks.gather(self.signalled))
        if ranks.RANK > 0:
            return
        # JSON has no NaN and no infinity.
        metrics = {key: value for key, value in metrics.items() if math.isfinite(value)}
        try:
            with open(self.folder / "metrics.jsonl", "a") as file:
                file.write(json.dumps({"iteration": iteration, **metrics}, allow_nan=False) + "\n")
            with open(self.folder / "samples.jsonl", "a") as file:
                for sample in samples:
                    file.write(json.dumps({"iteration": iteration, **sample}, allow_nan=False) + "\n")
        except OSError as error:
            raise UserError(f"{self.folder} cannot be written; the last checkpoint is whole") from error
        if self.args.tensorboard:
            for key, value in metrics.items():
                self.tensorboard.add_scalar(key, value, iteration)
        if "eval/accuracy" in metrics:
            self.say(f"iteration {iteration:4d}: held-out accuracy {metrics['eval/accuracy']:.3f}")
        is_uniform = metrics.get("rollout/frac_zero_std_groups") == 1
        self.uniform_iterations = self.uniform_iterations + 1 if is_uniform else 0
        if self.uniform_iterations == 10:
            self.say("collapse: for 10 iterations no group had two different rewards")
        self.bar.set_postfix_str(f"reward {metrics['rollout/reward_mean']:.2f}", refresh=False)
        self.bar.update()

    def save(self, state, model, tokenizer, generator, **parts):
        """Writes a checkpoint in place of the one before."""
        if ranks.RANK > 0:
            return
        folder = self.folder / f"checkpoint-{state['iteration']:06d}"
        scratch = self.folder / "checkpoint.tmp"
        try:
            shutil.rmtree(scratch, ignore_errors=True)
            model.save_pretrained(scratch)
            tokenizer.save_pretrained(scratch)
            saved = {
                "state": state,
                "generator": generator.get_state(),
                "parts": {name: part.state_dict() for name, part in parts.items()},
                "hashes": checkpoint_hashes(scratch),
            }
            torch.save(saved, scratch / STATE)
            scratch.rename(folder)
        except Exception as error:  # torch and safetensors have their own for a full disk
            raise UserError(f"{folder} cannot be written; the checkpoint before it is whole") from error
        for path in self.checkpoints()[:-1]:
            shutil.rmtree(path, ignore_errors=True)

    def exit_if_stopped(self):
        """After a signal, and the checkpoint that it asks for, ends the program."""
        if self.stop:
            if ranks.WORLD > 1:
                self.say("stopped by a signal; to resume: the same command with --resume")
            sys.exit(130)

    def finish(self, before, after):
        """Prints the results on held-out problems before and after training, and some completions."""
        self.bar.close()
        if ranks.RANK > 0:
            return
        print(f"\n{'held-out problems':20}  greedy: before, after; sampled: before, after")
        for key in before["greedy"]:
            greedy = f"{before['greedy'][key]:8.3g} ->{after['greedy'][key]:8.3g}"
            sampled = f"{before['sampled'][key]:8.3g} ->{after['sampled'][key]:8.3g}"
            print(f"{key:20}{greedy}   {sampled}")
        for (prompt, first), (_, last) in zip(before["examples"], after["examples"], strict=True):
            print(f"\n{prompt}\n  before: {first}\n  after:  {last}")
        print(f"\nthe trained model: {self.checkpoints()[-1]}")


def write_whole(path, text):
    """Writes a file under another name and renames it: it is there whole or not at all."""
    scratch = path.with_name(path.name + ".tmp")
    scratch.write_text(text)
    scratch.replace(path)
