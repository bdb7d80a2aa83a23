"""RankRole: what a runner computes of the steps of an engine on several ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from emberline.engine.gpu.data_parallel_rows import DataParallelRows
from emberline.engine.gpu.device import Device
from emberline.engine.gpu.draft_summary import DraftModelSummary
from emberline.engine.gpu.next_tokens import NextTokens, TokenReceiver, TokenSampler
from emberline.engine.gpu.rows import DeviceRows
from emberline.engine.gpu.sampling import ShareTokens
from emberline.kernels.comm.communicator import Communicator
from emberline.kv.layer_groups import LayerGroups
from emberline.models.config import ModelConfig
from emberline.models.decoder import DecoderModel
from emberline.models.forward import ForwardBatch
from emberline.models.pipeline import PipelineModel
from emberline.models.stage import Stage


@dataclass(frozen=True, slots=True)
class RankRole:
    groups: LayerGroups  # of the layers of this rank
    num_state_slots: int  # for recurrent states, on every rank that has recurrent layers
    is_leader: bool  # whether this rank samples
    stage: Stage
    stages: Communicator | None = None  # between the stages; None: there is only one
    shards: Communicator | None = None  # between the ranks of this stage; None: there is only this one
    has_dp_attention: bool = False  # whether this rank has the KV cache of requests of its own, and attends to these
    pages_per_slot: int = 0  # pages of the states of a sequence, on every rank; 0: as many as those of this rank need
    counts_rows: bool = False  # whether the rows of each expert are counted, because experts may move between ranks
    # On a rank that verifies drafts of the leader's draft model: what it must know of that model; None on other ranks.
    draft_model: DraftModelSummary | None = None

    @staticmethod
    def single(config: ModelConfig, groups: LayerGroups, num_state_slots: int) -> RankRole:
        """Return the role of the only rank of an engine."""
        return RankRole(groups, num_state_slots, is_leader=True, stage=Stage.from_config(config))

    @property
    def is_alone(self) -> bool:
        return self.stages is None and self.shards is None

    @property
    def dp_rank(self) -> int:
        """This rank's index among the ranks that attend to requests of their own; 0: it is none of these."""
        return self.shards.rank if self.shards is not None and self.has_dp_attention else 0

    @property
    def exchanging_ranks(self) -> int:
        """The number of ranks that attend to requests of their own, and exchange the rows of each step."""
        return self.shards.size if self.shards is not None and self.has_dp_attention else 1

    @property
    def has_logits(self) -> bool:
        return self.stage.is_last

    @property
    def num_plans(self) -> int:
        """The maximum number of plans that are launched before the result of the oldest is read."""
        return max(2, self.stage.count)

    def make_dp_rows(self, max_logits: int) -> DataParallelRows | None:
        """Return the DataParallelRows that select the work of this rank's requests; None: it attends to all requests.

        `max_logits`: maximum rows of logits of a captured step."""
        assert self.shards is not None or not self.has_dp_attention
        if self.shards is None or not self.has_dp_attention:
            return None
        return DataParallelRows(self.shards, max_logits, counts_rows=self.counts_rows)

    def make_next_tokens(self, rows: DeviceRows, device: Device, vocab_size: int, max_input_bytes: int) -> NextTokens:
        """Return the object that gives the requests of a step their next tokens."""
        if not self.is_leader:
            return TokenReceiver(rows, device, max_input_bytes, self._token_ranks)
        return TokenSampler(rows, device, vocab_size, max_input_bytes, self.share_tokens, self.num_plans + 1)

    @property
    def share_tokens(self) -> ShareTokens | None:
        """A function that sends the leader's tokens to the ranks that embed them; None: no other rank needs them."""
        return None if (comm := self._token_ranks) is None else partial(_send_tokens, comm)

    @property
    def _token_ranks(self) -> Communicator | None:
        """The ranks that embed tokens which only the leader's device knows; None: there are no such tokens or ranks.

        With several stages, a request is planned only after the host has read its newest token."""
        return self.shards if self.stages is None else None

    def run_model(self, model: DecoderModel, batch: ForwardBatch, out: Tensor | None) -> Tensor:
        """Queue this rank's part of a forward pass; return the logits: no rows before the last stage."""
        if self.stages is None:
            return model.forward(batch, out)
        return PipelineModel(model, self.stage, self.stages).forward(batch, out)


def _send_tokens(comm: Communicator, tokens: Tensor) -> None:
    comm.broadcast(tokens, comm.rank)
