"""Rendezvous: how the ranks of a group find each other, to connect. Importing this module does not import torch."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """A store in which each rank writes its address: a file if all ranks are on one machine, otherwise a TCPStore."""

    store_fd: int = -1  # of a file that all ranks can write; -1: a TCPStore
    store_host: str = ""
    store_port: int = 0
    address: str = "127.0.0.1"  # of this machine, at which the other ranks connect to this one

    def duplicate(self) -> Rendezvous:
        """Return a copy with a file descriptor of its own. The caller must call the copy's `close`."""
        return self if self.store_fd < 0 else replace(self, store_fd=os.dup(self.store_fd))

    def open_store(self, timeout: timedelta) -> Any:
        """Return the torch Store. Raises RuntimeError if it cannot be reached within `timeout`."""
        from torch import distributed

        if self.store_fd >= 0:
            store: Any = distributed.FileStore(f"/proc/self/fd/{self.store_fd}")
            store.set_timeout(timeout)
            return store
        return distributed.TCPStore(self.store_host, self.store_port, timeout=timeout, wait_for_workers=False)

    def close(self) -> None:
        if self.store_fd >= 0:
            os.close(self.store_fd)
