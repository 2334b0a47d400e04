"""examples/: their form, and what can be run of them without their packages. The losses in the real TRL
and verl are compared with the scripts' in benchmarks/losses_trl.py and benchmarks/losses_verl.py; here
stand-ins for these two call the losses as they do, with a step in unequal shares."""

import ast
import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys
import types

import pytest
import torch
from conftest import ROOT, script_args

EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))
PLUGGED = ["grpo", "dr_grpo", "dapo", "gspo", "cispo", "gmpo", "sapo"]
B, T = 16, 9


def source(name):
    return (ROOT / "examples" / f"{name}.py").read_text()


@pytest.mark.parametrize("name", EXAMPLES)
def test_form_of_an_example(name):
    """A header that says what it shows, how to run it and what to expect."""
    header = ast.get_docstring(ast.parse(source(name)))
    assert "Expect: " in header and re.search(r"^    \S", header, re.MULTILINE)
    for path in re.findall(r"(?:examples|benchmarks)/\w+\.(?:py|txt|md)", header):
        assert (ROOT / path).exists(), path


def test_the_packages_of_examples_are_pinned():
    lines = (ROOT / "examples" / "requirements.txt").read_text().splitlines()
    packages = [line for line in lines if not line.startswith(("#", "-r "))]
    assert "-r ../requirements.txt" in lines and all("==" in line for line in packages)
    benchmarks = (ROOT / "benchmarks" / "requirements.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in benchmarks if "==" in line)
    for line in packages:
        package, version = line.split("==")
        assert pins.get(package, version) == version, package


def make_batch():
    """Completions of unequal lengths, in float64, far enough from the old policy for clips to bind."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    lengths_B1 = torch.randint(1, T + 1, (B, 1), generator=generator)
    old_BT = -normal(B, T).abs()
    rewards_PG = (normal(B // 4, 4) > 0).double()
    return types.SimpleNamespace(
        mask=torch.arange(T) < lengths_B1,
        old=old_BT,
        new=old_BT + 0.4 * normal(B, T),
        ref=old_BT + 0.4 * normal(B, T),
        rewards=rewards_PG,
    )


def by_the_script(name, batch):
    """(loss, gradient) of the whole step at once."""
    module, args = script_args(name, max_new_tokens=T)
    logprobs_BT = batch.new.clone().requires_grad_()
    advantages_B1 = module.compute_advantages(batch.rewards).view(-1, 1)
    keywords = {}
    if name == "grpo":
        keywords["ref_logprobs_BT"] = batch.ref
    if name == "dr_grpo":
        keywords["max_new_tokens"] = T
    loss, _ = module.policy_loss(logprobs_BT, batch.old, advantages_B1, batch.mask, **keywords)
    (gradient,) = torch.autograd.grad(loss, logprobs_BT)
    return loss.item(), gradient


def fresh(monkeypatch, name, stand_ins):
    """The example, imported with stand-ins for packages that are not here."""
    for module, content in stand_ins.items():
        stand_in = types.ModuleType(module)
        vars(stand_in).update(content)
        monkeypatch.setitem(sys.modules, module, stand_in)
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    example = importlib.import_module(f"examples.{name}")
    del sys.modules[f"examples.{name}"]  # the next test has stand-ins of its own
    return example


class Everything(dict):
    """A defaultdict(list) that an attribute of the real trainer is."""

    def __missing__(self, key):
        self[key] = []
        return self[key]


def trl_process(example, name, batch, logprobs_BT, processes, accumulation, rank):
    """One process's part of a step of TRL's trainer, with its gradient: losses of its micro-batches."""
    module, args = script_args(name, max_new_tokens=T)
    step = torch.arange(B).chunk(processes * accumulation)
    rows_of = [step[i * processes + rank] for i in range(accumulation)]
    tokens = batch.mask.sum().float()

    def per_token_logprobs(model, ids, attention, length, compute_aux_loss):
        rows = ids[:, 0]  # the stand-in for a prompt is the number of the row
        assert attention.shape == ids.shape == (len(rows), 1 + T) and length == T
        return logprobs_BT[rows], None, None

    def reduce(count, how):  # of this process's tokens -> their mean over processes
        assert how == "mean" and count == sum(batch.mask[rows].sum() for rows in rows_of)
        return tokens / processes

    trainer = object.__new__(example.PluggedTrainer)
    trainer.script = module
    trainer.flags = args
    trainer.current_gradient_accumulation_steps = accumulation
    trainer.aux_loss_enabled = False
    trainer._metrics = {"train": Everything()}
    trainer._get_per_token_logps_and_entropies = per_token_logprobs
    trainer.accelerator = types.SimpleNamespace(reduce=reduce, gather=lambda value: value)
    trainer.args = types.SimpleNamespace(steps_per_generation=2 * accumulation)
    advantages_B = module.compute_advantages(batch.rewards).flatten()
    micros = []
    for rows in rows_of:
        micro = {"prompt_ids": rows[:, None], "prompt_mask": torch.ones(len(rows), 1)}
        micro |= {
            "completion_ids": torch.zeros(len(rows), T).long(),
            "completion_mask": batch.mask[rows],
        }
        micro |= {"advantages": advantages_B[rows], "old_per_token_logps": batch.old[rows]}
        micro |= {"ref_per_token_logps": batch.ref[rows]}
        micros.append(micro)
    other = [{"completion_mask": torch.ones(1, 1)}] * accumulation  # of the rollout's other step
    trainer._buffered_inputs = other + micros
    losses = []
    for number, micro in enumerate(micros):
        trainer._step = 4 * accumulation + accumulation + number  # in the third rollout
        losses.append(trainer._compute_loss(None, micro))
    return losses


@pytest.mark.parametrize("processes, accumulation", [(1, 1), (1, 2), (2, 1), (2, 2)])
@pytest.mark.parametrize("name", PLUGGED)
def test_a_step_in_trl_is_the_scripts(name, processes, accumulation, monkeypatch):
    """The gradients of a process's micro-batches are added, those of processes averaged."""
    stand_in = {"GRPOConfig": object, "GRPOTrainer": object}
    example = fresh(monkeypatch, "trl_trainer", {"trl": stand_in})
    assert example.ALGORITHMS == PLUGGED
    batch = make_batch()
    logprobs_BT = batch.new.clone().requires_grad_()
    value = 0.0
    for rank in range(processes):
        losses = trl_process(example, name, batch, logprobs_BT, processes, accumulation, rank)
        value += sum(losses) / processes
    (gradient,) = torch.autograd.grad(value, logprobs_BT)
    expected, expected_gradient = by_the_script(name, batch)
    assert value.item() == pytest.approx(expected, abs=1e-12)
    assert torch.allclose(gradient, expected_gradient, rtol=1e-12, atol=1e-15)
    assert gradient.abs().sum() > 0


def test_trl_gets_the_advantages_of_the_script(monkeypatch):
    """Each process its own part of what all rewards give."""
    rewards = torch.tensor([[1.0], [0.0], [1.0], [1.0], [0.5], [0.5], [0.5], [0.5]])

    class Base:
        def _calculate_rewards(self, inputs):
            return rewards

        def _generate_and_score_completions(self, inputs):
            self._calculate_rewards(inputs)
            return {"advantages": "theirs", "more": 1}

    example = fresh(monkeypatch, "trl_trainer", {"trl": {"GRPOConfig": object, "GRPOTrainer": Base}})
    module, _ = script_args("dr_grpo")
    found = []
    for rank in range(2):
        trainer = example.PluggedTrainer()
        trainer.script = module
        trainer.num_generations = 4
        trainer.accelerator = types.SimpleNamespace(process_index=rank)
        output = trainer._generate_and_score_completions([None] * 4)
        assert output["more"] == 1
        found.append(output["advantages"])
    assert torch.equal(torch.cat(found), module.compute_advantages(rewards.view(2, 4)).flatten())


def test_another_trl_is_refused_in_one_line(monkeypatch):
    stand_in = {"GRPOConfig": object, "GRPOTrainer": object}
    example = fresh(monkeypatch, "trl_trainer", {"trl": stand_in})
    assert f"trl=={example.TRL}\n" in (ROOT / "examples" / "requirements.txt").read_text()
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "1.15.0")
    with pytest.raises(SystemExit, match=f"^[^\n]*not 1.15.0: pip install trl=={example.TRL}$"):
        example.main([])


