"""EmbedderProcess: runs the embedding model in its own process, so that it does not delay generation.

The process is started by the first call.

    python -m emberline.engine.embedder DIRECTORY THREADS
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import msgspec

from emberline.core.errors import DeadlineExceeded, EmberlineError, EngineFailed, EngineUnavailable
from emberline.engine.messages import Rejection

CALL_TIMEOUT_S = 120.0  # for one batch, including the start of the process


class EmbedRequest(msgspec.Struct, tag=True):
    inputs: Sequence[Sequence[int]]


class EmbedReply(msgspec.Struct, tag=True):
    dim: int
    vectors: bytes  # float32, one vector after the other


class EmbedderProcess:
    """Computes embeddings in a child process, one call at a time. `embed` blocks, so call it in a thread."""

    def __init__(self, directory: Path, threads: int) -> None:
        self._command = [sys.executable, "-m", "emberline.engine.embedder", str(directory), str(threads)]
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._is_stopped = False

    def embed(self, inputs: Sequence[Sequence[int]]) -> list[array[float]]:
        with self._lock:
            process = self._ensure_running()
            timer = threading.Timer(CALL_TIMEOUT_S, process.kill)
            timer.start()
            try:
                assert process.stdin and process.stdout
                _write_message(process.stdin, EmbedRequest(inputs))
                answer = _read_message(process.stdout)
            except (BrokenPipeError, EOFError) as e:
                process.kill()
                process.wait()
                if timer.finished.is_set():
                    raise DeadlineExceeded(
                        f"the process that computes embeddings did not answer within {CALL_TIMEOUT_S:.0f} s",
                        hint="send the request again",
                    ) from e
                raise EngineFailed("the process that computes embeddings died", hint="send the request again") from e
            finally:
                timer.cancel()
        if isinstance(answer, Rejection):
            raise answer.to_error()
        assert isinstance(answer, EmbedReply)
        flat = array("f")
        flat.frombytes(answer.vectors)
        return [flat[i : i + answer.dim] for i in range(0, len(flat), answer.dim)]

    def stop(self) -> None:
        """End the process. Open and waiting calls fail, and later calls raise EngineUnavailable."""
        self._is_stopped = True
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _ensure_running(self) -> subprocess.Popen[bytes]:
        if self._is_stopped:
            raise EngineUnavailable("the server is shutting down")
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        return self._process


def _write_message(pipe: IO[bytes], message: EmbedRequest | EmbedReply | Rejection) -> None:
    body = msgspec.msgpack.encode(message)
    pipe.write(len(body).to_bytes(4, "little") + body)
    pipe.flush()


def _read_message(pipe: IO[bytes]) -> EmbedRequest | EmbedReply | Rejection:
    return _DECODER.decode(_read_exactly(pipe, int.from_bytes(_read_exactly(pipe, 4), "little")))


def _read_exactly(pipe: IO[bytes], size: int) -> bytes:
    data = pipe.read(size)
    if len(data) < size:  # the other process died, possibly in the middle of a message
        raise EOFError
    return data


_DECODER: msgspec.msgpack.Decoder[EmbedRequest | EmbedReply | Rejection] = msgspec.msgpack.Decoder(
    EmbedRequest | EmbedReply | Rejection
)


def main() -> int:
    import torch

    from emberline.models.bert import BertEmbedder

    torch.set_num_threads(int(sys.argv[2]))
    model: BertEmbedder | None = None
    with contextlib.suppress(EOFError, BrokenPipeError, KeyboardInterrupt):
        while True:
            request = _read_message(sys.stdin.buffer)
            assert isinstance(request, EmbedRequest)
            try:  # errors of the model's files are part of the reply
                model = model or BertEmbedder.load(Path(sys.argv[1]))
                vectors = model.embed(request.inputs)
                _write_message(sys.stdout.buffer, EmbedReply(model.dim, vectors.numpy().tobytes()))
            except EmberlineError as e:
                _write_message(sys.stdout.buffer, Rejection.from_error("", e))
    return 0


if __name__ == "__main__":
    sys.exit(main())
