"""The folder of a run: settings, metrics, samples, checkpoints; resume, and signals."""

import json
import math
import re
import shlex
import shutil
import signal
import sys
import zipfile
from pathlib import Path

import torch
from filelock import FileLock
from safetensors import SafetensorError
from tqdm import tqdm

from plumbing import ranks
from plumbing.args import UserError
from plumbing.settings import compare, file_hash, settings_of, versions_of

STATE = "trainer_state.pt"  # in a checkpoint: everything except the policy
CHECKPOINT = re.compile(r"checkpoint-\d{6}")  # a copy such as checkpoint-best-2 belongs to the user


def checkpoint_hashes(folder):
    """{file name: hash} of a checkpoint, except the state, which contains them and has checksums."""
    return {path.name: file_hash(path) for path in folder.iterdir() if path.name != STATE}


def read_checkpoint(folder):
    """The state that `Run.save` saved beside the policy. ValueError if a file has changed since."""
    damaged = zipfile.ZipFile(folder / STATE).testzip()
    if damaged is not None:
        raise ValueError(f"{STATE} is damaged at {damaged}")
    saved = torch.load(folder / STATE, weights_only=True, map_location="cpu")
    hashes = checkpoint_hashes(folder)
    for name in sorted(hashes.keys() | saved["hashes"].keys()):
        if hashes.get(name) != saved["hashes"].get(name):
            raise ValueError(f"{name} has changed since it was written")
    return {name: saved[name] for name in ("iteration", "before", "extra_state", "generator", "parts")}


