"""OutputParser: splits the streamed text of one choice into reasoning, text and tool calls.

    [reasoning]  text | call | text | call ...

- The result does not depend on how the input is split, once adjacent deltas of the same kind are joined. The parser
  holds back only text that may still become a marker, and a call's head: the part before its arguments.
- Text that begins like a call and turns out not to be a call is passed on as text. A call whose ToolCallStart was
  sent is not withdrawn: its arguments are passed on as written up to the closing brace, or up to the end of the output.
  If the closing marker of the model's tool call format is missing, the text in its place is passed on as text.
- If max_tokens cuts the output off within the head of a call, the head is dropped: it is not part of the answer.
- White space (and Llama's `;`) between calls, after calls and around the reasoning is dropped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from itertools import groupby

import msgspec

from emberline.api.reasoning import ReasoningStyle
from emberline.api.tool_call_parser import MAX_HEAD_CHARS, WHITESPACE, JsonValueScanner, ParseStatus, ToolCallParser
from emberline.api.tool_style import ToolStyle
from emberline.wire.deltas import ReasoningDelta, TextDelta, ToolCallArguments, ToolCallStart

Piece = TextDelta | ReasoningDelta | ToolCallStart | ToolCallArguments

# Mistral's call head without JSON: the name, then optionally an id that the model wrote and [ARGS].
_NAMED = re.compile(r"([A-Za-z0-9_.-]+)(?:\[CALL_ID\][A-Za-z0-9_-]+)?(?:\[ARGS\])?\s*")
_NAMED_CHAR = re.compile(r"[A-Za-z0-9_.\-\[\]\s]")

MIN_MARKER_CHARS = 4  # at the end of cut-off output, a shorter beginning of a marker counts as text


class OutputParser:
    def __init__(
        self,
        index: int,
        new_id: Callable[[], str],  # returns a new id of 24 letters or digits
        style: ToolStyle | None = None,
        reasoning: ReasoningStyle | None = None,
        starts_in_reasoning: bool = False,  # the prompt ends with the marker that opens the reasoning
    ) -> None:
        self.num_calls = 0
        self._index, self._new_id, self._style, self._reasoning = index, new_id, style, reasoning
        self._gap_chars = WHITESPACE + (";" if style is not None and style.allows_bare_call else "")
        self._text, self._at = "", 0  # _text[_at:] is the input that is not read yet
        self._gap = ""  # white space at a call boundary; becomes text unless a call follows
        self._raw = ""  # characters read since then and not passed on; become text unless they form a call
        self._in_list = False  # inside Mistral's brackets
        self._name_at = 0  # position in _raw at which a plain name starts
        self._reader = ToolCallParser(has_marker=False)
        self._argument_scanner = JsonValueScanner()
        self._pieces: list[Piece] = []
        # The state: a function that reads input and returns whether parsing can continue; false: more input is needed.
        self._state: Callable[[], bool] = self._select_first_answer_state()
        if reasoning is not None:
            self._state = self._skip_reasoning_space if starts_in_reasoning else self._parse_before_reasoning

    @property
    def is_in_reasoning(self) -> bool:
        """Whether the text parsed until now ends inside the reasoning."""
        return self._state in (self._skip_reasoning_space, self._parse_reasoning)

    def push(self, text: str) -> list[Piece]:
        self._text, self._at = self._text[self._at :] + text, 0
        while self._at < len(self._text) and self._state():
            pass
        return self._take_deltas()

    def flush(self, was_cut_off: bool = False) -> list[Piece]:
        """Return the deltas for text that `push` has not passed on yet; called after the end of the output.

        An unfinished closing marker is dropped. If `was_cut_off` (by max_tokens, not ended by the model), a call that
        has no arguments yet is also dropped.
        """
        rest = self._text[self._at :]
        self._text, self._at = "", 0
        if self._state == self._parse_reasoning:
            self._pieces.append(ReasoningDelta(rest, self._index))
        elif was_cut_off and self._is_in_call_head(rest):
            pass
        elif not self._is_at_call_end(rest):
            self._emit_text(self._gap + self._raw + rest)
        return self._take_deltas()

    def _is_at_call_end(self, unread_text: str) -> bool:
        if self._state == self._parse_call:
            return self._reader.is_confirmed
        if self._state == self._parse_call_boundary:
            return self.num_calls > 0 and not unread_text
        return self._state in (self._parse_after_call, self._parse_closing_marker, self._parse_after_list_element)

    def _is_in_call_head(self, unread_text: str) -> bool:
        """Return whether the output ends before a call's arguments: in its opening marker or its name."""
        if self._state == self._parse_call:
            return self._reader.has_marker or self.num_calls > 0 or self._reader.is_likely_call
        if self._state in (self._parse_call_boundary, self._parse_text):
            assert self._style is not None
            min_chars = 1 if self._state == self._parse_call_boundary and self.num_calls else MIN_MARKER_CHARS
            return len(unread_text) >= min_chars and self._style.begin.startswith(unread_text)
        return self._state in (self._parse_after_marker, self._parse_list_element, self._parse_unquoted_name)

    def _take_deltas(self) -> list[Piece]:
        pieces, self._pieces = merge_adjacent_deltas(self._pieces), []
        return pieces

    # -- reasoning

    def _parse_before_reasoning(self) -> bool:
        assert self._reasoning is not None
        self._gap += self._skip_chars(WHITESPACE)
        found = self._skip_marker(self._reasoning.begin)
        if found is None:
            return False
        if found:
            self._gap, self._state = "", self._skip_reasoning_space
        else:
            self._push_back_text(self._gap)
            self._gap, self._state = "", self._select_first_answer_state()
        return True

    def _skip_reasoning_space(self) -> bool:
        self._skip_chars(WHITESPACE)
        if self._at < len(self._text):
            self._state = self._parse_reasoning
        return True

    def _parse_reasoning(self) -> bool:
        assert self._reasoning is not None
        end = self._reasoning.end
        found = self._text.find(end, self._at)
        stop = found if found >= 0 else len(self._text) - _measure_prefix_overlap(self._text, self._at, end)
        reasoning_text = self._text[self._at : stop].rstrip(WHITESPACE)  # white space before the end marker is dropped
        self._pieces.append(ReasoningDelta(reasoning_text, self._index))
        self._at += len(reasoning_text)
        if found >= 0:
            self._at = found + len(end)
            self._state = self._parse_after_reasoning
        return found >= 0

    def _parse_after_reasoning(self) -> bool:
        self._skip_chars(WHITESPACE)
        if self._at < len(self._text):
            self._state = self._select_first_answer_state()
        return True

    def _select_first_answer_state(self) -> Callable[[], bool]:
        return self._parse_call_boundary if self._style is not None else self._parse_plain_text

    # -- text, and the head of a call

    def _parse_plain_text(self) -> bool:
        """Pass on text that cannot contain calls, without looking for markers."""
        self._emit_text(self._text[self._at :])
        self._at = len(self._text)
        return False

    def _parse_text(self) -> bool:
        assert self._style is not None
        begin = self._style.begin
        found = self._text.find(begin, self._at)
        stop = found if found >= 0 else len(self._text) - _measure_prefix_overlap(self._text, self._at, begin)
        self._emit_text(self._text[self._at : stop])
        self._at = stop
        if found >= 0:
            self._at += len(begin)
            self._raw, self._state = begin, self._parse_after_marker
        return found >= 0

    def _parse_call_boundary(self) -> bool:
        """Parse the start of the answer or the text after a call: here a call may begin without a marker."""
        assert self._style is not None
        self._gap += self._skip_chars(self._gap_chars)
        if self._at == len(self._text):
            return False
        if self._style.allows_bare_call and self._text[self._at] == "{":
            return self._start_call(has_marker=False)
        found = self._skip_marker(self._style.begin)
        if found is None:
            return False
        if found:
            self._raw, self._state = self._style.begin, self._parse_after_marker
        else:
            self._emit_text(self._gap)
            self._gap, self._state = "", self._parse_text
        return True

    def _parse_after_marker(self) -> bool:
        """Parse the text after the opening marker of a call."""
        assert self._style is not None
        char = self._read_char()
        if char in WHITESPACE and len(self._raw) <= MAX_HEAD_CHARS:
            return True
        if char == "{":
            self._unread_char()
            return self._start_call(has_marker=True)
        if char == "[" and self._style.allows_plain_name:
            self._state = self._parse_list_element
        elif self._style.allows_plain_name and (char.isalnum() or char == "_"):
            self._name_at = len(self._raw) - 1
            self._state = self._parse_unquoted_name
        else:
            self._reject_call()
        return True

    def _parse_list_element(self) -> bool:
        char = self._read_char()
        if char == "{":
            self._in_list = True
            self._unread_char()
            return self._start_call(has_marker=True)
        if char not in WHITESPACE or len(self._raw) > MAX_HEAD_CHARS:
            self._reject_call()
        return True

    def _parse_unquoted_name(self) -> bool:
        char = self._read_char()
        if char == "{" and (head := _NAMED.fullmatch(self._raw, self._name_at, len(self._raw) - 1)):
            self._unread_char()
            self._emit_call_start(head[1])
            self._argument_scanner, self._state = JsonValueScanner(), self._parse_arguments
        elif not _NAMED_CHAR.match(char) or len(self._raw) > MAX_HEAD_CHARS:
            self._reject_call()
        return True

    # -- inside a call

    def _start_call(self, has_marker: bool) -> bool:
        self._reader, self._state = ToolCallParser(has_marker), self._parse_call
        return True

    def _parse_call(self) -> bool:
        reader, begun = self._reader, self._reader.is_confirmed
        arguments = reader.feed(self._read_char())
        if reader.is_confirmed and not begun:
            assert reader.name is not None
            self._emit_call_start(reader.name)
        if arguments:
            self._emit_arguments(arguments)
        if reader.status is ParseStatus.INVALID:
            self._abandon_call() if reader.is_confirmed else self._reject_call()
        elif reader.status is ParseStatus.COMPLETE:
            self._raw, self._state = "", self._parse_after_call
        return True

    def _parse_arguments(self) -> bool:
        char = self._read_char()
        self._emit_arguments(char)
        if self._argument_scanner.consume_char(char):
            self._state = self._parse_call_boundary
        return True

    def _parse_after_call(self) -> bool:
        assert self._style is not None
        self._state = (
            self._parse_after_list_element
            if self._in_list
            else self._parse_closing_marker
            if self._style.end
            else self._parse_call_boundary
        )
        return True

    def _parse_closing_marker(self) -> bool:
        assert self._style is not None
        so_far = (self._raw + self._read_char()).lstrip(WHITESPACE)
        if so_far == self._style.end:
            self._raw, self._state = "", self._parse_call_boundary
        elif not self._style.end.startswith(so_far):
            self._abandon_call()
        return True

    def _parse_after_list_element(self) -> bool:
        char = self._read_char()
        if char == ",":
            self._state = self._parse_list_element
        elif char == "]":
            self._raw, self._in_list, self._state = "", False, self._parse_call_boundary
        elif char not in WHITESPACE:
            self._abandon_call()
        return True

    # -- results

    def _reject_call(self) -> None:
        """Treat the first character of the supposed call as text, and parse the rest of it again.

        The rest may contain the opening marker of a real call.
        """
        raw, self._raw, self._in_list = self._raw, "", False
        self._emit_text(self._gap + raw[0])
        self._push_back_text(raw[1:])
        self._gap, self._state = "", self._parse_text

    def _abandon_call(self) -> None:
        """Accept a call without its closing marker, and parse the characters after the call as text."""
        raw, self._raw, self._in_list = self._raw, "", False
        self._push_back_text(raw)
        self._state = self._parse_call_boundary

    def _emit_call_start(self, name: str) -> None:
        self._gap = self._raw = ""
        self._pieces.append(ToolCallStart(self.num_calls, f"call_{self._new_id()}", name, self._index))
        self.num_calls += 1

    def _emit_arguments(self, text: str) -> None:
        self._raw = ""
        self._pieces.append(ToolCallArguments(self.num_calls - 1, text, self._index))

    def _emit_text(self, text: str) -> None:
        self._pieces.append(TextDelta(text, self._index))

    # -- reading

    def _read_char(self) -> str:
        char = self._text[self._at]
        self._at += 1
        self._raw += char
        return char

    def _unread_char(self) -> None:
        self._at -= 1
        self._raw = self._raw[:-1]

    def _push_back_text(self, text: str) -> None:
        self._text, self._at = text + self._text[self._at :], 0

    def _skip_chars(self, chars: str) -> str:
        """Skip the next characters as long as they are in `chars`, and return them."""
        start = self._at
        while self._at < len(self._text) and self._text[self._at] in chars:
            self._at += 1
        return self._text[start : self._at]

    def _skip_marker(self, marker: str) -> bool | None:
        """Skip the marker and return True if it is next; return None if more input is needed to decide."""
        if self._text.startswith(marker, self._at):
            self._at += len(marker)
            return True
        return None if marker.startswith(self._text[self._at :]) else False


def _measure_prefix_overlap(text: str, start: int, marker: str) -> int:
    """Return the length of the longest suffix of text[start:] that is a prefix of the marker."""
    longest = min(len(marker) - 1, len(text) - start)
    return next((n for n in range(longest, 0, -1) if text.endswith(marker[:n])), 0)


def merge_adjacent_deltas(pieces: Iterable[Piece]) -> list[Piece]:
    """Return the deltas with adjacent deltas of the same kind joined and empty deltas dropped."""
    merged: list[Piece] = []
    for _, group in groupby(pieces, type):
        first, *rest = group
        if isinstance(first, ToolCallStart):
            merged += [first, *rest]
        elif text := first.text + "".join(piece.text for piece in rest if not isinstance(piece, ToolCallStart)):
            merged.append(msgspec.structs.replace(first, text=text) if rest else first)
    return merged
