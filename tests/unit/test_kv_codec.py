"""The KV codec is lossless and refuses damaged data; a link uses it if it is faster."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transfer_helpers import Fault, Proxy, blank, content, fill, small, soon, with_endpoint

from emberline.core.config import kernel_dir
from emberline.core.errors import InvalidRequest
from emberline.kernels.cpu.build import build_library
from emberline.kernels.cpu.library import load_library
from emberline.kv.codec import UnweightKVCodec, select_kv_codec
from emberline.kv.transfer.codec_choice import MIN_MEASURED_BYTES, RETRY_AFTER_TRANSFERS, LinkCodecChooser
from emberline.kv.transfer.errors import TransferCorrupted, TransferError
from emberline.kv.transfer.link import LinkOptions
from emberline.kv.transfer.receiver import Receiver
from emberline.kv.transfer.sender import Sender
from emberline.kv.transfer.tcp import TcpTransport, serve_tcp

LIBRARY = load_library(build_library(kernel_dir()))


def keys(count: int, seed: int = 1) -> bytes:
    """Return bfloat16 values as large as typical keys."""
    values = np.random.default_rng(seed).standard_normal(count, np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def encode_bytes(data: bytes, width: int = 2) -> bytes:
    codec = UnweightKVCodec(LIBRARY, width)
    out = memoryview(bytearray(codec.max_encoded_bytes(len(data))))
    return bytes(out[: codec.encode(memoryview(data), out)])


def decode_bytes(data: bytes, size: int, width: int = 2) -> bytes | None:
    out = memoryview(bytearray(size))
    return bytes(out) if UnweightKVCodec(LIBRARY, width).decode(memoryview(data), out) else None


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("count", [0, 1, 5, 4096, 65536, 65537, 262144, 262145, 600001])
def test_round_trip_of_every_size(count: int, width: int) -> None:
    data = keys(count * width // 2)
    assert decode_bytes(encode_bytes(data, width), len(data), width) == data


def test_round_trip_of_every_pattern() -> None:
    data = np.random.default_rng(1).permutation(1 << 16).astype(np.uint16).tobytes()
    assert decode_bytes(encode_bytes(data), len(data)) == data


@given(st.binary(max_size=3000), st.integers(1, 200))
@settings(max_examples=60, deadline=None)
def test_round_trip_of_any_bytes(part: bytes, times: int) -> None:
    data = part[: len(part) // 2 * 2] * times
    assert decode_bytes(encode_bytes(data), len(data)) == data


def test_unsampled_symbol_has_a_code() -> None:
    elements = np.frombuffer(keys(262144), np.uint16).copy()
    elements[5000], elements[200000] = 0x0000, 0xFF80  # smallest and largest exponent, between two samples
    assert decode_bytes(encode_bytes(elements.tobytes()), 2 * len(elements)) == elements.tobytes()


def test_keys_shrink_and_noise_does_not_grow() -> None:
    data, noise = keys(1 << 20), random.Random(1).randbytes(1 << 20)
    assert len(encode_bytes(data)) < 0.7 * len(data)
    assert len(encode_bytes(noise)) < len(noise) + 1024
    assert len(encode_bytes(bytes(1 << 20))) < 0.6 * (1 << 20)  # one symbol: a bit per element, plus the raw bits


def test_damaged_data_is_refused() -> None:
    data = keys(700)
    whole = encode_bytes(data)
    for at in range(len(whole)):
        for bit in (1, 16, 128):
            damaged = whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :]
            assert decode_bytes(damaged, len(data)) is None, at
        assert decode_bytes(whole[:at], len(data)) is None
    assert decode_bytes(whole + b"\0", len(data)) is None
    assert decode_bytes(whole, len(data) - 2) is None and decode_bytes(whole, len(data) + 2) is None
    raw = encode_bytes(random.Random(1).randbytes(64))
    assert all(decode_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :], 64) is None for at in range(len(raw)))


def test_garbage_is_refused() -> None:
    rng = random.Random(2)
    for _ in range(300):
        assert decode_bytes(rng.randbytes(rng.randrange(2000)), 2 * rng.randrange(1, 1000)) is None


def test_codec_selection() -> None:
    assert select_kv_codec("none", LIBRARY, "bfloat16") is None
    assert (
        select_kv_codec("auto", LIBRARY, "bfloat16") is not None
        and select_kv_codec("uw", LIBRARY, "float32") is not None
    )
    assert select_kv_codec("auto", None, "bfloat16") is None and select_kv_codec("auto", LIBRARY, "float8") is None
    for choice, library, dtype in (("uw", None, "bfloat16"), ("uw", LIBRARY, "float8"), ("zip", LIBRARY, "bfloat16")):
        with pytest.raises(InvalidRequest):
            select_kv_codec(choice, library, dtype)


# -- on a link ---------------------------------------------------------------------------------------------------------


def test_faster_way_is_chosen() -> None:
    for wins in (True, False):
        pace, taken = LinkCodecChooser(), []
        for _ in range(3 * RETRY_AFTER_TRANSFERS):
            taken.append(coded := pace.should_encode(MIN_MEASURED_BYTES))
            pace.record_transfer(coded, MIN_MEASURED_BYTES, 1.0 if coded is wins else 2.0)
        assert taken[:2] == [False, True] and 1 <= taken[2:].count(not wins) <= 3
        assert pace.should_encode(1) is wins


def test_link_speed_change_is_noticed() -> None:
    pace, seconds = LinkCodecChooser(), {True: 2.0, False: 1.0}
    for now in range(12 * RETRY_AFTER_TRANSFERS):
        if now == 3 * RETRY_AFTER_TRANSFERS:
            seconds = {True: 2.0, False: 9.0}
        coded = pace.should_encode(MIN_MEASURED_BYTES)
        pace.record_transfer(coded, MIN_MEASURED_BYTES, seconds[coded])
    assert pace.should_encode(MIN_MEASURED_BYTES) is True


def test_small_transfers_are_not_measured() -> None:
    pace = LinkCodecChooser()
    for _ in range(5):
        assert pace.should_encode(MIN_MEASURED_BYTES - 1) is False
        pace.record_transfer(False, MIN_MEASURED_BYTES - 1, 1.0)


BIG = small(heads=8, tokens=64, width=128)


class CountingCodec(UnweightKVCodec):
    used = 0

    def encode(self, data: memoryview, out: memoryview) -> int:
        self.used += 1
        return super().encode(data, out)


def test_link_measures_its_codec() -> None:
    sender, codec = Sender(blank(BIG, 12), "p"), CountingCodec(LIBRARY, 2)
    server = serve_tcp(sender, codecs=[codec])
    sent = fill(sender.region, range(8), 1)
    for always in (True, False):
        receiver = Receiver(
            blank(BIG, 12), [TcpTransport(BIG, LinkOptions(codecs=[UnweightKVCodec(LIBRARY, 2)], always_encode=always))]
        )
        used = []
        for _ in range(3):  # the link chooses: plain, encoded, then the faster way
            codec.used = 0
            fill(receiver.region, range(12), 2)
            receiver.pull(sender.publish(list(range(8)), 30.0), list(range(8)), soon())
            assert content(receiver.region, list(range(8))) == sent
            used.append(codec.used > 0)
        assert used[:2] == [always, True]
        receiver.close()
    server.stop()


def test_damaged_encoded_piece_is_noticed() -> None:
    layout = small(tokens=64, width=128)
    sender = Sender(blank(layout, 4), "p")
    server = serve_tcp(sender, codecs=[UnweightKVCodec(LIBRARY, 2)])
    sent, seen = fill(sender.region, [0, 1], 1), 0
    for at in range(2000, 60000, 9000):
        with Proxy(sender.endpoints["tcp"], Fault("flip", True, at)) as proxy:
            habits = LinkOptions(
                connections=1, use_checksums=False, codecs=[UnweightKVCodec(LIBRARY, 2)], always_encode=True
            )
            receiver = Receiver(blank(layout, 4), [TcpTransport(layout, habits)], max_piece_bytes=1 << 15)
            ticket = with_endpoint(sender.publish([0, 1], 30.0), proxy.address)
            try:
                receiver.pull(ticket, [2, 3], soon())
            except TransferError as error:
                seen += isinstance(error, TransferCorrupted)
                receiver.pull(ticket, [2, 3], soon())
            assert proxy.happened and content(receiver.region, [2, 3]) == sent
            receiver.close()
    server.stop()
    assert seen == 7
