"""Messages between the engine process and the server process: 4 bytes of length, then MessagePack."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from emberline.core import errors
from emberline.core.engine_config import EngineConfig, TimeSharingConfig
from emberline.core.errors import EmberlineError
from emberline.core.events import Output, SleepStats, Stats
from emberline.core.numerics import Numerics
from emberline.core.request import Submission
from emberline.engine.rank_summary import RankSummary


class StartEngine(msgspec.Struct, tag=True):
    models: dict[str, EngineConfig]
    rules: TimeSharingConfig


class Submit(msgspec.Struct, tag=True):
    submission: Submission


class Abort(msgspec.Struct, tag=True):
    id: str
    index: int | None = None  # which of the n completions; None: all


class SetPeers(msgspec.Struct, tag=True):
    """Tells a model's engine which engines to connect to from now on. It disconnects from all others."""

    model: str
    peers: list[dict[str, Any]]  # in the form of LoadedModelInfo.peer


class WatchBlocks(msgspec.Struct, tag=True):
    """Asks for reports of all changes of cached KV blocks from now on."""


class SetAsleep(msgspec.Struct, tag=True):
    """Puts all models without open requests to sleep, or wakes models while there is memory for them.

    A request for a sleeping model wakes it too."""

    on: bool


class LoadedModelInfo(msgspec.Struct):
    """Properties of a loaded model."""

    max_context: int
    vocab_size: int
    eos: list[int]
    kv_tokens: int  # that fit if all requests are short
    block_size: int
    weight_bytes: int
    kv_bytes: int
    kernels: str
    layout: str  # of its KV blocks
    max_running: int
    seconds: dict[str, float]
    peer: dict[str, Any] | None = None  # kv.transfer.ticket.Peer: how other engines reach its blocks
    device: str = "cpu"  # or cuda
    kv_dtype: str = ""  # torch's name of the KV cache's dtype
    prefix_cache: bool = True
    numerics: Numerics | None = None
    stored_dtype: str = ""  # of the matrices in the checkpoint's files, or their format if they are quantised
    full_context: int = 0  # the model's context in tokens, if the default context is shorter; else 0
    speculates: bool = False  # drafts tokens, for example from the prediction of a request
    kv_groups: int = 1  # groups of layers, each with a block table of its own
    ranks: tuple[RankSummary, ...] = ()  # among which the model is divided; empty: it is not
    kv_contexts: float = 0.0  # requests of `max_context` tokens that the KV cache holds at the same time


class Ready(msgspec.Struct, tag=True):
    models: dict[str, LoadedModelInfo]


# Short form of an Output with tokens and drafts only: id, index, tokens, drafted and accepted tokens.
NewTokens = tuple[str, int, list[int], int, int]


class EngineUpdate(msgspec.Struct, tag=True):
    model: str
    outputs: list[Output | NewTokens]
    stats: Stats


def compact_outputs(outputs: list[Output]) -> list[Output | NewTokens]:
    """Return the outputs, and replace those that have only tokens and drafts by the short form NewTokens."""
    return [
        (o.id, o.index, o.tokens, o.drafted_tokens, o.accepted_tokens)
        if o.timing is None and not o.logprobs and o.finish is None and o.ticket is None and o.prompt_logprobs is None
        else o
        for o in outputs
    ]


class ComputeProgress(msgspec.Struct, tag=True):
    """Reports that the process is computing, even if its current step has not ended yet."""


class SleepStateChange(msgspec.Struct, tag=True):
    """Reports that a model fell asleep or woke. At the start, one is sent for each model before Ready."""

    model: str
    awake: bool
    turns: SleepStats


class PairingChange(msgspec.Struct, tag=True):
    """Reports which peer engines a model's engine is now connected to.

    A peer is identified by its incarnation, the id of one run of its process."""

    model: str
    paired: list[str]
    refused: dict[str, str]  # incarnations that it cannot connect to, and why


class BlockChanges(msgspec.Struct, tag=True):
    """Changes of a model's cached KV blocks, in order. They are sent only after WatchBlocks."""

    model: str
    whole: bool  # `stored` lists all cached blocks and replaces earlier ones
    stored: list[tuple[bytes, bytes]]  # block hash, hash of the block before it
    removed: list[bytes]


class Rejection(msgspec.Struct, tag=True):
    """The error of a rejected submission, or, if `id` is "", of an engine that could not start."""

    id: str
    code: str
    message: str
    param: str | None = None
    hint: str | None = None
    retry_after: int = 1  # seconds, for Overloaded

    @staticmethod
    def from_error(submission_id: str, error: EmberlineError) -> Rejection:
        retry_after = error.retry_after if isinstance(error, errors.Overloaded) else 1
        return Rejection(submission_id, error.code, error.message, error.param, error.hint, retry_after)

    def to_error(self) -> EmberlineError:
        kind = _ERROR_BY_CODE.get(self.code, EmberlineError)
        if kind is errors.Overloaded:
            return errors.Overloaded(self.message, retry_after=self.retry_after, hint=self.hint)
        return kind(self.message, param=self.param, hint=self.hint)


EngineMessage = (
    StartEngine
    | Submit
    | Abort
    | SetPeers
    | WatchBlocks
    | SetAsleep
    | Ready
    | EngineUpdate
    | ComputeProgress
    | SleepStateChange
    | PairingChange
    | BlockChanges
    | Rejection
)


def _error_classes(kind: type[EmberlineError]) -> Iterator[type[EmberlineError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _error_classes(child)


_ERROR_BY_CODE = {kind.code: kind for kind in _error_classes(EmberlineError)}
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(EngineMessage)


def encode_message(message: EngineMessage) -> bytes:
    body = _ENCODER.encode(message)
    return len(body).to_bytes(4, "little") + body


class EngineMessageDecoder:
    """Splits received bytes into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[EngineMessage]:
        self._buffer += data
        while len(self._buffer) >= 4:
            end = 4 + int.from_bytes(self._buffer[:4], "little")
            if len(self._buffer) < end:
                break
            yield _DECODER.decode(memoryview(self._buffer)[4:end].tobytes())
            del self._buffer[:end]
