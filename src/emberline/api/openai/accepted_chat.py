"""The fields without effect of requests with messages, beside those of every request (`accepted.py`)."""

from __future__ import annotations

from typing import Annotated, Any

from emberline.api.fields import Empty, Hint, only
from emberline.api.openai.accepted import On
from emberline.api.openai.sampling import SamplingFields


class ChatFields(SamplingFields, kw_only=True):
    store: Hint = None  # there is nowhere to look a stored chat up
    verbosity: Hint = None
    prediction: Hint = None  # it would speed the answer up, and not change it
    modalities: Annotated[Any, only(["text"])] = None
    best_of: Annotated[Any, only(1)] = None
    documents: Empty = None
    mm_processor_kwargs: Empty = None
    media_io_kwargs: Empty = None
    separate_reasoning: On = None
    stream_reasoning: On = None
    parse_tool_calls: On = None
    reasoning_format: Annotated[Any, only("auto", "deepseek")] = None