VERL = {  # the actor's configuration that makes the losses those of the scripts, as the header says
    "grpo": {},
    "dr_grpo": {"loss_scale_factor": T},
    "dapo": {"clip_ratio_high": 0.28},
    "gspo": {"clip_ratio_low": 3e-3, "clip_ratio_high": 4e-3},
    "cispo": {"clip_ratio_high": 4.0},
    "gmpo": {"clip_ratio_high": 0.4},
    "sapo": {},
}


def verl_losses(monkeypatch):
    """{name: loss}, as the example registers them."""
    registered = {}

    def register_policy_loss(name):
        return lambda loss: registered.setdefault(name, loss)

    packages = {package: {} for package in ("verl", "verl.trainer", "verl.trainer.ppo")}
    core = {"verl.trainer.ppo.core_algos": {"register_policy_loss": register_policy_loss}}
    fresh(monkeypatch, "verl_losses", packages | core)
    return registered


def verl_config(**changes):
    defaults = dict(clip_ratio_low=0.2, clip_ratio_high=0.2, tau_pos=1.0, tau_neg=1.05)
    defaults |= dict(loss_scale_factor=None, global_batch_info={})
    return types.SimpleNamespace(**{**defaults, **changes})


@pytest.mark.parametrize("processes, micro_batches", [(1, 1), (1, 4), (2, 1), (4, 2)])
@pytest.mark.parametrize("name", PLUGGED)
def test_a_step_in_verl_is_the_scripts(name, processes, micro_batches, monkeypatch):
    """verl's own KL aside, which is not a part of the loss that it calls."""
    loss = verl_losses(monkeypatch)[f"nine_{name}"]
    module, _ = script_args(name)
    batch = make_batch()
    batch.ref = batch.new  # its KL is 0, and so is its gradient
    info = {"dp_size": processes, "batch_num_tokens": batch.mask.sum().item(), "global_batch_size": B}
    config = verl_config(**VERL[name], global_batch_info=info)
    logprobs_BT = batch.new.clone().requires_grad_()
    advantages_BT = module.compute_advantages(batch.rewards).view(-1, 1) * batch.mask
    value = 0.0
    for rows in torch.arange(B).chunk(processes * micro_batches):
        share, metrics = loss(
            old_log_prob=batch.old[rows],
            log_prob=logprobs_BT[rows],
            advantages=advantages_BT[rows],
            response_mask=batch.mask[rows],
            loss_agg_mode="token-mean",
            config=config,
            rollout_is_weights=None,
        )
        assert all(isinstance(metric, float) for metric in metrics.values())
        value += share / processes
    (gradient,) = torch.autograd.grad(value, logprobs_BT)
    expected, expected_gradient = by_the_script(name, batch)
    assert value.item() == pytest.approx(expected, abs=1e-12)
    assert torch.allclose(gradient, expected_gradient, rtol=1e-12, atol=1e-15)


