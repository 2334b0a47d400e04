"""Packs sequences of different lengths into rows, so that an update spends little on padding."""

from typing import NamedTuple

import torch

from plumbing.routing import Routing


def row_width(lengths):
    """Tokens in a packed row: the longest sequence's or, if that is much longer than a typical one, at
    least two typical ones'. Otherwise a few long sequences would leave the other rows half empty."""
    longest = max(lengths)
    typical = sorted(lengths)[len(lengths) * 3 // 4]  # the 75th percentile
    if longest > 1.3 * typical:
        return max(longest, 2 * typical)
    return longest


def first_fit(lengths, width):
    """Puts sequences into rows of `width` tokens, the longest first, each into the first row with room.
    Returns the index of each first token in the flattened rows, and the number of rows."""
    starts = [0] * len(lengths)
    room = []  # tokens left in each row
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        row = 0
        while row < len(room) and room[row] < lengths[i]:
            row += 1
        if row == len(room):
            room.append(width)
        starts[i] = width * (row + 1) - room[row]
        room[row] -= lengths[i]
    return starts, len(room)


class PackedOutput(NamedTuple):
    """A forward pass over packed rows, and where the batch's tokens are in these rows."""

    hidden: torch.Tensor  # (packed tokens, H), the last hidden states
    router_logits: tuple  # L tensors (packed tokens, E), if asked for
    experts: torch.Tensor | None  # the routers' own choices, (packed tokens, L, K); None if dense
    place_BS: torch.Tensor  # of each token, in the flattened rows
    is_token: torch.Tensor  # (rows, width): 1 on tokens, 0 on padding


def forward_packed(body, batch, one_sequence_per_row=False, replayed_BSLK=None, router_logits=False):
    """Runs `body`, a model without its head, on the batch's sequences, packed side by side into rows.
    Its routers choose the experts in `replayed_BSLK`, if given, except where it is -1.

    If no attention_mask is passed, transformers starts a new sequence wherever position_ids restart.
    """
    lengths = batch.lengths
    if one_sequence_per_row:
        lengths = [max(lengths)] * len(lengths)
    width = row_width(lengths)
    starts, num_rows = first_fit(lengths, width)
    size = num_rows * width
    positions_BS = (batch.attention_BS.cumsum(1) - 1).clamp(min=0)
    place_BS = torch.tensor(starts, device=positions_BS.device)[:, None] + positions_BS
    # Padding goes to one extra place after the rows. A boolean index would also leave it out, but the
    # host would have to wait for the GPU to count it.
    target_BS = torch.where(batch.attention_BS.bool(), place_BS, size)

    def packed(x_BS, filler=0):
        flat = x_BS.new_full((size + 1, *x_BS.shape[2:]), filler)
        return flat.index_put((target_BS,), x_BS)[:size]

    replayed = None
    if replayed_BSLK is not None:
        replayed = packed(replayed_BSLK, filler=-1)
    is_token = packed(batch.attention_BS).view(num_rows, width)
    positions = packed(positions_BS).view(num_rows, width)
    # Fill the gaps with the last token of a prompt. Token 0 is often padding, and its embedding may be
    # exactly zero, so that the gradient of its norm is NaN.
    filler = batch.tokens_BS[0, -batch.mask_BT.shape[1] - 1]
    tokens = torch.where(is_token.bool(), packed(batch.tokens_BS).view(num_rows, width), filler)
    options = {"output_router_logits": True} if router_logits else {}
    with Routing(body, replayed) as routing:
        output = body(tokens, position_ids=positions, use_cache=False, **options)
    hidden = output.last_hidden_state.flatten(0, 1).to(body.dtype)  # Mamba's are always in float32
    recorded = getattr(output, "router_logits", None) or ()
    return PackedOutput(hidden, recorded, routing.choices(), place_BS, is_token)
