"""What the nine scripts share: everything that no paper on the list would write differently.

In order: command line, model, data, verifier, sampler, log-probs and router statistics, evaluation, run
folder. The suffix of a tensor's name gives its axes: P prompts, G per prompt, N = P*G, B micro-batch, R rows
not yet ended, T response, S prompt + response, V vocabulary, L layers, K of E experts.
"""

import contextlib
import functools
import hashlib
import json
import re
import shlex
import shutil
import signal
import sys
import zipfile
from collections import Counter, namedtuple
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
import transformers
from filelock import FileLock
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

import tasks


def fail(message):
    """Ends the program with one line on stderr and exit code 2, as argparse does for bad usage."""
    print(f"{Path(sys.argv[0]).name}: error: {' '.join(str(message).split())}", file=sys.stderr)
    raise SystemExit(2)


@contextlib.contextmanager
def one_line(message):
    """Whatever goes wrong inside ends the program with `message` and the reason, not with a traceback."""
    try:
        yield
    except Exception as error:
        fail(f"{message}: {type(error).__name__} {error.__cause__ or error}")


RANGES = (  # lowest and highest value of the numbers among the arguments, the algorithms' own too
    (1, 1e9, "iterations prompts_per_iteration group_size max_new_tokens update_epochs num_minibatches"),
    (1, 1e9, "num_held_out max_sampling_rounds"),
    (0, 1e9, "seed micro_batch_size router_aux_coef eval_every save_every warm_start_steps ref_reset_every"),
    (0, 1e9, "clip_eps_high kl_coef value_coef value_clip entropy_coef"),
    (1e-9, 1e9, "temperature lr critic_lr max_grad_norm is_weight_cap log_ratio_clip tau_pos tau_neg"),
    (0, 1, "clip_eps_low gamma gae_lambda gamma_min"),
)
LOAD = dict(dtype=torch.float32, use_safetensors=True, trust_remote_code=False)  # for all weights


def parse_args(args_class):
    """Command line -> the script's `Args`, its numbers checked before any work is done."""
    parser = transformers.HfArgumentParser(args_class, allow_abbrev=False)
    parser.error = fail
    args = args_class(**vars(parser.parse_args()))
    for low, high, names in RANGES:
        for name in (name for name in names.split() if not low <= getattr(args, name, low) <= high):
            fail(f"--{name} must be from {low:g} to {high:g}, not {getattr(args, name)}")
    size, rest = divmod(args.prompts_per_iteration * args.group_size, args.num_minibatches)
    args.micro_batch_size = args.micro_batch_size or max(1, size)
    if rest or size % args.micro_batch_size:
        words = f"prompts_per_iteration x group_size / {args.num_minibatches} / {args.micro_batch_size}"
        fail(f"--num_minibatches, --micro_batch_size: {words} is not a whole number")
    best = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    with one_line(f"--device {args.device} is not there, the best device here is {best}"):
        args.device = str(torch.zeros(1, device=args.device or best).device)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return args


