"""A run's bookkeeping: averages, log, checkpoints, evaluations, signals. Its folder is in folder.py."""

import json
import math
import os
import shutil
import signal
import sys
import time

import torch
from tqdm import tqdm

from plumbing import UserError, clock, one_line, ranks
from plumbing.folder import LOGS, RunFolder, writing
from plumbing.metrics import iteration_metrics, micro_batch_reports, report
from plumbing.screen import TITLES, progress_line, results_text

STATE = "trainer_state.pt"  # in a checkpoint: everything except the policy
SAVED = ("iteration", "before", "after", "extra_state")  # what it holds of a Run


class Run:
    """Logs a run, and resumes it. A checkpoint is renamed into place before the previous one is
    removed, so one is always complete."""

    answers_signals = False  # whether a Run handles signals in this process

    def __init__(self, args, policy, problems, **parts):
        """Loads the newest checkpoint, if any. A checkpoint also holds the state_dict of each
        of the `parts` that is not None."""
        self.args = args
        self.policy = policy
        self.folder = RunFolder(args)  # `launch` may already have opened it
        self.noise = torch.Generator().manual_seed(args.seed)  # for sampling
        self.iteration = 0  # the current one, or the last one done
        self.before = None  # results of common.evaluate before training, and after it
        self.after = None
        self.extra_state = {}  # {name: number} that a script adds to checkpoints
        self.num_processes = ranks.WORLD
        self.num_signals = 0
        self.uniform_iterations = 0  # consecutive ones in which all rewards of every group were equal
        self.early_end = ""  # why the run ends before its last iteration
        # Without resets the reference can be loaded from --model again.
        if args.ref_reset_every == 0:
            parts["reference"] = None
        parts["problems"] = problems
        if args.rollout_refresh_every > 1:
            parts["sampler"] = policy.rollout_policy.model  # its weights are not the current ones
        self.parts = {name: part for name, part in parts.items() if part is not None}
        self.restore()
        if ranks.RANK == 0:
            self.folder.check_hashes(problems.raw_hash, problems.rendered_hash, policy.weights_hash)
            if not self.folder.checkpoints():
                self.save()  # fails early if that is impossible
            num_parameters = sum(weight.numel() for weight in policy.parameters())
            processes = f", {ranks.WORLD} processes" if ranks.WORLD > 1 else ""
            print(f"model: {num_parameters:,} parameters, {args.dtype}, on {args.device}{processes}")
            if args.resume and self.iteration == 0:
                print(f"--resume: no finished iteration in {self.folder.path}; starting at the first")
            print(TITLES)
        self.bar = tqdm(
            desc=self.folder.script,
            initial=self.iteration,
            total=args.iterations,
            leave=False,
            disable=None if ranks.RANK == 0 else True,  # None: disabled if stderr is not a terminal
        )
        clock.bar = self.bar

    # ------------------------------------------------------------------------- what a script calls

    @property
    def is_new(self):
        """Whether the evaluation before training is still to be done."""
        return self.before is None

    @property
    def is_last(self):
        return self.iteration >= self.args.iterations  # a resumed run may already have more

    @property
    def eval_is_due(self):
        return self.is_due(self.args.eval_every)

    def iterations(self):
        """Yields the numbers of the remaining iterations. After each one it writes the log and, if due,
        a checkpoint. A signal ends the program at that point, a second one at once."""
        kinds = (signal.SIGINT, signal.SIGTERM)
        handlers = {kind: signal.signal(kind, self.on_signal) for kind in kinds}
        Run.answers_signals = True
        try:
            while not self.is_last and not self.early_end:
                self.iteration += 1
                self.after = None  # left from a run that ended earlier
                self.reports = []  # see metrics.means
                self.step_losses = {}  # of the current step: {name: sum over micro-batches}
                self.num_steps = 0
                self.metrics = {}
                clock.seconds.clear()
                self.start = time.perf_counter()
                yield self.iteration
                self.end_iteration()
        finally:
            Run.answers_signals = False
            for kind, handler in handlers.items():
                signal.signal(kind, handler)

    def record(self, loss, stats, outputs, micro, **losses):
        """Records a micro-batch, after its backward pass. Losses are summed to the step's; `stats`,
        {name: scalar}, are averaged over tokens."""
        for name, value in {"policy_loss": loss, **losses}.items():
            self.step_losses[name] = self.step_losses.get(name, 0) + value.detach()
        num_experts = self.policy.routers.num_experts
        is_first = self.num_steps == 0
        self.reports += micro_batch_reports(stats, outputs, micro, num_experts, is_first)

    def record_step(self, minibatch, grad_norm, **norms):
        """Records a minibatch, before its step. UserError if the policy's loss or a norm is not
        finite."""
        for loss in self.step_losses.values():
            ranks.all_reduce(loss)
        finite = {"loss": self.step_losses["policy_loss"], "grad_norm": grad_norm, **norms}
        for name, scalar in finite.items():
            if not math.isfinite(scalar):  # the first one waits for the GPU; the others are then ready
                raise UserError(f"iteration {self.iteration}: {name} is not finite")
        if ranks.RANK == 0:  # count values that all ranks share only once
            self.reports += report("losses", self.step_losses, len(minibatch))
            self.reports += report("charts", {"grad_norm": grad_norm}, 1)
        self.step_losses = {}
        self.num_steps += 1
        clock.show(f"update {self.num_steps}/{self.args.num_minibatches * self.args.update_epochs}")

    def log(self, batch, completions, rewards, **numbers):
        """Records an iteration: all completions that were generated, the rewards that the update used,
        and more numbers by their keys in metrics.jsonl."""
        self.completions = completions
        self.metrics = iteration_metrics(self.reports, batch, completions, rewards, self.args)
        self.metrics |= {key: float(value) for key, value in numbers.items()}

    def log_eval(self, results):
        """Records the results of `evaluate` before training, during it, or after the last iteration."""
        metrics = {}
        for name in ("accuracy", "response_len_mean"):
            metrics[f"eval/{name}"] = results["greedy"][name]
        if self.is_new:
            self.before = results
            self.say(progress_line({"iteration": 0, **metrics}))
            return
        self.metrics |= metrics
        if self.is_last:
            self.after = results

    def end_early(self, why):
        self.early_end = why

    def say(self, message):
        """Prints above the progress bar."""
        if ranks.RANK == 0:
            tqdm.write(message)

    def finish(self):
        self.bar.close()
        if ranks.RANK == 0:
            print(f"\n{results_text(self.before, self.after)}\n")
            if self.early_end:
                print(f"ended early, after iteration {self.iteration}: {self.early_end}")
            print(f"the trained model: {self.folder.checkpoints()[-1]}")
        self.folder.close()
        ranks.wait_for_all()  # torchrun kills all processes soon after the first one ends

    # -------------------------------------------------------------------------------- an iteration

    def on_signal(self, number, frame):
        self.num_signals += 1
        if self.num_signals == 1:
            self.say("stopping after this iteration")
        # The next one ends the program. With torchrun, each Ctrl-C arrives twice: it is forwarded, too.
        if self.num_signals >= min(2, self.num_processes):
            signal.signal(number, signal.SIG_DFL)

    def is_due(self, every):
        """True every `every` iterations (0: never) and after the last one."""
        return self.is_last or (every > 0 and self.iteration % every == 0)

    def end_iteration(self):
        seconds = time.perf_counter() - self.start
        phases = dict(clock.seconds)
        phases["update"] = seconds - sum(phases.values())  # everything outside other phases
        num_tokens = sum(len(c.ids) for c in self.completions)
        training_seconds = seconds - phases.get("evaluation", 0)
        self.metrics["charts/tokens_per_second"] = num_tokens / training_seconds
        self.metrics |= {f"charts/{name}_seconds": value for name, value in phases.items()}
        if self.args.device.startswith("cuda"):
            self.metrics["charts/peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
        is_stopped = any(ranks.all_gather(self.num_signals))
        if ranks.RANK == 0:
            self.write_log()
            if self.is_due(self.args.save_every) or is_stopped or self.early_end:
                self.save()
        if is_stopped:
            self.bar.close()
            self.say(f"saved; to continue: --resume --run_dir {self.folder.path}")
            self.folder.close()
            ranks.wait_for_all()
            sys.exit(130)

    def write_log(self):
        # JSON has no NaN or infinity.
        metrics = {key: value for key, value in self.metrics.items() if math.isfinite(value)}
        metrics = {"iteration": self.iteration, **metrics}
        self.append("metrics.jsonl", metrics)
        for c in self.completions[:: self.args.group_size][:4]:
            sample = {"prompt": c.problem.prompt, "completion": c.text, "answer": c.problem.answer}
            sample |= {"reward": c.reward, "verdict": c.verdict}
            self.append("samples.jsonl", {"iteration": self.iteration, **sample})
        if self.iteration % 5 == 0 or "eval/accuracy" in metrics:
            self.say(progress_line(metrics))
        self.warn_without_signal(metrics)
        self.bar.update()

    def append(self, name, row):
        path = self.folder.path / name
        with writing(path), open(path, "a") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")

    def warn_without_signal(self, metrics):
        """Warns after ten iterations in which all rewards were equal (within every group, if any)."""
        is_uniform = metrics["rollout/reward_std"] == 0
        is_uniform = is_uniform or metrics.get("rollout/frac_zero_std_groups") == 1
        self.uniform_iterations = self.uniform_iterations + 1 if is_uniform else 0
        if self.uniform_iterations == 10:
            self.say(
                "warning: no learning signal for 10 iterations "
                "(all rewards within every group are equal); "
                f"no_answer_frac {metrics['rollout/no_answer_frac']:.2f}, "
                f"truncated_frac {metrics['rollout/truncated_frac']:.2f}"
            )

    # --------------------------------------------------------------------------------- checkpoints

    def restore(self):
        """Loads the newest checkpoint, if there is one."""
        folder = max(self.folder.checkpoints(), default=None)
        if len(set(ranks.all_gather(folder))) > 1:
            raise UserError(
                f"--run_dir {self.folder.path}: not all processes can see its newest checkpoint; "
                "several nodes need a shared folder"
            )
        if folder is not None:
            with one_line(f"--resume: {folder} cannot be read"):  # a damaged file may raise anything
                saved = torch.load(folder / STATE, weights_only=True, map_location="cpu")
                self.policy.load_pretrained(folder)
                self.noise.set_state(saved["noise"])
                for name, part in self.parts.items():
                    part.load_state_dict(saved["parts"][name])
                for name in SAVED:
                    setattr(self, name, saved[name])
                if ranks.RANK == 0:
                    for name, size in saved["log_sizes"].items():
                        os.truncate(self.folder.path / name, size)  # later lines will be written again

    def save(self):
        """Writes a checkpoint and removes the previous one."""
        folder = self.folder.path / f"checkpoint-{self.iteration:06d}"
        scratch = self.folder.path / "checkpoint.tmp"
        saved = {
            **{name: getattr(self, name) for name in SAVED},
            "log_sizes": {name: (self.folder.path / name).stat().st_size for name in LOGS},
            "noise": self.noise.get_state(),
            "parts": {name: part.state_dict() for name, part in self.parts.items()},
        }
        with writing(folder):
            shutil.rmtree(scratch, ignore_errors=True)
            self.policy.save_pretrained(scratch)
            torch.save(saved, scratch / STATE)
            scratch.rename(folder)
        for path in self.folder.checkpoints()[:-1]:
            shutil.rmtree(path, ignore_errors=True)


def leave_signals_to_the_run():
    """For processes that a reward function forks, such as a pool's. The pool ends them with SIGTERM; a
    Ctrl-C reaches them too, but only the run should handle it."""
    if Run.answers_signals:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)


os.register_at_fork(after_in_child=leave_signals_to_the_run)
