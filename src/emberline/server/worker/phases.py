"""Phases: what a request went through here, as spans below its own: its wait, its prompt, what was pulled of that, and
its tokens. They are told when it is over, by times that the engine took of its first choice; totals are of all."""

from __future__ import annotations

from collections.abc import Sequence

from emberline.core.events import Output, Timing
from emberline.core.handoff import Pulled
from emberline.trace.span import About, Span

CUT = "cut_off"  # of what had no end of its own: the client left, or something broke


class Phases:
    def __init__(self, span: Span, model: str, prompts: Sequence[int]) -> None:
        """`prompts`: how many tokens each has."""
        self._span = span
        self._prompt = prompts[0]
        self._timing: Timing | None = None  # the newest
        self._cached = self._all_cached = 0  # of the first prompt, and of all
        self._said = self._all_said = 0  # by the first choice, and by all
        span.about |= {"gen_ai.request.model": model, "gen_ai.usage.input_tokens": sum(prompts)}

    def take(self, index: int, output: Output) -> None:
        """Of a choice, from the engine; `output.index` is among those of its prompt."""
        self._all_said += len(output.tokens)
        if index:
            self._all_cached += 0 if output.index else output.cached_tokens
            return
        self._said += len(output.tokens)
        if output.timing is not None:
            if self._timing is None:
                self._cached = output.cached_tokens
                self._all_cached += self._cached
            self._timing = output.timing

    def close(self, now: float) -> None:
        self._span.about |= {
            "gen_ai.usage.output_tokens": self._all_said,
            "gen_ai.usage.cache_read.input_tokens": self._all_cached,
        }
        if self._timing is not None and self._span.context.sampled:
            self._tell(self._timing, now)

    def _tell(self, timing: Timing, now: float) -> None:
        over = now if timing.finished is None else timing.finished
        prompt: About = {"emberline.prompt_tokens": self._prompt, "emberline.cached_tokens": self._cached}
        itl = timing.decode / (self._said - 1) if timing.decode is not None and self._said > 1 else None
        tokens: About = {"emberline.tokens": self._said, "emberline.ttft": timing.ttft, "emberline.itl_mean": itl}
        for name, began, ended, about in (
            ("queue", timing.arrival, timing.admitted, {}),
            ("prefill", timing.admitted, timing.first_token, prompt),
            ("decode", timing.first_token, timing.finished, tokens),
        ):
            if began is None:
                break
            span = self._span.child(name, began=began)
            span.about |= about
            if name == "prefill" and timing.pulled is not None:
                _pull(span, timing.pulled)
            span.end(at=ended) if ended is not None else span.end(CUT, at=over)


def _pull(prefill: Span, pulled: Pulled) -> None:
    span = prefill.child("pull", began=pulled.began)
    span.about |= {
        "emberline.pull.source": pulled.source,
        "emberline.pull.bytes": pulled.bytes,
        "emberline.pull.moving_seconds": pulled.moving,
        "emberline.pull.prefill_seconds": pulled.prefill,
    }
    span.end(pulled.failure, at=pulled.ended)
