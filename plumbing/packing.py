"""Packs sequences of different lengths into rows, so that an update spends little on padding."""

from typing import NamedTuple

import torch

from plumbing.routing import Routing


class BodyOutput(NamedTuple):
    """What a model without its head computes for a batch, in the batch's own layout."""

    hidden_BUH: torch.Tensor  # last hidden states: where each token is predicted, and after the last
    router_logits: list  # L tensors (B, U, E), at the same places; [] if dense
    experts_BSLK: torch.Tensor  # the routers' own choice at every token, in top-k order; L = 0 if dense
    aux_loss: torch.Tensor  # the load-balancing loss over prompts and responses; 0 if none


def run_body(body, batch, routers=None, replayed_BSLK=None):
    """Runs `body`, a model without its head, on a batch whose sequences never see each other; values
    on padding mean nothing. With `routers`, also its MoE outputs. The routers use the experts in
    `replayed_BSLK`, if given, except where it is -1.

    Sequences are packed side by side into rows. If no attention_mask is passed, transformers starts a
    new sequence wherever position_ids restart; a body that does not has `never_packed` set.
    """
    lengths = batch.lengths
    if getattr(body, "never_packed", False):
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

    is_token = packed(batch.attention_BS).view(num_rows, width)
    positions = packed(positions_BS).view(num_rows, width)
    # Fill the gaps with the last token of a prompt. Token 0 is often padding, and its embedding may be
    # exactly zero, so that the gradient of its norm is NaN.
    U = batch.mask_BT.shape[1] + 1
    filler = batch.tokens_BS[0, -U]
    tokens = torch.where(is_token.bool(), packed(batch.tokens_BS).view(num_rows, width), filler)
    options = {"output_router_logits": True} if routers is not None and routers.has_softmax else {}
    replayed = None if replayed_BSLK is None else packed(replayed_BSLK, filler=-1)
    with Routing(body, replayed) as routing:
        output = body(tokens, position_ids=positions, use_cache=False, **options)

    place_BU = place_BS[:, -U:]  # the token at s is predicted at s - 1
    hidden_BUH = output.last_hidden_state.flatten(0, 1)[place_BU]
    if routers is None or routers.num_experts == 0:
        no_experts = place_BS.new_empty(*place_BS.shape, 0, 0)
        return BodyOutput(hidden_BUH, [], no_experts, hidden_BUH.new_zeros(()))
    router_logits = routers.logits_of(output)  # each (packed tokens, E)
    experts = routing.choices()
    aux_loss = routers.aux_loss(router_logits, experts, is_token)
    logits_BUE = [logits.detach()[place_BU] for logits in router_logits]
    return BodyOutput(hidden_BUH, logits_BUE, experts[place_BS], aux_loss)


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
