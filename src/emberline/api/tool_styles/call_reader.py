"""CallReader: the base of the classes that read tool calls in the format of one model family."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from enum import Enum

WHITESPACE = " \t\r\n"
MAX_HEAD_CHARS = 4096  # before a call is recognised; longer text is not a call


class ParseStatus(Enum):
    INCOMPLETE = "reading"
    COMPLETE = "done"
    INVALID = "broken"


@dataclass(frozen=True, slots=True)
class CallStart:
    name: str
    id: str | None = None  # the id that the model wrote; None: the server creates one


CallEvent = CallStart | str  # a string is a part of the arguments, which are a JSON object


class CallReader:
    """Reads the characters after the marker that opens a tool call, or a group of calls.

    `read` returns the events of the calls. The arguments in the events of one call, joined, are always the beginning of
    a JSON object. A character that was read is "unaccepted" until it is certain that it belongs to a call. If the text
    turns out not to be a call, the unaccepted characters are treated as text of the answer. A call to a tool that the
    request does not offer is text too.
    """

    def __init__(self, state: Callable[[str], None]) -> None:
        self.status = ParseStatus.INCOMPLETE
        self.has_calls = False  # whether a call has begun
        self._offered: Set[str] | None = None  # names of tools; None: calls may have any name
        self._state = state  # the function that reads the next character
        self._events: list[CallEvent] = []
        self._unaccepted: list[str] = []
        self._word = ""  # characters of a marker or a name that is being read

    def allow_only(self, names: Set[str]) -> None:
        """Reject calls to tools with other names."""
        self._offered = names

    @property
    def unaccepted_text(self) -> str:
        return "".join(self._unaccepted)

    @property
    def is_closing(self) -> bool:
        """Whether the characters that were read since the last accepted call can only close this call.

        Such characters are dropped if the output ends."""
        return False

    @property
    def is_likely_call(self) -> bool:
        """Whether the text looks like a call, even without an opening marker."""
        return self.has_calls

    @property
    def is_in_head(self) -> bool:
        """Whether it is not certain yet that the characters being read belong to a call.

        If there are more than MAX_HEAD_CHARS such characters, the text is rejected as a call.
        """
        return not self.has_calls

    def read(self, text: str, at: int) -> tuple[list[CallEvent], int]:
        """Read text[at:] up to the end of the call or of the text.

        Return the events that the text adds to the calls, and the position after the last character that was read.
        """
        while at < len(text) and self.status is ParseStatus.INCOMPLETE:
            char = text[at]
            self._unaccepted.append(char)
            self._state(char)
            at += 1
            if len(self._unaccepted) > MAX_HEAD_CHARS and self.is_in_head:
                self._reject()
        return self._take_events(), at

    def end(self) -> list[CallEvent]:
        """Return the events that complete the call if the output ended and only closing markers are missing."""
        self._complete_at_end()
        return self._take_events()

    def _complete_at_end(self) -> None:
        """Add the events that complete a call without its closing markers. By default there are none."""
        return

    def _take_events(self) -> list[CallEvent]:
        events, self._events = self._events, []
        return events

    def _start_call(self, name: str, id: str | None = None) -> None:
        if self._offered is not None and name not in self._offered:
            self._reject()
            return
        self.has_calls = True
        self._add_event(CallStart(name, id))

    def _add_event(self, event: CallEvent) -> None:
        """Add an event, unless the call was rejected."""
        if self.status is ParseStatus.INVALID:
            return
        if isinstance(event, str) and self._events and isinstance(last := self._events[-1], str):
            self._events[-1] = last + event
        else:
            self._events.append(event)
        self._unaccepted.clear()

    def _accept(self) -> None:
        """Make the characters read until now part of the call, unless it was rejected."""
        if self.status is not ParseStatus.INVALID:
            self._unaccepted.clear()

    def _complete(self) -> None:
        if self.status is not ParseStatus.INVALID:
            self._accept()
            self.status = ParseStatus.COMPLETE

    def _reject(self) -> None:
        self.status = ParseStatus.INVALID

    def _expect_one_of(self, char: str, markers: Mapping[str, Callable[[], None]]) -> None:
        """Add `char` to the marker that is being read. When the marker is complete, call its function.

        White space before the marker is skipped. The call is rejected if no marker begins with the characters read.
        """
        if not self._word and char in WHITESPACE:
            return
        self._word += char
        if found := markers.get(self._word):
            self._word = ""
            found()
        elif not any(marker.startswith(self._word) for marker in markers):
            self._reject()
