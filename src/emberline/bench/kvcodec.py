"""`emberline bench kv-codec`: keys and values of a real prompt: their size coded, the codec's speed, and the links on
which coding them is faster.

The links are token buckets between two network namespaces, where these can be made, and loopback. The sender is another
process; both run on this machine's cores.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch
from numpy.typing import NDArray

from emberline.bench.asked import Ask, asked
from emberline.bench.narrow import Far, NotAllowed, narrow
from emberline.bench.report import Report
from emberline.core.config import EngineConfig
from emberline.core.errors import InvalidRequest
from emberline.core.params import SamplingParams
from emberline.core.request import Submission
from emberline.engine.boot import boot
from emberline.hub.source import resolve
from emberline.kernels.cpu.library import find_library
from emberline.kv.checksum import crc_of
from emberline.kv.codec import Codec, codec_of
from emberline.kv.transfer.layout import Layout
from emberline.kv.transfer.link import Habits
from emberline.kv.transfer.pace import AGAIN
from emberline.kv.transfer.receiver import Receiver
from emberline.kv.transfer.region import HostRegion
from emberline.kv.transfer.sender import Sender
from emberline.kv.transfer.tcp import TcpTransport, serve_tcp
from emberline.kv.transfer.ticket import Ticket
from emberline.tokens.tokenizer import Tokenizer

Elements = NDArray[np.uint16]
LEASE = DEADLINE = 120.0  # seconds
STREAMS = 2


def bench(name: str, tokens: int, gigabits: list[float], rounds: int) -> Report:
    keys, values = _sample(resolve(name), tokens)
    codec = codec_of("auto", find_library(), "bfloat16")
    if codec is None:
        raise InvalidRequest("there is no native library to measure", hint="install g++")
    report = Report("kv-codec", {"model": name, "tokens": tokens, "rounds": rounds, "streams": STREAMS})
    for part, what in ((keys, "keys"), (values, "values")):
        size = len(_encoded(codec, part)) * 8 / part.size
        report.add(f"{what}_bits_per_value", size, "bit", peer=16.0, limit=_bound(part))
    both = np.stack([keys, values], 1)
    report.add("wire_bits_per_value", len(_encoded(codec, both)) * 8 / both.size, "bit", peer=16.0)
    _speeds(report, codec, both, rounds)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kv.npy"
        np.save(file, both)
        for rate in [*gigabits, 0.0]:
            _link(report, file, codec, rate, rounds)
    return report


def _sample(model: Path, tokens: int) -> tuple[Elements, Elements]:
    """[layers, blocks, heads, tokens, dim] of a prompt of Python's own manual, as bfloat16."""
    loaded = boot(EngineConfig(str(model), device="cpu", kv_dtype="bfloat16", kv_memory=1 << 29))
    text = "\n\n".join(topics[name] for name in sorted(topics))
    prompt = Tokenizer.load(model).encode(text)[:tokens]
    if len(prompt) < tokens:
        raise InvalidRequest(f"the text has {len(prompt)} tokens", param="tokens")
    loaded.engine.add(Submission("sample", prompt, SamplingParams(max_tokens=1, temperature=0.0)))
    while not loaded.engine.idle:
        loaded.engine.step()
    cache = loaded.engine.runner.cache  # type: ignore[attr-defined]
    parts = [half.view(torch.int16).numpy().view(np.uint16) for half in (cache.keys, cache.values)]
    used = [block for block in range(cache.num_blocks) if parts[0][:, block].any()][: tokens // cache.shape.block_size]
    return parts[0][:, used], parts[1][:, used]


def _bound(part: Elements) -> float:
    """Bits a value that no code can go below which knows how often signs, exponents and mantissas occur in a layer."""
    fields = ((part >> 15).astype(np.int64), (part >> 7 & 255).astype(np.int64), (part & 127).astype(np.int64))
    return sum(float(np.mean([_entropy(layer) for layer in field])) for field in fields)


def _entropy(symbols: NDArray[np.int64]) -> float:
    counts = np.bincount(symbols.ravel())
    share = counts[counts > 0] / symbols.size
    return float(-(share * np.log2(share)).sum())


def _bytes(data: Elements) -> memoryview:
    return np.ascontiguousarray(data).reshape(-1).view(np.uint8).data


def _encoded(codec: Codec, data: Elements) -> memoryview:
    plain = _bytes(data)
    room = memoryview(bytearray(codec.room(len(plain))))
    return room[: codec.encode(plain, room)]


def _speeds(report: Report, codec: Codec, data: Elements, rounds: int) -> None:
    plain = _bytes(data)
    room, out = (memoryview(bytearray(size)) for size in (codec.room(len(plain)), len(plain)))
    coded = room[: codec.encode(plain, room)]
    copy = max(_rates(lambda: np.copyto(np.frombuffer(out, np.uint8), np.frombuffer(plain, np.uint8)), plain, rounds))
    report.add("encode", _rates(lambda: codec.encode(plain, room), plain, rounds), "GB/s", limit=copy)
    report.add("decode", _rates(lambda: codec.decode(coded, out), plain, rounds), "GB/s", limit=copy)
    if out != plain:
        raise RuntimeError("what was decoded is not what was encoded")


def _rates(call: Callable[[], object], data: memoryview, rounds: int) -> list[float]:
    call()
    found = []
    for _ in range(rounds):
        began = time.perf_counter()
        call()
        found.append(len(data) / 1e9 / (time.perf_counter() - began))
    return found


# -- links -------------------------------------------------------------------------------------------------------------


def _link(report: Report, file: Path, codec: Codec, gigabits: float, rounds: int) -> None:
    """GB of keys and values a second over one link: as they are, coded, and as the link itself chooses."""
    name = f"link_{gigabits:g}gbit" if gigabits else "link_loopback"
    try:
        with narrow(gigabits) if gigabits else nullcontext() as far, asked(_serve, file, far) as ask:
            plain = _pulls(file, Habits(streams=STREAMS), rounds + 1, ask)[1:]  # the first touches the memory
            coded = _pulls(file, Habits(streams=STREAMS, codecs=[codec], always=True), rounds + 1, ask)[1:]
            chosen = _pulls(file, Habits(streams=STREAMS, codecs=[codec]), rounds + 2, ask)[2:]  # of each kind one
    except NotAllowed as error:
        report.config[name] = f"not measured: {error}"
        return
    limit = gigabits / 8 or None
    median = sorted(plain)[len(plain) // 2]
    report.add(f"{name}_plain", plain, "GB/s", limit=limit)
    report.add(f"{name}_coded", coded, "GB/s", peer=median, limit=limit)
    report.add(f"{name}_auto", chosen, "GB/s", peer=median, limit=limit)


def _pulls(file: Path, habits: Habits, rounds: int, ask: Ask) -> list[float]:
    assert rounds < AGAIN
    region = _region(np.zeros_like(np.load(file, mmap_mode="r")))
    crc = crc_of(find_library())
    habits = Habits(habits.streams, codecs=habits.codecs, always=habits.always, crc=crc)
    receiver, found = Receiver(region, [TcpTransport(region.layout, habits)]), []
    for _ in range(rounds):
        ticket, deadline = Ticket.parsed(ask("publish")), time.monotonic() + DEADLINE
        receiver.pair(ticket.peer, deadline)
        began = time.perf_counter()
        progress = receiver.pull(ticket, range(region.blocks), deadline)
        found.append(progress.bytes / 1e9 / (time.perf_counter() - began))
        receiver.acknowledge(ticket, deadline)
    receiver.close()
    return found


def _region(both: NDArray[np.uint16]) -> HostRegion:
    """Of [layers, parts, blocks, heads, tokens, dim]."""
    layers, parts, _, heads, tokens, dim = both.shape
    layout = Layout("bench", layers, parts, heads, tokens, 2 * dim, "bfloat16")
    return HostRegion(layout, [np.ascontiguousarray(both[:, i]).view(np.uint8).data for i in range(parts)])


def _serve(pipe: Connection, file: Path, far: Far | None) -> None:
    """Publishes what is in the file when asked to."""
    library = find_library()
    codec = codec_of("auto", library, "bfloat16")
    sender = Sender(_region(np.load(file)), "bench", crc=crc_of(library))
    assert codec is not None
    if far is not None:
        far.enter()
    server = serve_tcp(sender, far.host if far is not None else "127.0.0.1", codecs=[codec])
    while pipe.recv() != "stop":
        pipe.send(sender.publish(range(sender.region.blocks), LEASE).as_dict())
        sender.collect()
    server.stop()