def load_model(args):
    """`--model` -> (model in float32 with dropout off, its tokenizer); runs no code from a model folder."""
    source = tasks.base_model(args.warm_start_steps) if args.model == "tiny-moe" else args.model
    with one_line(f"--model {args.model} cannot be used"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        model = transformers.AutoModelForCausalLM.from_pretrained(source, **LOAD).to(args.device).eval()
        for layer in model.modules() if args.gradient_checkpointing else ():
            if isinstance(layer, GradientCheckpointingLayer):  # its activations are computed twice, not kept
                options = dict(use_reentrant=False, preserve_rng_state=False)
                layer.forward = functools.partial(checkpoint, layer.forward, **options)
        # The two ways to a log-prob, the sampler's and the update's, have to agree.
        prompts = tokenizer(["1", "2", "10+10="]).input_ids  # of several lengths, so that some are packed
        probe = type(args)(max_new_tokens=2)
        batch = collate(sample(model, tokenizer, prompts, 2, probe, greedy=True), args.device)
        with torch.no_grad():
            gap_NT = token_logprobs(model, batch, 1.0).logprobs_BT - batch.sampler_logprobs_NT
    if not gap_NT[batch.mask_NT].abs().max() < 1e-3:
        fail(f"--model {args.model} scales or caps the logits of its head, which is not supported")
    return model, tokenizer


Problem = namedtuple("Problem", "prompt answer prompt_ids")  # answer: the gold answer alone


def render(prompt, tokenizer, args):
    """A prompt as the model reads it: through the chat template, where there is one."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if args.instruction:
        messages[-1] = messages[-1] | {"content": f"{messages[-1]['content']}\n{args.instruction}"}
    if args.system_prompt:
        messages.insert(0, {"role": "system", "content": args.system_prompt})
    if tokenizer.chat_template:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    if len(messages) > 1:
        raise ValueError("chat messages and --system_prompt need a tokenizer with a chat template")
    return messages[0]["content"]


def load_problems(args, model, tokenizer):
    """`--dataset` -> (training, `--num_held_out` held-out) problems, disjoint and the same for all seeds."""
    pairs = tasks.read_dataset(args)
    with one_line(f"--dataset {args.dataset}: a prompt cannot be used"):
        answers = {render(prompt, tokenizer, args): answer for prompt, answer in pairs}
        ids = tokenizer(list(answers), add_special_tokens=not tokenizer.chat_template).input_ids
    problems = [Problem(*pair, row) for pair, row in zip(answers.items(), ids, strict=True)]
    longest, limit = max(map(len, ids)), getattr(model.config, "max_position_embeddings", float("inf"))
    if longest + args.max_new_tokens > limit:
        fail(f"--max_new_tokens: with a prompt of {longest} tokens, the model's limit of {limit} is exceeded")
    if len(problems) <= args.num_held_out:
        fail(f"--num_held_out {args.num_held_out} leaves none of {len(problems)} problems for training")
    return problems[args.num_held_out :], problems[: args.num_held_out]


def take_problems(problems, position, count, seed):
    """Problems `position` to `position + count` of an endless stream; each epoch is a shuffle of its own."""
    size, generator = len(problems), torch.Generator()
    epochs = range(position // size, (position + count - 1) // size + 1)
    shuffles = [torch.randperm(size, generator=generator.manual_seed((seed << 20) + e)) for e in epochs]
    return [problems[i] for i in torch.cat(shuffles)[position % size :][:count].tolist()]


def final_answer(text):
    r"""The rest of the line after the last '####', or the inside of the last '\boxed{}' if later, or None."""
    marker, box = text.rfind("####"), text.rfind("\\boxed{")
    depth = 0
    for end in range(box + 6, len(text) if box > marker else 0):
        depth += (text[end] == "{") - (text[end] == "}")
        if depth == 0:
            return text[box + 7 : end].strip() or None
    return text[marker + 4 :].split("\n", 1)[0].strip() or None if marker >= 0 else None


def canonical(answer):
    """A number ('$1,000.50', '42.0', '3/6', '7%', '42.') as a Fraction, anything else as folded text."""
    pattern = r"([+-]?)\$?([0-9]{1,3}(?:,[0-9]{3})+|[0-9]*)(\.[0-9]+)?(?:/([0-9]+))?%?\.?"
    number = re.fullmatch(pattern, answer) if len(answer) <= 100 else None
    try:
        sign, whole, decimals, denominator = number.groups("")
        return Fraction(sign + whole.replace(",", "") + decimals) / Fraction(denominator or 1)
    except (AttributeError, ValueError, ZeroDivisionError):
        return " ".join(answer.casefold().split())


def verify(text, answer, truncated=False):
    """(reward, why): 1.0 'correct'; 0.0 'wrong', 'no_answer' or 'truncated': what is cut off is not right."""
    found = final_answer(text)
    if truncated or found is None:
        return 0.0, "truncated" if truncated else "no_answer"
    return (1.0, "correct") if canonical(found) == canonical(answer) else (0.0, "wrong")


class Completion(NamedTuple):
    prompt_ids: list
    ids: list  # as sampled, never re-tokenized; the last one is the EOS unless truncated
    logprobs: list  # of ids, as the sampler saw them
    truncated: bool = False  # ran into the cap
    text: str = ""


def pad(rows, device, left=False):
    """List of lists -> tensor on the device, zeros on the right or left; CUDA does not wait for the copy."""
    width, side = max(map(len, rows)), -1 if left else 1
    rows = torch.tensor([(row[::side] + [0] * (width - len(row)))[::side] for row in rows])
    return rows.pin_memory().to(device, non_blocking=True) if "cuda" in str(device) else rows.to(device)


@torch.inference_mode()
def sample(model, tokenizer, prompts, group_size, args, generator=None, greedy=False, drop_every=None):
    """`group_size` completions per prompt (token ids), side by side, from the whole distribution or greedy. A
    prompt is run once, its cache copied to its group; rows leave the batch when they end. All noise is drawn
    in advance, so that what a row becomes does not depend on which others are left."""
    device, cap, N = model.device, args.max_new_tokens, len(prompts) * group_size
    eos = model.generation_config.eos_token_id  # chat models have several
    eos = {tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])} - {None}
    eos = torch.tensor(sorted(eos), device=device, dtype=torch.long)
    prompt_PS, attention_PS = (pad(x, device, left=True) for x in (prompts, [[1] * len(p) for p in prompts]))
    noise_NT = torch.rand(N, cap, generator=generator).to(device)
    ids_NT, logprobs_NT = torch.zeros_like(noise_NT, dtype=torch.long), torch.zeros_like(noise_NT)
    rows_R, ended_R = torch.arange(N, device=device), torch.zeros(N, dtype=torch.bool, device=device)
    drop_every = drop_every or (16 if device.type == "cuda" else 1)  # looking for ended rows stalls a GPU
    cache = transformers.DynamicCache(config=model.config)
    tokens, attention, positions = prompt_PS, attention_PS, (attention_PS.cumsum(1) - 1).clamp(min=0)
    for t in range(cap):
        inputs = dict(attention_mask=attention, position_ids=positions, past_key_values=cache)
        with torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bfloat16"):
            logits_RV = model(tokens, **inputs, logits_to_keep=1).logits[:, -1].float()
        if t == 0:  # each prompt was run once; from here on there is a row for each completion
            cache.batch_repeat_interleave(group_size)
            per_prompt = logits_RV, attention, positions
            logits_RV, attention, positions = (x.repeat_interleave(group_size, 0) for x in per_prompt)
        logprobs_RV = torch.log_softmax(logits_RV / args.temperature, dim=-1)
        if greedy:
            token_R1 = logprobs_RV.argmax(-1, keepdim=True)
        else:  # the first token at which the cumulative probability exceeds the noise
            cdf_RV = logprobs_RV.exp().cumsum(-1)
            token_R1 = torch.searchsorted(cdf_RV, noise_NT[rows_R, t, None] * cdf_RV[:, -1:], right=True)
            token_R1 = token_R1.clamp(max=cdf_RV.shape[1] - 1)
        ids_NT[rows_R, t] = token_R1[:, 0]
        logprobs_NT[rows_R, t] = logprobs_RV.gather(1, token_R1)[:, 0]
        ended_R |= torch.isin(token_R1[:, 0], eos)
        if (t + 1) % drop_every == 0:
            keep = (~ended_R).nonzero()[:, 0]
            if len(keep) < len(rows_R):
                cache.batch_select_indices(keep)
                rows_R, ended_R, token_R1 = rows_R[keep], ended_R[keep], token_R1[keep]
                attention, positions = attention[keep], positions[keep]
        if len(rows_R) == 0:
            break
        tokens, attention, positions = token_R1, F.pad(attention, (0, 1), value=1), positions[:, -1:] + 1
    # A completion ends with its first EOS: rows may have run on until they were dropped.
    is_eos_NT = torch.isin(ids_NT, eos)
    end_N = torch.where(is_eos_NT.any(1), is_eos_NT.int().argmax(1) + 1, cap).tolist()
    lists = ids_NT.tolist(), logprobs_NT.tolist()
    ids, logprobs = ([row[:n] for row, n in zip(rows, end_N, strict=True)] for rows in lists)
    prompts, cut = [p for p in prompts for _ in range(group_size)], (~is_eos_NT.any(1)).tolist()
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    return [Completion(*row) for row in zip(prompts, ids, logprobs, cut, texts, strict=True)]


class Batch(NamedTuple):
    """Completions as tensors. Masks come from lengths, never from token values: pad and EOS may be one id."""
    tokens_NS: torch.Tensor  # prompts padded on the left, responses on the right
    attention_NS: torch.Tensor  # 1 on prompt and response
    mask_NT: torch.Tensor  # True on the response, its EOS included
    sampler_logprobs_NT: torch.Tensor
    def rows(self, rows):
        return Batch(*(tensor[rows] for tensor in self))


def collate(completions, device):
    """List of `Completion`s -> `Batch` on the device."""
    prompts, responses = [c.prompt_ids for c in completions], [c.ids for c in completions]
    prompt_NP, response_NT = pad(prompts, device, left=True), pad(responses, device)
    lengths = [[len(p), len(r)] for p, r in zip(prompts, responses, strict=True)]
    prompt_N1, response_N1 = pad(lengths, device).split(1, dim=1)
    mask_NT = torch.arange(response_NT.shape[1], device=device) < response_N1
    is_prompt_NP = torch.arange(prompt_NP.shape[1], device=device).flip(0) < prompt_N1
    logprobs_NT = pad([c.logprobs for c in completions], device)
    pairs = (prompt_NP, response_NT), (is_prompt_NP.long(), mask_NT.long())
    return Batch(*(torch.cat(pair, dim=1) for pair in pairs), mask_NT, logprobs_NT)


class TokenOutputs(NamedTuple):
    logprobs_BT: torch.Tensor  # of the sampled tokens
    entropy_BT: torch.Tensor  # in nats
    aux_loss: torch.Tensor  # transformers' load-balancing loss over prompt and response; 0 for a dense model
    router_logits: tuple  # L tensors (B, T, E), raw, at the position that predicts the token; () if dense
    experts_BTLK: torch.Tensor  # indices of the active experts there, ascending; L = 0 for a dense model


def forward_packed(body, batch, **inputs):
    """The model without its head on the batch's sequences, laid side by side (first fit, longest first):
    half of a padded batch would be padding. position_ids that begin anew keep them apart. Returns its output,
    each token's index in the flattened rows (B, S), and a mask of the rows' tokens."""
    real_BS, lengths = batch.attention_NS.bool(), batch.attention_NS.sum(1).tolist()
    positions_BS = (batch.attention_NS.cumsum(1) - 1).clamp(min=0)
    width, most = max(lengths), sorted(lengths)[len(lengths) * 3 // 4]
    if width > 1.3 * most:  # the longest are few: two of the others have to fit into a row
        width = max(width, 2 * most)
    room, starts = [], [0] * len(lengths)
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        row = next((row for row, free in enumerate(room) if free >= lengths[i]), len(room))
        room += [width] * (row == len(room))
        starts[i] = width * (row + 1) - room[row]
        room[row] -= lengths[i]
    index_BS = torch.tensor(starts, device=real_BS.device)[:, None] + positions_BS
    rows = torch.zeros(3, len(room) * width, dtype=torch.long, device=real_BS.device)
    values = batch.tokens_NS, positions_BS, batch.attention_NS
    rows[:, index_BS[real_BS]] = torch.stack([value_BS[real_BS] for value_BS in values])
    tokens, positions, real = rows.view(3, len(room), width)
    return body(tokens, position_ids=positions, use_cache=False, **inputs), index_BS, real


def token_logprobs(model, batch, temperature, dtype="float32", chunk_numbers=2**26):
    """Log-probs and entropies of the response tokens at the sampling temperature, float32, with gradients; 0
    on padding. Only response tokens get logits, `chunk_numbers` at a time, computed again in the backward
    pass if there are several chunks: the logits of a large vocabulary never exist as a whole."""
    mask_BT, K = batch.mask_NT, getattr(model.config, "num_experts_per_tok", 0)
    T, is_moe = mask_BT.shape[1], dict(output_router_logits=True) if K else {}
    def logprob_and_entropy(hidden_CH, token_C):
        logits_CV = model.get_output_embeddings()(hidden_CH).float() / temperature
        logprobs_CV = torch.log_softmax(logits_CV, dim=-1)
        return logprobs_CV.gather(1, token_C[:, None])[:, 0], -(logprobs_CV.exp() * logprobs_CV).sum(-1)
    with torch.autocast(mask_BT.device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
        output, index_BS, real = forward_packed(model.base_model, batch, **is_moe)
        predicts_BT = index_BS[:, -T - 1 : -1]  # the token at s is predicted at s - 1
        flat = output.last_hidden_state.flatten(0, 1)[predicts_BT[mask_BT]], batch.tokens_NS[:, -T:][mask_BT]
        chunks = [x.split(max(1, chunk_numbers // model.config.vocab_size)) for x in flat]
        recompute = functools.partial(checkpoint, logprob_and_entropy, use_reentrant=False)
        run = recompute if len(chunks[0]) > 1 else logprob_and_entropy
        parts = [run(*chunk) for chunk in zip(*chunks, strict=True)]
    zeros_BT, columns = torch.zeros(mask_BT.shape, device=mask_BT.device), zip(*parts, strict=True)
    logprobs_BT, entropy_BT = (zeros_BT.masked_scatter(mask_BT, torch.cat(column)) for column in columns)
    if not K:
        return TokenOutputs(logprobs_BT, entropy_BT, 0.0, (), logprobs_BT.new_empty(*logprobs_BT.shape, 0, 0))
    layers = tuple(layer.float() for layer in output.router_logits)  # each (rows * width, E)
    aux_loss = load_balancing_loss_func(layers, layers[0].shape[-1], K, real)  # without padding
    experts = torch.stack([layer.detach().topk(K).indices.sort().values for layer in layers], dim=1)
    layers = tuple(layer[predicts_BT] for layer in layers)
    return TokenOutputs(logprobs_BT, entropy_BT, aux_loss, layers, experts[predicts_BT])


def masked_mean(x, mask):
    """Mean of x where the mask of the same shape is 1, and 0 if it never is; a NaN elsewhere does no harm."""
    return torch.where(mask.bool(), x, 0).sum() / mask.sum().clamp(min=1)


@torch.no_grad()
def router_stats(outputs, old_experts_BTLK, mask_BT):
    """Means over response tokens and layers: router entropy (nats), share of tokens whose active experts are
    not the old policy's any more, (L*E numbers) the share of its layer's load that an expert carries."""
    if not outputs.router_logits:
        return {}
    entropy = [torch.special.entr(layer.softmax(-1)).sum(-1) for layer in outputs.router_logits]
    flips_BTL = (outputs.experts_BTLK != old_experts_BTLK).any(-1)
    counts_LE = F.one_hot(outputs.experts_BTLK[mask_BT], outputs.router_logits[0].shape[-1]).sum((0, 2))
    return {
        "router_entropy": masked_mean(sum(entropy) / len(entropy), mask_BT),
        "expert_flip_frac": masked_mean(flips_BTL.float().mean(-1), mask_BT),
        "load": (counts_LE / counts_LE.sum(1, keepdim=True).clamp(min=1)).flatten(),
    }


class Meter(dict):
    """{key: [(value, weight), ...]} of an iteration's micro-batches, on the device until it is read."""
    def add(self, prefix, values, weight):
        for name, value in values.items():
            self.setdefault(f"{prefix}/{name}", []).append((torch.as_tensor(value).detach(), weight))

    def means(self):  # and the maximum of what is called '..._max'
        means = {}
        for key, pairs in self.items():
            mean = sum(value * weight for value, weight in pairs) / sum(weight for _, weight in pairs)
            means[key] = (max(value for value, _ in pairs) if key.endswith("_max") else mean).tolist()
        load = means.pop("moe/load", None)
        return means | ({"moe/load_max": max(load), "moe/load_min": min(load)} if load else {})


def describe(completions, verdicts):
    """Shares and lengths in completions with their (reward, why); 'direct' has nothing before the answer."""
    why, lengths = [why for _, why in verdicts], [len(c.ids) for c in completions]
    words = dict(accuracy="correct", truncated_frac="truncated", no_answer_frac="no_answer")
    shares = {key: why.count(word) / len(why) for key, word in words.items()}
    shares["direct_frac"] = sum(c.text.lstrip().startswith(("####", "\\box")) for c in completions) / len(why)
    return shares | {"response_len_mean": sum(lengths) / len(why), "response_len_max": max(lengths)}


def evaluate(model, tokenizer, problems, args):
    """Held-out problems, answered once greedily and once at the training temperature with fixed noise."""
    result, size = {}, args.prompts_per_iteration * args.group_size
    for name in ("greedy", "sampled"):
        completions = []
        for i in range(0, len(problems), size):
            prompts = [problem.prompt_ids for problem in problems[i : i + size]]
            noise = torch.Generator().manual_seed(i)
            completions += sample(model, tokenizer, prompts, 1, args, noise, greedy=name == "greedy")
        pairs = list(zip(completions, problems, strict=True))
        result[name] = describe(completions, [verify(c.text, p.answer, c.truncated) for c, p in pairs])
    return result | {"examples": [[p.prompt, c.text] for c, p in pairs[:3]]}


def checksums(folder):
    """Of the weights of a checkpoint, in hexadecimal."""
    return [hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.safetensors"))]


class Run:
    """The run folder: metrics.jsonl, samples.jsonl and a checkpoint, always whole: a transformers folder with
    the rest of the state in it, renamed into place before its predecessor is removed."""
    def __init__(self, args):
        self.args, self.script, self.stop, self.uniform = args, Path(sys.argv[0]).stem, False, 0
        may_change = {"device", "iterations", "eval_every", "save_every", "resume", "run_dir", "tensorboard"}
        self.settings = {"script": self.script} | {k: v for k, v in vars(args).items() if k not in may_change}
        self.folder = Path(args.run_dir or f"runs/{self.script}-seed{args.seed}")
        with one_line(f"--run_dir {self.folder} cannot be written, or is in use by another process"):
            self.folder.mkdir(parents=True, exist_ok=True)
            self.lock = FileLock(self.folder / "lock")
            self.lock.acquire(timeout=0)
        if (self.folder / "metrics.jsonl").exists() and not args.resume:
            fail(f"{self.folder} holds another run: go on with it by --resume, or give another --run_dir")
        if args.tensorboard:
            with one_line("--tensorboard needs a package (pip install tensorboard)"):
                from torch.utils.tensorboard import SummaryWriter
            self.writer = SummaryWriter(self.folder)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.on_signal)

    def on_signal(self, number, frame):  # the first one ends the run after its iteration's save
        signal.signal(number, signal.SIG_DFL)
        command = shlex.join(["python", *sys.argv, *["--resume"][: "--resume" not in sys.argv]])
        tqdm.write(f"stopping after this iteration; to go on: {command}", file=sys.stderr)
        self.stop = True

    def restore(self, model, generator, **parts):
        """Loads the newest checkpoint, if any, into model, generator and parts (with a state_dict). Returns
        the state: iterations done, position in the data, and what the script added."""
        state = {"iteration": 0, "position": 0}
        folder = max(self.folder.glob("checkpoint-*[0-9]"), default=None)
        if folder:
            with one_line(f"--resume: {folder} cannot be read"):
                saved = torch.load(folder / "trainer_state.pt", weights_only=True, map_location="cpu")
                state, settings = saved["state"], saved["settings"]
                for name in (name for name in self.settings if self.settings[name] != settings.get(name)):
                    fail(f"--resume: {folder} has {name} {settings.get(name)}, not {self.settings[name]}")
                zip_error = zipfile.ZipFile(folder / "trainer_state.pt").testzip()
                if zip_error or checksums(folder) != saved["checksums"]:
                    raise ValueError("its files are not as they were written")
                policy = transformers.AutoModelForCausalLM.from_pretrained(folder, **LOAD)
                model.load_state_dict(policy.state_dict())
                generator.set_state(saved["generator"])
                for name, part in parts.items():
                    part.load_state_dict(saved["parts"][name])
        with one_line(f"--resume: {self.folder} cannot be used"):
            for path in (self.folder / "metrics.jsonl", self.folder / "samples.jsonl"):
                lines = path.read_text().splitlines() if path.exists() else []
                whole = [line for line in lines if line.endswith("}")]  # the last may be half a line
                kept = [line for line in whole if json.loads(line)["iteration"] <= state["iteration"]]
                path.with_suffix(".tmp").write_text("".join(f"{line}\n" for line in kept))
                path.with_suffix(".tmp").replace(path)
        self.bar = tqdm(initial=state["iteration"], total=self.args.iterations, desc=self.script)
        return state

    def check_finite(self, iteration, **tensors):
        """Ends the run before a NaN or an infinity reaches the weights; the last checkpoint stays."""
        for name in (name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()):
            fail(f"iteration {iteration}: {name} is not finite")

    def due(self, every, iteration):  # each `every` iterations (0: never), and after the last one
        return iteration == self.args.iterations or bool(every and iteration % every == 0)

    def log(self, iteration, metrics, problems, completions, verdicts):
        """A line in metrics.jsonl, four completions in samples.jsonl, the bar; a word about a collapse."""
        shares, group = describe(completions, verdicts), len(completions) // len(problems)
        metrics = {f"rollout/{key}": value for key, value in shares.items()} | metrics
        rows = zip(problems[:4], completions[::group], verdicts[::group], strict=False)
        samples = [{"prompt": p.prompt, "completion": c.text, "verdict": why} for p, c, (_, why) in rows]
        with one_line(f"{self.folder} cannot be written, the last checkpoint is whole"):
            for name, lines in (("metrics.jsonl", [metrics]), ("samples.jsonl", samples)):
                with open(self.folder / name, "a") as file:
                    file.writelines(json.dumps({"iteration": iteration, **line}) + "\n" for line in lines)
        for key, value in metrics.items() if self.args.tensorboard else ():
            self.writer.add_scalar(key, value, iteration)
        if "eval/accuracy" in metrics:
            tqdm.write(f"iteration {iteration:4d}: held-out accuracy {metrics['eval/accuracy']:.3f}")
        rewards = torch.tensor([reward for reward, _ in verdicts]).view(len(problems) if group > 1 else 1, -1)
        self.uniform = self.uniform + 1 if (rewards == rewards[:, :1]).all() else 0
        if self.uniform == 10:
            counts = ", ".join(f"{n} {why}" for why, n in Counter(why for _, why in verdicts).items())
            tqdm.write(f"collapse: for 10 iterations no group had two different rewards; now {counts}")
        self.bar.set_postfix_str(f"reward {metrics['rollout/reward_mean']:.2f}", refresh=False)
        self.bar.update()

    def save(self, state, model, tokenizer, generator, **parts):
        """Writes the checkpoint and, after a signal, ends the program."""
        folder, scratch = self.folder / f"checkpoint-{state['iteration']:06d}", self.folder / "checkpoint.tmp"
        with one_line(f"{folder} cannot be written, the checkpoint before it is whole"):
            shutil.rmtree(scratch, ignore_errors=True)
            model.save_pretrained(scratch)
            tokenizer.save_pretrained(scratch)
            saved = dict(state=state, settings=self.settings, generator=generator.get_state())
            saved["parts"] = {name: part.state_dict() for name, part in parts.items()}
            torch.save(saved | {"checksums": checksums(scratch)}, scratch / "trainer_state.pt")
            scratch.rename(folder)
        for old in set(self.folder.glob("checkpoint-*[0-9]")) - {folder}:
            shutil.rmtree(old, ignore_errors=True)
        if self.stop:
            raise SystemExit(130)

    def finish(self, before, after):
        """Prints the held-out results before and after training, and some sampled completions."""
        self.bar.close()
        print(f"\n{'held-out problems':20}  greedy: before, after; sampled: before, after")
        for key in before["greedy"]:
            x = [result[name][key] for name in ("greedy", "sampled") for result in (before, after)]
            print(f"{key:20}{x[0]:8.3g} ->{x[1]:8.3g}{x[2]:11.3g} ->{x[3]:8.3g}")
        for (prompt, first), (_, last) in zip(before["examples"], after["examples"], strict=True):
            print(f"\n{prompt}\n  before: {first}\n  after:  {last}")
        print(f"\nthe trained model: {max(self.folder.glob('checkpoint-*[0-9]'))}")
