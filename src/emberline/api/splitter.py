"""Splitter: one choice's text, as it comes, into reasoning, text and tool calls.

    [reasoning]  text | call | text | call ...

- Where the input is cut never changes the result, pieces of the same kind joined. Held back is only what could still
  turn out to be a marker, and a call's head until its name is complete and its arguments have begun.
- What began like a call and is none comes out as text, all of it. Once a call has been announced it stands: its
  arguments are passed on as written up to the closing brace, or up to the end of the output if that comes first; should
  the call not close as its style says, whatever stands there instead is text.
- Output that was cut off (by max_tokens) within the head of a call ends there: the head is dropped, it is no answer.
- White space (and Llama's `;`) between and after calls, and around the reasoning, is syntax and dropped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from itertools import groupby

import msgspec

from emberline.api.callreader import MAX_HEAD, WHITESPACE, CallReader, Status, Value
from emberline.api.deltas import ReasoningDelta, TextDelta, ToolCallArguments, ToolCallStart
from emberline.api.reasoning import ReasoningStyle
from emberline.api.toolstyle import ToolStyle

Piece = TextDelta | ReasoningDelta | ToolCallStart | ToolCallArguments

# Mistral's head without JSON: name, perhaps an id of the model's making, perhaps [ARGS].
_NAMED = re.compile(r"([A-Za-z0-9_.-]+)(?:\[CALL_ID\][A-Za-z0-9_-]+)?(?:\[ARGS\])?\s*")
_NAMED_CHAR = re.compile(r"[A-Za-z0-9_.\-\[\]\s]")

MIN_MARKER = 4  # characters of a marker that are taken for one at the end of output that was cut off


class Splitter:
    def __init__(
        self,
        index: int,
        new_id: Callable[[], str],  # 24 letters or digits, fresh each time
        style: ToolStyle | None = None,
        reasoning: ReasoningStyle | None = None,
        inside: bool = False,  # the prompt has opened the reasoning already
    ) -> None:
        self.calls = 0
        self._index, self._new_id, self._style, self._reasoning = index, new_id, style, reasoning
        self._gap_chars = WHITESPACE + (";" if style is not None and style.bare else "")
        self._text, self._at = "", 0  # the input not yet read is _text[_at:]
        self._gap = ""  # read at a seam; text, unless a call follows
        self._raw = ""  # read since, and not passed on; text, unless it proves to be a call
        self._listed = False  # inside Mistral's brackets
        self._name_at = 0  # where in _raw a plain name starts
        self._reader = CallReader(marked=False)
        self._value = Value()
        self._pieces: list[Piece] = []
        # A step reads on and says whether to go on; false: it needs more input.
        self._step: Callable[[], bool] = self._answer()
        if reasoning is not None:
            self._step = self._trim_thought if inside else self._before_thought

    @property
    def thinking(self) -> bool:
        """Whether the text so far ends inside the reasoning."""
        return self._step in (self._trim_thought, self._thought)

    def push(self, text: str) -> list[Piece]:
        self._text, self._at = self._text[self._at :] + text, 0
        while self._at < len(self._text) and self._step():
            pass
        return self._drain()

    def flush(self, cut: bool = False) -> list[Piece]:
        """The output has ended; what was held back comes out, unless it is the unfinished end of a call. `cut`: the
        model did not end it, so that an unfinished head of a call is none of the text either."""
        rest = self._text[self._at :]
        self._text, self._at = "", 0
        if self._step == self._thought:
            self._pieces.append(ReasoningDelta(self._index, rest))
        elif cut and self._in_head(rest):
            pass
        elif not self._ending_a_call(rest):
            self._say(self._gap + self._raw + rest)
        return self._drain()

    def _ending_a_call(self, rest: str) -> bool:
        if self._step == self._call:
            return self._reader.begun
        if self._step == self._seam:
            return self.calls > 0 and not rest
        return self._step in (self._after_call, self._close, self._after_element)

    def _in_head(self, rest: str) -> bool:
        """Whether the output ends within a call that is not announced yet, or within the marker of one."""
        if self._step == self._call:
            return self._reader.marked or self.calls > 0 or self._reader.is_likely_call
        if self._step in (self._seam, self._prose):
            assert self._style is not None
            least = 1 if self._step == self._seam and self.calls else MIN_MARKER
            return len(rest) >= least and self._style.begin.startswith(rest)
        return self._step in (self._open, self._element, self._named)

    def _drain(self) -> list[Piece]:
        pieces, self._pieces = fold(self._pieces), []
        return pieces

    # -- reasoning

    def _before_thought(self) -> bool:
        assert self._reasoning is not None
        self._gap += self._run(WHITESPACE)
        found = self._ahead(self._reasoning.begin)
        if found is None:
            return False
        if found:
            self._gap, self._step = "", self._trim_thought
        else:
            self._unread(self._gap)
            self._gap, self._step = "", self._answer()
        return True

    def _trim_thought(self) -> bool:
        self._run(WHITESPACE)
        if self._at < len(self._text):
            self._step = self._thought
        return True

    def _thought(self) -> bool:
        assert self._reasoning is not None
        end = self._reasoning.end
        found = self._text.find(end, self._at)
        stop = found if found >= 0 else len(self._text) - _overlap(self._text, self._at, end)
        thought = self._text[self._at : stop].rstrip(WHITESPACE)  # the white space may be the last before the marker
        self._pieces.append(ReasoningDelta(self._index, thought))
        self._at += len(thought)
        if found >= 0:
            self._at = found + len(end)
            self._step = self._after_thought
        return found >= 0

    def _after_thought(self) -> bool:
        self._run(WHITESPACE)
        if self._at < len(self._text):
            self._step = self._answer()
        return True

    def _answer(self) -> Callable[[], bool]:
        return self._seam if self._style is not None else self._plain

    # -- text, and the way into a call

    def _plain(self) -> bool:
        """Text without anything to look for."""
        self._say(self._text[self._at :])
        self._at = len(self._text)
        return False

    def _prose(self) -> bool:
        assert self._style is not None
        begin = self._style.begin
        found = self._text.find(begin, self._at)
        stop = found if found >= 0 else len(self._text) - _overlap(self._text, self._at, begin)
        self._say(self._text[self._at : stop])
        self._at = stop
        if found >= 0:
            self._at += len(begin)
            self._raw, self._step = begin, self._open
        return found >= 0

    def _seam(self) -> bool:
        """At the start of the answer, or after a call: where calls follow each other and a bare one may stand."""
        assert self._style is not None
        self._gap += self._run(self._gap_chars)
        if self._at == len(self._text):
            return False
        if self._style.bare and self._text[self._at] == "{":
            return self._read_call(marked=False)
        found = self._ahead(self._style.begin)
        if found is None:
            return False
        if found:
            self._raw, self._step = self._style.begin, self._open
        else:
            self._say(self._gap)
            self._gap, self._step = "", self._prose
        return True

    def _open(self) -> bool:
        """Right after the marker."""
        assert self._style is not None
        char = self._read()
        if char in WHITESPACE and len(self._raw) <= MAX_HEAD:
            return True
        if char == "{":
            self._back_up()
            return self._read_call(marked=True)
        if char == "[" and self._style.named:
            self._step = self._element
        elif self._style.named and (char.isalnum() or char == "_"):
            self._name_at = len(self._raw) - 1
            self._step = self._named
        else:
            self._refuse()
        return True

    def _element(self) -> bool:
        char = self._read()
        if char == "{":
            self._listed = True
            self._back_up()
            return self._read_call(marked=True)
        if char not in WHITESPACE or len(self._raw) > MAX_HEAD:
            self._refuse()
        return True

    def _named(self) -> bool:
        char = self._read()
        if char == "{" and (head := _NAMED.fullmatch(self._raw, self._name_at, len(self._raw) - 1)):
            self._back_up()
            self._announce(head[1])
            self._value, self._step = Value(), self._arguments
        elif not _NAMED_CHAR.match(char) or len(self._raw) > MAX_HEAD:
            self._refuse()
        return True

    # -- inside a call

    def _read_call(self, marked: bool) -> bool:
        self._reader, self._step = CallReader(marked), self._call
        return True

    def _call(self) -> bool:
        reader, begun = self._reader, self._reader.begun
        arguments = reader.feed(self._read())
        if reader.begun and not begun:
            assert reader.name is not None
            self._announce(reader.name)
        if arguments:
            self._argue(arguments)
        if reader.status is Status.BROKEN:
            self._loosen() if reader.begun else self._refuse()
        elif reader.status is Status.DONE:
            self._raw, self._step = "", self._after_call
        return True

    def _arguments(self) -> bool:
        char = self._read()
        self._argue(char)
        if self._value.ends_with(char):
            self._step = self._seam
        return True

    def _after_call(self) -> bool:
        assert self._style is not None
        self._step = self._after_element if self._listed else self._close if self._style.end else self._seam
        return True

    def _close(self) -> bool:
        assert self._style is not None
        so_far = (self._raw + self._read()).lstrip(WHITESPACE)
        if so_far == self._style.end:
            self._raw, self._step = "", self._seam
        elif not self._style.end.startswith(so_far):
            self._loosen()
        return True

    def _after_element(self) -> bool:
        char = self._read()
        if char == ",":
            self._step = self._element
        elif char == "]":
            self._raw, self._listed, self._step = "", False, self._seam
        elif char not in WHITESPACE:
            self._loosen()
        return True

    # -- what comes of it

    def _refuse(self) -> None:
        """It was no call. Its first character is text for certain; the rest may yet hold another marker."""
        raw, self._raw, self._listed = self._raw, "", False
        self._say(self._gap + raw[0])
        self._unread(raw[1:])
        self._gap, self._step = "", self._prose

    def _loosen(self) -> None:
        """The call stands, but did not end as it should."""
        raw, self._raw, self._listed = self._raw, "", False
        self._unread(raw)
        self._step = self._seam

    def _announce(self, name: str) -> None:
        self._gap = self._raw = ""
        self._pieces.append(ToolCallStart(self._index, self.calls, f"call_{self._new_id()}", name))
        self.calls += 1

    def _argue(self, text: str) -> None:
        self._raw = ""
        self._pieces.append(ToolCallArguments(self._index, self.calls - 1, text))

    def _say(self, text: str) -> None:
        self._pieces.append(TextDelta(self._index, text))

    # -- reading

    def _read(self) -> str:
        char = self._text[self._at]
        self._at += 1
        self._raw += char
        return char

    def _back_up(self) -> None:
        self._at -= 1
        self._raw = self._raw[:-1]

    def _unread(self, text: str) -> None:
        self._text, self._at = text + self._text[self._at :], 0

    def _run(self, chars: str) -> str:
        """Reads over these characters."""
        start = self._at
        while self._at < len(self._text) and self._text[self._at] in chars:
            self._at += 1
        return self._text[start : self._at]

    def _ahead(self, marker: str) -> bool | None:
        """Whether the marker comes next, and then reads over it; None: too early to say."""
        if self._text.startswith(marker, self._at):
            self._at += len(marker)
            return True
        return None if marker.startswith(self._text[self._at :]) else False


def _overlap(text: str, start: int, marker: str) -> int:
    """The length of the longest end of text[start:] that begins the marker."""
    longest = min(len(marker) - 1, len(text) - start)
    return next((n for n in range(longest, 0, -1) if text.endswith(marker[:n])), 0)


def fold(pieces: Iterable[Piece]) -> list[Piece]:
    """Neighbours of the same kind joined, and empty ones left out."""
    folded: list[Piece] = []
    for _, group in groupby(pieces, type):
        first, *rest = group
        if isinstance(first, ToolCallStart):
            folded += [first, *rest]
        elif text := first.text + "".join(piece.text for piece in rest if not isinstance(piece, ToolCallStart)):
            folded.append(msgspec.structs.replace(first, text=text) if rest else first)
    return folded
