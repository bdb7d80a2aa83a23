"""Choice: converts the engine's outputs of one choice to deltas of text, reasoning and tool calls."""

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
        kept: frozenset[int],  # special tokens that the text includes
        continuing: bool,  # the output continues the prompt's text
        ends: frozenset[int] = frozenset(),
        prompt_ids: Sequence[int] | None = None,  # with return_token_ids: the prompt's, sent with the first token
    ) -> None:
        self.index = index
        self.num_tokens = 0
        self.told = 0  # tokens that another worker had sent to the client
        self.reasoning_tokens = 0
        self.finished = False
        self.reason: Reason | None = None
        self.stopped_early = False  # a stop string ended the text, and the engine still generates
        self.last_token: float | None = None  # time of the last token
        self._tokenizer = tokenizer
        self._params = params
        self._detokenizer = Detokenizer(
            tokenizer,
            params.skip_special_tokens,
            params.stop,
            params.include_stop,
            continuing=continuing,
            keep=kept,
            at_least=params.min_tokens,
        )
        self._parser = splitter
        self._eos_token_ids = ends
        self._prompt_ids = prompt_ids
        self._last_id: int | None = None
        self._is_plain = splitter is None and prompt_ids is None and params.logprobs is None  # only text deltas
        self._infos: list[TokenInfo] = []  # of tokens whose text is held back

    @property
    def splits(self) -> bool:
        """Whether the text is parsed into reasoning, tool calls and content, whose tokens are counted separately."""
        return self._parser is not None

    @property
    def thinking(self) -> bool:
        """Whether the next token belongs to the reasoning."""
        return self._parser is not None and not self.finished and self._parser.thinking

    def take(self, output: Output) -> list[Delta]:
        """Return the deltas of an engine output. Raises the output's error."""
        if self.finished:
            return []  # the engine had generated it before the stop string was found
        if output.error is not None:
            raise output_error(output.error)
        text = self._detokenizer.push(output.tokens)
        if self._is_plain and output.finish is None and self._detokenizer.stopped is None:
            if output.tokens:
                self._last_id = output.tokens[-1]
                self.num_tokens += len(output.tokens)
            return [TextDelta(self.index, text)] if text else []
        return self._process_all(output, text, self.thinking)

    def _process_all(self, output: Output, text: str, thinking: bool) -> list[Delta]:
        num_taken = len(self._detokenizer.offsets) - self.num_tokens  # fewer than all if a stop string ended the text
        if output.logprobs:
            self._infos += [
                self._info(t, p, self._detokenizer.offsets[self.num_tokens + i])
                for i, (t, p) in enumerate(zip(output.tokens[:num_taken], output.logprobs, strict=False))
            ]
        deltas: list[Delta] = []
        if self._prompt_ids is not None and num_taken:
            prompt = self._prompt_ids if self.num_tokens == 0 else ()
            deltas.append(TokenIds(self.index, output.tokens[:num_taken], prompt))
        if num_taken:
            self._last_id = output.tokens[num_taken - 1]
        self.num_tokens += num_taken
        deltas += self._parse_text(text)
        if (thinking and self.thinking) or any(isinstance(delta, ReasoningDelta) for delta in deltas):
            self.reasoning_tokens += num_taken
        if self._detokenizer.stopped is not None:
            self.stopped_early = output.finish is None
            deltas += self._end("stop", self._detokenizer.stopped)
        elif output.finish is not None:
            deltas += self._parse_text(self._detokenizer.flush())
            deltas += self._end(_REASONS[output.finish], None)
        return deltas

    def _parse_text(self, text: str) -> list[Delta]:
        if self._parser is None:
            return self._with_infos([TextDelta(self.index, text)] if text or self._infos else [])
        return self._with_infos(self._parser.push(text) if text else [])

    def _end(self, reason: Reason, stop: str | None) -> list[Delta]:
        self.finished = True
        ended_by_token = reason == "stop" and stop is None
        deltas: list[Delta] = []
        if self._parser is not None:
            deltas = self._with_infos(self._parser.flush(cut=reason in ("length", "abort")))
        if self._infos:
            deltas.append(TextDelta(self.index, "", self._take_infos()))
        if reason == "stop" and self._parser is not None and self._parser.calls:
            reason = "tool_calls"
        self.reason = reason
        is_requested = self._last_id in self._params.stop_token_ids
        token = self._last_id if ended_by_token and (is_requested or self._last_id in self._eos_token_ids) else None
        return [*deltas, Finish(self.index, reason, stop, token, is_requested and token is not None)]

    def _with_infos(self, deltas: Sequence[Delta]) -> list[Delta]:
        """Attach the collected token infos to the first text among the deltas."""
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
        what = "the request, or its next token, exceeded the time limit"
        return DeadlineExceeded(what, hint="raise --request-timeout or --token-timeout of the server")
    what = f"the output cannot continue under the grammar of response_format: {text}"
    return InvalidRequest(what, param="response_format", hint="simplify the grammar or schema")
