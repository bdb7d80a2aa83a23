"""HeadTrainer: trains an EAGLE-3 head step by step. A step depends only on its number, the data and the settings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from emberline.drafter.batches import TrainingBatch, make_batch, make_reducer, order_batches, target_span
from emberline.drafter.head import TrainableHead
from emberline.drafter.head_config import HeadConfig
from emberline.drafter.sequences import Answer
from emberline.drafter.settings import TrainingSettings
from emberline.drafter.target import TargetStates, copy_to_device
from emberline.drafter.vocabulary import DraftVocabulary

PASS_WEIGHT_DECAY = 0.8  # weight of a pass's loss relative to that of the pass before
MAX_GRADIENT_NORM = 0.5
BETAS, WEIGHT_DECAY = (0.9, 0.95), 0.01
WARMUP_SHARE, MAX_WARMUP_STEPS = 0.05, 500
FINAL_RATE_SHARE = 0.05  # learning rate of the last step, relative to the highest


class HeadTrainer:
    def __init__(
        self,
        config: HeadConfig,
        target: TargetStates,
        answers: Sequence[Answer],
        vocabulary: DraftVocabulary,
        settings: TrainingSettings,
    ) -> None:
        self.target, self.vocabulary, self.settings = target, vocabulary, settings
        self._answers = answers
        self._reduce = make_reducer(vocabulary, target.device)
        self._draft_ids = copy_to_device(vocabulary.ids, target.device)
        self.head = TrainableHead(config).to(target.device)
        self._initialize_head()
        self._optimizer = torch.optim.AdamW(
            self.head.parameters(),
            lr=settings.learning_rate,
            betas=BETAS,
            weight_decay=WEIGHT_DECAY,
            fused=target.device.type == "cuda",
        )
        self.step = 0
        self._epoch_batches: tuple[int, list[list[int]]] = (-1, [])
        steps = [len(self._batches_of(epoch)) for epoch in range(settings.epochs)]
        self._epoch_ends = np.cumsum(steps)
        self.total_steps = int(min(self._epoch_ends[-1], settings.max_steps or self._epoch_ends[-1]))

    def run_step(self) -> StepMetrics:
        """Train on the next batch."""
        answers = self._answers_of(self.step)
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate_of(self.step)
        batch = make_batch(answers, self.target, self.settings.passes, self._reduce)
        loss, metrics = self._compute_loss(batch)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), MAX_GRADIENT_NORM)
        self._optimizer.step()
        self.step += 1
        return StepMetrics(loss.detach(), metrics, sum(len(each.tokens) for each in answers))

    def state(self) -> dict[str, Any]:
        return {"step": self.step, "weights": self.head.state_dict(), "optimizer": self._optimizer.state_dict()}

    def load_state(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])
        self.head.load_state_dict(state["weights"])
        self._optimizer.load_state_dict(state["optimizer"])

    def _compute_loss(self, batch: TrainingBatch) -> tuple[Tensor, Tensor]:
        """Return the loss, and the share of drafted tokens of each pass that equal those of the data."""
        assert batch.probabilities is not None and batch.is_drafted is not None
        total, matches = batch.hidden.new_zeros((), dtype=torch.float32), []
        with compute_in_bfloat16(self.target.device):
            outputs = self.head.unroll(batch.hidden, batch.embedded, len(batch.passes))
            for number, (x, rows) in enumerate(zip(outputs, batch.passes, strict=True)):
                logits = self.head.logits(x.flatten(0, 1).index_select(0, rows.drafts)).float()
                wanted = batch.probabilities.index_select(0, rows.targets)
                counted = batch.is_drafted.index_select(0, rows.targets).float()
                errors = -(wanted * logits.log_softmax(-1)).sum(-1)
                mean = (errors * counted).sum() / counted.sum().clamp_min(1)
                total = total + PASS_WEIGHT_DECAY**number * mean
                drafted = self._draft_ids[logits.detach().argmax(-1)]
                matches.append((drafted == batch.next_tokens.index_select(0, rows.targets)).float().mean())
        return total, torch.stack(matches)

    def _initialize_head(self) -> None:
        """Set the head's first weights from the seed, the target's LM head and the states of the first answers."""
        tokens, first = 0, list[Answer]()
        for each in self._answers:
            if first and tokens + len(each.tokens) > self.settings.batch_tokens:
                break
            first.append(each)
            tokens += len(each.tokens)
        spans = [target_span(each) for each in first]
        hidden = torch.cat(
            [states for states, _ in self.target.compute([each.tokens for each in first], spans)]
        ).float()
        starts = np.cumsum([0] + [len(each.tokens) for each in first[:-1]])
        hidden[copy_to_device(starts, hidden.device)] = 0  # first tokens have states of extreme size
        width = self.head.config.hidden
        by_layer = hidden.view(len(hidden), -1, width).square().mean((0, 2)).sqrt()
        rows = self.target.output_rows(self._draft_ids)
        norm = self.target.model.head.norm
        assert norm is not None
        self.head.initialize(self.settings.seed, by_layer.repeat_interleave(width), rows, norm)

    def _answers_of(self, step: int) -> list[Answer]:
        epoch = int(np.searchsorted(self._epoch_ends, step, side="right"))
        begin = 0 if epoch == 0 else int(self._epoch_ends[epoch - 1])
        return [self._answers[index] for index in self._batches_of(epoch)[step - begin]]

    def _batches_of(self, epoch: int) -> list[list[int]]:
        if self._epoch_batches[0] != epoch:
            batches = order_batches(self._answers, self.settings.batch_tokens, self.settings.seed, epoch)
            self._epoch_batches = epoch, batches
        return self._epoch_batches[1]

    def _rate_of(self, step: int) -> float:
        """Return the learning rate of a step: a linear warm-up, then half a cosine."""
        warmup = max(1, min(MAX_WARMUP_STEPS, round(WARMUP_SHARE * self.total_steps)))
        if step < warmup:
            return self.settings.learning_rate * (step + 1) / warmup
        part = (step - warmup) / max(1, self.total_steps - warmup)
        share = FINAL_RATE_SHARE + (1 - FINAL_RATE_SHARE) * 0.5 * (1 + math.cos(math.pi * part))
        return self.settings.learning_rate * share


class StepMetrics:
    """The loss and the matches of one step, which stay on the device until they are read."""

    def __init__(self, loss: Tensor, matches: Tensor, tokens: int) -> None:
        self._loss, self._matches = loss, matches
        self.tokens = tokens  # tokens of the batch, without padding

    def read(self) -> tuple[float, list[float]]:
        """Return the loss and the share of matching drafted tokens of each pass."""
        return float(self._loss), [float(each) for each in self._matches.tolist()]


def compute_in_bfloat16(device: torch.device) -> torch.autocast:
    """Return a context in which a GPU computes matrix products in bfloat16; a CPU keeps float32."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")
