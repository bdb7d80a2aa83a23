"""CodingGain: decides from measured reads whether encoded blocks load faster than plain ones. Pure."""

from __future__ import annotations

from dataclasses import dataclass

FRESH = 0.1  # of the moving averages


@dataclass(frozen=True, slots=True)
class Reading:
    """How long it took to read and decode one block."""

    size: int  # bytes of the block in the tier
    seconds: float
    decoding: float  # 0 for a block stored without encoding


class Gain:
    def __init__(self, buffer_bytes: int) -> None:
        self._buffer_bytes = buffer_bytes
        self._pace: float | None = None  # average seconds to read a stored byte
        self._coded: tuple[float, float] | None = None  # averages of an encoded block: bytes, seconds to decode

    def note(self, reading: Reading) -> None:
        self._pace = _towards(self._pace, reading.seconds / reading.size)
        if reading.decoding:
            size, seconds = self._coded or (None, None)
            self._coded = _towards(size, float(reading.size)), _towards(seconds, reading.decoding)

    def pays(self) -> bool:
        """Return whether encoding makes loads faster; True until measured, since more encoded blocks fit."""
        if self._pace is None or self._coded is None:
            return True
        size, decoding = self._coded
        return self._pace * (self._buffer_bytes - size) > decoding


def _towards(old: float | None, new: float) -> float:
    return new if old is None else old + FRESH * (new - old)
