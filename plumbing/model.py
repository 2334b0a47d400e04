"""Loads a model, and keeps its float32 master weights and a working copy that computes."""

import copy
import functools
import inspect
import os
import re
import sys
from pathlib import Path

import huggingface_hub
import torch
import transformers

from plumbing.data import hash_of
from plumbing.errors import UserError, one_line
from plumbing.folder import checkpoints_in
from plumbing.memory import checkpoint_layers
from plumbing.routing import read_routers

NUM_THREADS = torch.get_num_threads()  # before a run with a tiny model takes one
TINY_MOE = Path(__file__).parent.parent / "tiny_moe"  # the folder that --model tiny-moe means
TOKENIZER_FILES = """tokenizer* special_tokens_map.json added_tokens.json vocab* merges.txt *.model
*.tiktoken *chat_template* additional_chat_templates/*""".split()


# ------------------------------------------------------------------------------------------ loading


def load_unchecked(args):
    """`--model` -> `Policy`. Runs no code from the folder."""
    for module in (transformers, sys.modules["transformers"]):  # it may import itself twice
        numbers = re.findall("[0-9]+", module.__version__)
        if [int(number) for number in numbers[:2]] < [5, 21]:
            message = "is too old, 5.21 or newer is needed: pip install -r requirements.txt"
            raise UserError(f"transformers {module.__version__} {message}")
    source = str(TINY_MOE) if args.model == "tiny-moe" else args.model
    if not Path(source).is_dir():
        with one_line(f"--model {args.model} is not a folder, and cannot be read from the hub"):
            # Ask the hub once: without a network the loaders would retry for minutes.
            is_cached = isinstance(huggingface_hub.try_to_load_from_cache(source, "config.json"), str)
            try:
                huggingface_hub.model_info(source, timeout=10)
            except Exception:  # no network, offline on purpose, or the hub does not have it
                if not is_cached:
                    raise
                source = huggingface_hub.snapshot_download(source, local_files_only=True)
    if Path(source, "adapter_config.json").exists():
        raise UserError(f"--model {args.model} is an adapter: merge it into its base model first")
    checkpoints = checkpoints_in(Path(source))
    if checkpoints and not Path(source, "config.json").exists():
        raise UserError(f"--model {args.model} is a run: pass its {checkpoints[-1].name}")
    with one_line(f"--model {args.model} cannot be used"):  # damaged folders may raise anything
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        model = load_weights(source).to(args.torch_device).eval()
        if model.device.type == "cuda":
            torch.cuda.set_device(model.device)  # for what uses the current one: graphs, memory
        config = model.config.get_text_config()
        # Router logits come from our own hooks; if transformers' are on, decoding fails.
        if getattr(config, "output_router_logits", False):
            config.output_router_logits = False
        if args.gradient_checkpointing:
            checkpoint_layers(model)
        policy = Policy(model, tokenizer, args.dtype)
        policy.tokenizer_files = tokenizer_files(source)
        check_policy(policy)
    if args.torch_device == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        # A tiny model's operators are so small that threads would mostly wait for each other.
        is_tiny = model.num_parameters() < 10_000_000
        torch.set_num_threads(1 if is_tiny else NUM_THREADS)
    # In bfloat16, CUDA prefers cuDNN's attention, which makes a new plan for every shape, and so for
    # every sampled token.
    torch.backends.cuda.enable_cudnn_sdp(False)
    return policy


def load_weights(source):
    """The model in a folder, or on the hub, in float32. UserError if its weights do not fit its config:
    transformers would fill in random ones, without a visible warning."""
    config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
    # Quantized weights (FP8, MXFP4) are dequantized: their kernels pass no gradient, and no error would
    # reveal it.
    for part in (config, config.get_text_config()):
        if getattr(part, "quantization_config", None):
            part.quantization_config["dequantize"] = True
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        source,
        config=config,
        dtype=torch.float32,
        use_safetensors=True,
        trust_remote_code=False,
        output_loading_info=True,
    )
    misfits = {kind: sorted(map(str, names)) for kind, names in report.items() if names}
    if misfits:
        raise UserError(f"the weights in {source} do not fit its config: {misfits!s:.200}")
    model = model.float()  # some dequantized weights are in bfloat16
    # Weights may be unaligned in the file. Used in place, they would make products of few rows round
    # differently in the policy than in a copy of it, such as the reference.
    for weight in model.parameters():
        weight.data = weight.data.clone()
    return model


def check_policy(policy):
    """UserError if it cannot be trained."""
    if getattr(policy.master, "is_quantized", False):
        raise UserError("its weights are quantized, and transformers cannot dequantize them")
    if len(policy.tokenizer) <= len(policy.tokenizer.all_special_ids):
        raise UserError("it has no tokenizer")
    if not policy.end_ids:
        raise UserError("it has no EOS: name one in its generation_config.json (eos_token_id)")
    if not all(isinstance(token, int) for token in policy.end_ids):
        raise UserError(f"its EOS ids must be integers, not {policy.end_ids}")


def tokenizer_files(source):
    """{name: bytes} of a tokenizer's files, for checkpoints. transformers would write them in a form
    that its older versions, and engines pinned to those, cannot read."""
    folder = Path(source)
    if not folder.is_dir():
        folder = Path(huggingface_hub.snapshot_download(source, local_files_only=True))
    files = {}
    for pattern in TOKENIZER_FILES:
        for path in filter(Path.is_file, folder.glob(pattern)):
            files[str(path.relative_to(folder))] = path.read_bytes()
    return files


# ------------------------------------------------------------------------------------------- weights


