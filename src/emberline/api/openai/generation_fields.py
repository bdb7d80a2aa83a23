"""Builds the fields of a call that are the same for chat completions and text completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from emberline.api.fields import IgnoredFields
from emberline.api.openai.sampling import SamplingFields, UsageStreamOptions
from emberline.core.errors import InvalidRequest


class GenerationFields(TypedDict):
    """The keyword arguments that the constructors of OpenAIChatCall and OpenAICompletionCall both take."""

    bad_words: Sequence[str]
    truncate_prompt_tokens: int | None
    keeps_first_tokens: bool
    return_token_ids: bool
    tokens_as_ids: bool
    unset_params: frozenset[str]
    ignored: IgnoredFields
    stream: bool
    includes_usage: bool
    running_usage: bool


def build_generation_fields(
    request: SamplingFields,
    stream_options: UsageStreamOptions | None,
    max_tokens: int | None,
    ignored: IgnoredFields,
) -> GenerationFields:
    """Return the call's fields, read from the request.

    Raises InvalidRequest for prompt_logprobs in a stream and for stream_options without a stream."""
    if request.prompt_logprobs is not None and request.stream:
        what = "prompt_logprobs is not supported for streams"
        raise InvalidRequest(what, param="prompt_logprobs", hint="send stream: false")
    return GenerationFields(
        bad_words=request.bad_words or (),
        truncate_prompt_tokens=request.truncate_prompt_tokens,
        keeps_first_tokens=request.truncation_side == "right",
        return_token_ids=bool(request.return_token_ids),
        tokens_as_ids=bool(request.return_tokens_as_token_ids),
        unset_params=request.list_unset_params(max_tokens),
        ignored=ignored.with_known(stream_options.find_ignored_fields() if stream_options else ()),
        stream=bool(request.stream),
        includes_usage=request.returns_usage(),
        running_usage=stream_options is not None and stream_options.reports_running_usage(),
    )
