"""Handoff: what whoever goes on with a request must know besides the request itself. Plain data, the same in JSON.

Sampling and grammar state follow from seed, params and tokens alone, so the tokens are enough to go on, to the bit.
Keys and values that can be had elsewhere are only a saving: `source` may be missing or stale.

A tracked stream is made of groups. Each is one write of the worker: a comment, then the events those tokens caused.

    : said <index> <tokens> <size>\\n\\n              tokens of choice <index>, commas between them; "-" for none
    : said <index> <tokens> <size> <finish>\\n\\n     the same, and the choice has ended
    ...                                             <size> bytes of events, perhaps none (text held back)

`: cached <n>\\n\\n` stands before the first, and before any that changes it: prompt tokens found in a cache so far. Who
asks for it is told there too where the prompt ends: `: chain <hash> <blocks>\\n\\n`, of its last full block. A
group that did not come whole was not said: whoever passes a stream on passes on all of its bytes or none. Nothing
stands outside of groups; the last has no tokens and holds the protocol's own ending.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from emberline.core.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Said:
    """One group of tokens of one choice, as the client was told them."""

    index: int
    tokens: tuple[int, ...]
    finish: str = ""  # how the choice ended, if it did: a FinishReason's value

    def line(self, size: int) -> bytes:
        """The comment that stands before its events, which have so many bytes."""
        tokens = ",".join(map(str, self.tokens)) or "-"
        return f": said {self.index} {tokens} {size}{self.finish and ' '}{self.finish}\n\n".encode()

    @staticmethod
    def read(line: bytes) -> Said:
        """Of such a comment; the size has done its duty then."""
        index, tokens, _size, *finish = line.removeprefix(b": said ").decode().split()
        ids = () if tokens == "-" else tuple(map(int, tokens.split(",")))
        return Said(int(index), ids, finish[0] if finish else "")


@dataclass(frozen=True, slots=True)
class Handoff:
    said: tuple[Said, ...] = ()  # in the order in which they were said
    started: bool = False  # the client has seen the opening of the reply, if nothing else
    cached_tokens: int | None = None  # of the prompt, as the client is to be told; None: whoever goes on finds out
    source: dict[str, Any] | None = None  # a ticket (kv.transfer.ticket) of a peer that has blocks of the prompt

    def resumed(self, n: int) -> tuple[tuple[int, ...], ...]:
        """What each of n choices has said so far; () if nobody has said anything."""
        if not self.said:
            return ()
        said: list[list[int]] = [[] for _ in range(n)]
        for group in self.said:
            if group.index >= n:
                raise InvalidRequest(f"choice {group.index} has said something; there are {n}", param="handoff")
            said[group.index].extend(group.tokens)
        return tuple(map(tuple, said))

    def as_dict(self) -> dict[str, Any]:
        return {
            "said": [[group.index, list(group.tokens), group.finish] for group in self.said],
            "started": self.started,
            "cached_tokens": self.cached_tokens,
            "source": self.source,
        }

    @staticmethod
    def parsed(told: Any) -> Handoff:
        """Of what `as_dict` gave; all of it may be missing."""
        try:
            said = tuple(_said(*group) for group in told.get("said", ()))
            started, cached, source = told.get("started", False), told.get("cached_tokens"), told.get("source")
            if type(started) is not bool or not (source is None or isinstance(source, dict)):
                raise ValueError("started is true or false, source an object or null")
            return Handoff(said, started, None if cached is None else _natural(cached), source)
        except (AttributeError, TypeError, ValueError) as error:
            raise InvalidRequest(f"the handoff cannot be read: {error}", param="handoff") from error


@dataclass(frozen=True, slots=True)
class Note:
    """What an engine that computed a prompt for another has to say in the end, besides blocks."""

    tokens: tuple[int, ...]  # the first of the output
    stop: bool  # with it the request's grammar is complete
    cached: int  # tokens of the prompt that it did not have to compute
    seconds: float  # from admission to the first token

    def __str__(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def parsed(text: str) -> Note | None:
        """None: there is none that makes sense."""
        try:
            told = json.loads(text)
            tokens = tuple(map(_natural, told["tokens"]))
            return Note(tokens, bool(told["stop"]), _natural(told["cached"]), float(told["seconds"]))
        except (KeyError, TypeError, ValueError):
            return None


@dataclass(frozen=True, slots=True)
class Pulled:
    """Blocks of one request's prompt that another engine had. Times are on the engine's clock."""

    source: str  # its name
    began: float
    ended: float
    moving: float  # seconds of these in which bytes came; in the others it had none to give yet
    bytes: int
    failure: str = ""  # why the rest was computed: a code of kv.transfer.errors
    prefill: float | None = None  # seconds that it took for the prompt, by its own word; None: it was not heard


def _natural(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a number of a token or a choice")
    return value


def _said(index: Any, tokens: Any, finish: Any = "") -> Said:
    if finish not in ("", "stop", "length", "abort"):
        raise ValueError(f"{finish!r} is no ending of a choice")
    return Said(_natural(index), tuple(map(_natural, tokens)), finish)
