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
from pathlib import Path
from typing import IO

import msgspec

from emberline.core.errors import DeadlineExceeded, EmberlineError, EngineFailed, EngineUnavailable
from emberline.engine.messages import Refused

DEADLINE = 120.0  # for one call, including the start of the process


class Embed(msgspec.Struct, tag=True):
    inputs: list[list[int]]


class Embedded(msgspec.Struct, tag=True):
    dim: int
    vectors: bytes  # float32, one vector after the other


class EmbedderProcess:
    """`embed` blocks: call it in a thread. Calls run one at a time."""

    def __init__(self, directory: Path, threads: int) -> None:
        self._command = [sys.executable, "-m", "emberline.engine.embedder", str(directory), str(threads)]
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._stopped = False

    def embed(self, inputs: list[list[int]]) -> list[array[float]]:
        with self._lock:
            process = self._running()
            timer = threading.Timer(DEADLINE, process.kill)
            timer.start()
            try:
                assert process.stdin and process.stdout
                _write(process.stdin, Embed(inputs))
                answer = _read(process.stdout)
            except (BrokenPipeError, EOFError) as e:
                process.kill()
                process.wait()
                if timer.finished.is_set():
                    raise DeadlineExceeded(
                        f"the embedder did not answer within {DEADLINE:.0f} s", hint="send fewer inputs at once"
                    ) from e
                raise EngineFailed("the embedder process died", hint="send the request again") from e
            finally:
                timer.cancel()
        if isinstance(answer, Refused):
            raise answer.error()
        assert isinstance(answer, Embedded)
        flat = array("f")
        flat.frombytes(answer.vectors)
        return [flat[i : i + answer.dim] for i in range(0, len(flat), answer.dim)]

    def stop(self) -> None:
        """End the process. Open and waiting calls fail, and later ones raise EngineUnavailable."""
        self._stopped = True
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._stopped:
            raise EngineUnavailable("the server is shutting down")
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        return self._process


def _write(pipe: IO[bytes], message: Embed | Embedded | Refused) -> None:
    body = msgspec.msgpack.encode(message)
    pipe.write(len(body).to_bytes(4, "little") + body)
    pipe.flush()


def _read(pipe: IO[bytes]) -> Embed | Embedded | Refused:
    return _DECODER.decode(_exactly(pipe, int.from_bytes(_exactly(pipe, 4), "little")))


def _exactly(pipe: IO[bytes], size: int) -> bytes:
    data = pipe.read(size)
    if len(data) < size:  # the other process died, possibly in the middle of a message
        raise EOFError
    return data


_DECODER: msgspec.msgpack.Decoder[Embed | Embedded | Refused] = msgspec.msgpack.Decoder(Embed | Embedded | Refused)


def main() -> int:
    import torch

    from emberline.models.bert import Embedder

    torch.set_num_threads(int(sys.argv[2]))
    model: Embedder | None = None
    with contextlib.suppress(EOFError, BrokenPipeError, KeyboardInterrupt):
        while True:
            request = _read(sys.stdin.buffer)
            assert isinstance(request, Embed)
            try:  # errors of the model's files are part of the reply
                model = model or Embedder.load(Path(sys.argv[1]))
                vectors = model.embed(request.inputs)
                _write(sys.stdout.buffer, Embedded(model.dim, vectors.numpy().tobytes()))
            except EmberlineError as e:
                _write(sys.stdout.buffer, Refused.of("", e))
    return 0


if __name__ == "__main__":
    sys.exit(main())
