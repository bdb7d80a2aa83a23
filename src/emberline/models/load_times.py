"""LoadTimes: how long it took to load the weights of a model to a device."""

from __future__ import annotations

from dataclasses import dataclass

from emberline.models.reader import ReadStats


@dataclass(frozen=True, slots=True)
class LoadTimes:
    read: ReadStats
    wait_seconds: float  # time that `finish` waited for the disk
    copy_seconds: float  # time that `finish` copied, pinned and decoded
    pin_seconds: float
    unread_bytes: int  # not yet read when `finish` began
    decoded_bytes: int = 0
    decode_seconds: float = 0.0  # summed over threads

    def __str__(self) -> str:
        decoded = f", decoded {self.decoded_bytes / 1e9:.2f} GB in {self.decode_seconds:.2f} thread-seconds"
        return (
            f"read {self.read.bytes / 1e9:.2f} GB in {self.read.seconds:.2f} s "
            f"({self.read.gigabytes_per_second:.2f} GB/s, "
            f"{self.read.direct_bytes / max(1, self.read.bytes):.0%} direct), waited {self.wait_seconds:.2f} s, "
            f"copied {self.copy_seconds:.2f} s (pinning {self.pin_seconds:.2f} s){decoded * bool(self.decoded_bytes)}; "
            f"{self.unread_bytes / 1e9:.2f} GB were unread at the start"
        )
