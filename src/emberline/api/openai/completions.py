"""Requests of POST /v1/completions.

    call = parse(body)
    writer = completions_stream.CompletionReplyWriter(call, id, created, fingerprint)

With several prompts, the choice with index `i * n + k` is the k-th completion of prompt i. With `echo`, each choice
begins with a PromptDelta. `max_tokens: 0` asks for only the echoed prompt: the engine still generates one token,
which the writer neither sends nor counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from emberline.api.call import CompletionCall
from emberline.api.fields import IgnoredField, OnlyEmpty
from emberline.api.openai.generation_fields import build_generation_fields
from emberline.api.openai.inputs import MAX_INPUTS_PER_REQUEST, Inputs, list_inputs
from emberline.api.openai.sampling import Count, LogprobCount, SamplingFields, UsageStreamOptions
from emberline.api.parse import decode_request
from emberline.core.errors import InvalidRequest
from emberline.core.params import MAX_COMPLETIONS

__all__ = ["CompletionRequest", "OpenAICompletionCall", "parse"]

DEFAULT_MAX_TOKENS = 16  # OpenAI's default


class CompletionRequest(SamplingFields, kw_only=True):
    prompt: Inputs
    stream_options: UsageStreamOptions | None = None
    max_tokens: Count | None = None
    logprobs: LogprobCount | None = None
    echo: bool | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_COMPLETIONS)] | None = None  # must equal n
    suffix: OnlyEmpty = None
    store: IgnoredField = None
    metadata: IgnoredField = None


@dataclass(frozen=True, slots=True)
class OpenAICompletionCall(CompletionCall):
    includes_usage: bool = False
    echoes_only: bool = False
    shows_prompt_logprobs: bool = False


def parse(body: bytes) -> OpenAICompletionCall:
    request, ignored = decode_request(body, CompletionRequest)
    prompts = list_inputs(request.prompt, "prompt")
    n = request.n or 1
    if request.best_of is not None and request.best_of != n:
        what = f"best_of is {request.best_of} and n is {n}; they must be equal"
        raise InvalidRequest(what, param="best_of", hint="remove best_of")
    if len(prompts) * n > MAX_INPUTS_PER_REQUEST:
        choices = f"prompt has {len(prompts)} entries and n is {n}: {len(prompts) * n} choices"
        what = f"{choices}; the limit is {MAX_INPUTS_PER_REQUEST}"
        raise InvalidRequest(what, param="prompt", hint="split the request")
    max_tokens = request.resolve_max_tokens(("max_tokens", request.max_tokens))
    if max_tokens is None and request.n_predict is None:  # n_predict: -1 means no limit
        max_tokens = max(DEFAULT_MAX_TOKENS, request.min_tokens or 0)
    if max_tokens == 0 and not request.echo:
        hint = "send max_tokens of 1 or more, or echo: true"
        raise InvalidRequest("max_tokens is 0 without echo: nothing to return", param="max_tokens", hint=hint)
    return OpenAICompletionCall(
        **build_generation_fields(request, request.stream_options, max_tokens, ignored),
        common=request.build_common_fields(),
        prompts=prompts,
        params=request.build_sampling_params(
            max_tokens=1 if max_tokens == 0 else max_tokens,
            logprobs=request.logprobs,
            prompt_logprobs=_resolve_prompt_logprobs(request),
        ),
        echo=bool(request.echo),
        add_special_tokens=request.add_special_tokens is not False,
        echoes_only=max_tokens == 0,
        shows_prompt_logprobs=request.prompt_logprobs is not None,
    )


def _resolve_prompt_logprobs(request: CompletionRequest) -> int | None:
    """Return the number of logprobs per prompt token, from `prompt_logprobs` or `logprobs` with `echo`."""
    counts = [request.prompt_logprobs, request.logprobs if request.echo else None]
    return max((count for count in counts if count is not None), default=None)
