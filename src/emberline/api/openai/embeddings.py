"""Requests and replies of POST /v1/embeddings.

call = parse(body)
reply = render(call, vectors, prompt_tokens, model)    # one vector of length call.dimensions per input
"""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta

from emberline.api.call import CommonFields, EmbeddingCall
from emberline.api.openai.inputs import Inputs, list_inputs
from emberline.api.openai.sampling import ModelName
from emberline.api.parse import WireStruct, decode_request
from emberline.core.errors import InvalidRequest


class EmbeddingRequest(WireStruct):
    input: Inputs
    model: ModelName | None = None  # None: the server's embedding model
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=1 << 20)] | None = None
    user: str | None = None


def parse(body: bytes) -> EmbeddingCall:
    request, ignored = decode_request(body, EmbeddingRequest)
    return EmbeddingCall(
        common=CommonFields(request.model or "", user=request.user),
        inputs=_list_texts(request.input),
        dimensions=request.dimensions,
        encoding=request.encoding_format or "float",
        ignored=ignored,
    )


def _list_texts(inputs: Inputs) -> list[str]:
    """Return the texts to embed. Raises InvalidRequest for token ids.

    Clients count tokens with the vocabulary of OpenAI's models. In the embedder's vocabulary the same ids are other
    words, and nothing in a request says which vocabulary its ids are of.
    """
    texts = list_inputs(inputs, "input")
    if not all(isinstance(text, str) for text in texts):
        raise InvalidRequest(
            "input has token ids, which may be of another model's vocabulary",
            param="input",
            hint="send texts; in LangChain, set check_embedding_ctx_length=False",
        )
    return [text for text in texts if isinstance(text, str)]


def render(call: EmbeddingCall, vectors: Sequence[Iterable[float]], prompt_tokens: int, model: str) -> dict[str, Any]:
    assert len(vectors) == len(call.inputs), "the number of vectors differs from the number of inputs"
    encode = _encode_base64 if call.encoding == "base64" else _to_float_list
    return {
        "object": "list",
        "model": model,
        "data": [{"object": "embedding", "index": i, "embedding": encode(vector)} for i, vector in enumerate(vectors)],
        "usage": {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens},
    }


def _to_float_list(vector: Iterable[float]) -> list[float]:
    return [float(value) for value in vector]


def _encode_base64(vector: Iterable[float]) -> str:
    """Return the vector as base64 of little-endian float32 numbers, as OpenAI's clients expect."""
    values = array("f", vector)
    if sys.byteorder == "big":
        values.byteswap()
    return base64.b64encode(values.tobytes()).decode()
