"""Fields without effect of requests with messages, in addition to those of every request (`accepted.py`)."""

from __future__ import annotations

from typing import Annotated, Any

from emberline.api.fields import Empty, Hint, only
from emberline.api.openai.accepted import On
from emberline.api.openai.sampling import SamplingFields


class ChatFields(SamplingFields, kw_only=True):
    store: Hint = None  # no endpoint reads a stored chat
    verbosity: Hint = None
    prediction: Hint = None  # would only speed up the answer
    modalities: Annotated[Any, only(["text"])] = None
    best_of: Annotated[Any, only(1)] = None
    documents: Empty = None
    mm_processor_kwargs: Empty = None
    media_io_kwargs: Empty = None
    separate_reasoning: On = None
    stream_reasoning: On = None
    parse_tool_calls: On = None
    reasoning_format: Annotated[Any, only("auto", "deepseek")] = None
