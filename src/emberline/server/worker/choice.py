"""Choice: the outputs of one completion become deltas, with reasoning and tool calls told from text."""

from __future__ import annotations

from collections.abc import Sequence

from emberline.api.deltas import Delta, Finish, Reason, ReasoningDelta, TextDelta, TokenIds, TokenInfo
from emberline.api.splitter import Splitter
from emberline.core.errors import DeadlineExceeded, EmberlineError, InvalidRequest
from emberline.core.events import Output
from emberline.core.params import SamplingParams
from emberline.core.plan import TokenLogprob
from emberline.core.request import FinishReason
from emberline.tokens.detokenizer import Detokenizer
from emberline.tokens.tokenizer import Tokenizer


class Choice:
    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        params: SamplingParams,
        splitter: Splitter | None,
        *,
        kept: frozenset[int],  # special tokens that are shown nevertheless
        continuing: bool,  # the text goes on from the prompt's, as a chat's reply does not
        ends: frozenset[int] = frozenset(),  # the model's own end tokens
        prompt_ids: Sequence[int] | None = None,  # tokens are told as ids, and before the first those of the prompt
    ) -> None:
        self.index = index
        self.num_tokens = 0
        self.told = 0  # of these, by another worker
        self.reasoning_tokens = 0
        self.finished = False
        self.reason: Reason | None = None  # how it ended
        self.stopped_early = False  # a stop string was found: the engine does not know yet
        self.last_token: float | None = None  # when it came
        self._tokenizer = tokenizer
        self._params = params
        self._text = Detokenizer(
            tokenizer,
            params.skip_special_tokens,
            params.stop,
            params.include_stop,
            continuing=continuing,
            keep=kept,
            at_least=params.min_tokens,
        )
        self._splitter = splitter
        self._ends = ends
        self._prompt_ids = prompt_ids
        self._last_id: int | None = None
        self._is_plain = splitter is None and prompt_ids is None and params.logprobs is None  # nothing but text
        self._infos: list[TokenInfo] = []  # of tokens whose text is still held back

    @property
    def splits(self) -> bool:
        """Whether text is split into reasoning, calls and content, whose tokens are counted apart."""
        return self._splitter is not None

    @property
    def thinking(self) -> bool:
        """Whether it goes on inside the reasoning."""
        return self._splitter is not None and not self.finished and self._splitter.thinking

    def take(self, output: Output) -> list[Delta]:
        if self.finished:
            return []  # what was under way when the stop string was found
        if output.error is not None:
            raise output_error(output.error)
        text = self._text.push(output.tokens)
        if self._is_plain and output.finish is None and self._text.stopped is None:
            if output.tokens:
                self._last_id = output.tokens[-1]
                self.num_tokens += len(output.tokens)
            return [TextDelta(self.index, text)] if text else []
        return self._take_rest(output, text, self.thinking)

    def _take_rest(self, output: Output, text: str, thinking: bool) -> list[Delta]:
        taken = len(self._text.offsets) - self.num_tokens  # fewer than came if a stop string was completed on the way
        if output.logprobs:
            self._infos += [
                self._info(t, p, self._text.offsets[self.num_tokens + i])
                for i, (t, p) in enumerate(zip(output.tokens[:taken], output.logprobs, strict=False))
            ]
        deltas: list[Delta] = []
        if self._prompt_ids is not None and taken:
            prompt = self._prompt_ids if self.num_tokens == 0 else ()
            deltas.append(TokenIds(self.index, output.tokens[:taken], prompt))
        if taken:
            self._last_id = output.tokens[taken - 1]
        self.num_tokens += taken
        deltas += self._split(text)
        if (thinking and self.thinking) or any(isinstance(delta, ReasoningDelta) for delta in deltas):
            self.reasoning_tokens += taken
        if self._text.stopped is not None:
            self.stopped_early = output.finish is None
            deltas += self._end("stop", self._text.stopped)
        elif output.finish is not None:
            deltas += self._split(self._text.flush())
            deltas += self._end(_REASONS[output.finish], None)
        return deltas

    def _split(self, text: str) -> list[Delta]:
        if self._splitter is None:
            return self._with_infos([TextDelta(self.index, text)] if text or self._infos else [])
        return self._with_infos(self._splitter.push(text) if text else [])

    def _end(self, reason: Reason, stop: str | None) -> list[Delta]:
        self.finished = True
        ended = reason == "stop" and stop is None
        deltas: list[Delta] = []
        if self._splitter is not None:
            deltas = self._with_infos(self._splitter.flush(cut=reason in ("length", "abort")))
        if self._infos:
            deltas.append(TextDelta(self.index, "", self._take_infos()))
        if reason == "stop" and self._splitter is not None and self._splitter.calls:
            reason = "tool_calls"
        self.reason = reason
        asked = self._last_id in self._params.stop_token_ids
        token = self._last_id if ended and (asked or self._last_id in self._ends) else None
        return [*deltas, Finish(self.index, reason, stop, token, asked and token is not None)]

    def _with_infos(self, deltas: Sequence[Delta]) -> list[Delta]:
        """The first text that comes out carries what is known of the tokens since the last."""
        out: list[Delta] = []
        for delta in deltas:
            if isinstance(delta, TextDelta | ReasoningDelta) and self._infos:
                delta = type(delta)(delta.index, delta.text, self._take_infos())
            out.append(delta)
        return out

    def _take_infos(self) -> list[TokenInfo]:
        infos, self._infos = self._infos, []
        return infos

    def _info(self, token: int, logprob: TokenLogprob, offset: int) -> TokenInfo:
        return token_info(self._tokenizer, token, logprob, offset)


def token_info(tokenizer: Tokenizer, token: int, logprob: TokenLogprob | None, offset: int = 0) -> TokenInfo:
    top = (
        [TokenInfo(t, tokenizer.token_text(t), tokenizer.token_bytes(t), p) for t, p in logprob.top] if logprob else []
    )
    value = logprob.logprob if logprob else None
    return TokenInfo(token, tokenizer.token_text(token), tokenizer.token_bytes(token), value, top, offset)


_REASONS: dict[FinishReason, Reason] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
    FinishReason.ERROR: "abort",
}


def output_error(text: str) -> EmberlineError:
    if text == DeadlineExceeded.code:
        what = "the request was not finished, or its next token was not there, within its time limit"
        return DeadlineExceeded(what, hint="raise --request-timeout or --token-timeout")
    return InvalidRequest(f"the output cannot go on: {text}", param="response_format", hint="make the grammar simpler")
