"""PipelineModel: one stage of a model whose layers are divided among the ranks of a group."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from emberline.kernels.comm.communicator import Communicator
from emberline.models.decoder import DecoderModel
from emberline.models.forward import ForwardBatch
from emberline.models.stage import Stage


@dataclass(frozen=True, slots=True)
class PipelineModel:
    model: DecoderModel  # loaded for `stage`
    stage: Stage
    comm: Communicator  # its ranks are the stages, in order

    def forward(self, batch: ForwardBatch, out: Tensor | None = None) -> Tensor:
        """Return float32 logits [S, vocab] of `batch.logit_rows`; [0, vocab] if this is not the last stage.

        The input comes from the stage before this one, and the output goes to the stage after it. Raises RankLost.
        """
        config = self.model.config
        if self.stage.is_first:
            x = self.model.embed(batch)
        else:
            x = torch.empty(len(batch.tokens), config.hidden, dtype=self._input_dtype, device=batch.tokens.device)
            self.comm.receive(x, self.stage.index - 1)
            self._receive_captured(batch)
        if (capture := batch.capture) is not None:
            batch = replace(batch, capture=capture.select_stage(self.stage.layers, is_last=self.stage.is_last))
        if self.stage.is_last:
            return self.model.compute_logits(self.model.run_layers(x, batch), out)
        # The next stage needs all rows, since their keys and values are cached in its layers too.
        x = self.model.run_layers(x, replace(batch, logit_rows=None))
        self.comm.send(x.contiguous(), self.stage.index + 1)
        if capture is not None and (states := capture.states_before(self.stage.layers.stop, len(x))).numel():
            self.comm.send(states.contiguous(), self.stage.index + 1)
        return x.new_empty(0, config.vocab)

    def _receive_captured(self, batch: ForwardBatch) -> None:
        """Receive the hidden states that earlier stages captured for a draft model."""
        if batch.capture is None:
            return
        states = batch.capture.states_before(self.stage.layers.start, len(batch.tokens))
        if states.numel():
            received = torch.empty_like(states, memory_format=torch.contiguous_format)
            self.comm.receive(received, self.stage.index - 1)
            states.copy_(received)

    @property
    def _input_dtype(self) -> torch.dtype:
        """The dtype of activations between layers: on a CPU, kernels compute with float32."""
        return torch.float32 if self.model.device.type == "cpu" else self.model.dtype
