"""POST /v1/completions.

    call = parse(body)                                  a Call is a CompletionCall and what only these replies need
    reply = completions_stream.Renderer(call, id, created, fingerprint)    for a stream and for a plain reply alike

Choice `prompt * n + k` is the k-th continuation of that prompt; with echo, each choice begins with a PromptDelta.
`max_tokens: 0` asks for the echo alone: the engine still makes one token, which the renderer neither shows nor counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from emberline.api.call import CompletionCall
from emberline.api.fields import Empty, Hint, ignored_fields
from emberline.api.openai.inputs import MAX_INPUTS, Inputs, each_input
from emberline.api.openai.sampling import Count, LogprobCount, RunningStreamOptions, SamplingFields
from emberline.api.parse import decode
from emberline.core.errors import InvalidRequest
from emberline.core.params import MAX_COMPLETIONS

__all__ = ["Call", "CompletionRequest", "parse"]

DEFAULT_MAX_TOKENS = 16  # OpenAI's


class CompletionRequest(SamplingFields, kw_only=True):
    prompt: Inputs
    stream_options: RunningStreamOptions | None = None
    max_tokens: Count | None = None
    logprobs: LogprobCount | None = None
    echo: bool | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_COMPLETIONS)] | None = None  # as n, or nothing
    suffix: Empty = None
    store: Hint = None
    metadata: Hint = None


@dataclass(frozen=True, slots=True)
class Call(CompletionCall):
    include_usage: bool = False
    echo_only: bool = False
    show_prompt_logprobs: bool = False


def parse(body: bytes) -> Call:
    asked = decode(body, CompletionRequest)
    ignored = ignored_fields(asked) + (asked.stream_options.ignored() if asked.stream_options else [])
    prompts = each_input(asked.prompt, "prompt")
    n = asked.n or 1
    if asked.best_of is not None and asked.best_of != n:
        raise InvalidRequest(f"best_of is {asked.best_of} and n is {n}; they must be equal", param="best_of")
    if len(prompts) * n > MAX_INPUTS:
        raise InvalidRequest(f"{len(prompts)} prompts times n={n} is over {MAX_INPUTS} choices", param="prompt")
    max_tokens = asked.limit(("max_tokens", asked.max_tokens))
    if max_tokens is None and asked.n_predict is None:  # n_predict: -1 asks for no limit
        max_tokens = DEFAULT_MAX_TOKENS
    if max_tokens == 0 and not asked.echo:
        raise InvalidRequest("max_tokens is 0, which asks for nothing without echo", param="max_tokens")
    if asked.prompt_logprobs is not None and asked.stream:
        raise InvalidRequest("prompt_logprobs cannot be streamed", param="prompt_logprobs", hint="send stream: false")
    return Call(
        caller=asked.caller(),
        prompts=prompts,
        params=asked.params(
            max_tokens=1 if max_tokens == 0 else max_tokens,
            logprobs=asked.logprobs,
            prompt_logprobs=_prompt_logprobs(asked),
        ),
        echo=bool(asked.echo),
        add_special_tokens=asked.add_special_tokens is not False,
        bad_words=asked.bad_words or (),
        truncate=asked.truncate_prompt_tokens,
        keep_first=asked.truncation_side == "right",
        return_token_ids=bool(asked.return_token_ids),
        tokens_as_ids=bool(asked.return_tokens_as_token_ids),
        unset=asked.unset(max_tokens),
        ignored=ignored,
        stream=bool(asked.stream),
        include_usage=asked.include_usage(),
        running_usage=asked.stream_options is not None and asked.stream_options.running(),
        echo_only=max_tokens == 0,
        show_prompt_logprobs=asked.prompt_logprobs is not None,
    )


def _prompt_logprobs(asked: CompletionRequest) -> int | None:
    """What the engine must compute: vLLM's prompt_logprobs, and the echoed prompt's share of logprobs."""
    wanted = [asked.prompt_logprobs, asked.logprobs if asked.echo else None]
    return max((count for count in wanted if count is not None), default=None)