def test_what_verl_cannot_give_is_refused(monkeypatch):
    losses = verl_losses(monkeypatch)
    assert sorted(losses) == sorted(f"nine_{name}" for name in PLUGGED)
    batch = make_batch()
    tensors = (batch.old, batch.new, torch.ones(B, T), batch.mask)
    with pytest.raises(ValueError, match="loss_scale_factor"):
        losses["nine_dr_grpo"](*tensors, config=verl_config())
    with pytest.raises(ValueError, match="rollout_is_weights"):
        losses["nine_gmpo"](*tensors, config=verl_config(), rollout_is_weights=torch.ones(B, T))


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo", "cispo", "sapo"])
def test_weights_of_verl_are_factors_of_the_tokens(name, monkeypatch):
    """With the weight 2 for all tokens, the loss is twice as large."""
    loss = verl_losses(monkeypatch)[f"nine_{name}"]
    batch = make_batch()
    module, _ = script_args(name)
    advantages_BT = module.compute_advantages(batch.rewards).view(-1, 1) * batch.mask
    tensors = (batch.old, batch.new, advantages_BT, batch.mask)
    plain, _ = loss(*tensors, config=verl_config())
    doubled, _ = loss(*tensors, config=verl_config(), rollout_is_weights=torch.full((B, T), 2.0))
    assert doubled.item() == pytest.approx(2 * plain.item(), abs=1e-12)


def test_small_sums(tmp_path):
    """The file is a dataset that the scripts read."""
    path = tmp_path / "sums.jsonl"
    command = [sys.executable, ROOT / "examples" / "small_sums.py", path]
    subprocess.run(command, check=True, cwd=tmp_path)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == 4000 and len({row["question"][-1]["content"] for row in rows}) == 4000
    for row in rows:
        a, b = row["question"][-1]["content"].split(" + ")
        assert int(a) + int(b) == int(row["answer"])
    from plumbing.data import read_dataset

    _, args = script_args("grpo", dataset=str(path))
    pairs = read_dataset(args)
    assert sorted(answer for _, answer in pairs) == sorted(row["answer"] for row in rows)


@pytest.mark.parametrize("name", ["smollm2", "small_sums"])
def test_without_a_path_an_example_says_how_to_run_it(name):
    result = subprocess.run(
        [sys.executable, ROOT / "examples" / f"{name}.py"], capture_output=True, text=True
    )
    assert result.returncode > 0 and f"python examples/{name}.py" in result.stderr


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("trl") is None,
    reason="TRL is not installed: pip install -r examples/requirements.txt",
)
def test_the_real_trl_trains_the_default_job(tmp_path):
    """Two processes, the command of the header."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    flags = ["--algorithm", "gspo", "--use_cpu", "True", "--output_dir", str(tmp_path / "trl")]
    result = subprocess.run(
        [*torchrun, "examples/trl_trainer.py", *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    (greedy,) = re.findall(r"held-out accuracy: {'greedy': ([0-9.]+)", result.stdout)
    assert float(greedy) >= 0.9
