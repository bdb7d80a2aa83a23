"""PhaseSpans: records the phases of a request as trace spans: queue, prefill, pull of KV blocks, decode.

The spans are recorded when the request has ended. Their times are those of the first choice. The token counts in the
span of the whole request cover all choices.
"""

from __future__ import annotations

from collections.abc import Sequence

from emberline.core.events import Output, Timing
from emberline.core.handoff import BlockPull
from emberline.trace.span import Attributes, Span

CUT_OFF_ERROR = "cut_off"  # error of a phase that did not end: the client disconnected, or the request failed


class PhaseSpans:
    def __init__(self, span: Span, model: str, prompt_lengths: Sequence[int]) -> None:
        """`span` is the span of the request. `prompt_lengths` has the number of tokens of each prompt."""
        self._span = span
        self._prompt_tokens = prompt_lengths[0]
        self._timing: Timing | None = None  # the latest
        self._cached = self._all_cached = 0  # tokens of the first prompt, and of all prompts
        self._generated = self._all_generated = 0  # tokens of the first choice, and of all choices
        self._drafted = self._accepted = 0  # tokens of the first choice
        span.attributes |= {"gen_ai.request.model": model, "gen_ai.usage.input_tokens": sum(prompt_lengths)}

    def record_output(self, choice_index: int, output: Output) -> None:
        """Add an engine output of a choice. `choice_index` numbers the choices of all prompts of the request."""
        self._all_generated += len(output.tokens)
        if choice_index:
            self._all_cached += 0 if output.index else output.cached_tokens
            return
        self._generated += len(output.tokens)
        self._drafted += output.drafted_tokens
        self._accepted += output.accepted_tokens
        if output.timing is not None:
            if self._timing is None:
                self._cached = output.cached_tokens
                self._all_cached += self._cached
            self._timing = output.timing

    def close(self, now: float) -> None:
        self._span.attributes |= {
            "gen_ai.usage.output_tokens": self._all_generated,
            "gen_ai.usage.cache_read.input_tokens": self._all_cached,
        }
        if self._timing is not None and self._span.context.is_sampled:
            self._record_phases(self._timing, now)

    def _record_phases(self, timing: Timing, now: float) -> None:
        end_time = now if timing.finished is None else timing.finished
        prompt_attributes: Attributes = {
            "emberline.prompt_tokens": self._prompt_tokens,
            "emberline.cached_tokens": self._cached,
        }
        itl = timing.decode / (self._generated - 1) if timing.decode is not None and self._generated > 1 else None
        decode_attributes: Attributes = {
            "emberline.tokens": self._generated,
            "emberline.ttft": timing.ttft,
            "emberline.itl_mean": itl,
        }
        if self._drafted:
            decode_attributes["emberline.drafted_tokens"] = self._drafted
            decode_attributes["emberline.accepted_tokens"] = self._accepted
        for name, start, end, attributes in (
            ("queue", timing.arrival, timing.admitted, {}),
            ("prefill", timing.admitted, timing.first_token, prompt_attributes),
            ("decode", timing.first_token, timing.finished, decode_attributes),
        ):
            if start is None:
                break
            span = self._span.start_child(name, start_time=start)
            span.attributes |= attributes
            if name == "prefill" and timing.pulled is not None:
                _record_pull(span, timing.pulled)
            span.end(end_time=end) if end is not None else span.end(CUT_OFF_ERROR, end_time=end_time)


def _record_pull(prefill: Span, pull: BlockPull) -> None:
    span = prefill.start_child("pull", start_time=pull.began)
    span.attributes |= {
        "emberline.pull.source": pull.source,
        "emberline.pull.bytes": pull.bytes,
        "emberline.pull.moving_seconds": pull.moving,
        "emberline.pull.prefill_seconds": pull.prefill,
    }
    span.end(pull.failure, end_time=pull.ended)
