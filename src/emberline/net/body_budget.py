"""BodyBudget: limits the memory of all request bodies of a process that are being received or have not been answered.

A client may use as much memory as it leaves free: alone, half of the budget, beside one other client a third. So a
client that sends many large bodies at once cannot keep other clients out.
"""

from __future__ import annotations

from emberline.core.errors import BodyMemoryFull, BodyShareFull
from emberline.core.fair_threads import Tenant, current_client

TOTAL_BODY_BYTES = 512 << 20
MIN_TOTAL_BODY_BYTES = 64 << 20
MEMORY_SHARE = 4  # the budget is at most one of so many parts of the memory that is free at the start
UNCOUNTED_BODY_BYTES = 1 << 16  # of each body; every connection may buffer that much anyway


class BodyBudget:
    def __init__(self, total_bytes: int = TOTAL_BODY_BYTES) -> None:
        self._total = total_bytes
        self._used_by_client: dict[Tenant, int] = {}
        self.used_bytes = 0
        self.rejected_bodies = 0  # since the start

    def fit_to_memory(self, free_bytes: int) -> None:
        """Lower the budget so that it fits into the memory that is free when the server starts."""
        self._total = max(min(self._total, free_bytes // MEMORY_SHARE), MIN_TOTAL_BODY_BYTES)

    def reserve(self, client: Tenant, size: int) -> None:
        """Reserve `size` bytes for a body of the client. Raises BodyMemoryFull if they exceed the client's share.

        A single body is always accepted: the server's setting max_body limits its size."""
        own = self._used_by_client.get(client, 0)
        if self.used_bytes and own + size > self._total - self.used_bytes - size:
            self.rejected_bodies += 1
            if own > self.used_bytes - own:
                raise BodyShareFull("this client's open requests use all the memory that it may have for their bodies")
            raise BodyMemoryFull("open requests use all the memory that the server has for their bodies")
        self._used_by_client[client] = own + size
        self.used_bytes += size

    def release(self, client: Tenant, size: int) -> None:
        self.used_bytes -= size
        left = self._used_by_client[client] - size
        if left:
            self._used_by_client[client] = left
        else:
            del self._used_by_client[client]


class BodyReservation:
    """The part of the budget that one body has reserved: its declared length, or what has arrived of it."""

    __slots__ = ("_address", "_arrived", "_budget", "_client", "_reserved")

    def __init__(self, budget: BodyBudget, address: str) -> None:
        """`address`: of the client, which is charged unless the request's key was checked (`current_client`)."""
        self._budget = budget
        self._address = address.encode() or b"unknown"
        self._client: Tenant = b""  # known once something is reserved: most bodies are too small for that
        self._reserved = self._arrived = 0

    def reserve(self, size: int) -> None:
        """Reserve memory for a body of `size` bytes. Raises BodyMemoryFull."""
        if size > max(self._reserved, UNCOUNTED_BODY_BYTES):
            if not self._client:
                self._client = current_client.get() or self._address
                current_client.set(self._client)  # large work for this request takes turns with other clients'
            self._budget.reserve(self._client, size - self._reserved)
            self._reserved = size

    def add(self, size: int) -> None:
        """Count `size` bytes that have arrived. Raises BodyMemoryFull."""
        self._arrived += size
        self.reserve(self._arrived)

    def release(self) -> None:
        """Give the memory back. May be called again."""
        if self._reserved:
            self._budget.release(self._client, self._reserved)
        self._reserved = self._arrived = 0


body_budget = BodyBudget()  # the one instance of this process
