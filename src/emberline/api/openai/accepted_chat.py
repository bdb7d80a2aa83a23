"""Fields that the server accepts and ignores in requests with messages, besides those of accepted.py."""

from __future__ import annotations

from typing import Annotated, Any

from emberline.api.fields import IgnoredField, OnlyEmpty, accepts_only
from emberline.api.openai.accepted import OnlyTrue
from emberline.api.openai.sampling import SamplingFields


class ChatFields(SamplingFields, kw_only=True):
    store: IgnoredField = None  # no endpoint reads a stored chat
    verbosity: IgnoredField = None
    web_search_options: IgnoredField = None  # a tool that OpenAI hosts
    modalities: Annotated[Any, accepts_only(["text"])] = None
    best_of: Annotated[Any, accepts_only(1)] = None
    documents: OnlyEmpty = None
    mm_processor_kwargs: OnlyEmpty = None
    media_io_kwargs: OnlyEmpty = None
    separate_reasoning: OnlyTrue = None
    stream_reasoning: OnlyTrue = None
    parse_tool_calls: OnlyTrue = None
    reasoning_format: Annotated[Any, accepts_only("auto", "deepseek")] = None
