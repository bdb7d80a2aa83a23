"""`emberline bench kv-codec`: how well and how fast keys and values are compressed, and on which links this helps.

It compresses the KV cache of a real prompt and measures size and speed. Then it transfers the cache over links of
limited bandwidth and over loopback. A limited link is a pair of network namespaces with a rate limit; without the
permission to create them, only loopback is measured. The sender is a second process on the same machine.
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

from emberline.bench.command_process import SendCommand, running_command_process
from emberline.bench.rate_limited_network import NamespacesUnavailable, RemoteNamespace, rate_limited_network
from emberline.bench.report import BenchReport
from emberline.core.engine_config import EngineConfig
from emberline.core.errors import InvalidRequest
from emberline.core.params import SamplingParams
from emberline.core.request import Submission
from emberline.engine.boot import boot
from emberline.hub.source import resolve_model
from emberline.kernels.cpu.library import find_library
from emberline.kv.checksum import select_crc
from emberline.kv.codec import KVCodec, select_kv_codec
from emberline.kv.transfer.codec_choice import RETRY_AFTER_TRANSFERS
from emberline.kv.transfer.layout import KVLayout
from emberline.kv.transfer.link import LinkOptions
from emberline.kv.transfer.receiver import Receiver
from emberline.kv.transfer.region import HostRegion
from emberline.kv.transfer.sender import Sender
from emberline.kv.transfer.tcp import TcpTransport, serve_tcp
from emberline.kv.transfer.ticket import Ticket
from emberline.tokens.tokenizer import Tokenizer

Elements = NDArray[np.uint16]
LEASE_S = DEADLINE = 120.0  # seconds
STREAMS = 2


def bench(model_name: str, tokens: int, link_rates_gbit: list[float], rounds: int) -> BenchReport:
    keys, values = _sample_keys_and_values(resolve_model(model_name), tokens)
    codec = select_kv_codec("auto", find_library(), "bfloat16")
    if codec is None:
        raise InvalidRequest("the native library with the KV codec could not be built", hint="install g++")
    report = BenchReport("kv-codec", {"model": model_name, "tokens": tokens, "rounds": rounds, "streams": STREAMS})
    for part, what in ((keys, "keys"), (values, "values")):
        size = len(_encode_values(codec, part)) * 8 / part.size
        report.add(f"{what}_bits_per_value", size, "bit", peer=16.0, limit=_entropy_bound(part))
    both = np.stack([keys, values], 1)
    report.add("wire_bits_per_value", len(_encode_values(codec, both)) * 8 / both.size, "bit", peer=16.0)
    _add_codec_speeds(report, codec, both, rounds)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kv.npy"
        np.save(file, both)
        for rate in [*link_rates_gbit, 0.0]:
            _measure_link(report, file, codec, rate, rounds)
    return report


def _sample_keys_and_values(model: Path, num_tokens: int) -> tuple[Elements, Elements]:
    """Return the keys and the values of a prompt from Python's manual, as the bits of bfloat16 numbers.

    Both arrays have the shape [layers, blocks, heads, tokens, dim].
    """
    loaded = boot(EngineConfig.build(str(model), device="cpu", kv_dtype="bfloat16", kv_memory=1 << 29))
    text = "\n\n".join(topics[name] for name in sorted(topics))
    prompt = Tokenizer.load(model).encode(text)[:num_tokens]
    if len(prompt) < num_tokens:
        raise InvalidRequest(
            f"the sample text has only {len(prompt)} tokens, but --tokens is {num_tokens}", param="tokens"
        )
    loaded.engine.add(Submission("sample", prompt, SamplingParams(max_tokens=1, temperature=0.0)))
    while not loaded.engine.idle:
        loaded.engine.step()
    cache = loaded.engine.runner.cache  # type: ignore[attr-defined]
    parts = [half.view(torch.int16).numpy().view(np.uint16) for half in (cache.keys, cache.values)]
    used = [block for block in range(cache.num_blocks) if parts[0][:, block].any()][
        : num_tokens // cache.shape.block_size
    ]
    return parts[0][:, used], parts[1][:, used]


def _entropy_bound(values: Elements) -> float:
    """Return the entropy in bits per value: the smallest size of a code that encodes each value separately.

    Signs, exponents and mantissas are counted separately, layer by layer.
    """
    fields = ((values >> 15).astype(np.int64), (values >> 7 & 255).astype(np.int64), (values & 127).astype(np.int64))
    return sum(float(np.mean([_entropy(layer) for layer in field])) for field in fields)


def _entropy(symbols: NDArray[np.int64]) -> float:
    counts = np.bincount(symbols.ravel())
    share = counts[counts > 0] / symbols.size
    return float(-(share * np.log2(share)).sum())


def _as_bytes(values: Elements) -> memoryview:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data


def _encode_values(codec: KVCodec, values: Elements) -> memoryview:
    plain = _as_bytes(values)
    room = memoryview(bytearray(codec.max_encoded_bytes(len(plain))))
    return room[: codec.encode(plain, room)]


def _add_codec_speeds(report: BenchReport, codec: KVCodec, values: Elements, rounds: int) -> None:
    plain = _as_bytes(values)
    room, out = (memoryview(bytearray(size)) for size in (codec.max_encoded_bytes(len(plain)), len(plain)))
    coded = room[: codec.encode(plain, room)]
    copy = max(
        _measure_rates(lambda: np.copyto(np.frombuffer(out, np.uint8), np.frombuffer(plain, np.uint8)), plain, rounds)
    )
    report.add("encode", _measure_rates(lambda: codec.encode(plain, room), plain, rounds), "GB/s", limit=copy)
    report.add("decode", _measure_rates(lambda: codec.decode(coded, out), plain, rounds), "GB/s", limit=copy)
    if out != plain:
        raise RuntimeError("decoding did not restore the encoded bytes")


def _measure_rates(call: Callable[[], object], data: memoryview, rounds: int) -> list[float]:
    call()
    found = []
    for _ in range(rounds):
        began = time.perf_counter()
        call()
        found.append(len(data) / 1e9 / (time.perf_counter() - began))
    return found


# -- links -------------------------------------------------------------------------------------------------------------


def _measure_link(report: BenchReport, values_file: Path, codec: KVCodec, rate_gbit: float, rounds: int) -> None:
    """Add the GB/s over one link to the report: uncompressed, compressed, and with the automatic choice."""
    name = f"link_{rate_gbit:g}gbit" if rate_gbit else "link_loopback"
    try:
        with (
            rate_limited_network(rate_gbit) if rate_gbit else nullcontext() as far,
            running_command_process(_serve_values, values_file, far) as ask,
        ):
            plain = _measure_pulls(values_file, LinkOptions(connections=STREAMS), rounds + 1, ask)[
                1:
            ]  # the first is a warm-up
            coded = _measure_pulls(
                values_file, LinkOptions(connections=STREAMS, codecs=[codec], always_encode=True), rounds + 1, ask
            )[1:]
            chosen = _measure_pulls(values_file, LinkOptions(connections=STREAMS, codecs=[codec]), rounds + 2, ask)[
                2:
            ]  # one of each kind
    except NamespacesUnavailable as error:
        report.config[name] = f"not measured: {error}"
        return
    limit = rate_gbit / 8 or None
    median = sorted(plain)[len(plain) // 2]
    report.add(f"{name}_plain", plain, "GB/s", limit=limit)
    report.add(f"{name}_coded", coded, "GB/s", peer=median, limit=limit)
    report.add(f"{name}_auto", chosen, "GB/s", peer=median, limit=limit)


def _measure_pulls(values_file: Path, options: LinkOptions, rounds: int, send_command: SendCommand) -> list[float]:
    assert rounds < RETRY_AFTER_TRANSFERS
    region = _make_region(np.zeros_like(np.load(values_file, mmap_mode="r")))
    crc = select_crc(find_library())
    options = LinkOptions(options.connections, codecs=options.codecs, always_encode=options.always_encode, crc=crc)
    receiver, found = Receiver(region, [TcpTransport(region.layout, options)]), []
    for _ in range(rounds):
        ticket, deadline = Ticket.parse(send_command("publish")), time.monotonic() + DEADLINE
        receiver.connect(ticket.peer, deadline)
        began = time.perf_counter()
        progress = receiver.pull(ticket, range(region.blocks), deadline)
        found.append(progress.arrived_bytes / 1e9 / (time.perf_counter() - began))
        receiver.acknowledge(ticket, deadline)
    receiver.close()
    return found


def _make_region(keys_and_values: NDArray[np.uint16]) -> HostRegion:
    """Return a region of host memory (the blocks of a KV cache) that holds these keys and values.

    The array has the shape [layers, 2 (keys, values), blocks, heads, tokens, dim].
    """
    layers, parts, _, heads, tokens, dim = keys_and_values.shape
    layout = KVLayout("bench", layers, parts, heads, tokens, 2 * dim, "bfloat16")
    return HostRegion(layout, [np.ascontiguousarray(keys_and_values[:, i]).view(np.uint8).data for i in range(parts)])


def _serve_values(pipe: Connection, values_file: Path, remote_namespace: RemoteNamespace | None) -> None:
    """Main function of the sending process: publish the content of the file on each command."""
    library = find_library()
    codec = select_kv_codec("auto", library, "bfloat16")
    sender = Sender(_make_region(np.load(values_file)), "bench", crc=select_crc(library))
    assert codec is not None
    if remote_namespace is not None:
        remote_namespace.enter()
    server = serve_tcp(sender, remote_namespace.host if remote_namespace is not None else "127.0.0.1", codecs=[codec])
    while pipe.recv() != "stop":
        pipe.send(sender.publish(range(sender.region.blocks), LEASE_S).as_dict())
        sender.collect_ended_leases()
    server.stop()
