"""DraftSender, receive_drafts: how the drafts of the leader's draft model reach the ranks that only verify them.

Ranks may keep the same request in different rows of DeviceRows, so a message has no rows, but lists the requests that
want a draft in the order of DraftRows: for each, how many tokens of its previous draft were accepted, its newest token,
and its new draft."""

from __future__ import annotations

import torch
from torch import Tensor

from emberline.engine.gpu.rows import DeviceRows
from emberline.engine.gpu.sampling import ShareTokens
from emberline.kernels.comm.communicator import Communicator


class DraftSender:
    def __init__(self, share: ShareTokens, max_rows: int, rows: DeviceRows) -> None:
        """`share`: queues the sending of a tensor. `max_rows`: maximum requests that want a draft, with padding."""
        self._share = share
        self.message = _make_message(max_rows, rows)

    def fill(self, accepted: Tensor, drafts: Tensor) -> None:
        """Queue the writing of a message. `drafts`: [B, 1 + length], the newest token and the draft of each request.

        The tensor is at a fixed address, so this can be part of a captured graph; the sending is not."""
        self.message[: len(accepted), 0].copy_(accepted)
        self.message[: len(drafts), 1 : 1 + drafts.shape[1]].copy_(drafts)

    def send(self, count: int) -> None:
        """Queue the sending of the message without its padding. `count`: number of requests."""
        self._share(self.message[:count])


def receive_drafts(comm: Communicator, rows: DeviceRows, indexes: Tensor) -> None:
    """Queue the receipt of drafts from the first rank, and store them. `indexes`: each request's row in DeviceRows."""
    message = comm.broadcast(_make_message(len(indexes), rows), 0)
    rows.store_drafts(indexes, message[:, 0], message[:, 1:])


def _make_message(count: int, rows: DeviceRows) -> Tensor:
    # Zeros are ids of tokens, also while a rank starts and receives nothing.
    return torch.zeros(count, 2 + rows.max_draft, dtype=torch.int64, device=rows.newest.device)
