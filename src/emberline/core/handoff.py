r"""Handoff: what a worker needs, besides the request, to continue a stream that another worker began.

It is plain data, and its JSON has the same fields. The state of sampling and grammar can be rebuilt from seed, params
and tokens, so the output continues bit for bit. `source` says where the previous worker's KV blocks can be copied from.
It may be missing or out of date: then the blocks are recomputed.

The router reads a stream as groups of tokens. The worker writes each group at once: a comment, then the events of
the group's tokens.

    : said <index> <tokens> <size>\n\n              tokens of choice <index>, separated by commas; "-" for none
    : said <index> <tokens> <size> <finish>\n\n     the same, and the choice has ended
    ...                                             <size> bytes of events; 0 if no text can be sent yet

`: cached <n>\n\n` precedes the first group and each group that changes n, the number of prompt tokens found in a
cache. `: drafts <drafted> <accepted>\n\n` precedes each group that changes how many tokens of the reply speculative
decoding has drafted and accepted. If requested, `: chain <hash> <blocks>\n\n` follows: the hash of the prompt's last
full KV block, and the number of blocks. A router forwards all bytes of a group or none. All bytes of the stream belong
to a group: the last group has no tokens and contains the end of the stream in the client's protocol."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from emberline.core.errors import InvalidRequest

EVENT_IDS_HEADER = "x-emberline-event-ids"  # of a router's request to a worker: write an id in each event


@dataclass(frozen=True, slots=True)
class TokenGroup:
    """Tokens of one choice that were sent to the client together."""

    index: int
    tokens: tuple[int, ...]
    finish: str = ""  # value of the FinishReason if the choice has ended

    def to_comment(self, event_bytes: int) -> bytes:
        """Return the comment line to send before the group's events. `event_bytes`: total size of the events."""
        tokens = ",".join(map(str, self.tokens)) or "-"
        return f": said {self.index} {tokens} {event_bytes}{self.finish and ' '}{self.finish}\n\n".encode()

    @staticmethod
    def from_comment(line: bytes) -> TokenGroup:
        """Return the token group in an SSE comment line that `to_comment` wrote. The size of its events is not kept."""
        index, tokens, _size, *finish = line.removeprefix(b": said ").decode().split()
        ids = () if tokens == "-" else tuple(map(int, tokens.split(",")))
        return TokenGroup(int(index), ids, finish[0] if finish else "")


class DraftCounts(NamedTuple):
    """Numbers of tokens of a reply that speculative decoding has drafted and accepted."""

    drafted: int = 0
    accepted: int = 0

    def add(self, drafted: int, accepted: int) -> DraftCounts:
        return DraftCounts(self.drafted + drafted, self.accepted + accepted)


NO_DRAFTS = DraftCounts()


@dataclass(frozen=True, slots=True)
class Handoff:
    groups: tuple[TokenGroup, ...] = ()  # groups in the order in which they were sent
    started: bool = False  # the client has received the beginning of the reply
    cached_tokens: int | None = None  # cached prompt tokens to report to the client; None: the next worker counts them
    source: dict[str, Any] | None = None  # ticket (kv.transfer.ticket) of a peer that has blocks of the prompt
    drafts: DraftCounts = NO_DRAFTS  # of all workers so far
    # For a client that has reconnected in the middle of a group:
    resends_last_group: bool = False  # the events of the last group are sent again
    skip_events: int = 0  # first events of what is sent, which the client has already

    def tokens_by_choice(self, choice_count: int) -> tuple[tuple[int, ...], ...]:
        """Return the output tokens so far of each of the `choice_count` choices; () if there are none.

        Raises InvalidRequest if a group has a choice index of `choice_count` or more."""
        if not self.groups:
            return ()
        tokens: list[list[int]] = [[] for _ in range(choice_count)]
        for group in self.groups:
            if group.index >= choice_count:
                message = f"handoff has tokens of choice {group.index}, and the request has {choice_count} choices"
                raise InvalidRequest(message, param="handoff")
            tokens[group.index].extend(group.tokens)
        return tuple(map(tuple, tokens))

    def as_dict(self) -> dict[str, Any]:
        return {
            "said": [[group.index, list(group.tokens), group.finish] for group in self.groups],
            "started": self.started,
            "cached_tokens": self.cached_tokens,
            "source": self.source,
            "drafts": list(self.drafts),
            **({"resends_last_group": self.resends_last_group} if self.resends_last_group else {}),
            **({"skip_events": self.skip_events} if self.skip_events else {}),
        }

    @staticmethod
    def parse(data: Any) -> Handoff:
        """Parse a dict made by `as_dict`; all keys are optional. Raises InvalidRequest for invalid values."""
        try:
            groups = tuple(_parse_token_group(*group) for group in data.get("said", ()))
            started, cached, source = data.get("started", False), data.get("cached_tokens"), data.get("source")
            resends = data.get("resends_last_group", False)
            is_valid = type(started) is type(resends) is bool and (source is None or isinstance(source, dict))
            if not is_valid:
                raise ValueError(
                    "started and resends_last_group must be true or false, and source must be an object or null"
                )
            skip = _parse_non_negative_int(data.get("skip_events", 0))
            drafts = DraftCounts(*map(_parse_non_negative_int, data.get("drafts", ())))
            cached_tokens = None if cached is None else _parse_non_negative_int(cached)
            return Handoff(groups, started, cached_tokens, source, drafts, resends, skip)
        except (AttributeError, TypeError, ValueError) as error:
            raise InvalidRequest(
                f"the handoff (state of a stream to continue) cannot be parsed: {error}", param="handoff"
            ) from error


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """The first token and the statistics of a prompt that a prefill engine computed for another engine."""

    tokens: tuple[int, ...]  # first token of the output
    stop: bool  # whether this token completes the request's grammar
    cached: int  # prompt tokens that it did not have to compute
    seconds: float  # from admission to the first token

    def __str__(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def parse(text: str) -> PrefillResult | None:
        """Parse the JSON of `__str__`; return None if it is invalid."""
        try:
            data = json.loads(text)
            tokens = tuple(map(_parse_non_negative_int, data["tokens"]))
            return PrefillResult(
                tokens, bool(data["stop"]), _parse_non_negative_int(data["cached"]), float(data["seconds"])
            )
        except (KeyError, TypeError, ValueError):
            return None


@dataclass(frozen=True, slots=True)
class BlockPull:
    """A record of copying a request's KV blocks from another engine. Times are on this engine's clock."""

    source: str  # name of the other engine
    began: float
    ended: float
    moving: float  # seconds between began and ended in which bytes arrived; the rest was waiting for the other engine
    bytes: int
    failure: str = ""  # why the remaining blocks were recomputed: a code of kv.transfer.errors
    prefill: float | None = None  # seconds that the other engine reports for the prompt; None: it reported nothing


def _parse_non_negative_int(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} must be an integer of at least 0")
    return value


def _parse_token_group(index: Any, tokens: Any, finish: Any = "") -> TokenGroup:
    if finish not in ("", "stop", "length", "abort"):
        raise ValueError(f"finish is {finish!r}; it must be stop, length, abort or empty")
    return TokenGroup(_parse_non_negative_int(index), tuple(map(_parse_non_negative_int, tokens)), finish)
