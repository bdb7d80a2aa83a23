"""TokenSampler, TokenReceiver: how the requests of a step get their next tokens, which stay on the device.

An engine on one GPU samples them. On several ranks, the leader samples and sends them to the ranks that embed them in
the next step. These ranks only receive tokens: they have no grammars, penalties or log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from emberline.core.plan import StepPlan, StepResult, WorkItem
from emberline.engine.gpu.device import Device, DeviceEvent
from emberline.engine.gpu.draft_inputs import DraftRows
from emberline.engine.gpu.penalties import DevicePenalties
from emberline.engine.gpu.prompt_scores import score_prompts
from emberline.engine.gpu.rows import DeviceRows
from emberline.engine.gpu.sampling import (
    LaunchDrafting,
    ShareTokens,
    StepSampling,
    list_newest_indexes,
    words_per_mask,
)
from emberline.engine.gpu.shared_drafts import receive_drafts
from emberline.engine.gpu.staging import RING_BUFFERS, InputStaging
from emberline.kernels.comm.communicator import Communicator


@dataclass(frozen=True, slots=True)
class ComputedStep:
    """A step whose model was launched, and whose next tokens are not chosen yet."""

    plan: StepPlan
    failures: dict[str, str]  # by request id: why it cannot be sampled; the work items are of other requests
    began: DeviceEvent
    singles: Sequence[WorkItem]
    chunks: Sequence[WorkItem]
    logits: Tensor
    prepare_drafting: Callable[[], LaunchDrafting] | None  # to be called after the sampling was launched, if possible
    count_prepared: Callable[[], int]  # StepResult.num_prepared, when the result is read

    @property
    def sampled_work(self) -> list[WorkItem]:
        """The work items after which a token is sampled, in the order of the logits."""
        return [*self.singles, *(w for w in self.chunks if w.samples)]


class NextTokens(Protocol):
    def launch(self, step: ComputedStep) -> Callable[[], StepResult]:
        """Queue the sampling or the receipt of a step's next tokens; return a function that waits for the result."""
        ...

    def device_buffers(self) -> list[Tensor]:
        """Return the tensors that stay on the device between steps."""
        ...

    def drop_device_addresses(self) -> None: ...


class TokenSampler:
    """Samples the tokens of an engine's steps."""

    def __init__(
        self,
        rows: DeviceRows,
        device: Device,
        vocab_size: int,
        max_input_bytes: int,
        share_tokens: ShareTokens | None = None,
        num_buffers: int = RING_BUFFERS,
    ) -> None:
        """`max_input_bytes`: maximum bytes of the inputs of sampling in one step, without grammar masks.

        `share_tokens`: sends the tokens to other ranks; None: none needs them. `num_buffers`: number of pinned buffers
        for these inputs on the host."""
        self._rows, self._stream, self._vocab_size = rows, device.step_stream, vocab_size
        self._share_tokens = share_tokens
        self._penalties = DevicePenalties(rows.padding_row + 1, vocab_size, device.torch_device)
        mask_bytes = rows.padding_row * words_per_mask(vocab_size) * 4
        self._inputs = InputStaging(max_input_bytes + mask_bytes, device, num_buffers)
        self._waiting: StepSampling | None = None  # the newest step, if it waits for tokens of the previous one

    def launch(self, step: ComputedStep) -> Callable[[], StepResult]:
        all_work = [*step.singles, *step.chunks]
        sampled = StepSampling(step.sampled_work, self._rows, self._penalties, self._share_tokens)
        waits = sampled.waits_for_tokens()
        staged = self._inputs.new_inputs()
        reset = self._penalties.prepare_reset(self._rows.rows_of(all_work), staged)
        if not waits:
            sampled.prepare(self._vocab_size, staged)
        staged.send()
        if reset is not None:
            self._penalties.reset_counts(reset)
        scores, sampled.logits = score_prompts(all_work, step.logits, self._rows)
        if waits:
            assert self._waiting is None, "the previous step was not sampled yet"
            self._waiting = sampled
        else:
            sampled.launch(self._stream)
        if step.prepare_drafting is not None:
            sampled.draft_next = step.prepare_drafting()
            if not waits:
                sampled.launch_drafting()

        plan, failures, began, count_prepared = step.plan, step.failures, step.began, step.count_prepared

        def finish() -> StepResult:  # keeps no reference to the logits
            tokens, lost = sampled.wait_for_tokens_and_failures()
            self._sample_waiting_step()
            prompts = {name: score() for name, score in scores.items()}
            forced = self._rows.forced_tokens(tokens) if plan.reports_forced else {}
            seconds = sampled.end_event.seconds_since(began)
            drafted, failed = sampled.read_drafts(), failures | lost
            return StepResult(plan.step, tokens, prompts, failed, seconds, forced, drafted, count_prepared())

        return finish

    def _sample_waiting_step(self) -> None:
        """If the newest step waits for the tokens that were just read, sample it now."""
        step, self._waiting = self._waiting, None
        if step is not None:
            with torch.inference_mode(), self._stream.activate():
                staged = self._inputs.new_inputs()
                step.prepare(self._vocab_size, staged)
                staged.send()
                step.launch(self._stream)
                step.launch_drafting()

    def device_buffers(self) -> list[Tensor]:
        return [self._penalties.counts, self._inputs.device]

    def drop_device_addresses(self) -> None:
        self._inputs.forget_views()


class TokenReceiver:
    """Receives the tokens that another rank samples, and the drafts of its draft model."""

    def __init__(self, rows: DeviceRows, device: Device, max_input_bytes: int, comm: Communicator | None) -> None:
        """`comm`: connects the ranks that get tokens; its first rank samples. None: no plan has pending tokens."""
        self._rows, self._stream, self._comm = rows, device.step_stream, comm
        self._inputs = InputStaging(max_input_bytes, device)

    def launch(self, step: ComputedStep) -> Callable[[], StepResult]:
        if self._comm is not None and (work := step.sampled_work):
            staged = self._inputs.new_inputs()
            indexes = staged.put(list_newest_indexes(work, self._rows))
            drafted = staged.put(self._list_drafted_rows(step))
            staged.send()
            tokens = torch.zeros_like(indexes)  # ids of tokens also while a rank starts and receives nothing
            self._comm.broadcast(tokens, 0)
            self._rows.newest.index_copy_(0, indexes, tokens)
            if len(drafted):
                receive_drafts(self._comm, self._rows, drafted)
        end, number, began = self._stream.record_event(), step.plan.step, step.began

        def finish() -> StepResult:  # keeps no reference to the logits
            end.wait()
            return StepResult(number, {}, seconds=end.seconds_since(began))

        return finish

    def _list_drafted_rows(self, step: ComputedStep) -> np.ndarray:
        """Return the rows of the requests for which the leader's draft model drafts after this step."""
        has_drafts = self._rows.max_draft > 0
        found = DraftRows.select(step.singles, step.chunks, self._rows).request_rows if has_drafts else []
        return np.array([row.index for row in found], np.int64)

    def device_buffers(self) -> list[Tensor]:
        return [self._inputs.device]

    def drop_device_addresses(self) -> None:
        self._inputs.forget_views()
