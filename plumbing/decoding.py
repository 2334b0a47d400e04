"""Runs the sampler's model: the prompts first, then one token per row at a time."""

import contextlib
import warnings

import torch
import torch.nn.functional as F
import transformers
from torch.nn.utils.rnn import pad_sequence
from transformers.cache_utils import DynamicLayer

STRETCH = (64, 256)  # fewest and most tokens that are decoded with one CUDA graph
LITTLE_MEMORY = 2**31  # free bytes


def pad_left(rows, device):
    """Lists of different lengths -> one tensor."""
    tensors = [torch.tensor(row) for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_side="left").to(device)


def new_decoder(policy, max_new_tokens):
    """A `Decoder` for one batch of prompts."""
    if policy.graphs is None:
        return Decoder(policy)
    return StretchDecoder(policy, policy.graphs, max_new_tokens, STRETCH)


class Decoder:
    """Gives the logits of each row's next token: first `prefill`, then a call with the tokens that were
    chosen. `drop` drops rows that have ended, so `rows` has the index of each row's completion."""

    can_drop = True  # whether rows may be dropped now

    def __init__(self, policy):
        self.policy = policy
        self.device = policy.model.device
        self.cache = None
        self.num_tokens = 0  # per row, with logits so far

    @property
    def should_look(self):
        """Whether `drop` should look for rows that have ended: rarely on a GPU, since the host has to
        wait there for the answer."""
        return self.device.type != "cuda" or self.num_tokens % 16 == 0

    def prefill(self, prompts):
        """Logits (B, V), for a prompt per row. Prompts that are equal go through the model once, and
        their part of the KV cache is then copied to their rows."""
        index_of = {}  # {prompt: its index among those that differ}
        for ids in prompts:
            index_of.setdefault(tuple(ids), len(index_of))
        copies = torch.tensor([index_of[tuple(ids)] for ids in prompts], device=self.device)
        tokens_PS = pad_left(index_of, self.device)
        self.attention = pad_left([[1] * len(ids) for ids in index_of], self.device)
        positions_PS = (self.attention.cumsum(1) - 1).clamp(min=0)
        logits_PV = self.forward(tokens_PS, self.attention, positions_PS)
        self.positions = positions_PS[:, -1:] + 1  # of each row's next token
        self.rows = torch.arange(len(index_of), device=self.device)  # prompts, which `keep` copies
        self.num_tokens = 1
        self.keep(copies)
        self.rows = torch.arange(len(copies), device=self.device)
        return logits_PV[copies]

    def __call__(self, token_R1):
        self.attention = F.pad(self.attention, (0, 1), value=1)
        logits_RV = self.forward(token_R1, self.attention, self.positions)
        self.positions = self.positions + 1
        self.num_tokens += 1
        return logits_RV

    def forward(self, tokens, attention, positions):
        output = self.policy.model(
            tokens,
            attention_mask=attention,
            position_ids=positions,
            logits_to_keep=1,
            use_cache=True,
            **{self.policy.cache_name: self.cache},
        )
        self.cache = getattr(output, self.policy.cache_name, None)  # Mamba's is a different kind
        if type(self.cache) is not transformers.DynamicCache:
            raise TypeError("it has no cache that allows rows to be copied and removed")
        return output.logits[:, -1]

    def drop(self, token_R1, has_ended_R):
        """Drops rows that have ended, if it can now. Returns both tensors for the rows that are left:
        all if none was dropped, and none if all have ended."""
        if not self.should_look:
            return token_R1, has_ended_R
        kept = (~has_ended_R).nonzero()[:, 0]
        if len(kept) == 0:
            return token_R1[:0], has_ended_R[:0]
        if len(kept) < len(has_ended_R) and self.can_drop:
            self.keep(kept)
            return token_R1[kept], has_ended_R[kept]
        return token_R1, has_ended_R

    def keep(self, kept):
        """Keeps the rows with these indices, which may repeat."""
        self.cache.reorder_cache(kept)
        self.attention = self.attention[kept]
        self.positions = self.positions[kept]
        self.rows = self.rows[kept]