class TrainedModel:
    """Master weights, which the optimizer changes, and the model that computes with them: a policy or
    a critic. In float32 both are the same model."""

    def __init__(self, master, dtype="float32"):
        self.master = master
        self.model = working_copy(master, dtype)

    def parameters(self):
        return self.master.parameters()

    def state_dict(self):
        return self.master.state_dict()

    def load_state_dict(self, state):
        self.master.load_state_dict(state)
        self.refresh()

    def hash(self):
        """A hash of the master weights' bits, in their order: the same on all devices."""
        return hash_of([sum_of_bits(weight.detach()) for weight in self.parameters()])

    def clip_gradients(self, max_norm):
        """Clips the gradients' norm; returns the norm before clipping."""
        return torch.nn.utils.clip_grad_norm_(self.parameters(), max_norm)

    @torch.no_grad()
    def refresh(self):
        """Copies the master weights into the working copy, if there is one."""
        if self.model is not self.master:
            weights = zip(self.model.parameters(), self.master.parameters(), strict=True)
            for weight, master_weight in weights:
                weight.copy_(master_weight)


def sum_of_bits(weight):
    """An integer sum in which each number's place counts, modulo 2^64. It is computed on the device:
    to hash bytes, all weights would have to go through the host."""
    bits_N = weight.flatten().view(torch.int32)
    total = 0
    start = 1
    for part_N in bits_N.split(2**18):  # what fits into a CPU's cache is ten times as fast
        place_N = torch.arange(start, start + len(part_N), device=weight.device)
        total = total + (part_N * place_N * place_N).sum()
        start += len(part_N)
    return int(total)


class Policy(TrainedModel):
    """A language model with its tokenizer, and what was detected about its routers."""

    def __init__(self, master, tokenizer, dtype="float32"):
        super().__init__(master, dtype)
        self.tokenizer = tokenizer
        self.tokenizer_files = {}  # {name: bytes}
        self.routers = read_routers(master).of(self.model)
        # transformers 5.24 calls it cache, and warns of the old name.
        is_renamed = "cache" in inspect.signature(master.forward).parameters
        self.cache_name = "cache" if is_renamed else "past_key_values"
        self.graphs = None  # set before training, if the sampler's steps can be CUDA graphs
        self.why_no_graphs = ""

    @property
    def end_ids(self):
        """The ids that end a completion; chat models have several."""
        ids = self.model.generation_config.eos_token_id
        ids = ids if isinstance(ids, list) else [ids]
        return [token for token in [*ids, self.tokenizer.eos_token_id] if token is not None]

    def with_model(self, model):
        """A policy with a different model of the same architecture, and the same tokenizer."""
        policy = copy.copy(self)
        policy.master = policy.model = model
        policy.routers = self.routers.of(model)
        policy.graphs = None
        return policy

    def frozen_copy(self, dtype=None):
        """The current weights, frozen, such as a reference; `dtype` None: that of the policy."""
        model = copied(self.master, dtype) if dtype else copy.deepcopy(self.model)
        return self.with_model(model.requires_grad_(False))

    def body_copy(self):
        """A critic's body: the current weights without the head, in float32, to be trained."""
        return copy.deepcopy(self.master.base_model)

    def save_pretrained(self, folder):
        """Writes the master weights and the tokenizer as an ordinary transformers folder."""
        self.master.save_pretrained(folder)
        for name, content in self.tokenizer_files.items():
            path = Path(folder, name)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)

    def load_pretrained(self, folder):
        self.load_state_dict(load_weights(folder).state_dict())


def working_copy(master, dtype):
    """The model that computes: `master` itself in float32, else a copy of it in `dtype`. The copy's
    gradients are moved to the master, in float32, as soon as they are computed."""
    if dtype == "float32":
        return master

    def move_gradient(weight, master_weight):
        if master_weight.grad is None:
            master_weight.grad = weight.grad.float()
        else:
            master_weight.grad += weight.grad
        weight.grad = None

    model = copied(master, dtype)
    for weight, master_weight in zip(model.parameters(), master.parameters(), strict=True):
        if weight.requires_grad:
            hook = functools.partial(move_gradient, master_weight=master_weight)
            weight.register_post_accumulate_grad_hook(hook)
    return model


def copied(model, dtype):
    """A copy with weights in `dtype`, except those that stay in float32. All buffers stay as they are,
    since positions are computed from them."""
    model = copy.deepcopy(model)
    kept = set() if dtype == "float32" else kept_in_float32(model)
    for weight in model.parameters():
        if id(weight) not in kept:
            weight.data = weight.data.to(getattr(torch, dtype))
    return model


def kept_in_float32(model):
    """ids of the weights that stay in float32: a critic's head, and what transformers keeps in float32
    in a bfloat16 model, because the architecture lists it or creates it so."""
    bodies = [part for part in model.modules() if isinstance(part, transformers.PreTrainedModel)]
    if not bodies:
        return set()
    body = bodies[0]  # the whole model, or a critic's body
    kept = {id(weight) for weight in model.parameters()} - {id(x) for x in body.parameters()}
    with torch.device("meta"):  # without allocating weights
        empty = type(body)._from_config(copy.deepcopy(body.config), dtype=torch.bfloat16)
    patterns = [pattern.replace("*", ".*") for pattern in empty._get_dtype_plan(torch.bfloat16)]
    for name, weight in empty.named_parameters():
        is_listed = any(re.search(pattern, name) for pattern in patterns)
        if is_listed or weight.dtype == torch.float32:
            kept.add(id(body.get_parameter(name)))
    return kept
