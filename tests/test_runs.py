"""The scripts as a user runs them, on the CPU and without a network."""

import dataclasses
import importlib
import itertools
import json
import math
import re

import pytest
import torch
from conftest import MORE, SCRIPTS, flags_it_has, run, run_process
from transformers import AutoModelForCausalLM, AutoTokenizer

import common
import grpo
from common import Completion, Problem, OldScores, TokenOutputs, load_problems, verify
from plumbing.metrics import Meter, group_summary, pass_at_k, rollout_summary
from plumbing.policy import Policy

SMALL = """--prompts_per_iteration 16 --group_size 4 --max_new_tokens 32 --num_minibatches 2
--eval_every 2 --iterations 3""".split()
TIMES = {"charts/tokens_per_second", "charts/rollout_seconds", "charts/update_seconds"}


def small(name, *flags, held_out=32):
    """The default base model, but small rollouts of 64 completions: about a second."""
    own = ("--prompts_per_iteration", 64) if name == "ppo" else ()
    return run(name, *flags_it_has(name, SMALL), *own, *flags, held_out=held_out)


def metrics(folder):
    """The lines of metrics.jsonl; a NaN or an infinity, which is not JSON, fails."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=pytest.fail) for line in lines]


def untimed(folder):
    return [{key: value for key, value in line.items() if key not in TIMES} for line in metrics(folder)]


def evaluations(monkeypatch):
    """A list that gets "greedy" or "sampled" for each pass over the 32 held-out problems."""
    passes = []
    original = common.sample

    def sample(policy, problems, *args, greedy=False, **keywords):
        if len(problems) == 32:
            passes.append("greedy" if greedy else "sampled")
        return original(policy, problems, *args, greedy=greedy, **keywords)

    monkeypatch.setattr(common, "sample", sample)
    return passes


def keys(prefix, names):
    return {prefix + name for name in names.split()}


COMMON_KEYS = (
    keys("rollout/", "reward_mean reward_std accuracy truncated_frac response_len_mean")
    | keys("rollout/", "response_len_max response_len_right response_len_wrong")
    | keys("rollout/", "no_answer_frac direct_frac sampler_kl sampler_logratio_max")
    | keys("rollout/", "sampler_sequence_ratio_min sampler_sequence_ratio_max")
    | keys("losses/", "policy_loss entropy approx_kl ratio_max ratio_min sequence_ratio_max")
    | keys("losses/", "logratio_spread first_step_ratio_error_max")
    | keys("moe/", "aux_loss load_max load_min router_entropy expert_flip_frac")
    | keys("charts/", "grad_norm tokens_per_second rollout_seconds update_seconds")
)
CLIPS = keys("losses/", "clipfrac_low clipfrac_high")
GROUPS = keys("rollout/", "frac_zero_std_groups all_right_frac all_wrong_frac distinct_frac")
DAPO = "kept dropped_all_right dropped_all_wrong generated sampling_rounds"
EXTRA_KEYS = {
    "ppo": CLIPS | keys("losses/", "value_loss explained_variance kl_ref"),
    "grpo": CLIPS | GROUPS | {"losses/kl_ref"},
    "rspo": CLIPS | GROUPS | {"moe/router_shift"},
    "sapo": GROUPS | {"losses/gate_slope"},
    "dapo": CLIPS | GROUPS | keys("rollout/groups_", DAPO),
    "more.reinforce": GROUPS - {"rollout/frac_zero_std_groups"},
    "more.rloo": GROUPS,
    "more.vapo": CLIPS
    | GROUPS - {"rollout/frac_zero_std_groups"}
    | keys("losses/", "value_loss explained_variance kl_ref positive_lm_loss"),
}


@pytest.mark.parametrize("name", [*SCRIPTS, *MORE])
def test_run_of_each_script_logs_sensible_numbers(name, tmp_path, monkeypatch):
    passes = evaluations(monkeypatch)
    result = small(name, "--run_dir", tmp_path)
    assert result.returncode == 0, result.stderr
    # Before, after iteration 2, and at the end, where what is logged and what is printed are the same.
    assert passes == ["greedy", "sampled", "greedy", "greedy", "sampled"]
    lines = metrics(tmp_path)
    assert [line["iteration"] for line in lines] == [1, 2, 3]
    for line in lines:
        logged = {key for key in line if not key.startswith(("eval/", "iteration"))}
        assert logged == COMMON_KEYS | EXTRA_KEYS.get(name, CLIPS | GROUPS)
        assert all(math.isfinite(value) for value in line.values())
        # The ratio of the first inner step is 1: old log-probs and update share one forward.
        assert line["losses/first_step_ratio_error_max"] < 1e-4
        assert abs(line["rollout/sampler_kl"]) < 1e-4
        assert 0 <= line["rollout/accuracy"] <= 1 and 0 < line["rollout/response_len_mean"] <= 32
        assert 0 < line["losses/entropy"] < math.log(17) and line["losses/approx_kl"] >= 0
        assert line["losses/ratio_max"] >= 1 >= line["losses/ratio_min"] > 0
        # One step per rollout, and a policy that does not learn yet, keep the ratio at 1.
        assert (line["losses/logratio_spread"] == 0) == (name in MORE)
        assert line["losses/logratio_spread"] < 1 and line["charts/grad_norm"] < 100
        assert (line["charts/grad_norm"] == 0) == (name == "more.vapo")  # it trains the critic alone
        assert line["moe/load_min"] < 1 / 8 < line["moe/load_max"] and line["moe/aux_loss"] >= 1.9
        evaluated = {"eval/accuracy", "eval/response_len_mean"} if line["iteration"] > 1 else set()
        assert {key for key in line if key.startswith("eval/")} == evaluated
    if name == "dapo":
        kept = [line["rollout/groups_kept"] for line in lines]
        generated = [line["rollout/groups_generated"] for line in lines]
        assert all(k <= 16 for k in kept) and sum(generated) > sum(kept)
        for line in lines:
            right = line["rollout/groups_dropped_all_right"]
            dropped = right + line["rollout/groups_dropped_all_wrong"]
            assert line["rollout/groups_kept"] + dropped == line["rollout/groups_generated"]
            assert line["rollout/all_right_frac"] == right / line["rollout/groups_generated"]
    if name == "rspo":
        assert all(0.5 < line["moe/router_shift"] < 1 for line in lines)
    if name == "sapo":
        assert all(0.5 < line["losses/gate_slope"] < 1 for line in lines)
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert {s["verdict"] for s in samples} <= {"correct", "wrong", "no_answer", "truncated"}
    assert "held-out" in result.stdout and "Traceback" not in result.stderr
    checkpoint = tmp_path / "checkpoint-000003"
    assert str(checkpoint) in result.stdout and not list(tmp_path.glob("*tmp*"))
    files = {"lock", "settings.json", "metrics.jsonl", "samples.jsonl", checkpoint.name}
    assert {path.name for path in tmp_path.iterdir()} == files
    assert json.loads((tmp_path / "settings.json").read_text())["script"] == name.removeprefix("more.")


def test_run_a_process_computes_the_same(tmp_path):
    """As a user starts it: else the runs in this process would prove nothing."""
    flags = (*SMALL, "--num_held_out", 32, "--run_dir")
    for result in (run("grpo", *flags, tmp_path / "a"), run_process("grpo", *flags, tmp_path / "b")):
        assert result.returncode == 0, result.stderr
        assert "held-out" in result.stdout
    assert untimed(tmp_path / "a") == untimed(tmp_path / "b")


def checkpoint_parts(folder):
    """Names of what a checkpoint holds beside the policy."""
    (checkpoint,) = folder.glob("checkpoint-*")
    return set(torch.load(checkpoint / "trainer_state.pt", weights_only=True)["parts"])


@pytest.mark.parametrize("kl_coef", [0, 0.04])
@pytest.mark.parametrize("name, dtype", [("grpo", "float32"), ("ppo", "bfloat16")])
def test_run_without_a_kl_there_is_no_reference(name, kl_coef, dtype, tmp_path, monkeypatch):
    """With --kl_coef 0: the policy's log-probs alone are computed, the checkpoint holds no other model,
    and no KL is logged."""
    module = importlib.import_module(name)
    models = []

    def recorded(original):
        def score(policy, *args, **keywords):
            models.append(policy.model)
            return original(policy, *args, **keywords)

        return score

    for function in ("score", "score_old"):
        monkeypatch.setattr(module, function, recorded(getattr(module, function)))
    flags = ("--iterations", 1, "--kl_coef", kl_coef, "--dtype", dtype)
    result = small(name, "--run_dir", tmp_path, *flags)
    assert result.returncode == 0, result.stderr
    expected = {"optimizer", "problem_stream"}
    if name == "ppo":
        expected.add("critic")
    if kl_coef > 0:
        expected.add("reference")
    assert checkpoint_parts(tmp_path) == expected
    assert len(models) == (2 if kl_coef > 0 else 1)
    assert ("losses/kl_ref" in metrics(tmp_path)[0]) == (kl_coef > 0)


def test_the_summary_of_a_rollout_by_hand():
    """Shares and lengths of completions, and of groups."""
    texts = ["#### 3", "1+2=3 #### 3", " \\boxed{3}", "1+", "no", "so \\boxed{3}"]
    reasons = ["wrong", "correct", "wrong", "truncated", "no_answer", "correct"]
    completions = []
    for length, (text, why) in enumerate(zip(texts, reasons, strict=True), 1):
        ids, logprobs = [2] * length, [0.0] * length
        cut = why == "truncated"
        completions.append(Completion(Problem("", "", [1]), ids, logprobs, cut, text, verdict=why))
    shares = rollout_summary(completions)
    assert shares == pytest.approx(
        {
            "accuracy": 2 / 6,
            "truncated_frac": 1 / 6,
            "no_answer_frac": 1 / 6,
            "direct_frac": 2 / 6,
            "response_len_mean": 3.5,
            "response_len_max": 6,
        }
    )
    lengths = {"response_len_right": 4, "response_len_wrong": 13 / 4}
    assert group_summary(completions, 1) == lengths
    completions[3] = completions[3]._replace(text=texts[2])
    for group_size, wrong, distinct in ((2, 1 / 3, 5 / 6), (3, 0, 1), (6, 0, 5 / 6)):
        shares = {"all_right_frac": 0, "all_wrong_frac": wrong, "distinct_frac": distinct}
        assert group_summary(completions, group_size) == pytest.approx(lengths | shares)
    right = [c._replace(verdict="correct") for c in completions]
    assert group_summary(right, 2)["all_right_frac"] == 1
    assert "response_len_wrong" not in group_summary(right, 2)


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_pass_at_k_is_the_mean_over_all_choices_of_k(n):
    """By enumeration: of k out of n completions, at least one is right."""
    patterns = list(itertools.product(["correct", "wrong"], repeat=n))[:: max(1, 2**n // 32)]
    one = Completion(Problem("", "", [1]), [2], [0.0])
    completions = [one._replace(verdict=name) for pattern in patterns for name in pattern]
    expected = {}
    for k in [k for k in (1, 2, 4, 8) if k <= n]:
        chosen = [
            any(w == "correct" for w in c) for p in patterns for c in itertools.combinations(p, k)
        ]
        expected[f"pass@{k}"] = sum(chosen) / len(chosen)
    assert pass_at_k(completions, n) == pytest.approx(expected, rel=1e-12)


def test_run_pass_at_k_before_and_after(tmp_path):
    result = small("grpo", "--eval_samples", 4, "--run_dir", tmp_path, held_out=8)
    assert result.returncode == 0, result.stderr
    rows = {line.split()[0]: line.split()[1:] for line in result.stdout.splitlines() if "->" in line}
    assert {key for key in rows if key.startswith("pass@")} == {"pass@1", "pass@2", "pass@4"}
    before, after = (float(number) for number in " ".join(rows["pass@1"]).split("->"))
    accuracies = [float(number) for number in " ".join(rows["accuracy"]).replace("->", " ").split()]
    assert [before, after] == accuracies[2:]
    assert float(rows["pass@4"][0]) > float(rows["pass@2"][0]) > before


def test_the_spread_inside_a_completion_and_extreme_ratios():
    """A completion without tokens, as dapo's filter leaves it, does not count, nor does a micro-batch
    of such ones."""
    mask_BT = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]]).bool()
    logprobs_BT = torch.tensor([[-1.0, -2.0, -4.5, torch.nan], [-3.0, 7, 7, 7], [-1, -1, -1, -1]])
    outputs = TokenOutputs(
        logprobs_BT, torch.zeros(3, 4), torch.zeros(()), (), 0, torch.zeros(3, 4, 0, 0), None
    )
    meter = Meter(1)
    old = OldScores(torch.tensor([[-1.5, -1.0, -3.0, 0], [-2.9, 0, 0, 0], [-2, -2, -2, -2]]), None)
    losses = {"policy_loss": torch.zeros(())}
    meter.add_pass(losses, {}, outputs, old, torch.arange(3), torch.zeros_like(mask_BT))
    names = {"losses/logratio_spread", "losses/ratio_min", "losses/sequence_ratio_max"}
    assert names.isdisjoint(meter.means())
    meter.add_pass(losses, {}, outputs, old, torch.arange(3), mask_BT)
    expected = torch.tensor([0.5, -1.0, -1.5]).std(correction=0).item() / 2
    means = meter.means()
    assert means["losses/logratio_spread"] == pytest.approx(expected)
    assert means["losses/ratio_min"] == pytest.approx(math.exp(-1.5))
    assert means["losses/sequence_ratio_max"] == pytest.approx(math.exp(-0.1))  # not the last row's e
    assert "losses/first_step_ratio_error_max" not in means


def test_run_dapo_says_so_when_no_group_is_mixed(tmp_path, reward_file):
    """The iteration is logged and saved, and the run ends with a message, a file and exit code 3.
    Resumed where some answers are right, it goes on."""
    easy = tmp_path / "easy"
    reward = reward_file(
        "import os",
        f"is_right = os.path.exists({str(easy)!r}) and len(text) % 2 == 0",
        'return (1.0, "correct") if is_right else (0.0, "wrong")',
    )
    folder = tmp_path / "run"
    flags = ("--max_sampling_rounds", 2, "--reward", reward, "--run_dir", folder, "--eval_every", 0)
    result = small("dapo", *flags, held_out=8)
    assert result.returncode == 3 and "Traceback" not in result.stderr
    assert "after 2 rounds 16 mixed groups are missing" in result.stderr + result.stdout
    first, _, rest = result.stdout.partition("ended early: too few mixed groups\n")
    assert "held-out" in rest and "held-out" not in first
    assert (folder / "ended_early.txt").read_text() == "iteration 1: too few mixed groups\n"
    (line,) = metrics(folder)
    assert line["rollout/groups_kept"] == line["rollout/accuracy"] == 0
    assert line["rollout/groups_dropped_all_wrong"] == line["rollout/groups_generated"] == 32
    easy.touch()
    assert small("dapo", *flags, "--resume", held_out=8).returncode == 0
    assert not (folder / "ended_early.txt").exists()
    assert [line["iteration"] for line in metrics(folder)] == [1, 2, 3]


def test_run_what_is_not_finite_is_not_logged(tmp_path, monkeypatch):
    """JSON has no word for it."""
    original = grpo.policy_loss

    def policy_loss(*args, **keywords):
        loss, stats = original(*args, **keywords)
        nonsense = {"approx_kl": torch.tensor(math.nan), "ratio_max": torch.tensor(math.inf)}
        return loss, stats | nonsense

    monkeypatch.setattr(grpo, "policy_loss", policy_loss)
    assert small("grpo", "--run_dir", tmp_path, "--iterations", 1).returncode == 0
    (line,) = metrics(tmp_path)
    assert {"losses/approx_kl", "losses/ratio_max"}.isdisjoint(line) and "losses/kl_ref" in line


def test_run_resume_with_nothing_left_to_do(tmp_path):
    """Fewer iterations than were done already: the table of the trained model, and no change."""
    assert small("grpo", "--run_dir", tmp_path, "--iterations", 2, held_out=8).returncode == 0
    before = metrics(tmp_path)
    result = small("grpo", "--run_dir", tmp_path, "--iterations", 1, "--resume", held_out=8)
    assert result.returncode == 0 and "held-out" in result.stdout and metrics(tmp_path) == before


def weights(folder):
    return AutoModelForCausalLM.from_pretrained(max(folder.glob("checkpoint-*[0-9]"))).state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", "ppo", "dapo"])
def test_run_micro_batches_are_memory_not_results(name, tmp_path):
    """Metrics agree to rounding, also where the last micro-batch of a minibatch of 32 is smaller than
    the others; without the aux loss, which depends on the micro-batches. Gradients: test_main.py."""
    for size in (0, 32, 4, 5):
        flags = ("--iterations", 1, "--micro_batch_size", size, "--router_aux_coef", 0)
        assert small(name, "--run_dir", tmp_path / str(size), *flags, held_out=8).returncode == 0
    whole = untimed(tmp_path / "32")[0]
    for size in ("0", "4", "5"):
        parts = untimed(tmp_path / size)[0]
        assert whole.keys() == parts.keys()
        for key in whole:
            if not key.startswith("moe/aux"):
                assert whole[key] == pytest.approx(parts[key], rel=1e-3, abs=1e-5), key


def test_run_checkpoint_is_an_ordinary_transformers_folder(tmp_path):
    """Opened with plain transformers, it answers greedily as the script's last evaluation did."""
    result = small("grpo", "--run_dir", tmp_path, "--save_every", 1)
    assert result.returncode == 0, result.stderr
    (checkpoint,) = tmp_path.glob("checkpoint-*")
    names = {path.name for path in checkpoint.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    problems = load_problems(grpo.Args(num_held_out=32), Policy(model, tokenizer))[1]
    inputs = tokenizer(
        [p.prompt for p in problems], return_tensors="pt", padding=True, padding_side="left"
    )
    answers = model.generate(**inputs, max_new_tokens=32, do_sample=False)[
        :, inputs.input_ids.shape[1] :
    ]
    texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
    truncated = (answers != tokenizer.eos_token_id).all(dim=1).tolist()
    rows = zip(texts, problems, truncated, strict=True)
    verdicts = [verify(text, p.answer, cut) for text, p, cut in rows]
    accuracy = sum(reward for reward, _ in verdicts) / len(problems)
    lengths = (answers != tokenizer.pad_token_id).sum(dim=1).float().mean().item()
    assert accuracy == pytest.approx(metrics(tmp_path)[-1]["eval/accuracy"], abs=1e-9)
    assert lengths == pytest.approx(metrics(tmp_path)[-1]["eval/response_len_mean"], abs=1e-5)


def test_run_a_dense_model(tmp_path, tiny_model):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=17, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "dense")
    tiny_model[1].save_pretrained(tmp_path / "dense")
    assert small("gmpo", "--model", tmp_path / "dense", "--run_dir", tmp_path / "gmpo").returncode == 0


