"""CompressionGainEstimator: decides from measured reads whether compressed blocks load faster."""

from __future__ import annotations

from dataclasses import dataclass

NEWEST_SAMPLE_WEIGHT = 0.1  # of the moving averages


@dataclass(frozen=True, slots=True)
class BlockReadTiming:
    """How long it took to read and decode one block."""

    stored_bytes: int  # bytes of the block in the tier
    read_seconds: float
    decode_seconds: float  # 0 for a block stored without encoding


class CompressionGainEstimator:
    def __init__(self, buffer_bytes: int) -> None:
        self._buffer_bytes = buffer_bytes
        self._seconds_per_byte: float | None = None  # average seconds to read a stored byte
        self._coded: tuple[float, float] | None = None  # averages of an encoded block: bytes, seconds to decode

    def record_read(self, timing: BlockReadTiming) -> None:
        self._seconds_per_byte = _moving_average(self._seconds_per_byte, timing.read_seconds / timing.stored_bytes)
        if timing.decode_seconds:
            size, seconds = self._coded or (None, None)
            self._coded = (
                _moving_average(size, float(timing.stored_bytes)),
                _moving_average(seconds, timing.decode_seconds),
            )

    def is_encoding_faster(self) -> bool:
        """Return whether compression makes loads faster.

        Return True until there are measurements, because a tier holds more blocks when they are compressed.
        """
        if self._seconds_per_byte is None or self._coded is None:
            return True
        size, decoding = self._coded
        return self._seconds_per_byte * (self._buffer_bytes - size) > decoding


def _moving_average(old: float | None, new: float) -> float:
    return new if old is None else old + NEWEST_SAMPLE_WEIGHT * (new - old)
