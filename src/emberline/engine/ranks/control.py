"""Messages between the leader of a group and a rank's process: 4 bytes of length, then MessagePack.

They are sent while the processes start, and when a rank has put its part of the model to sleep or woken it."""

from __future__ import annotations

import hashlib
import socket
from typing import Any

import msgspec

from emberline.core.engine_config import EngineConfig
from emberline.engine.gpu.draft_summary import DraftModelSummary
from emberline.engine.messages import Rejection
from emberline.engine.ranks.block_buffer_layout import BlockBufferLayout
from emberline.engine.ranks.layout import Layout
from emberline.engine.ranks.rank_commands import ProductChoices
from emberline.kernels.comm.rendezvous import Rendezvous

DEFAULT_SETTING = "default"  # stands for the value of a setting that gets the default of the device or the model


class StartRank(msgspec.Struct, tag=True):
    config: EngineConfig
    layout: Layout
    rank: int
    rendezvous: Rendezvous


class RankStarted(msgspec.Struct, tag=True):
    """Reports that a process can connect to the others, and with which settings it would load the model."""

    version: str
    settings: str  # digest_settings of its config and layout


class MeasureDevice(msgspec.Struct, tag=True):
    """Asks a rank how much memory its GPU has. It is sent when all ranks have started and nothing is loaded."""


class MeasuredGPU(msgspec.Struct, tag=True):
    """Reports the memory of a rank's GPU, or of its share of a GPU that several ranks of the model use."""

    total_bytes: int
    other_bytes: int  # of these, what other processes use
    kernels: str = ""  # name of the kernels that the GPU uses; empty: not known


class GPUMemoryBudget(msgspec.Struct, frozen=True):
    """The memory of a GPU that a rank may plan with, because other models use the GPU too."""

    total_bytes: int
    other_bytes: int  # of these, what the rank may not use
    kv_memory: int | None = None  # bytes of its KV cache; None: as the settings say


class ConnectRanks(msgspec.Struct, tag=True):
    """Asks a rank to connect to the others and to load its part of the model.

    It is sent when all ranks have started."""

    memory: GPUMemoryBudget | None = None  # None: the rank measures the memory of its GPU


class RankLoaded(msgspec.Struct, tag=True):
    """Reports that a rank has loaded its part of the model."""

    fingerprint: str  # of the whole model
    layers: int  # that this rank has
    weight_bytes: int
    block_bytes: int  # of this rank's part of a KV block
    slot_bytes: int  # of this rank's part of a request's recurrent states
    draft_bytes: int = 0  # of recurrent layers, for the drafted tokens of a running request
    draft_block_bytes: int = 0  # on a GPU: of a block of the KV cache of the leader's draft model
    max_blocks: int = 0  # KV blocks that fit on this rank's GPU; 0 on a CPU
    max_slots: int = 0  # slots for recurrent states that fit on this rank's GPU; 0 on a CPU
    fixed_bytes: int = 0  # on its GPU, freed when the model sleeps; without KV blocks
    device_name: str = "cpu"


class BufferArea(msgspec.Struct, frozen=True):
    """The place of buffers of equal size in the group's memory: those of the host tier, or those for KV transfers."""

    offset: int  # in bytes
    buffer_bytes: int
    count: int

    @property
    def num_bytes(self) -> int:
        return self.buffer_bytes * self.count


class AllocateCaches(msgspec.Struct, tag=True):
    num_blocks: int
    num_slots: int
    # On GPUs: kernels of matrix products that the leader has measured. All ranks must choose the same ones, because
    # other kernels round differently: ranks must not choose different experts for a token.
    products: ProductChoices = []
    cache_offsets: dict[int, int] = {}  # by rank: where its KV cache is in the group's memory; empty: not shared
    host_buffers: BufferArea | None = None  # None: there are no KV tiers
    transfer_slots: BufferArea | None = None  # on GPUs: for DeviceGroupRegion; None: no blocks are exchanged
    buffer_parts: BlockBufferLayout | None = (
        None  # the division of `host_buffers` among GPUs; None: they have whole blocks
    )
    draft_model: DraftModelSummary | None = (
        None  # on GPUs: the leader's, whose drafts all ranks verify; None: it has none
    )


