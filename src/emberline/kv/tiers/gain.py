"""Gain: whether blocks come back sooner if they are stored coded, by how others were read and decoded. Pure."""

from __future__ import annotations

from dataclasses import dataclass

FRESH = 0.1  # weight of the newest block


@dataclass(frozen=True, slots=True)
class Reading:
    """How one block came back: its bytes there, and seconds to have them and to decode them."""

    size: int
    seconds: float
    decoding: float  # 0: it was not coded


class Gain:
    def __init__(self, buffer_bytes: int) -> None:
        self._buffer_bytes = buffer_bytes
        self._pace: float | None = None  # seconds a byte of what is stored
        self._coded: tuple[float, float] | None = None  # bytes of a coded block, and seconds to decode it

    def note(self, reading: Reading) -> None:
        self._pace = _towards(self._pace, reading.seconds / reading.size)
        if reading.decoding:
            size, seconds = self._coded or (None, None)
            self._coded = _towards(size, float(reading.size)), _towards(seconds, reading.decoding)

    def pays(self) -> bool:
        """Until something was loaded, yes: more blocks fit."""
        if self._pace is None or self._coded is None:
            return True
        size, decoding = self._coded
        return self._pace * (self._buffer_bytes - size) > decoding


def _towards(old: float | None, new: float) -> float:
    return new if old is None else old + FRESH * (new - old)
