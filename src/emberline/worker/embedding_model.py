"""EmbeddingModel: converts texts to vectors, in a process of its own."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path

from emberline.api.call import EmbeddingCall
from emberline.core.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound
from emberline.core.fair_threads import FairThreads
from emberline.core.jsonfile import read_object_if_exists
from emberline.engine.embedder import EmbedderProcess
from emberline.tokens.tokenizer import Tokenizer
from emberline.worker.protocols import MAX_CHARS_PER_TOKEN


class EmbeddingModel:
    def __init__(self, name: str, directory: Path, threads: int) -> None:
        config = read_object_if_exists(directory / "config.json")
        self.name = name
        self.directory = directory
        self.dim = int(config.get("hidden_size", 0))
        longest = read_object_if_exists(directory / "sentence_bert_config.json").get("max_seq_length")
        self.max_tokens = int(longest or config.get("max_position_embeddings", 512))
        self._tokenizer = Tokenizer.load(directory)
        self._process = EmbedderProcess(directory, threads)
        self._tokenizer_threads = FairThreads("texts for embeddings", 2)
        self._threads = FairThreads("embeddings", 1)  # the process handles one call at a time

    async def embed(self, call: EmbeddingCall) -> tuple[Sequence[Sequence[float]], int]:
        """Return a vector with a norm of 1 for each input, and the number of tokens of all inputs.

        Raises ModelNotFound or ContextLengthExceeded.
        """
        if call.common.model.removesuffix(":latest") not in ("", self.name):
            raise ModelNotFound(
                f"embedding model {call.common.model[:200]!r} not found",
                param="model",
                hint=f"the server's embedding model is {self.name!r}",
            )
        if call.dimensions is not None and not 1 <= call.dimensions <= self.dim:
            what = f"dimensions is {call.dimensions}; it must be in [1, {self.dim}]"
            raise InvalidRequest(what, param="dimensions")
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
        vectors: Sequence[array[float]] = await self._threads.run(tenant, self._process.embed, ids)
        if call.dimensions is not None and call.dimensions < self.dim:
            vectors = [_normalize(vector[: call.dimensions]) for vector in vectors]
        return vectors, sum(len(tokens) for tokens in ids)

    def stop(self) -> None:
        self._tokenizer_threads.close()
        self._threads.close()
        self._process.stop()


def _normalize(vector: array[float]) -> array[float]:
    norm = sum(v * v for v in vector) ** 0.5 or 1.0
    return array("f", (v / norm for v in vector))
