"""IpcGroup: exchanges tensors between GPUs of one machine with our own kernels, in memory that all ranks have mapped.

`kernels/cuda/collectives.cu` has the kernels, and describes how sums are computed. Calls put their kernels on torch's
current stream and return before these have run. Calls of one group must be ordered on the device. CUDA graphs can
capture calls: each call gets its number from device memory when it runs, so captured and other calls may be mixed, if
all ranks run the same calls in the same order.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from emberline.kernels.comm.communicator import CollectivesUnavailable, Communicator, RankLost, gather_bytes
from emberline.kernels.comm.thresholds import prefers_two_shot
from emberline.kernels.cuda import collectives, ipc
from emberline.kernels.cuda.driver import CudaDriverError
from emberline.kernels.cuda.nvrtc import KernelCompileError

SLOT_BYTES = 8 << 20  # the most bytes of a tensor that one kernel exchanges; a larger tensor takes several kernels
EXCHANGE_BLOCKS = 16  # CTAs of all_to_all, whose ranks do not know each other's number of rows
ALIGNMENT = 16  # bytes of the addresses that kernels read
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
REASONS = {
    collectives.TIMED_OUT: "did not take part within {timeout_s:g} s",
    collectives.OTHER_CALL: "made another call, or one with another shape or dtype",
    collectives.STOPPED: "was waited for when the group was aborted",
    collectives.ANOTHER_GAVE_UP: "has given up",
}


def count_buffer_bytes(message_bytes: int = 0, num_senders: int = 0, slot_bytes: int = SLOT_BYTES) -> int:
    """Return the bytes of a rank's buffer. Arguments: see IpcGroup."""
    inboxes = 2 * num_senders * _round_up(message_bytes)
    return collectives.HEADER_BYTES + 2 * (slot_bytes // ALIGNMENT * ALIGNMENT) + inboxes


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class IpcGroup(Communicator):
    can_capture = True

    def __init__(
        self,
        host: Communicator,
        device: torch.device,
        *,
        timeout_s: float,
        slot_bytes: int = SLOT_BYTES,
        message_bytes: int = 0,
        senders: Sequence[int] = (),
        max_blocks: int = collectives.MAX_BLOCKS,
    ) -> None:
        """Map the memory of the other ranks.

        Raises CollectivesUnavailable, or RankLost if a rank does not take part.

        `host`: connects the same ranks in main memory. Only this constructor uses it.
        `timeout_s`: how long a kernel waits for other ranks.
        `message_bytes`: the most bytes that one kernel of `send` sends; larger tensors take several messages.
        `senders`: the ranks that send to this rank. Memory for two messages is allocated for each of them, so a sender
        waits only while two of its messages have not been received yet.
        `max_blocks`: the most CTAs of a kernel, the same on all ranks.
        """
        self.rank, self.size, self._device, self._max_blocks = host.rank, host.size, device, max_blocks
        self.fuses_norm = collectives.has_norm_order(device)
        self.prefers_two_shot = prefers_two_shot  # tests and benchmarks replace it; the same on all ranks
        self._timeout_s, self._slot_bytes = timeout_s, slot_bytes // ALIGNMENT * ALIGNMENT
        self._message_bytes = _round_up(message_bytes)
        self._memory: ipc.AllocatedMemory | None = None
        self._opened: list[ipc.OpenedMemory] = []
        self._pinned_report = torch.zeros(collectives.REPORT_WORDS, dtype=torch.int64, pin_memory=True)
        self._report = self._pinned_report.numpy()
        first_inbox = count_buffer_bytes(slot_bytes=slot_bytes)
        self._inboxes = {rank: first_inbox + 2 * self._message_bytes * i for i, rank in enumerate(senders)}
        self._nbytes = count_buffer_bytes(message_bytes, len(senders), slot_bytes)
        try:
            self._connect(host)
        except BaseException:
            self.close()
            raise

    def _connect(self, host: Communicator) -> None:
        own = self._describe()
        peers = [json.loads(text) for text in gather_bytes(host, json.dumps(own).encode())]
        problem = own["problem"] or self._map_peers(peers)
        problems = [text.decode() for text in gather_bytes(host, problem.encode())]
        if any(problems):
            raise CollectivesUnavailable(next(filter(None, problems)))

    def _describe(self) -> dict[str, Any]:
        """Allocate this rank's buffer, load the kernels, and return what others need to map the buffer.

        If this rank cannot share its memory, the item "problem" of the result says why."""
        own: dict[str, Any] = {"problem": "", "boot": BOOT_ID.read_text().strip(), "pid": os.getpid()}
        own |= {"inboxes": self._inboxes, "sizes": [self._slot_bytes, self._message_bytes, self._max_blocks]}
        if self.size > collectives.MAX_RANKS:
            return own | {
                "problem": f"the group has {self.size} ranks, and at most {collectives.MAX_RANKS} are possible"
            }
        try:
            self._memory = ipc.AllocatedMemory(self._nbytes, self._device)
            own |= {"address": self._memory.address, "handle": self._memory.export().hex()}
            own |= {"gpu": ipc.get_device_uuid(self._device.index).hex()}
            collectives.load_kernels(self.size)
        except (CudaDriverError, KernelCompileError) as error:
            own["problem"] = f"rank {self.rank} cannot share memory of its GPU: {error}"
        return own

    def _map_peers(self, peers: list[dict[str, Any]]) -> str:
        """Map the buffers of the other ranks; return why that is impossible, or an empty string."""
        own, group = peers[self.rank], collectives.Group(rank=self.rank, size=self.size)
        for rank, peer in enumerate(peers):
            if peer["problem"]:
                return ""  # that rank reports it
            if problem := self._find_obstacle(own, rank, peer):
                return problem
            try:
                group.buffers[rank] = self._map_buffer(own, peer)
            except CudaDriverError as error:
                return f"rank {self.rank} cannot map the GPU memory of rank {rank}: {error}"
            group.own_inboxes[rank] = self._inboxes.get(rank, 0)
            group.peer_inboxes[rank] = peer["inboxes"].get(str(self.rank), 0)
        group.report, group.data = self._pinned_report.data_ptr(), collectives.HEADER_BYTES
        group.slot_bytes, group.message_bytes = self._slot_bytes, self._message_bytes
        group.timeout_ns = int(self._timeout_s * 1e9)
        # On a GPU that ranks share, a kernel that starts early could occupy the SMs that the kernel it waits for needs.
        group.can_overlap = len({peer["gpu"] for peer in peers}) == self.size
        self._group = group
        return ""

    def _find_obstacle(self, own: dict[str, Any], rank: int, peer: dict[str, Any]) -> str:
        pair = f"rank {self.rank} and rank {rank}"
        if peer["boot"] != own["boot"]:
            return f"{pair} are on different machines"
        if peer["sizes"] != own["sizes"]:
            return f"{pair} have different settings: {own['sizes']} and {peer['sizes']}"
        if peer["pid"] == own["pid"] and peer["gpu"] != own["gpu"]:
            return f"{pair} are in one process, but have different GPUs"
        if not ipc.can_access_peer(self._device.index, bytes.fromhex(peer["gpu"])):
            return f"the GPU of rank {self.rank} cannot access that of rank {rank}, or the process does not see it"
        return ""

    def _map_buffer(self, own: dict[str, Any], peer: dict[str, Any]) -> int:
        """Return the address of a rank's buffer in this process."""
        if peer["pid"] == own["pid"]:
            return int(peer["address"])
        self._opened.append(ipc.OpenedMemory(bytes.fromhex(peer["handle"]), self._device))
        return self._opened[-1].address

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def all_reduce(self, x: Tensor) -> Tensor:
        x = _align(x)
        self._reduce(x, None, x)
        return x

    def all_reduce_add(self, x: Tensor, partial: Tensor) -> Tensor:
        assert x.shape == partial.shape and x.dtype == partial.dtype
        out = _align(x)
        self._reduce(_align(partial), out, out)
        return x if out is x else x.copy_(out)

    def all_reduce_add_norm(self, x: Tensor, partial: Tensor, weight: Tensor, eps: float) -> Tensor:
        is_small = x.nbytes <= self._slot_bytes and not self.prefers_two_shot(x.nbytes, self.size)
        is_supported = self.fuses_norm and collectives.supports_norm(x) and _align(x) is x
        if not is_small or not is_supported or not len(x):
            return super().all_reduce_add_norm(x, partial, weight, eps)
        assert x.shape == partial.shape and x.dtype == partial.dtype
        assert weight.dtype == torch.float32 and weight.is_contiguous()
        self.check()
        normed, signature = torch.empty_like(x), _sign("norm", x.shape, x.dtype)
        partial = _align(partial)
        collectives.reduce_add_norm(self._group, partial, x, weight, eps, normed, signature, self._max_blocks)
        return normed

    def _reduce(self, x: Tensor, residual: Tensor | None, out: Tensor) -> None:
        self.check()
        signature = _sign("reduce", x.shape, x.dtype)
        two_shot = self.prefers_two_shot(x.nbytes, self.size)
        for part in self._split(x.numel(), x.itemsize):
            collectives.reduce(
                self._group,
                x.view(-1)[part],
                None if residual is None else residual.view(-1)[part],
                out.view(-1)[part],
                signature,
                two_shot=two_shot,
                max_blocks=self._max_blocks,
            )

    def _split(self, count: int, item_bytes: int, max_bytes: int = 0) -> Iterator[slice]:
        """Yield slices of `count` items that each fit into a slot, or into `max_bytes` if that is not 0."""
        step = (max_bytes or self._slot_bytes) // ALIGNMENT * ALIGNMENT // item_bytes
        return (slice(start, min(start + step, count)) for start in range(0, count, step))

    def all_gather(self, x: Tensor) -> Tensor:
        self.check()
        x, signature = _align(x), _sign("gather", x.shape, x.dtype)
        rows, shape = x.view(math.prod(x.shape[:-1]), x.shape[-1]), (*x.shape[:-1], self.size * x.shape[-1])
        if rows.numel() and rows.shape[1] * x.itemsize > self._slot_bytes:
            return self._gather_long_rows(rows).view(shape)
        out = x.new_empty(len(rows), self.size * rows.shape[1])
        for part in self._split(len(rows) if rows.numel() else 0, rows.shape[1] * x.itemsize or 1):
            collectives.gather_rows(self._group, rows[part], out[part], signature, self._max_blocks)
        return out.view(shape)

    def _gather_long_rows(self, rows: Tensor) -> Tensor:
        """Gather rows that do not fit into a slot, in parts of their columns."""
        parts = [self.all_gather(rows[:, part].contiguous()) for part in self._split(rows.shape[1], rows.itemsize)]
        return torch.cat([part.view(len(rows), self.size, -1) for part in parts], dim=2).flatten(1)

    def all_to_all(self, x: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Tensor:
        self.check()
        assert len(x) == sum(send_counts), f"{len(x)} rows, counts {send_counts}"
        x = _align(x)
        out = x.new_empty(sum(receive_counts), *x.shape[1:])
        row_bytes, signature = x.itemsize * math.prod(x.shape[1:]), _sign("exchange", x.shape[1:], x.dtype)
        blocks = min(EXCHANGE_BLOCKS, self._max_blocks)
        collectives.exchange_rows(self._group, x, out, row_bytes, send_counts, receive_counts, signature, blocks)
        return out

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        self.check()
        flat, signature = _align(x).view(-1).view(torch.uint8), _sign("broadcast", x.shape, x.dtype)
        for part in self._split(len(flat), 1):
            collectives.broadcast(self._group, flat[part], source, signature, self._max_blocks)
        return x if flat.data_ptr() == x.data_ptr() else x.copy_(flat.view(x.dtype).view(x.shape))

    def send(self, x: Tensor, to: int) -> None:
        self.check()
        flat = _align(x).view(-1).view(torch.uint8)
        if not self._group.peer_inboxes[to]:
            raise ValueError(f"rank {to} has no memory for messages of rank {self.rank}: it is not one of its senders")
        for part in self._split(len(flat), 1, self._message_bytes):
            signature = _sign("message", flat[part].shape, flat.dtype)
            collectives.send(self._group, flat[part], to, signature, self._max_blocks)

    def receive(self, x: Tensor, source: int) -> None:
        self.check()
        if source not in self._inboxes:
            raise ValueError(
                f"rank {self.rank} has no memory for messages of rank {source}: it is not one of its senders"
            )
        flat = _align(x).view(-1).view(torch.uint8)
        for part in self._split(len(flat), 1, self._message_bytes):
            signature = _sign("message", flat[part].shape, flat.dtype)
            collectives.receive(self._group, flat[part], source, signature, self._max_blocks)
        if flat.data_ptr() != x.data_ptr():
            x.copy_(flat.view(x.dtype).view(x.shape))

    def check(self) -> None:
        if report := int(self._report[0]):
            reason = REASONS[report & 0xFF].format(timeout_s=self._timeout_s)
            raise RankLost(
                f"rank {self.rank} of {self.size}: in call {report >> 16}, rank {report >> 8 & 0xFF} {reason}"
            )

    def abort(self) -> None:
        self._report[1] = 1

    def close(self) -> None:
        """Unmap and free the memory. A second call does nothing. Calls of ranks in the same process must have ended.

        Memory that other processes have mapped lasts until these processes end or unmap it."""
        self.abort()
        with suppress(CudaDriverError, RuntimeError):  # after a fault of the device, every call of it fails
            torch.cuda.synchronize(self._device)
        for memory in (*self._opened, self._memory):
            with suppress(CudaDriverError):
                if memory is not None:
                    memory.close()
        self._opened, self._memory = [], None


def _align(x: Tensor) -> Tensor:
    """Return x if kernels can read it, otherwise a copy that is contiguous and aligned."""
    return x if x.is_contiguous() and x.data_ptr() % ALIGNMENT == 0 else x.clone(memory_format=torch.contiguous_format)


@lru_cache(4096)
def _sign(call: str, shape: Sequence[int], dtype: torch.dtype) -> int:
    """Return a 16-bit checksum of a call. Ranks compare it, to detect that they make different calls."""
    return zlib.crc32(f"{call} {tuple(shape)} {dtype}".encode()) & 0xFFFF