class Run:
    """The folder of a run, `--run_dir`. Only one process at a time may use it. A checkpoint is renamed
    into place before its predecessor is removed, so that one is always whole."""

    def __init__(self, args):
        self.args = args
        self.script = Path(sys.argv[0]).stem
        self.folder = Path(args.run_dir or f"runs/{self.script}-seed{args.seed}")
        self.iteration = 0  # the last one that is done
        self.before = None  # held-out results before training, and after it: common.evaluate
        self.after = None
        self.extra_state = {}  # {name: number} that a script adds to its checkpoints
        self.signalled = False
        self.stop = False  # one of the ranks was signalled
        self.uniform_iterations = 0
        self.early_end = ""  # why the run ends before its last iteration
        settings = settings_of(args, self.script, self.folder)
        # As text, since a value may be a list; ranks may have different devices.
        mine = {name: str(value) for name, value in (vars(args) | settings | {"device": ""}).items()}
        every = ranks.all_gather(mine)
        differing = {name for theirs in every for name, _ in theirs.items() ^ every[0].items()}
        if differing:
            names = ", ".join(sorted(differing))
            raise UserError(f"the ranks were started with different values of {names}")
        ranks.on_rank_0(self.open_folder, settings)
        signal.signal(signal.SIGINT, self.on_signal)
        signal.signal(signal.SIGTERM, self.on_signal)

    def open_folder(self, settings):
        """Locks the folder; UserError if it is in use or holds another run."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.lock = FileLock(self.folder / "lock")
            self.lock.acquire(timeout=0)
            if self.checkpoints() and not self.args.resume:
                raise UserError(
                    f"{self.folder} holds a run: --resume continues it, --run_dir starts another"
                )
            log = self.folder / "metrics.jsonl"
            has_begun = self.checkpoints() or (log.exists() and log.stat().st_size > 0)
            if self.args.resume and has_begun:
                compare(settings, self.folder)
            else:
                write_whole(self.folder / "settings.json", json.dumps(settings, indent=1))
            (self.folder / "ended_early.txt").unlink(missing_ok=True)
        except (OSError, ValueError, TimeoutError) as error:
            message = f"--run_dir {self.folder} cannot be written or read, or another process uses it"
            raise UserError(message) from error

    def checkpoints(self):
        """The checkpoints in the folder, oldest first."""
        return sorted(path for path in self.folder.iterdir() if CHECKPOINT.fullmatch(path.name))

    def on_signal(self, number, frame):
        """The first signal ends the run after the iteration, with a checkpoint; the second at once."""
        signal.signal(number, signal.SIG_DFL)
        spec = sys.modules["__main__"].__spec__  # python -m more.rloo has one
        program = ["-m", spec.name] if spec else sys.argv[:1]
        flags = sys.argv[1:] if "--resume" in sys.argv else [*sys.argv[1:], "--resume"]
        command = shlex.join(["python", *program, *flags])
        if ranks.WORLD == 1:  # with several ranks, see save_if_due
            tqdm.write(f"stopping after this iteration; to resume: {command}", file=sys.stderr)
        self.signalled = True

    def restore(self, policy, problem_stream, generator, **parts):
        """Registers the state to checkpoint, and loads the newest checkpoint, if any. `parts` have a
        state_dict; parts that are None are left out."""
        self.policy = policy
        self.generator = generator
        parts["problem_stream"] = problem_stream
        if self.args.rollout_refresh_every > 1:
            parts["sampler"] = policy.sampler  # its weights are not the current ones
        self.parts = {name: part for name, part in parts.items() if part is not None}
        checkpoints = self.checkpoints()
        if checkpoints:
            folder = checkpoints[-1]
            try:
                saved = read_checkpoint(folder)
            except Exception as error:  # a damaged file may raise anything
                raise UserError(f"--resume: {folder} cannot be read") from error
            policy.load_pretrained(folder)
            generator.set_state(saved["generator"])
            for name, part in self.parts.items():
                part.load_state_dict(saved["parts"][name])
            self.iteration = saved["iteration"]
            self.before = saved["before"]
            self.extra_state = saved["extra_state"]
        ranks.on_rank_0(self.note_versions)
        for name in ("metrics.jsonl", "samples.jsonl"):
            ranks.on_rank_0(self.cut_lines, name)
        sizes = {"initial": self.iteration, "total": self.args.iterations}
        # It disappears when results or an error are printed.
        self.bar = tqdm(desc=self.script, disable=ranks.RANK > 0, leave=False, **sizes)

    def note_versions(self):
        """Adds versions and commits to the settings; warns where the run was started under others."""
        path = self.folder / "settings.json"
        settings = json.loads(path.read_text())
        versions = versions_of(self.args)
        first = settings.setdefault("versions", versions)
        for name, version in sorted(first.items() - versions.items()):
            message = f"{self.folder} was started under {name} {version}, not {versions.get(name)}"
            tqdm.write(f"warning: --resume: {message}", file=sys.stderr)
        write_whole(path, json.dumps(settings, indent=1))

    def cut_lines(self, name):
        """Drops the lines after the checkpoint's, which will be written again."""
        path = self.folder / name
        if not path.exists():
            return
        *lines, _ = path.read_text().split("\n")  # a last line without newline was cut off
        kept = [line for line in lines if json.loads(line)["iteration"] <= self.iteration]
        write_whole(path, "".join(line + "\n" for line in kept))

    def say(self, message):  # above the progress bar
        if ranks.RANK == 0:
            tqdm.write(message)

    def is_due(self, every, iteration):
        """True every `every` iterations (0: never) and after the last one."""
        return iteration == self.args.iterations or (every > 0 and iteration % every == 0)

    def log(self, iteration, metrics, completions):
        """Appends a line of metrics and some samples, advances the bar, reports a collapse."""
        self.iteration = iteration
        self.stop = any(ranks.all_gather(self.signalled))
        ranks.on_rank_0(self.write_log, iteration, metrics, completions)

    def write_log(self, iteration, metrics, completions):
        # JSON has no NaN and no infinity.
        metrics = {key: value for key, value in metrics.items() if math.isfinite(value)}
        try:
            with open(self.folder / "metrics.jsonl", "a") as file:
                file.write(json.dumps({"iteration": iteration, **metrics}, allow_nan=False) + "\n")
            with open(self.folder / "samples.jsonl", "a") as file:
                for sample in transcripts(completions, self.args.group_size):
                    file.write(json.dumps({"iteration": iteration, **sample}, allow_nan=False) + "\n")
        except OSError as error:
            raise UserError(f"{self.folder} cannot be written; the last checkpoint is whole") from error
        if "eval/accuracy" in metrics:
            self.say(f"iteration {iteration:4d}: held-out accuracy {metrics['eval/accuracy']:.3f}")
        is_uniform = metrics.get("rollout/frac_zero_std_groups") == 1
        self.uniform_iterations = self.uniform_iterations + 1 if is_uniform else 0
        if self.uniform_iterations == 10:
            self.say("collapse: for 10 iterations no group had two different rewards")
        self.bar.set_postfix_str(f"reward {metrics['rollout/reward_mean']:.2f}", refresh=False)
        self.bar.update()

    def save_if_due(self, iteration):
        """Writes a checkpoint if one is due, and after a signal, which then ends the program."""
        if self.is_due(self.args.save_every, iteration) or self.stop:
            ranks.on_rank_0(self.save, iteration)
        if self.stop:
            if ranks.WORLD > 1:
                self.say("stopped by a signal; to resume: the same command with --resume")
            sys.exit(130)

    def save(self, iteration):
        """Writes a checkpoint and removes the previous one, on rank 0."""
        folder = self.folder / f"checkpoint-{iteration:06d}"
        scratch = self.folder / "checkpoint.tmp"
        try:
            shutil.rmtree(scratch, ignore_errors=True)
            self.policy.save_pretrained(scratch)
            saved = {
                "iteration": iteration,
                "before": self.before,
                "extra_state": self.extra_state,
                "generator": self.generator.get_state(),
                "parts": {name: part.state_dict() for name, part in self.parts.items()},
                "hashes": checkpoint_hashes(scratch),
            }
            torch.save(saved, scratch / STATE)
            scratch.rename(folder)
        except (OSError, RuntimeError, SafetensorError) as error:  # these are of a full disk
            raise UserError(f"{folder} cannot be written; the checkpoint before it is whole") from error
        for path in self.checkpoints()[:-1]:
            shutil.rmtree(path, ignore_errors=True)

    def end_early(self, iteration, metrics, completions, why):
        """Logs and saves an iteration after which the run cannot go on; `finish` exits with code 3."""
        self.early_end = why
        self.log(iteration, metrics, completions)
        ranks.on_rank_0(self.save, iteration)
        ranks.on_rank_0(write_whole, self.folder / "ended_early.txt", f"iteration {iteration}: {why}\n")

    def finish(self):
        """Prints the results. Exits with code 130 after a signal, and with 3 if the run ended early."""
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self.bar.close()
        ranks.on_rank_0(self.print_results)  # the others wait: torchrun ends all soon after the first
        if self.signalled:
            sys.exit(130)
        if self.early_end:
            sys.exit(3)

    def print_results(self):
        """Prints held-out results before and after training, and some completions."""
        if self.early_end:
            print(f"\nended early: {self.early_end}")
        print(f"\n{'held-out problems':20}  greedy: before, after; sampled: before, after")
        for key in self.before["sampled"]:
            greedy = " " * 19  # pass@k takes several samples
            if key in self.before["greedy"]:
                greedy = f"{self.before['greedy'][key]:8.3g} ->{self.after['greedy'][key]:8.3g}"
            sampled = f"{self.before['sampled'][key]:8.3g} ->{self.after['sampled'][key]:8.3g}"
            print(f"{key:20}{greedy}   {sampled}")
        examples = zip(self.before["examples"], self.after["examples"], strict=True)
        for (prompt, first), (_, last) in examples:
            print(f"\n{prompt}\n  before: {first}\n  after:  {last}")
        print(f"\nthe trained model: {self.checkpoints()[-1]}")


def transcripts(completions, group_size):
    """The first completion of each of the first four problems, for samples.jsonl: [dict]."""
    samples = []
    for c in completions[::group_size][:4]:
        sample = {"prompt": c.problem.prompt, "completion": c.text, "answer": c.problem.answer}
        samples.append(sample | {"reward": c.reward, "verdict": c.verdict})
    return samples


def write_whole(path, text):
    """Writes a file under another name and renames it, so that it is never half written."""
    scratch = path.with_name(path.name + ".tmp")
    scratch.write_text(text)
    scratch.replace(path)
