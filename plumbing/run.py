"""A run's bookkeeping: what it logs, prints and saves, and how it ends and resumes."""

import json
import math
import shutil
import signal
import subprocess
import threading
import time
from itertools import chain
from pathlib import Path

import torch
import transformers
from tqdm import tqdm

from plumbing.args import leave_ctrl_c_to_this_process
from plumbing.data import hash_of
from plumbing.errors import UserError, one_line
from plumbing.folder import checkpoints_in, lock_folder, restore
from plumbing.folder import write_checkpoint, write_settings
from plumbing.metrics import add, clock, missing_signal, policy_stats, rollout_summary
from plumbing.metrics import router_stats, sampler_stats, summarize
from plumbing.model import TrainedModel


class Run:
    """Logs a run, and resumes it. A checkpoint is renamed into place before the previous one is
    removed, so one is always complete."""

    def __init__(self, args, policy, problems, **parts):
        """With --resume, loads the newest checkpoint, if any. A checkpoint also holds the state_dict of
        each of the `parts` that is not None."""
        self.args = args
        self.policy = policy
        self.folder = args.folder
        self.noise = torch.Generator().manual_seed(args.seed)  # for sampling
        self.iteration = 0  # the current one, or the last one done
        self.last_logged = 0  # the last iteration in metrics.jsonl
        self.extra_state = {}  # {name: number} that a script adds to checkpoints
        self.metrics = {"iteration": 0}  # of the current iteration
        self.early_end = ""  # a script sets this: why it left the loop
        self.is_stopped = False  # by a signal
        self.sampler = parts.get("sampler", policy)
        self.parts = {name: part for name, part in parts.items() if part is not None}
        # Not saved: a reference without resets, which --model has, and a sampler that is refreshed in
        # each iteration, which the policy has.
        if args.ref_reset_every == 0:
            self.parts.pop("reference", None)
        if args.rollout_refresh_every == 1:
            self.parts.pop("sampler", None)
        self.parts["problems"] = problems
        optimizers = [part for part in self.parts.values() if isinstance(part, torch.optim.Optimizer)]
        assert optimizers, "pass it the optimizer: it is saved, and a step refreshes bfloat16 copies"
        for optimizer in optimizers:
            optimizer.register_step_post_hook(self.refresh)
        self.open_folder(problems)
        print(model_line(args, policy, self.sampler))
        print(TITLES)
        self.bar = tqdm(
            desc=args.script,
            initial=self.iteration,
            total=args.iterations,
            leave=False,
            disable=None,  # None: disabled if stderr is not a terminal
        )
        clock.show = self.bar.set_postfix_str

    # ------------------------------------------------------------------------- what a script calls

    @property
    def needs_first_eval(self):
        """Whether the evaluation before training is still to be done."""
        return (self.folder / "evaluations.jsonl").stat().st_size == 0

    @property
    def is_last(self):
        return self.iteration >= self.args.iterations  # a resumed run may already have more

    @property
    def checkpoint(self):
        """The folder of the current iteration's checkpoint."""
        return self.folder / f"checkpoint-{self.iteration:06d}"

    def is_due(self, every):
        """True every `every` iterations (0: never) and after the last one."""
        return self.is_last or (every > 0 and self.iteration % every == 0)

    def iterations(self):
        """Yields the numbers of the remaining iterations; each must be logged. In the loop, the first
        Ctrl-C or SIGTERM lets the iteration finish; `log` then saves and raises KeyboardInterrupt. A
        second one acts as before the run."""
        leave_ctrl_c_to_this_process()
        is_main = threading.current_thread() is threading.main_thread()
        kinds = (signal.SIGINT, signal.SIGTERM) if is_main else ()  # other threads cannot set handlers
        self.handlers = {kind: signal.signal(kind, self.on_signal) for kind in kinds}
        try:
            while not self.is_last:
                self.iteration += 1
                self.reports = {}  # {key: [(value, weight)]}
                self.step_losses = {}  # of the current step: {name: sum over micro-batches}
                self.num_steps = 0
                self.metrics = {"iteration": self.iteration}
                clock.seconds.clear()
                self.start = time.perf_counter()
                yield self.iteration
                if self.last_logged < self.iteration:
                    message = "call run.log before `continue`: each has a line in metrics.jsonl"
                    raise RuntimeError(f"iteration {self.iteration} was not logged; {message}")
        finally:
            for kind, handler in self.handlers.items():
                signal.signal(kind, handler)

    def record(self, loss, stats, outputs, micro, **losses):
        """Records a micro-batch, after its backward pass. Losses are added up over the step; `stats`,
        {name: scalar}, are averaged over tokens, or are maxima."""
        for name, value in {"policy_loss": loss, **losses}.items():
            self.step_losses[name] = self.step_losses.get(name, 0) + value.detach()
        routers = self.policy.routers
        stats = stats | policy_stats(outputs, micro, self.num_steps == 0)
        stats = stats | router_stats(outputs, micro, routers.num_experts)
        add(self.reports, "losses", stats, micro.mask_BT.sum())
        if routers.are_balanced:
            add(self.reports, "moe", {"aux_loss": outputs.aux_loss}, len(micro))

    def record_step(self, num_sequences, grad_norm, **norms):
        """Records an optimizer step of `num_sequences` completions, before it is taken. UserError if
        the policy's loss or a norm is not finite."""
        finite = {"loss": self.step_losses["policy_loss"], "grad_norm": grad_norm, **norms}
        for name, scalar in finite.items():
            if not math.isfinite(scalar):  # waits for the GPU, once
                advice = "a new run from the last checkpoint (--model) with a lower --lr may help"
                raise UserError(f"iteration {self.iteration}: {name} is not finite; {advice}")
        add(self.reports, "losses", self.step_losses, num_sequences)
        add(self.reports, "charts", {"grad_norm": grad_norm}, 1)
        self.step_losses = {}
        self.num_steps += 1
        clock.show(f"update, step {self.num_steps}")

    def log(self, steps, completions, rewards, **script_metrics):
        """Ends an iteration: writes its metrics and some completions and, if due, a checkpoint. After a
        signal it then raises KeyboardInterrupt. If a script leaves the loop before this, `finish` logs
        what is known of the iteration, and saves it.

        steps           of the update, as from `split_into_steps`; [] if there was no update
        completions     all that were generated
        rewards         those that the update used, (P, G), or (B, 1) if groups are not the baseline
        script_metrics  the script's own numbers, named as in metrics.jsonl
        """
        rollout = rollout_summary(completions)
        rollout["reward_mean"] = rewards.mean().item()
        rollout["reward_std"] = rewards.std(correction=0).item()
        wrong_lengths = [len(c.ids) for c in completions if c.verdict not in ("correct", None)]
        if wrong_lengths:
            rollout["response_len_wrong"] = sum(wrong_lengths) / len(wrong_lengths)
        if rewards.shape[1] > 1:
            is_uniform_P = (rewards == rewards[:, :1]).all(1)
            rollout["frac_zero_std_groups"] = is_uniform_P.float().mean().item()
        if steps:
            add(self.reports, "rollout", sampler_stats(list(chain(*steps))), 1)
        self.metrics |= summarize(self.reports) | {f"rollout/{name}": x for name, x in rollout.items()}
        self.metrics |= {key: float(value) for key, value in script_metrics.items()}
        self.metrics |= self.times(sum(len(c.ids) for c in completions))
        self.write_log(completions)
        reason = missing_signal(completions, rewards)
        if reason and self.iteration == 1:
            self.say(f"warning: no learning signal in iteration 1: {reason}")
        self.last_logged = self.iteration
        if self.is_due(self.args.save_every) or self.is_stopped:
            self.save()
        if self.is_stopped:
            self.bar.close()
            self.say(f"saved; to continue: --resume --run_dir {self.folder}")
            self.lock.release(force=True)
            raise KeyboardInterrupt  # SystemExit would end a Python session with its variables

    def log_eval(self, results):
        """Records the results of `evaluate` before training, during it, or after the last iteration."""
        self.append_to("evaluations.jsonl", {"iteration": self.iteration, **results})
        score = "accuracy" if "accuracy" in results["greedy"] else "reward_mean"
        for name in (score, "response_len_mean"):
            self.metrics[f"eval/{name}"] = results["greedy"][name]
        if self.iteration == 0:
            if not all("accuracy" in results[way] for way in results.keys() - {"examples"}):
                self.say(NO_VERDICTS)
            self.say(progress_line(self.metrics))

    def say(self, message):
        tqdm.write(message)  # above the progress bar

    def finish(self):
        """After the loop, also if the script left it early: saves what is not saved, and prints how the
        run went."""
        self.bar.close()
        if self.last_logged < self.iteration:  # the script left the loop before `log`
            self.metrics |= summarize(self.reports)
            self.write_metrics()
        if not self.checkpoint.exists():
            self.save()
        lines = (self.folder / "evaluations.jsonl").read_text().splitlines()
        evaluations = {"before": json.loads(lines[0])}
        last = json.loads(lines[-1])
        if last["iteration"] > 0 and "sampled" in last:
            evaluations["after"] = last
        print(f"\n{results_text(evaluations)}\n")
        if self.early_end:
            print(f"ended early, after iteration {self.iteration}: {self.early_end}")
        print(f"the trained model: {checkpoints_in(self.folder)[-1]}")
        # Forced, since the traceback of a run that failed before in this process may hold it, too.
        self.lock.release(force=True)

    # -------------------------------------------------------------------------------- an iteration

    def refresh(self, *_):
        """After a step of an optimizer: bfloat16 copies get the new master weights."""
        for part in (self.policy, *self.parts.values()):
            if isinstance(part, TrainedModel):
                part.refresh()

    def on_signal(self, number, frame):
        self.is_stopped = True
        self.say("stopping after this iteration")
        signal.signal(number, self.handlers[number])  # on a command line the next one ends the program

    def times(self, num_tokens):
        """{key: number} on the current iteration's time and memory."""
        seconds = time.perf_counter() - self.start
        training_seconds = seconds - clock.seconds.get("evaluation", 0)
        # All that is not timed, such as old and reference log-probs, counts as update.
        clock.seconds["update"] = seconds - sum(clock.seconds.values())
        result = {f"charts/{name}_seconds": value for name, value in clock.seconds.items()}
        result["charts/tokens_per_second"] = num_tokens / training_seconds
        if self.args.torch_device.startswith("cuda"):
            result["charts/peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
            result["charts/peak_reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
        return result

    def write_log(self, completions):
        metrics = self.write_metrics()
        for c in completions[:: self.args.group_size][:4]:
            sample = {"prompt": c.problem.prompt, "completion": c.text, "answer": c.problem.answer}
            sample |= {"reward": c.reward, "verdict": c.verdict}
            self.append_to("samples.jsonl", {"iteration": self.iteration, **sample})
        is_evaluated = "eval/response_len_mean" in metrics
        if self.iteration < 5 or self.iteration % 5 == 0 or is_evaluated:
            self.say(progress_line(metrics))
        left = self.args.iterations - 1
        minutes = left * sum(clock.seconds.values()) / 60
        if self.iteration == 1 and self.bar.disable and minutes >= 1:
            self.say(f"note: the other {left} iterations will take about {minutes:.0f} minutes")
        kl = metrics.get("rollout/sampler_kl", 0)
        is_exact = self.sampler is self.policy and self.args.dtype == "float32"
        if self.iteration == 1 and is_exact and kl > 1e-3:
            self.say(f"warning: sampler and training forward disagree: rollout/sampler_kl is {kl:.2g}")
        self.bar.update()

    def write_metrics(self):
        # JSON has no NaN or infinity.
        metrics = {key: value for key, value in self.metrics.items() if math.isfinite(value)}
        self.append_to("metrics.jsonl", metrics)
        return metrics

    def append_to(self, name, row):
        path = self.folder / name
        with one_line(f"{path} cannot be written"), open(path, "a") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")

    # --------------------------------------------------------------------------------- checkpoints

    def open_folder(self, problems):
        """Locks the run's folder, and resumes the run in it or writes the first checkpoint."""
        if not self.args.resume:
            self.check_space()
        hashes = {"problems_hash": problems.hash, "model_hash": self.policy.hash()}
        self.lock, saved = lock_folder(self.args, hashes)
        now = versions()
        settings = {"versions": now, **saved, **self.args.settings(), **hashes}
        settings["reward_hash"] = reward_hash(self.args.reward)
        if settings["versions"] != now:
            print(f"note: the run began with {settings['versions']}, and goes on with {now}")
        reward = {name: settings[name] for name in ("reward", "reward_hash")}
        if saved and not reward.items() <= saved.items():
            print(f"note: --reward was {saved['reward']}; since then its file has moved or changed")
        checkpoints = checkpoints_in(self.folder)
        is_resumed = self.args.resume and len(checkpoints) > 0
        if is_resumed:
            restore(self, checkpoints[-1])
        write_settings(self.folder, settings, is_resumed)
        if not is_resumed:
            self.save()

    def check_space(self):
        """UserError if the disk cannot hold a new run's checkpoints at their peak: one is removed only
        when the next is complete. All but the first have two moments of each trained weight."""
        parents = [path for path in (self.folder, *self.folder.parents) if path.exists()]
        models = [part for part in (self.policy, *self.parts.values()) if hasattr(part, "parameters")]
        weights = [weight for model in models for weight in model.parameters()]
        first = sum(weight.nbytes for weight in weights)
        later = first + sum(2 * weight.nbytes for weight in weights if weight.requires_grad)
        needed = first
        if self.args.iterations > 0:
            needed += later
        if 0 < self.args.save_every < self.args.iterations:
            needed = 2 * later
        free = shutil.disk_usage(parents[0]).free
        if free < needed:
            message = f"{free / 1e9:.3g} GB of free space, and checkpoints need {needed / 1e9:.3g} GB"
            raise UserError(f"--run_dir {self.folder} has {message}")

    def state(self):
        """What a checkpoint holds in addition to the policy and the state of the logs."""
        return {
            "iteration": self.iteration,
            "settings": self.args.settings(),
            "extra_state": self.extra_state,
            "noise": self.noise.get_state(),
            "parts": {name: part.state_dict() for name, part in self.parts.items()},
        }

    def load_state(self, saved):
        self.noise.set_state(saved["noise"])
        for name, part in self.parts.items():
            part.load_state_dict(saved["parts"][name])
        self.iteration = saved["iteration"]
        self.last_logged = self.iteration
        self.extra_state = saved["extra_state"]

    def save(self):
        """Writes a checkpoint and removes the previous one."""
        write_checkpoint(self.checkpoint, self.policy, self.state())


def reward_hash(reward):
    """A hash of the file that FILE.py:FUNCTION names; "" for a function, or without one."""
    if callable(reward) or not reward:
        return ""
    return hash_of(Path(reward.rpartition(":")[0]).read_bytes())


def versions():
    """The software that a run uses: {name: version or commit}."""
    found = {"torch": str(torch.__version__), "transformers": transformers.__version__}
    if shutil.which("git"):
        command = "git describe --always --dirty --abbrev=40 --exclude=*".split()
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
        if done.stdout:
            found["commit"] = done.stdout.strip()
    return found


# ------------------------------------------------------------------------------------ printed lines

PHASES = ("rollout", "reward", "update", "evaluation")
# Title of a column: format, keys in metrics.jsonl, whose sum is shown
COLUMNS = {
    "iteration": ("d", "iteration"),
    "seconds": (".1f", *[f"charts/{phase}_seconds" for phase in PHASES]),
    "reward": (".3f", "rollout/reward_mean"),
    "accuracy": (".3f", "rollout/accuracy"),
    "length": (".1f", "rollout/response_len_mean"),
    "entropy": (".3f", "losses/entropy"),
    "clipped": (".2%", "losses/clipfrac_low", "losses/clipfrac_high"),
    "held-out": (".3f", "eval/accuracy", "eval/reward_mean"),  # only one of them
}
TITLES = "  ".join(COLUMNS)
NO_VERDICTS = (
    "note: where a reward other than 0 and 1 has no verdict, accuracy is blank, and held-out is the "
    "mean reward; return (number, verdict)"
)


def model_line(args, policy, sampler):
    """What runs where, in words."""
    count = sum(weight.numel() for weight in policy.parameters())
    size = f"{count:,}" if count < 1e7 else f"{count / 1e6:,.0f} million"
    line = f"model: {size} parameters, {args.dtype}, on {device_name(args)}"
    if not args.torch_device.startswith("cuda"):
        return line
    if sampler.graphs is None:
        return f"{line}; sampling without CUDA graphs ({sampler.why_no_graphs})"
    return f"{line}; sampling with CUDA graphs"


def device_name(args):
    """The device's name. For a CPU that was not asked for, also the reason."""
    if args.torch_device.startswith("cuda"):
        return torch.cuda.get_device_name()
    if args.torch_device != "cpu" or args.device:
        return args.torch_device
    if torch.backends.cuda.is_built():
        return "cpu (torch finds no GPU)"
    return "cpu (this torch is built without CUDA)"


def progress_line(metrics):
    """A line below `TITLES`. Cells without a metric (a key in metrics.jsonl) stay blank."""
    cells = []
    for title, (kind, *keys) in COLUMNS.items():
        values = [metrics[key] for key in keys if key in metrics]
        text = f"{sum(values):{kind}}" if values else ""
        cells.append(text.rjust(len(title)))
    return "  ".join(cells).rstrip()


def results_text(evaluations):
    """Results of common.evaluate, {"before": ...} or also {"after": ...}, as a table, and some
    completions."""
    before = evaluations["before"]
    header = "held-out problems"
    for mode in ("greedy", "sampled"):
        header += f"{mode:>9}" + "".join(f"{when:>8}" for when in evaluations)
    lines = [header]
    summaries = [results[mode] for results in evaluations.values() for mode in ("greedy", "sampled")]
    for name in dict.fromkeys(name for summary in summaries for name in summary):
        line = f"{name:17}"
        for mode in ("greedy", "sampled"):
            line += " " * 9
            for results in evaluations.values():
                value = results[mode].get(name)  # pass@k needs several samples
                line += " " * 8 if value is None else f" {value:7.3f}"
        lines.append(line.rstrip())
    for i, (prompt, answer, _) in enumerate(before["examples"]):
        lines += ["", f"{prompt}   (sampled; the answer is {answer})"]
        for when, results in evaluations.items():
            lines.append(f"  {when + ':':7} {results['examples'][i][2]}")
    return "\n".join(lines)