# --------------------------------------------------------------------------------------- CUDA graphs


class StretchDecoder(Decoder):
    """For a GPU, which runs a step's thousand small kernels faster than the host launches them. As a
    CUDA graph, they are launched as one. A graph needs tensors that keep their size and place. So the
    cache gets spare columns for a stretch of tokens, all of which use the same graph. Rows are dropped
    between stretches."""

    def __init__(self, policy, graphs, max_new_tokens, stretch):
        super().__init__(policy)
        self.graphs = graphs
        self.num_left = max_new_tokens - 1  # tokens that go through the model after the prompts
        self.stretch = stretch
        self.num_spare = 0  # tokens for which this stretch still has columns

    @property
    def can_drop(self):
        return self.num_spare == 0

    @property
    def should_look(self):
        return self.can_drop or self.num_tokens % 16 == 0

    def begin_stretch(self):
        width = self.attention.shape[1]
        fewest, most = self.stretch
        # A stretch at most doubles a long cache, since attention reads the spare columns, too.
        self.num_spare = min(max(fewest, width), most, self.num_left)
        self.num_left -= self.num_spare
        end = width + self.num_spare
        aligned_end = end + -end % 16  # attention's kernels would copy a mask that is not aligned
        self.column_1 = torch.full((1,), width, device=self.device)  # of the next token
        self.mask = F.pad(self.attention, (0, aligned_end - width)).bool()[:, None, None]
        self.attention = F.pad(self.attention, (0, self.num_spare), value=1)  # after the stretch
        self.token_R1 = torch.zeros_like(self.positions)
        for i, layer in enumerate(self.cache.layers):
            keys = layer.keys[:, :, :width]
            values = layer.values[:, :, :width]
            self.cache.layers[i] = FixedLayer(keys, values, aligned_end, self.column_1)
        self.is_warm = False
        # This destroys the last stretch's graph, and torch then clears the stream's cuBLAS workspaces.
        # So the next warm step, which makes new ones for the next graph, comes after it.
        self.replay = None

    def __call__(self, token_R1):
        if self.num_spare == 0:
            self.begin_stretch()
        self.token_R1.copy_(token_R1)
        if not self.is_warm:  # the first step loads kernels, which cannot be done during a capture
            self.graphs.run(self.step)
            self.is_warm = True
        else:
            if self.replay is None:
                self.replay = self.graphs.capture(self.step)
            self.replay()
        self.num_spare -= 1
        self.num_tokens += 1
        return self.logits_RV

    def step(self):
        """One token of each row. Everything that changes is changed in place."""
        self.mask.index_fill_(3, self.column_1, True)
        self.logits_RV = self.forward(self.token_R1, self.mask, self.positions)
        self.positions.add_(1)
        self.column_1.add_(1)


class FixedLayer(DynamicLayer):
    """A layer of the KV cache whose tensors have spare columns. New keys and values are written to
    `column_1`, a tensor, since a graph would repeat a number."""

    def __init__(self, keys, values, num_columns, column_1):
        super().__init__()
        self.lazy_initialization(keys, values)
        spare = num_columns - keys.shape[2]
        self.keys = F.pad(keys, (0, 0, 0, spare))
        self.values = F.pad(values, (0, 0, 0, spare))
        self.column_1 = column_1

    def update(self, keys, values, *args, **kwargs):
        self.keys.index_copy_(2, self.column_1, keys)
        self.values.index_copy_(2, self.column_1, values)
        return self.keys, self.values


