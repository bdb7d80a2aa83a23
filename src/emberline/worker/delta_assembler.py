"""DeltaAssembler: converts the engine's outputs for one call to groups of deltas, one group per output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from emberline.api.deltas import Delta, PromptDelta, ReplyStart, RunningUsage, TokenUsage
from emberline.core.events import Output
from emberline.core.handoff import Handoff, TokenGroup
from emberline.core.plan import TokenLogprob
from emberline.server.metrics import ModelMetrics
from emberline.tokens.detokenizer import Detokenizer
from emberline.tokens.tokenizer import Tokenizer
from emberline.worker.choice import Choice, make_token_info
from emberline.worker.phase_spans import PhaseSpans
from emberline.worker.prepared_call import PreparedCall, PreparedPrompt


class PromptOutput(NamedTuple):
    """An engine output and its prompt. `is_replayed`: another worker has already sent it to the client."""

    prompt: PreparedPrompt
    output: Output
    is_replayed: bool = False


@dataclass(slots=True)
class DeltaGroup:
    deltas: list[Delta]
    is_replayed: bool = False
    cached_tokens: int | None = None  # prompt tokens found in a cache so far; None: as before
    chain: str = ""  # hash and number of the prompt's last full KV block, if the router asked for it
    index: int = 0  # of the choice
    output: Output | None = None  # the engine output they were made from; None: from none

    @property
    def token_group(self) -> TokenGroup:
        """The output's tokens and finish, for a handoff."""
        if self.output is None:
            return TokenGroup(0, ())
        finish = self.output.finish.value if self.output.finish is not None else ""
        return TokenGroup(self.index, tuple(self.output.tokens), finish)


class DeltaAssembler:
    def __init__(
        self,
        call: PreparedCall,
        tokenizer: Tokenizer,
        metrics: ModelMetrics,
        handoff: Handoff,
        phase_spans: PhaseSpans | None,
    ) -> None:
        self.choices = [
            Choice(
                index,
                tokenizer,
                call.params,
                call.make_parser(index),
                visible_special_tokens=call.visible_special_tokens,
                continues_prompt=call.continues_prompt,
                eos_token_ids=call.eos_token_ids,
                prompt_ids=call.prompt_of(index).token_ids if call.return_token_ids else None,
            )
            for index in range(len(call.prompts) * call.params.n)
        ]
        self._call = call
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._phase_spans = phase_spans
        self._cached_tokens = handoff.cached_tokens or 0
        self._counts_cached = handoff.cached_tokens is None or len(call.prompts) > 1
        self._started_prompts: set[int] = set()  # first choices of the prompts that have output
        self._has_started = False
        for prompt in call.prompts:
            metrics.record_request(len(prompt.token_ids), call.params.n, call.params.max_tokens)

    def replay_start(self) -> DeltaGroup:
        """Return the start of a reply that another worker has sent without any output after it."""
        self._has_started = True
        return DeltaGroup([ReplyStart(self._call.prompt_tokens, self._cached_tokens)], is_replayed=True)

    def process_output(self, prompt_output: PromptOutput, now: float) -> DeltaGroup:
        prompt, output, is_replayed = prompt_output
        choice = self.choices[prompt.first_choice + output.index]
        group = DeltaGroup([], is_replayed)
        if self._phase_spans is not None and not is_replayed:
            self._phase_spans.record_output(choice.index, output)
        if prompt.first_choice not in self._started_prompts and output.index == 0:
            self._start_prompt(prompt_output, group)
        if not self._has_started:
            self._has_started = True
            group.cached_tokens = self._cached_tokens
            group.deltas.append(ReplyStart(self._call.prompt_tokens, self._cached_tokens))
        if prompt.echo and choice.num_tokens == 0 and output.tokens:
            group.deltas.append(self._prompt_delta(choice.index, prompt.token_ids, output.prompt_logprobs))
        if not choice.is_finished:
            group.index, group.output = choice.index, output
        finished_elsewhere = choice.is_finished and choice.num_replayed_tokens == choice.num_tokens
        pieces = choice.process_output(output)
        if self._call.running_usage and group.output:
            group.deltas.append(RunningUsage(*self._count_tokens()))
        group.deltas += pieces
        if is_replayed:
            choice.num_replayed_tokens = choice.num_tokens
        elif not finished_elsewhere:
            self._record_metrics(choice, output, now)
        return group

    def final_usage(self) -> DeltaGroup:
        tokens, reasoning_tokens = self._count_tokens()
        return DeltaGroup([TokenUsage(self._call.prompt_tokens, tokens, self._cached_tokens, reasoning_tokens)])

    def _start_prompt(self, prompt_output: PromptOutput, group: DeltaGroup) -> None:
        self._started_prompts.add(prompt_output.prompt.first_choice)
        if prompt_output.is_replayed:
            return
        # Resumed output may be cached too.
        cached = min(prompt_output.output.cached_tokens, len(prompt_output.prompt.token_ids))
        self._metrics.record_admission(len(prompt_output.prompt.token_ids), cached)
        if self._counts_cached and cached:
            self._cached_tokens += cached
            group.cached_tokens = self._cached_tokens

    def _count_tokens(self) -> tuple[int, int]:
        """Return the number of tokens of all choices so far, and of those in reasoning."""
        return sum(c.num_tokens for c in self.choices), sum(c.reasoning_tokens for c in self.choices)

    def _record_metrics(self, choice: Choice, output: Output, now: float) -> None:
        if output.tokens:
            if choice.last_token_time is not None:
                self._metrics.itl.observe(now - choice.last_token_time)
            choice.last_token_time = now
        if output.finish is not None:
            reason = choice.finish_reason or output.finish.value
            self._metrics.record_completion(reason, output.timing, choice.num_tokens - choice.num_replayed_tokens)

    def _prompt_delta(self, index: int, ids: list[int], logprobs: list[TokenLogprob] | None) -> PromptDelta:
        text = self._tokenizer.decode(ids, skip_special=False)
        if logprobs is None:
            return PromptDelta(index, text)
        detokenizer = Detokenizer(self._tokenizer, skip_special=False)
        detokenizer.push(ids)
        tokens = zip(ids, [None, *logprobs], detokenizer.offsets, strict=True)
        return PromptDelta(index, text, [make_token_info(self._tokenizer, *each) for each in tokens])
