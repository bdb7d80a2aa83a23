"""NcclGroup.abort, which several threads may call: torch's own must be called once. None of this needs NCCL."""

from __future__ import annotations

import threading
import time
from typing import Any

from emberline.kernels.comm.nccl import NcclGroup


class FakeTorchGroup:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def abort(self) -> None:
        self.calls.append("abort")
        time.sleep(0.01)  # lets the other threads in

    def shutdown(self) -> None:
        self.calls.append("shutdown")


class FakeHost:
    def close(self) -> None: ...


class SlowFlag:
    """A flag whose reading lets other threads run, so that a check without a lock shows."""

    def __get__(self, owner: Any, kind: Any = None) -> bool:
        value = bool(owner.__dict__.get("flag"))
        time.sleep(0.005)
        return value

    def __set__(self, owner: Any, value: bool) -> None:
        owner.__dict__["flag"] = value


class RacingGroup(NcclGroup):
    _is_aborted = SlowFlag()  # type: ignore[assignment]

    def __init__(self, torch_group: FakeTorchGroup) -> None:
        self._abort_lock, self._group, self._host = threading.Lock(), torch_group, FakeHost()  # type: ignore[assignment]


def test_group_is_aborted_once() -> None:
    torch_group = FakeTorchGroup()
    group = RacingGroup(torch_group)
    threads = [threading.Thread(target=group.abort) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    group.abort()
    group.close()
    group.close()
    assert torch_group.calls == ["abort"]


def test_closed_group_is_not_aborted() -> None:
    torch_group = FakeTorchGroup()
    group = RacingGroup(torch_group)
    group.close()
    group.abort()
    assert torch_group.calls == ["shutdown"]
