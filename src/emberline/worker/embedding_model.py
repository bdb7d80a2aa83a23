"""EmbeddingModel: converts texts to vectors, in a process of its own.

The texts of a call are computed in batches of few tokens. The API keys take turns with their batches.
"""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

from emberline.api.call import EmbeddingCall
from emberline.core.errors import ContextLengthExceeded, DeadlineExceeded, InvalidRequest, ModelNotFound
from emberline.core.fair_threads import FairThreads
from emberline.core.jsonfile import read_object_if_exists
from emberline.engine.embedder import EmbedderProcess
from emberline.hub.model_lock import hold_model
from emberline.tokens.tokenizer import Tokenizer
from emberline.worker.protocols import MAX_CHARS_PER_TOKEN

MAX_BATCH_TOKENS = 1024  # of about a second on a slow CPU, for which other keys wait; 360 take 1.5 times the CPU time


class EmbeddingModel:
    def __init__(
        self, name: str, directory: Path, threads: int, timeout: float = math.inf, description: str = ""
    ) -> None:
        """`timeout`: the time limit of a call in seconds. `description`: of the model, for its users."""
        config = read_object_if_exists(directory / "config.json")
        self.name, self.description = name, description
        self.directory = directory
        self.dim = int(config.get("hidden_size", 0))
        longest = read_object_if_exists(directory / "sentence_bert_config.json").get("max_seq_length")
        self.max_tokens = int(longest or config.get("max_position_embeddings", 512))
        self._tokenizer = Tokenizer.load(directory)
        self._process = EmbedderProcess(directory, threads)
        self._tokenizer_threads = FairThreads("texts for embeddings", 2)
        self._threads = FairThreads("embeddings", 1)  # the process computes one batch at a time
        self._timeout = timeout
        self._held = hold_model(directory)

    async def embed(self, call: EmbeddingCall) -> tuple[Sequence[Sequence[float]], int]:
        """Return a vector with a norm of 1 for each input, and the number of tokens of all inputs.

        Raises ModelNotFound, ContextLengthExceeded or DeadlineExceeded.
        """
        check_embedding_call(call, self.name, self.dim)
        try:
            async with asyncio.timeout(None if math.isinf(self._timeout) else self._timeout):
                return await self._embed(call)
        except TimeoutError as e:
            raise DeadlineExceeded(
                f"the embeddings were not computed within {self._timeout:g} s", hint="send fewer inputs at once"
            ) from e

    async def _embed(self, call: EmbeddingCall) -> tuple[Sequence[Sequence[float]], int]:
        tenant = call.common.tenant
        max_chars = self.max_tokens * MAX_CHARS_PER_TOKEN
        texts = [text[:max_chars] for text in call.inputs] if call.truncates else list(call.inputs)
        for i, text in enumerate(texts):
            if len(text) > max_chars:
                raise ContextLengthExceeded(
                    f"input[{i}] has {len(text)} characters; the limit of the model is {self.max_tokens} tokens",
                    param="input",
                    hint="shorten the text",
                )
        ids = await self._tokenizer_threads.run(tenant, self._tokenizer.encode_batch, texts)
        if call.truncates:  # the last token ends the text
            ids = [t if len(t) <= self.max_tokens else [*t[: self.max_tokens - 1], t[-1]] for t in ids]
        for i, tokens in enumerate(ids):
            if len(tokens) > self.max_tokens:
                raise ContextLengthExceeded(
                    f"input[{i}] has {len(tokens)} tokens; the limit of the model is {self.max_tokens}",
                    param="input",
                    hint="shorten the text",
                )
        vectors: list[array[float]] = []
        for batch in split_into_batches(ids):
            vectors += await self._threads.run(tenant, self._process.embed, batch)
        if call.dimensions is not None and call.dimensions < self.dim:
            vectors = [_normalize(vector[: call.dimensions]) for vector in vectors]
        return vectors, sum(len(tokens) for tokens in ids)

    def stop(self) -> None:
        self._tokenizer_threads.close()
        self._threads.close()
        self._process.stop()
        self._held.close()


def check_embedding_call(call: EmbeddingCall, name: str, dim: int) -> None:
    """Raise ModelNotFound or InvalidRequest if the model with this name and vector length cannot serve the call."""
    if call.common.model.removesuffix(":latest") not in ("", name):
        raise ModelNotFound(
            f"embedding model {call.common.model[:200]!r} not found",
            param="model",
            hint=f"the server's embedding model is {name!r}",
        )
    if call.dimensions is not None and not 1 <= call.dimensions <= dim:
        what = f"dimensions is {call.dimensions}; it must be in [1, {dim}]"
        raise InvalidRequest(what, param="dimensions")


def split_into_batches(inputs: Sequence[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
    """Yield the inputs in order, in batches of at most MAX_BATCH_TOKENS tokens or of one input."""
    batch: list[Sequence[int]] = []
    num_tokens = 0
    for tokens in inputs:
        if batch and num_tokens + len(tokens) > MAX_BATCH_TOKENS:
            yield batch
            batch, num_tokens = [], 0
        batch.append(tokens)
        num_tokens += len(tokens)
    if batch:
        yield batch


def _normalize(vector: array[float]) -> array[float]:
    norm = sum(v * v for v in vector) ** 0.5 or 1.0
    return array("f", (v / norm for v in vector))