class RankReady(msgspec.Struct, tag=True):
    """Reports that a rank waits for plans."""

    weight_bytes: int = 0  # of the weights on its GPU
    expert_forms: str = ""  # a hash of the forms of experts that may move between GPUs; empty: there are none


class RankAsleep(msgspec.Struct, tag=True):
    """Reports that a rank has freed the memory of its GPU."""

    copied_bytes: int  # to main memory


class RankAwake(msgspec.Struct, tag=True):
    """Reports that a rank has restored the memory of its GPU."""

    copied_bytes: int  # from main memory


RankMessage = (
    StartRank
    | RankStarted
    | MeasureDevice
    | MeasuredGPU
    | ConnectRanks
    | RankLoaded
    | AllocateCaches
    | RankReady
    | RankAsleep
    | RankAwake
    | Rejection
)
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(RankMessage)


def encode_rank_message(message: RankMessage) -> bytes:
    return _ENCODER.encode(message)


def decode_rank_message(body: bytes) -> RankMessage:
    message: RankMessage = _DECODER.decode(body)
    return message


class ControlSocket:
    """One end of the socket between the leader and a rank."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._received = bytearray()

    def send(self, message: RankMessage) -> None:
        self.send_encoded(encode_rank_message(message))

    def send_encoded(self, body: bytes) -> None:
        """Send the result of `encode_rank_message`."""
        self.connection.sendall(len(body).to_bytes(4, "little") + body)

    def receive(self) -> RankMessage | None:
        """Wait for the next message and return it; None: the other process has ended."""
        while (message := self.take_message()) is None:
            if not self.read_available():
                return None
        return message

    def read_available(self) -> bool:
        """Wait for bytes and keep them for `take_message`; return False if the other process has ended."""
        try:
            data = self.connection.recv(1 << 16)
        except ConnectionError:
            return False
        self._received += data
        return bool(data)

    @property
    def num_received(self) -> int:
        """The number of bytes that were received and not yet taken as messages."""
        return len(self._received)

    def take_message(self) -> RankMessage | None:
        """Return the next message that was received completely; None: there is none yet."""
        return None if (body := self.take_encoded()) is None else decode_rank_message(body)

    def take_encoded(self) -> bytes | None:
        """Return the next message without decoding it; None: there is none yet."""
        end = 4 + int.from_bytes(self._received[:4], "little")
        if len(self._received) < max(end, 5):
            return None
        body = bytes(self._received[4:end])
        del self._received[:end]
        return body


def digest_settings(config: EngineConfig, layout: Layout) -> str:
    """Return a hash of the settings, which all ranks of a group must have in common."""
    received = msgspec.convert(msgspec.to_builtins(config), EngineConfig)  # as a rank decodes it: 5 becomes 5.0
    shared = list_shared_settings(received), layout
    encoded = msgspec.msgpack.encode(shared, order="deterministic")  # the order of a set differs by process
    return hashlib.sha256(encoded).hexdigest()[:16]


def list_shared_settings(config: EngineConfig) -> dict[str, Any]:
    """Return the settings that all ranks of a group must have in common, by name.

    Settings that may differ are left out: other nodes may have the checkpoint in another directory and another number
    of cores, and reach node 0 at another address."""
    settings: dict[str, Any] = {}
    for name, value in msgspec.to_builtins(config, order="deterministic").items():
        if name not in ("model", "threads", "transfer", "unset"):
            settings |= value if isinstance(value, dict) else {name: value}
    settings |= dict.fromkeys(sorted(config.unset), DEFAULT_SETTING)
    return {name: value for name, value in settings.items() if name not in ("node_rank", "node_address", "master")}