@pytest.mark.parametrize("name", [*SCRIPTS, *MORE])
def test_run_help_explains_every_flag(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    text = " ".join(run(name, "--help").stdout.split())
    for field in dataclasses.fields(importlib.import_module(name).Args):
        explained = rf" --{field.name} (\S+ ){{0,7}}{re.escape(field.metadata['help'])}"
        assert re.search(explained, text), field.name


def test_run_grpo_learns(tmp_path):
    """12 iterations from the default base model: sampled accuracy on held-out problems rises by 0.3 or
    more."""
    result = run("grpo", "--iterations", 12, "--eval_every", 0, "--run_dir", tmp_path)
    assert result.returncode == 0, result.stderr
    (row,) = (line.split() for line in result.stdout.splitlines() if line.startswith("accuracy"))
    numbers = [float(x.strip("->")) for x in row[1:] if x.strip("->")]
    _, greedy_after, before, after = numbers
    assert 0.2 <= before <= 0.6, "base pass@1"
    assert after >= before + 0.3 and greedy_after >= 0.9


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SCRIPTS)
def test_run_every_script_learns(name, dtype, tmp_path):
    """The default run: greedy held-out accuracy of 0.9 or more, at least 0.4 above the base."""
    result = run_process(name, "--run_dir", tmp_path, "--dtype", dtype, timeout=900)
    assert result.returncode == 0, result.stderr
    (row,) = (line.split() for line in result.stdout.splitlines() if line.startswith("accuracy"))
    numbers = [float(x.strip("->")) for x in row[1:] if x.strip("->")]
    assert numbers[1] >= max(0.9, numbers[0] + 0.4)
    assert max(line["losses/first_step_ratio_error_max"] for line in metrics(tmp_path)) < 1e-4
