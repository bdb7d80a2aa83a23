"""DeltaAssembler: converts the engine's outputs for one call to groups of deltas, one group per output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from emberline.api.deltas import Delta, Progress, PromptDelta, Started, Usage
from emberline.core.events import Output
from emberline.core.handoff import Handoff, Said
from emberline.core.plan import TokenLogprob
from emberline.server.metrics import Metrics
from emberline.server.worker.choice import Choice, token_info
from emberline.server.worker.order import Job, Order
from emberline.server.worker.phases import Phases
from emberline.tokens.detokenizer import Detokenizer
from emberline.tokens.tokenizer import Tokenizer


class Step(NamedTuple):
    """An engine output and its prompt. `is_replayed`: another worker has already sent it to the client."""

    job: Job
    output: Output
    told: bool = False


@dataclass(slots=True)
class Group:
    deltas: list[Delta]
    told: bool = False
    cached: int | None = None  # prompt tokens found in a cache so far; None: as before
    chain: str = ""  # hash and number of the prompt's last full KV block, if the router asked for it
    index: int = 0  # of the choice
    output: Output | None = None  # the engine output they were made from; None: from none

    @property
    def said(self) -> Said:
        """The output's tokens and finish, for a handoff."""
        if self.output is None:
            return Said(0, ())
        finish = self.output.finish.value if self.output.finish is not None else ""
        return Said(self.index, tuple(self.output.tokens), finish)


class Groups:
    def __init__(
        self, order: Order, tokenizer: Tokenizer, metrics: Metrics, handoff: Handoff, phases: Phases | None
    ) -> None:
        self.choices = [
            Choice(
                index,
                tokenizer,
                order.params,
                order.splitter(index),
                kept=order.kept,
                continuing=order.continuing,
                ends=order.ends,
                prompt_ids=order.job_of(index).ids if order.return_token_ids else None,
            )
            for index in range(len(order.jobs) * order.params.n)
        ]
        self._call = order
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._phases = phases
        self._cached_tokens = handoff.cached_tokens or 0
        self._counts_cached = handoff.cached_tokens is None or len(order.jobs) > 1
        self._started_prompts: set[int] = set()  # first choices of the prompts that have output
        self._has_started = False
        for job in order.jobs:
            metrics.asked(len(job.ids), order.params.n, order.params.max_tokens)

    def opening(self) -> Group:
        """Return the start of a reply that another worker has sent without any output after it."""
        self._has_started = True
        return Group([Started(self._call.prompt_tokens, self._cached_tokens)], told=True)

    def take(self, step: Step, now: float) -> Group:
        job, output, is_replayed = step
        choice = self.choices[job.first + output.index]
        group = Group([], is_replayed)
        if self._phases is not None and not is_replayed:
            self._phases.take(choice.index, output)
        if job.first not in self._started_prompts and output.index == 0:
            self._start_prompt(step, group)
        if not self._has_started:
            self._has_started = True
            group.cached = self._cached_tokens
            group.deltas.append(Started(self._call.prompt_tokens, self._cached_tokens))
        if job.echo and choice.num_tokens == 0 and output.tokens:
            group.deltas.append(self._prompt_delta(choice.index, job.ids, output.prompt_logprobs))
        if not choice.finished:
            group.index, group.output = choice.index, output
        finished_elsewhere = choice.finished and choice.told == choice.num_tokens
        pieces = choice.take(output)
        if self._call.running_usage and group.output:
            group.deltas.append(Progress(*self._count_tokens()))
        group.deltas += pieces
        if is_replayed:
            choice.told = choice.num_tokens
        elif not finished_elsewhere:
            self._record_metrics(choice, output, now)
        return group

    def ending(self) -> Group:
        tokens, reasoning_tokens = self._count_tokens()
        return Group([Usage(self._call.prompt_tokens, tokens, self._cached_tokens, reasoning_tokens)])

    def _start_prompt(self, step: Step, group: Group) -> None:
        self._started_prompts.add(step.job.first)
        if step.told:
            return
        cached = min(step.output.cached_tokens, len(step.job.ids))  # resumed output may be cached too
        self._metrics.began(len(step.job.ids), cached)
        if self._counts_cached and cached:
            self._cached_tokens += cached
            group.cached = self._cached_tokens

    def _count_tokens(self) -> tuple[int, int]:
        """Return the number of tokens of all choices so far, and of those in reasoning."""
        return sum(c.num_tokens for c in self.choices), sum(c.reasoning_tokens for c in self.choices)

    def _record_metrics(self, choice: Choice, output: Output, now: float) -> None:
        if output.tokens:
            if choice.last_token is not None:
                self._metrics.itl.observe(now - choice.last_token)
            choice.last_token = now
        if output.finish is not None:
            reason = choice.reason or output.finish.value
            self._metrics.ended(reason, output.timing, choice.num_tokens - choice.told)

    def _prompt_delta(self, index: int, ids: list[int], logprobs: list[TokenLogprob] | None) -> PromptDelta:
        text = self._tokenizer.decode(ids, skip_special=False)
        if logprobs is None:
            return PromptDelta(index, text)
        detokenizer = Detokenizer(self._tokenizer, skip_special=False)
        detokenizer.push(ids)
        tokens = zip(ids, [None, *logprobs], detokenizer.offsets, strict=True)
        return PromptDelta(index, text, [token_info(self._tokenizer, *each) for each in tokens])
