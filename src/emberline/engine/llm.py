"""LLM: runs the engine in the calling process, for scripts and batches of prompts.

from emberline import LLM, SamplingParams
with LLM("smollm2") as llm:
    print(llm.generate("The capital of France is", SamplingParams(max_tokens=8))[0].text)
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from emberline.core.config import DEFAULT_MODEL
from emberline.core.engine_config import EngineConfig
from emberline.core.errors import (
    EmberlineError,
    EngineFailed,
    EngineUnavailable,
    InvalidRequest,
    Overloaded,
    UnsupportedModel,
)
from emberline.core.events import Output
from emberline.core.params import SamplingParams
from emberline.core.plan import TokenLogprob
from emberline.core.request import FinishReason, Submission
from emberline.engine.boot import boot
from emberline.engine.grammar_guard import GrammarGuard, GrammarTrialProcess
from emberline.hub.source import resolve_model
from emberline.tokens.detokenizer import Detokenizer
from emberline.tokens.template import ChatTemplate
from emberline.tokens.tokenizer import Tokenizer


@dataclass(slots=True)
class Completion:
    """One continuation of one prompt."""

    prompt: int  # index of the prompt
    index: int  # which of the n completions
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] | None = None
    cached_tokens: int = 0
    finish_reason: str = ""


OpenCompletions = dict[tuple[str, int], tuple[Completion, Detokenizer]]  # by submission id and completion index


class LLM:
    def __init__(self, model: Path | str = DEFAULT_MODEL, **settings: Any) -> None:
        """Load a model.

        `model`: any name that `emberline pull` accepts. `settings`: settings of the engine, such as max_running=8,
        as in EngineConfig.build."""
        directory = resolve_model(str(model))
        self.tokenizer = Tokenizer.load(directory)
        self.template = _load_template(directory)
        self.loaded = boot(EngineConfig.build(str(directory), **settings))
        self.engine = self.loaded.engine
        runner = self.engine.runner  # checks untrusted grammars; the first one starts its process
        self._guard = GrammarGuard(
            GrammarTrialProcess(directory / "tokenizer.json", runner.vocab_size, sorted(runner.eos))
        )
        self._count = 0
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Write pending KV blocks to disk or store, and end child processes. A second call does nothing."""
        if not self._closed:
            self._closed = True
            self._guard.close()
            self.engine.close()

    def generate(
        self,
        prompts: str | list[int] | Sequence[str | list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[Completion]:
        """Complete all prompts in one batch; return params.n completions of each prompt, in order.

        A prompt is text or a list of token ids. `params` are those of all prompts, or a sequence with those of each
        prompt. Raises EmberlineError if a prompt cannot be completed."""
        if self._closed:
            raise EngineUnavailable("this LLM object was closed", hint="create a new LLM")
        single = isinstance(prompts, str) or (bool(prompts) and isinstance(prompts[0], int))
        many: Sequence[Any] = [prompts] if single else prompts
        params_of = _expand_params(params, len(many))
        for grammar in {each.grammar for each in params_of if each.grammar is not None}:
            self._guard.check(grammar, param="grammar")
        jobs: OpenCompletions = {}
        bar = _ProgressBar(sum(each.n for each in params_of), enabled=progress and sys.stderr.isatty())
        try:
            for i, (prompt, each) in enumerate(zip(many, params_of, strict=True)):
                self._submit(i, prompt, each, jobs, bar)
            while not self.engine.idle:
                self._run_step(jobs, bar)
            bar.close()
        except BaseException:  # an invalid prompt or Ctrl-C: the other prompts are no longer needed
            for name, _ in jobs:
                self.engine.abort(name)
            # Ranks must not wait for the rest of a step: that would count as a hang. If they are lost, the next call
            # raises the error.
            with contextlib.suppress(EngineFailed):
                while not self.engine.idle:
                    self.engine.step()
            raise
        return [completion for completion, _ in jobs.values()]

    def chat(
        self, messages: Sequence[dict[str, Any]], params: SamplingParams | None = None, **template: Any
    ) -> Completion:
        if self.template is None:
            raise UnsupportedModel("this model has no chat template", hint="use LLM.generate")
        text = self.template.render(list(messages), **template)
        return self.generate([self.tokenizer.encode(text, add_special=False)], params, progress=False)[0]

    def _submit(
        self,
        prompt_index: int,
        prompt: str | list[int],
        params: SamplingParams,
        open_completions: OpenCompletions,
        progress_bar: _ProgressBar,
    ) -> None:
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        self._count += 1
        name = f"llm-{self._count}"
        submission = Submission(name, ids, params, timeout=float("inf"))
        while not self._try_add(submission):
            self._run_step(open_completions, progress_bar)
        shown = params.skip_special_tokens, params.stop, params.include_stop
        for n in range(params.n):
            text = Detokenizer(self.tokenizer, *shown, continues_prompt=True, min_tokens=params.min_tokens)
            open_completions[name, n] = Completion(prompt_index, n), text

    def _try_add(self, submission: Submission) -> bool:
        """Add the submission to the engine; return False if the engine is full, to try again later."""
        try:
            self.engine.add(submission)
        except Overloaded:
            if self.engine.idle:
                raise
            return False
        return True

    def _run_step(self, open_completions: OpenCompletions, progress_bar: _ProgressBar) -> None:
        for output in self.engine.step():
            if (
                job := open_completions.get((output.id, output.index))
            ) is not None:  # else it belongs to an earlier call that failed
                self._apply_output(output, *job)
                progress_bar.advance(len(output.tokens), output.finish is not None)

    def _apply_output(self, output: Output, completion: Completion, detokenizer: Detokenizer) -> None:
        if completion.finish_reason:
            return  # tokens that were sampled between its stop string and the abort
        if output.error is not None:
            raise EmberlineError(f"the prompt with index {completion.prompt} failed: {output.error}")
        completion.text += detokenizer.push(output.tokens)
        completion.tokens += output.tokens
        completion.logprobs += output.logprobs
        completion.cached_tokens += output.cached_tokens
        completion.prompt_logprobs = output.prompt_logprobs or completion.prompt_logprobs
        if detokenizer.matched_stop is not None:
            completion.finish_reason = FinishReason.STOP.value
            self.engine.abort_completion(output.id, output.index)
        elif output.finish is not None:
            completion.text += detokenizer.flush()
            completion.finish_reason = output.finish.value


def _expand_params(params: SamplingParams | Sequence[SamplingParams] | None, prompts: int) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * prompts
    if len(params) != prompts:
        raise InvalidRequest(f"params has {len(params)} elements; it must have one for each of {prompts} prompts")
    return params


def _load_template(directory: Path) -> ChatTemplate | None:
    try:
        return ChatTemplate.load(directory)
    except UnsupportedModel:
        return None  # generate works without one


class _ProgressBar:
    """Shows finished completions and tokens per second on one line of a terminal."""

    def __init__(self, total: int, *, enabled: bool) -> None:
        self._total, self._enabled = total, enabled
        self._done = self._tokens = 0
        self._began = self._drawn = time.monotonic()

    def advance(self, tokens: int, has_ended: bool) -> None:
        self._tokens += tokens
        self._done += has_ended
        now = time.monotonic()
        if self._enabled and (now - self._drawn > 0.1 or self._done == self._total):
            self._drawn = now
            filled = 30 * self._done // self._total
            rate = self._tokens / max(now - self._began, 1e-9)
            bar = "#" * filled + "-" * (30 - filled)
            sys.stderr.write(f"\r[{bar}] {self._done}/{self._total}  {rate:,.0f} tok/s ")
            sys.stderr.flush()

    def close(self) -> None:
        if self._enabled:
            sys.stderr.write("\n")
