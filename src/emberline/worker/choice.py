"""Choice: one of the n alternative replies to a prompt. It converts the engine's outputs to deltas.

A delta is a part of the reply: text, reasoning or a tool call.
"""

from __future__ import annotations

from collections.abc import Sequence

from emberline.api.output_parser import OutputParser
from emberline.core.errors import DeadlineExceeded, EmberlineError, InvalidRequest
from emberline.core.events import Output
from emberline.core.params import SamplingParams
from emberline.core.plan import TokenLogprob
from emberline.core.request import FinishReason
from emberline.server.metrics import ModelMetrics
from emberline.tokens.detokenizer import Detokenizer
from emberline.tokens.tokenizer import Tokenizer
from emberline.wire.deltas import (
    Delta,
    EngineFinishReason,
    Finish,
    PromptDelta,
    ReasoningDelta,
    TextDelta,
    TokenIdsDelta,
    TokenInfo,
)


class Choice:
    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        params: SamplingParams,
        parser: OutputParser | None,
        *,
        visible_special_tokens: frozenset[int],  # special tokens that the text includes
        continues_prompt: bool,  # the output continues the prompt's text
        eos_token_ids: frozenset[int] = frozenset(),
        prompt_ids: Sequence[int] | None = None,  # with return_token_ids: the prompt's, sent with the first token
    ) -> None:
        self.index = index
        self.num_tokens = 0
        self.num_replayed_tokens = 0  # tokens that another worker had sent to the client
        self.reasoning_tokens = 0
        self.is_finished = False
        self.finish_reason: EngineFinishReason | None = None
        self.needs_engine_abort = False  # a stop string ended the text, and the engine still generates
        self._last_token_time: float | None = None  # by the engine's clock
        self._tokenizer = tokenizer
        self._params = params
        self._detokenizer = Detokenizer(
            tokenizer,
            params.skip_special_tokens,
            params.stop,
            params.include_stop,
            continues_prompt=continues_prompt,
            shown_special_ids=visible_special_tokens,
            min_tokens=params.min_tokens,
        )
        self._parser = parser
        self._eos_token_ids = eos_token_ids
        self._prompt_ids = prompt_ids
        self._last_id: int | None = None
        self._is_plain = parser is None and prompt_ids is None and params.logprobs is None  # only text deltas
        self._infos: list[TokenInfo] = []  # of tokens whose text is held back

    @property
    def parses_output(self) -> bool:
        """Whether the text is split into reasoning, tool calls and content."""
        return self._parser is not None

    @property
    def in_reasoning(self) -> bool:
        """Whether the reply is inside its reasoning part, so that the next token belongs to the reasoning."""
        return self._parser is not None and not self.is_finished and self._parser.is_in_reasoning

    def process_output(self, output: Output) -> list[Delta]:
        """Return the deltas for an engine output. If the output has an error, raise that error."""
        if self.is_finished:
            return []  # the engine had generated it before the stop string was found
        if output.error is not None:
            raise error_from_output(output.error)
        text = self._detokenizer.push(output.tokens)
        if self._is_plain and output.finish is None and self._detokenizer.matched_stop is None:
            if output.tokens:
                self._last_id = output.tokens[-1]
                self.num_tokens += len(output.tokens)
            return [TextDelta(text, self.index)] if text else []
        return self._build_all_deltas(output, text, self.in_reasoning)

    def echo_prompt(self, ids: list[int], logprobs: list[TokenLogprob] | None) -> PromptDelta:
        """Return a delta with the prompt's text, which is sent before the reply.

        `logprobs`: the log-probabilities of all prompt tokens except the first."""
        text = self._tokenizer.decode(ids, skip_special=False)
        if logprobs is None:
            return PromptDelta(self.index, text)
        detokenizer = Detokenizer(self._tokenizer, skip_special=False)
        detokenizer.push(ids)
        tokens = zip(ids, [None, *logprobs], detokenizer.offsets, strict=True)
        return PromptDelta(self.index, text, [_make_token_info(self._tokenizer, *each) for each in tokens])

    def record_metrics(self, metrics: ModelMetrics, output: Output, now: float) -> None:
        """Record the metrics of an engine output that was processed at the time `now`."""
        if output.tokens:
            if self._last_token_time is not None:
                metrics.itl.observe(now - self._last_token_time)
            self._last_token_time = now
        if output.finish is not None:
            reason = self.finish_reason or output.finish.value
            metrics.record_completion(reason, output.timing, self.num_tokens - self.num_replayed_tokens)

    def _build_all_deltas(self, output: Output, text: str, was_in_reasoning: bool) -> list[Delta]:
        num_taken = len(self._detokenizer.offsets) - self.num_tokens  # fewer than all if a stop string ended the text
        if output.logprobs:
            self._infos += [
                self._build_token_info(t, p, self._detokenizer.offsets[self.num_tokens + i])
                for i, (t, p) in enumerate(zip(output.tokens[:num_taken], output.logprobs, strict=False))
            ]
        deltas: list[Delta] = []
        if self._prompt_ids is not None and num_taken:
            prompt = self._prompt_ids if self.num_tokens == 0 else ()
            deltas.append(TokenIdsDelta(self.index, output.tokens[:num_taken], prompt))
        if num_taken:
            self._last_id = output.tokens[num_taken - 1]
        self.num_tokens += num_taken
        deltas += self._parse_text(text)
        if (was_in_reasoning and self.in_reasoning) or any(isinstance(delta, ReasoningDelta) for delta in deltas):
            self.reasoning_tokens += num_taken
        if self._detokenizer.matched_stop is not None:
            self.needs_engine_abort = output.finish is None
            deltas += self._finish("stop", self._detokenizer.matched_stop)
        elif output.finish is not None:
            deltas += self._parse_text(self._detokenizer.flush())
            deltas += self._finish(_REASONS[output.finish], None)
        return deltas

    def _parse_text(self, text: str) -> list[Delta]:
        if self._parser is None:
            return self._attach_token_infos([TextDelta(text, self.index)] if text or self._infos else [])
        return self._attach_token_infos(self._parser.push(text) if text else [])

    def _finish(self, reason: EngineFinishReason, stop: str | None) -> list[Delta]:
        self.is_finished = True
        ended_by_token = reason == "stop" and stop is None
        deltas: list[Delta] = []
        if self._parser is not None:
            deltas = self._attach_token_infos(self._parser.flush(was_cut_off=reason in ("length", "abort")))
        if self._infos:
            deltas.append(TextDelta("", self.index, self._take_token_infos()))
        if reason == "stop" and self._parser is not None and self._parser.num_calls:
            reason = "tool_calls"
        self.finish_reason = reason
        is_requested = self._last_id in self._params.stop_token_ids
        token = self._last_id if ended_by_token and (is_requested or self._last_id in self._eos_token_ids) else None
        return [*deltas, Finish(reason, stop, self.index, token, is_requested and token is not None)]

    def _attach_token_infos(self, deltas: Sequence[Delta]) -> list[Delta]:
        """Return the deltas, with the collected log-probabilities attached to the first one with text or reasoning.

        Log-probabilities are collected while the text of their tokens is incomplete."""
        out: list[Delta] = []
        for delta in deltas:
            if isinstance(delta, TextDelta | ReasoningDelta) and self._infos:
                delta = type(delta)(delta.text, delta.choice, self._take_token_infos())
            out.append(delta)
        return out

    def _take_token_infos(self) -> list[TokenInfo]:
        infos, self._infos = self._infos, []
        return infos

    def _build_token_info(self, token: int, logprob: TokenLogprob, offset: int) -> TokenInfo:
        return _make_token_info(self._tokenizer, token, logprob, offset)


def _make_token_info(tokenizer: Tokenizer, token: int, logprob: TokenLogprob | None, offset: int = 0) -> TokenInfo:
    top = (
        [TokenInfo(t, tokenizer.token_text(t), tokenizer.token_bytes(t), p) for t, p in logprob.top] if logprob else []
    )
    value = logprob.logprob if logprob else None
    return TokenInfo(token, tokenizer.token_text(token), tokenizer.token_bytes(token), value, top, offset)


_REASONS: dict[FinishReason, EngineFinishReason] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
    FinishReason.ERROR: "abort",
}


def error_from_output(error_text: str) -> EmberlineError:
    if error_text == DeadlineExceeded.code:
        what = "the request, or its next token, exceeded the time limit"
        return DeadlineExceeded(what, hint="raise --request-timeout or --token-timeout of the server")
    what = f"the output cannot match the requested schema or grammar: {error_text}"
    return InvalidRequest(
        what, param="response_format", hint="send the request again, or simplify the grammar or schema"
    )
