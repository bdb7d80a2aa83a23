"""DraftRunner: runs a draft model on the CPU behind each step of the target model, with a KV cache of its own.

The cache has the blocks of the target model's cache: a token's keys and values are in the same block in both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from emberline.core.plan import SampledToken, StepPlan, WorkItem
from emberline.engine.batch import build_forward_batch
from emberline.kv.cache import KVCache
from emberline.models.draft_model import DraftModel
from emberline.models.forward import HiddenCapture

GetTokens = Callable[[str], Sequence[int]]  # returns all known tokens of a request, by its id


@dataclass(slots=True)
class DraftState:
    """How much of one request's tokens is in the draft model's cache."""

    computed: int  # tokens whose keys and values are there, drafts included
    preemptions: int
    drafted: Sequence[int] = ()  # the newest draft
    draft_start: int = 0  # position of its first token

    def drop_rejected(self, tokens: Sequence[int]) -> None:
        """Count tokens of the newest draft as not computed, from the first that differs from the request's tokens."""
        actual = tokens[self.draft_start : self.draft_start + len(self.drafted)]
        right = 0
        while right < len(actual) and actual[right] == self.drafted[right]:
            right += 1
        self.computed = min(self.computed, self.draft_start + right) if self.drafted else self.computed


class DraftRunner:
    def __init__(self, model: DraftModel, cache: KVCache) -> None:
        self._model = model
        self._cache = cache
        self._states: dict[str, DraftState] = {}

    def free_cache(self) -> None:
        self._cache.free_pages()

    def note_work(self, work: Sequence[WorkItem]) -> None:
        """Record where the work of new and of preempted requests begins, also in steps without the draft model.

        The target model found the tokens before that in its prefix cache. They count as computed by the draft model
        too, which is right unless drafts were off when the target model computed them."""
        for w in work:
            state = self._states.get(w.id)
            if state is None or state.preemptions != w.preemptions:
                self._states[w.id] = DraftState(w.start, w.preemptions)

    def make_capture(self, plan: StepPlan) -> HiddenCapture | None:
        """Return where the target model copies hidden states during this step; None if they are not needed."""
        return HiddenCapture.allocate(self.captured_layers(plan), plan.num_tokens, self._model.config.hidden)

    def captured_layers(self, plan: StepPlan) -> tuple[int, ...]:
        """Return the layers of the target model whose inputs the draft model reads in this step."""
        return self._model.captured_layers if plan.runs_draft_model else ()

    def forget(self, request_id: str) -> None:
        self._states.pop(request_id, None)

    def propose(
        self,
        work: Sequence[WorkItem],
        sampled: dict[str, SampledToken],
        capture: HiddenCapture | None,
        tokens_of: GetTokens,
    ) -> dict[str, Sequence[int]]:
        """Return drafts by request id, after a step of the target model with this work and these results."""
        if capture is None:
            first = [self._known_tokens(w, tokens_of(w.id)) for w in work if w.num_propose and w.id in sampled]
            return self._draft(first, work, self._run(first, None))
        rows: list[Tensor] = []
        items: list[WorkItem] = []
        end = 0
        for w in work:
            begin, end = end, end + len(w.tokens)
            if (item := self._shifted_tokens(w, sampled.get(w.id), tokens_of(w.id))) is not None:
                items.append(item)
                rows.append(torch.arange(begin, begin + len(item.tokens)))
        if not items:
            return {}
        hidden = self._model.combine(capture.out[torch.cat(rows)])
        return self._draft([w for w in items if w.samples], work, self._run(items, hidden))

    def _known_tokens(self, work: WorkItem, tokens: Sequence[int]) -> WorkItem:
        """Return a work item with the tokens that the draft model has not computed, at least the newest one.

        This is the input of draft models that read tokens and no hidden states."""
        state = self._states[work.id]
        state.drop_rejected(tokens)
        begin = min(state.computed, len(tokens) - 1)
        state.computed = len(tokens)
        return WorkItem(work.id, begin, tokens[begin:], work.blocks, True, False, work.preemptions)

    def _shifted_tokens(self, work: WorkItem, sampled: SampledToken | None, tokens: Sequence[int]) -> WorkItem | None:
        """Return the input of a draft model that reads hidden states: for each computed position, the token after it.

        If a draft is wanted, `samples` of the work item is set. Return None if no draft is wanted and earlier positions
        are missing in the draft model's cache, because their hidden states are gone. If a draft is wanted although
        positions are missing, they are few (`DraftContext`), and the model drafts without them."""
        count = len(work.tokens) - work.num_draft + (len(sampled.further) if sampled is not None else 0)
        state = self._states[work.id]
        if state.computed != work.start and not work.num_propose:
            return None
        state.computed = work.start + count
        following = tokens[work.start + 1 : work.start + 1 + count]
        wanted = sampled is not None and work.num_propose > 0 and len(following) == count
        if len(following) < count:  # the request failed, or does not continue
            following = [*following, tokens[-1]][:count]
        return WorkItem(work.id, work.start, following, work.blocks, wanted, False, work.preemptions)

    def _run(self, items: Sequence[WorkItem], hidden: Tensor | None) -> tuple[list[int], Tensor | None]:
        if not items:
            return [], None
        tokens, following = self._model.forward(build_forward_batch(items, self._cache), hidden)
        return tokens.tolist(), following

    def _draft(
        self, items: Sequence[WorkItem], work: Sequence[WorkItem], first: tuple[list[int], Tensor | None]
    ) -> dict[str, Sequence[int]]:
        """Return drafts for `items`, each of the length that its item in `work` asks for.

        `first`: the result of a pass over `items`: the first token of each draft, and hidden states. Each further token
        takes another pass."""
        wanted = {w.id: w.num_propose for w in work}
        tokens, hidden = first
        drafts: dict[str, list[int]] = {w.id: [token] for w, token in zip(items, tokens, strict=True)}
        for w in items:
            state = self._states[w.id]
            state.drafted, state.draft_start = drafts[w.id], w.start + len(w.tokens)
        while alive := [w for w in items if len(drafts[w.id]) < wanted[w.id]]:
            if hidden is not None and len(alive) < len(items):
                hidden = hidden[[i for i, w in enumerate(items) if len(drafts[w.id]) < wanted[w.id]]]
            items = [
                WorkItem(w.id, w.start + len(w.tokens), [drafts[w.id][-1]], w.blocks, True, False, w.preemptions)
                for w in alive
            ]
            tokens, hidden = self._run(items, hidden)
            for w, token in zip(items, tokens, strict=True):
                drafts[w.id].append(token)
                if not self._model.captured_layers:
                    self._states[w.id].computed = w.start + 1
        return dict(drafts)
