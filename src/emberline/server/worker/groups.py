"""Groups: the engine's outputs of one order become deltas, those of one output together."""

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
    """An output, and whose. `told`: the client knows it already, from another worker."""

    job: Job
    output: Output
    told: bool = False


@dataclass(slots=True)
class Group:
    deltas: list[Delta]
    told: bool = False
    cached: int | None = None  # prompt tokens found in a cache so far, where that is news
    chain: str = ""  # hash and number of the prompt's last full block, if somebody wants to know
    index: int = 0  # the choice they belong to
    output: Output | None = None  # what they came from; None: from no choice's

    @property
    def said(self) -> Said:
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
        self._order = order
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._phases = phases
        self._cached = handoff.cached_tokens or 0
        self._counts_cached = handoff.cached_tokens is None or len(order.jobs) > 1
        self._begun: set[int] = set()  # jobs that have put something out, by their first choice
        self._opened = False
        for job in order.jobs:
            metrics.asked(len(job.ids), order.params.n, order.params.max_tokens)

    def opening(self) -> Group:
        """For a client that has seen it elsewhere, and nothing after it."""
        self._opened = True
        return Group([Started(self._order.prompt_tokens, self._cached)], told=True)

    def take(self, step: Step, now: float) -> Group:
        job, output, told = step
        choice = self.choices[job.first + output.index]
        group = Group([], told)
        if self._phases is not None and not told:
            self._phases.take(choice.index, output)
        if job.first not in self._begun and output.index == 0:
            self._begin(step, group)
        if not self._opened:
            self._opened = True
            group.cached = self._cached
            group.deltas.append(Started(self._order.prompt_tokens, self._cached))
        if job.echo and choice.num_tokens == 0 and output.tokens:
            group.deltas.append(self._echoed(choice.index, job.ids, output.prompt_logprobs))
        if not choice.finished:
            group.index, group.output = choice.index, output
        over = choice.finished and choice.told == choice.num_tokens  # elsewhere
        pieces = choice.take(output)
        if self._order.running_usage and group.output:
            group.deltas.append(Progress(*self._cost()))
        group.deltas += pieces
        if told:
            choice.told = choice.num_tokens
        elif not over:
            self._measure(choice, output, now)
        return group

    def ending(self) -> Group:
        tokens, reasoning_tokens = self._cost()
        return Group([Usage(self._order.prompt_tokens, tokens, self._cached, reasoning_tokens)])

    def _begin(self, step: Step, group: Group) -> None:
        self._begun.add(step.job.first)
        if step.told:
            return
        cached = min(step.output.cached_tokens, len(step.job.ids))  # more if what was said elsewhere is cached too
        self._metrics.began(len(step.job.ids), cached)
        if self._counts_cached and cached:
            self._cached += cached
            group.cached = self._cached

    def _cost(self) -> tuple[int, int]:
        """Tokens of all choices so far, and how many of them were reasoning."""
        return sum(c.num_tokens for c in self.choices), sum(c.reasoning_tokens for c in self.choices)

    def _measure(self, choice: Choice, output: Output, now: float) -> None:
        if output.tokens:
            if choice.last_token is not None:
                self._metrics.itl.observe(now - choice.last_token)
            choice.last_token = now
        if output.finish is not None:
            reason = choice.reason or output.finish.value
            self._metrics.ended(reason, output.timing, choice.num_tokens - choice.told)

    def _echoed(self, index: int, ids: list[int], logprobs: list[TokenLogprob] | None) -> PromptDelta:
        text = self._tokenizer.decode(ids, skip_special=False)
        if logprobs is None:
            return PromptDelta(index, text)
        places = Detokenizer(self._tokenizer, skip_special=False)
        places.push(ids)
        told = zip(ids, [None, *logprobs], places.offsets, strict=True)
        return PromptDelta(index, text, [token_info(self._tokenizer, *each) for each in told])
