"""MarkerParser: splits output in which markers separate reasoning, text and tool calls.

    [reasoning]  text | call | text | call ...

- The parser holds back only text that may still become a marker, and a call's head: the part before its arguments.
- Text that begins like a call and turns out not to be a call is passed on as text. A call whose ToolCallStart was
  sent is not withdrawn: its arguments are passed on up to their end, or up to the end of the output. If the closing
  marker of the model's tool call format is missing, the text in its place is passed on as text.
- If max_tokens cuts the output off within the head of a call, the head is dropped: it is not part of the answer.
- A call to a tool that the request does not offer is text. A closing marker without a call before it is dropped,
  unless its opening marker was passed on as text.
- White space (and Llama's `;`) between calls, after calls and around the reasoning is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from emberline.api.call import Tool
from emberline.api.marker_finder import MarkerFinder
from emberline.api.output_parser import OutputParser, Piece
from emberline.api.reasoning import ReasoningStyle
from emberline.api.tool_styles.call_reader import MAX_HEAD_CHARS, WHITESPACE, CallReader, ParseStatus
from emberline.api.tool_styles.style import ToolStyle

MIN_MARKER_CHARS = 4  # at the end of cut-off output, a shorter beginning of a marker counts as text


class MarkerParser(OutputParser):
    def __init__(
        self,
        index: int,
        new_id: Callable[[], str],
        style: ToolStyle | None = None,
        reasoning: ReasoningStyle | None = None,
        starts_in_reasoning: bool = False,  # the prompt ends with the marker that opens the reasoning
        tools: Sequence[Tool] = (),
    ) -> None:
        super().__init__(index, new_id)
        self._style, self._reasoning, self._tools = style, reasoning, tools
        self._tool_names = frozenset(tool.name for tool in tools)
        self._closing_markers = frozenset(style.dropped_markers if style else ())
        self._num_open_as_text = 0  # opening markers passed on as text, whose closing markers are text too
        self._dropped = frozenset(
            (*(style.dropped_markers if style else ()), *(reasoning.dropped_markers if reasoning else ()))
        )
        self._answer_markers = MarkerFinder((*(style.begin_markers if style else ()), *self._dropped))
        self._markerless_starts = style.markerless_starts if style else ""
        self._gap_chars = WHITESPACE + (style.gap_chars if style else "")
        ends = (
            *(reasoning.end_markers if reasoning else ()),
            *(style.begin_markers if style and style.ends_reasoning else ()),
        )
        self._reasoning_begins = MarkerFinder(reasoning.begin_markers if reasoning else ())
        self._reasoning_ends = MarkerFinder(ends)
        self._text, self._at = "", 0  # _text[_at:] is the input that is not read yet
        self._gap = ""  # white space at a call boundary; becomes text unless a call follows
        self._head = ""  # the opening marker of a call and white space after it; becomes text unless a call follows
        self._begin = ""  # the opening marker
        self._reader: CallReader | None = None
        # The state: a function that reads input and returns whether parsing can continue; false: more input is needed.
        self._state: Callable[[], bool] = self._select_first_answer_state()
        if reasoning is not None:
            self._state = self._skip_reasoning_space if starts_in_reasoning else self._parse_before_reasoning

    @property
    def is_in_reasoning(self) -> bool:
        return self._state in (self._skip_reasoning_space, self._parse_reasoning)

    def push(self, text: str) -> list[Piece]:
        self._text, self._at = self._text[self._at :] + text, 0
        while self._at < len(self._text) and self._state():
            pass
        return self._take_deltas()

    def flush(self, was_cut_off: bool = False) -> list[Piece]:
        rest = self._text[self._at :]
        self._text, self._at = "", 0
        if self._state == self._parse_reasoning:
            self._emit_reasoning(rest)
        elif self._state == self._parse_call:
            self._flush_call(was_cut_off)
        elif not (was_cut_off and self._is_in_call_head(rest)) and not self._is_after_call(rest):
            self._emit_text(self._gap + self._head + rest)
        return self._take_deltas()

    def _flush_call(self, was_cut_off: bool) -> None:
        reader = self._reader
        assert reader is not None
        if not was_cut_off:
            for event in reader.end():
                self._emit_call_event(event)
        is_dropped = was_cut_off and (bool(self._begin) or self.num_calls > 0 or reader.is_likely_call)
        if not is_dropped and not reader.is_closing and reader.status is ParseStatus.INCOMPLETE:
            self._emit_text(self._gap + self._head + reader.unaccepted_text)

    def _is_after_call(self, unread_text: str) -> bool:
        return self._state == self._parse_call_boundary and self.num_calls > 0 and not unread_text

    def _is_in_call_head(self, unread_text: str) -> bool:
        """Return whether the output ends within the opening marker of a call, or directly after it."""
        if self._state in (self._parse_call_boundary, self._parse_text):
            min_chars = 1 if self._state == self._parse_call_boundary and self.num_calls else MIN_MARKER_CHARS
            return len(unread_text) >= min_chars and self._answer_markers.is_prefix(unread_text)
        return self._state == self._parse_after_begin

    # -- reasoning

    def _parse_before_reasoning(self) -> bool:
        self._gap += self._skip_chars(WHITESPACE)
        if self._at == len(self._text):
            return False
        found = self._reasoning_begins.match(self._text, self._at)
        if found == "":
            return False
        if found:
            self._at += len(found)
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
        stop, end = self._reasoning_ends.find(self._text, self._at)
        reasoning_text = self._text[self._at : stop].rstrip(WHITESPACE)  # white space before the end marker is dropped
        self._emit_reasoning(reasoning_text)
        self._at += len(reasoning_text)
        if end is not None:
            self._at = stop + (len(end) if end in self._reasoning.end_markers else 0)
            self._state = self._parse_after_reasoning
        return end is not None

    def _parse_after_reasoning(self) -> bool:
        self._skip_chars(WHITESPACE)
        if self._at < len(self._text):
            self._state = self._select_first_answer_state()
        return True

    def _select_first_answer_state(self) -> Callable[[], bool]:
        return self._parse_call_boundary if self._style is not None or self._dropped else self._parse_plain_text

    # -- text, and the start of a call

    def _parse_plain_text(self) -> bool:
        """Pass on text that cannot contain calls, without looking for markers."""
        self._emit_text(self._text[self._at :])
        self._at = len(self._text)
        return False

    def _parse_text(self) -> bool:
        stop, marker = self._answer_markers.find(self._text, self._at)
        self._emit_text(self._text[self._at : stop])
        self._at = stop
        if marker is None:
            return False
        self._read_marker(marker)
        return True

    def _parse_call_boundary(self) -> bool:
        """Parse the start of the answer or the text after a call, where a call may begin without a marker.

        Return False if more text is needed.
        """
        self._gap += self._skip_chars(self._gap_chars)
        if self._at == len(self._text):
            return False
        if self._text[self._at] in self._markerless_starts:
            self._begin = self._head = ""
            return self._start_reader()
        marker = self._answer_markers.match(self._text, self._at)
        if marker == "":
            return False
        if marker:
            self._read_marker(marker)
        else:
            self._emit_text(self._gap)
            self._gap, self._state = "", self._parse_text
        return True

    def _read_marker(self, marker: str) -> None:
        self._at += len(marker)
        if marker in self._closing_markers and self._num_open_as_text:
            self._num_open_as_text -= 1
            self._emit_text(self._gap + marker)
            self._gap, self._state = "", self._parse_text
        elif marker in self._dropped:
            self._gap, self._state = "", self._parse_call_boundary
        else:
            self._begin = self._head = marker
            self._state = self._parse_after_begin

    def _parse_after_begin(self) -> bool:
        """Skip white space after a call's opening marker. The next character decides how the call is read.

        Return False if more text is needed.
        """
        self._head += self._skip_chars(WHITESPACE)
        if len(self._head) > MAX_HEAD_CHARS:
            self._reject_call("")
            return True
        return self._at < len(self._text) and self._start_reader()

    def _start_reader(self) -> bool:
        assert self._style is not None
        self._reader = self._style.make_reader(self._begin, self._text[self._at], self._tools)
        if self._reader is None:
            self._reject_call("")
        else:
            self._reader.allow_only(self._tool_names)
            self._state = self._parse_call
        return True

    # -- inside a call

    def _parse_call(self) -> bool:
        reader = self._reader
        assert reader is not None
        events, self._at = reader.read(self._text, self._at)
        for event in events:
            self._emit_call_event(event)
        if events:
            self._gap = self._head = ""
        if reader.status is ParseStatus.INVALID:
            self._abandon_call(reader) if reader.has_calls else self._reject_call(reader.unaccepted_text)
        elif reader.status is ParseStatus.COMPLETE:
            self._state = self._parse_call_boundary
        return True

    def _reject_call(self, read_text: str) -> None:
        """Treat the first character of the supposed call as text, and parse the rest of it again.

        The rest may contain the opening marker of a real call. `read_text` was read after the supposed opening marker.
        """
        self._num_open_as_text += bool(self._begin)
        text = self._head + read_text
        self._emit_text(self._gap + text[:1])
        self._push_back_text(text[1:])
        self._gap, self._head, self._state = "", "", self._parse_text

    def _abandon_call(self, reader: CallReader) -> None:
        """End a call whose closing marker is missing, and parse the characters after the call again."""
        self._push_back_text(reader.unaccepted_text)
        self._state = self._parse_call_boundary

    # -- reading

    def _push_back_text(self, text: str) -> None:
        self._text, self._at = text + self._text[self._at :], 0

    def _skip_chars(self, chars: str) -> str:
        """Skip the next characters as long as they are in `chars`, and return them."""
        start = self._at
        while self._at < len(self._text) and self._text[self._at] in chars:
            self._at += 1
        return self._text[start : self._at]
