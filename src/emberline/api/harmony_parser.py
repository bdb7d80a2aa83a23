"""HarmonyParser: splits the output of gpt-oss, which is a sequence of messages with a header.

    <|channel|>analysis<|message|>TEXT<|end|><|start|>assistant<|channel|>final<|message|>TEXT<|return|>

The analysis channel is reasoning. A message that is addressed to functions.NAME is a tool call, and its text is the
JSON of the arguments. All other messages are text, also those to functions that the request does not
offer. Output that does not have this form is passed on as text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Set

from emberline.api.marker_finder import MarkerFinder
from emberline.api.output_parser import OutputParser, Piece
from emberline.api.tool_styles.call_reader import WHITESPACE, CallStart
from emberline.api.tool_styles.json_call import JsonValueScanner

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>")
_MARKERS = MarkerFinder((START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS))
_RECIPIENT = re.compile(r"\bto=functions\.([\w.-]+)")
_ANALYSIS = re.compile(re.escape(CHANNEL) + r"\s*analysis\b")
# What may precede the channel in a header: the role and the recipient. The output begins after the role.
_ROLE = re.compile(r"\s*(?:assistant(?:\s+|$))?(?:to=[\w.:-]*\s*)?")
MIN_MARKER_CHARS = 4  # at the end of cut-off output, a shorter beginning of a marker counts as text


class HarmonyParser(OutputParser):
    def __init__(self, index: int, new_id: Callable[[], str], tool_names: Set[str]) -> None:
        super().__init__(index, new_id)
        self._tool_names = tool_names
        self._text = ""  # input that may begin a marker
        self._header: str | None = ""  # header read until now; None inside a message
        self._has_role = False  # the header begins with the role
        self._emit: Callable[[str], None] = self._emit_text  # passes on the text of a message
        self._name = ""  # of a tool call whose arguments have not begun
        self._space = ""  # white space before the arguments
        self._scanner: JsonValueScanner | None = None  # inside the arguments of a tool call

    @property
    def is_in_reasoning(self) -> bool:
        return self._header is None and self._emit == self._emit_reasoning

    def push(self, text: str) -> list[Piece]:
        text = self._text + text
        at = 0
        while True:
            stop, marker = _MARKERS.find(text, at)
            if stop > at:
                self._read_text(text[at:stop])
            if marker is None:
                self._text = text[stop:]
                return self._take_deltas()
            self._read_marker(marker)
            at = stop + len(marker)

    def flush(self, was_cut_off: bool = False) -> list[Piece]:
        rest, self._text = self._text, ""
        if not (was_cut_off and len(rest) >= MIN_MARKER_CHARS) and rest:
            self._read_text(rest)
        header = self._header or ""
        if was_cut_off and (CHANNEL in header or "to=" in header or self._name):
            self._header = self._name = self._space = ""
        self._end_message(self._header or "")
        return self._take_deltas()

    def _read_text(self, text: str) -> None:
        if self._header is None:
            self._emit(text)
            return
        self._header += text
        if CHANNEL not in self._header and not _may_begin_header(self._header):
            header, self._header, self._emit = self._header, None, self._emit_text
            self._emit_text(header)

    def _read_marker(self, marker: str) -> None:
        if marker == MESSAGE:
            if self._header is not None:
                self._begin_message(self._header)
        elif marker == CONSTRAIN:
            if self._header is not None:
                self._header += marker
        elif marker == CHANNEL and self._header is not None:
            self._header += marker
        else:
            self._end_message(self._header or "")
            self._has_role = marker == START
            self._header = CHANNEL if marker == CHANNEL else ""

    def _begin_message(self, header: str) -> None:
        self._header = None
        recipient = _RECIPIENT.search(header)
        if recipient and recipient[1] in self._tool_names:
            self._name, self._space, self._emit = recipient[1], "", self._emit_call_text
        else:
            self._emit = self._emit_reasoning if _ANALYSIS.search(header) else self._emit_text

    def _end_message(self, header: str) -> None:
        """Complete the tool call that is being read, and pass on a header without a message as text."""
        if self._name and not self._space.strip(WHITESPACE):
            self._emit_call_event(CallStart(self._name))
            self._emit_call_event("{}")
        header = header.removeprefix("assistant") if self._has_role else header
        self._emit_text(header if header.strip(WHITESPACE) else "")
        self._name, self._space, self._scanner, self._header = "", "", None, ""

    def _emit_call_text(self, text: str) -> None:
        """Pass on the text of a tool call: as the call's arguments if it is a JSON object, else as text."""
        if self._name:
            self._space += text
            arguments = self._space.lstrip(WHITESPACE)
            if not arguments:
                return
            if arguments[0] != "{":
                self._emit = self._emit_text
                self._emit_text(self._space)
                self._name = self._space = ""
                return
            self._emit_call_event(CallStart(self._name))
            self._name, self._space, self._scanner, text = "", "", JsonValueScanner(), arguments
        assert self._scanner is not None
        end = next((i + 1 for i, char in enumerate(text) if self._scanner.consume_char(char)), None)
        self._emit_call_event(text[:end])
        if end is not None:
            self._scanner, self._emit = None, self._emit_text_after_call
            self._emit_text_after_call(text[end:])

    def _emit_text_after_call(self, text: str) -> None:
        """Pass on text after the arguments, without the white space before it."""
        if text := text.lstrip(WHITESPACE):
            self._emit = self._emit_text
            self._emit_text(text)


def _may_begin_header(text: str) -> bool:
    """Return whether the text may begin a header: a role and a recipient, which precede the channel marker."""
    words = " ".join(text.split())
    return "assistant to=".startswith(words) or "to=".startswith(words) or _ROLE.fullmatch(text) is not None