class Graphs:
    """Captures a policy's steps as CUDA graphs, all on one stream and in one pool of memory: graphs
    with pools of their own would leave them behind."""

    def __init__(self):
        self.stream = torch.cuda.Stream()
        # torch fails when it captures into a pool that no graph holds any more. So one graph, which is
        # never replayed, holds the pool.
        self.holder = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.holder, stream=self.stream, capture_error_mode="thread_local"):
            torch.zeros(1, device="cuda")
        self.pool = self.holder.pool()

    @contextlib.contextmanager
    def on_stream(self):
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield
        torch.cuda.current_stream().wait_stream(self.stream)

    def run(self, step):
        with self.on_stream():
            step()

    def capture(self, step):
        """Records the kernels that `step` launches. Returns a function that runs them."""
        if torch.cuda.mem_get_info()[0] < LITTLE_MEMORY:
            torch.cuda.empty_cache()  # which torch cannot do during a capture
        graph = torch.cuda.CUDAGraph()
        with self.on_stream():
            # A reward function may launch kernels in a thread of its own.
            graph.capture_begin(self.pool, capture_error_mode="thread_local")
            try:
                step()
            except BaseException:  # after Ctrl-C, a notebook goes on: its stream must not stay captured
                with contextlib.suppress(RuntimeError):  # the first exception is the one to show
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph.replay

    @contextlib.contextmanager
    def refuse_to_wait(self):
        """Inside, an operator that makes the host wait for the GPU raises a RuntimeError. It could not
        be captured, and a capture that fails may leave CUDA's allocator and random numbers unusable."""
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(action="ignore"):  # torch calls it a prototype
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


# The check below decodes this many tokens after the prompts, in two stretches.
NUM_CHECKED = 6


def graphs_for(policy, prompts, max_new_tokens):
    """Decides before training, once, how a policy samples. Returns (`Graphs`, "") if a step can be
    captured, else (None, why not): then the cache grows. prompts: of token ids."""
    if policy.model.device.type != "cuda":
        return None, "there is no CUDA GPU"
    if max_new_tokens <= NUM_CHECKED:
        return None, "the answers are too short"
    try:
        graphs = Graphs()
        check_stretches(policy, prompts, graphs)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # some architectures cannot, each in its own way
        reason = str(error).strip().partition("\n")[0]
        if "synchronizing" in reason:
            part = "experts wait" if policy.routers.num_experts > 0 else "layers wait"
            reason = f"its {part} for the GPU"
        return None, f"{reason:.200}"
    return graphs, ""


@torch.inference_mode()
def check_stretches(policy, prompts, graphs):
    """Compares a `StretchDecoder` with a `Decoder`, both given the same tokens, in two stretches with
    fewer rows in the second one. An exception if they differ."""
    growing = Decoder(policy)
    fixed = StretchDecoder(policy, graphs, 1 + NUM_CHECKED, stretch=(3, 3))
    logits_RV = growing.prefill(prompts)
    fixed.prefill(prompts)
    if policy.model.config._attn_implementation != "sdpa":
        raise ValueError("its attention is not sdpa")
    if not all(type(layer) is DynamicLayer for layer in growing.cache.layers):
        raise ValueError("its cache does not keep all keys and values")
    is_exact = policy.model.dtype == torch.float32
    for step in range(NUM_CHECKED):
        token_R1 = logits_RV.argmax(1, keepdim=True)
        if step == 3:
            kept = torch.arange(1, len(token_R1), device=token_R1.device)
            token_R1 = token_R1[kept]
            growing.keep(kept)
            fixed.keep(kept)
        logits_RV = growing(token_R1)
        with graphs.refuse_to_wait():
            others_RV = fixed(token_R1)
        # The total variation distance of their distributions. In bfloat16 it is up to a few percent
        # between two kernels that are both right.
        difference_RV = logits_RV.float().softmax(-1) - others_RV.float().softmax(-1)
        gap = difference_RV.abs().sum(-1).max().item() / 2
        if not gap < (1e-3 if is_exact else 0.2):  # a NaN fails this too
            raise ValueError(f"its distributions differ by {gap:.2g} from those with a growing cache")
