"""TraceWorkload: replays recorded traffic: the gateway's request log, and public traces in their own formats.

| format | file | fields |
|---|---|---|
| `gateway` | JSON lines of the gateway's log export | created_at, tokens_in, tokens_out, session_id |
| `mooncake` | JSON lines | timestamp (ms), input_length, output_length, hash_ids (of 512 tokens each) |
| `azure` | CSV | TIMESTAMP (date and time), ContextTokens, GeneratedTokens |
| `burstgpt` | CSV | Timestamp (s), Request tokens, Response tokens |

The first two say which prompts share a beginning. In the others, no prompt shares anything."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from emberline.core.errors import InvalidRequest
from emberline.sim.prompt import PromptSegment
from emberline.sim.sessions import SingleRequest
from emberline.sim.workloads.requests import make_single_request, reply_key, request_id

MOONCAKE_BLOCK_TOKENS = 512
MAX_TRACE_TOKENS = 1 << 31  # highest number of tokens of one prompt or reply
MAX_TRACE_S = 366 * 86_400.0  # a simulation has events in every second; a longer trace has times in another unit


class TraceError(InvalidRequest):
    """A trace cannot be read. The message names the file, the line and the field."""

    code = "invalid_trace"


@dataclass(frozen=True, slots=True)
class TraceRequest:
    time: float  # seconds since the first request
    segments: tuple[PromptSegment, ...]
    output_tokens: int
    session: str = ""  # conversation whose prompts continue one another; "": unknown


@dataclass(frozen=True, slots=True)
class TraceWorkload:
    requests: tuple[TraceRequest, ...]  # requests in the order of their times
    speed: float = 1.0  # factor of time: 2 sends the same requests twice as fast

    def __post_init__(self) -> None:
        if not (self.speed > 0 and math.isfinite(self.speed)):
            raise InvalidRequest(f"speed is {self.speed:g}; it must be above 0", param="speed")

    def sessions(self, seed: int) -> Iterator[SingleRequest]:
        for number, each in enumerate(self.requests):
            yield make_single_request(request_id(number), each.time / self.speed, each.segments, each.output_tokens)


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One record of a trace file, with the name of the file and the line for error messages."""

    path: Path
    line: int
    fields: Mapping[str, Any]

    def error(self, field: str, problem: str) -> TraceError:
        return TraceError(f"{self.path}, line {self.line}, field {field!r}: {problem}", param=field)

    def text(self, field: str) -> str:
        value = self.fields.get(field)
        if value is None or value == "":
            raise self.error(field, "it is missing, and every record must have it")
        return str(value)

    def number(self, field: str) -> float:
        text = self.text(field)
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise self.error(field, f"{text[:100]!r} must be a number")
        return value

    def tokens(self, field: str) -> int:
        value = self.number(field)
        if not (0 <= value <= MAX_TRACE_TOKENS and value == int(value)):
            raise self.error(field, f"{value:g} must be a whole number from 0 to {MAX_TRACE_TOKENS}")
        return int(value)

    def date(self, field: str) -> float:
        """Return the seconds since 1970 of a date and time, which is in UTC unless it names a time zone."""
        text = self.text(field)
        # Azure writes 7 digits after the second, and Python reads 6.
        whole, dot, rest = text.partition(".")
        digits = len(rest) - len(rest.lstrip("0123456789"))
        try:
            parsed = datetime.fromisoformat(whole + dot + rest[: min(digits, 6)] + rest[digits:])
        except ValueError:
            raise self.error(field, f"{text[:100]!r} must be a date and time, as 2024-05-10 00:00:00.01") from None
        return (parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp()


# Returns None for a row without a prompt or a reply, which is left out.
ReadRow = Callable[[TraceRow], TraceRequest | None]


def read_trace(path: Path, trace_format: str = "auto", speed: float = 1.0) -> TraceWorkload:
    """Return the requests of a trace file. Raises TraceError if it is malformed or has no request.

    `trace_format`: a key of TRACE_FORMATS, or `auto`: the fields of the first record determine the format."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path} cannot be read: {error}", hint="name a text file with a trace") from error
    if text.lstrip().startswith("["):
        message = f"{path} is a JSON list; a trace has a JSON object in each line"
        raise TraceError(message, hint="jq -c '.[]' FILE writes the objects of a list in lines")
    rows = _read_json_lines(path, text) if text.lstrip().startswith("{") else _read_csv(path, text)
    requests: list[TraceRequest] = []
    read_row: ReadRow | None = None
    for row in rows:
        if read_row is None:
            read_row = _find_reader(row, trace_format)
        if (request := read_row(row)) is not None:
            requests.append(request)
    if not requests:
        raise TraceError(f"{path} has no request", hint="a trace needs at least one record with prompt and output")
    start = min(request.time for request in requests)
    requests.sort(key=lambda request: request.time)
    if (seconds := requests[-1].time - start) > MAX_TRACE_S:
        message = f"{path} has requests over {seconds:.3g} s; a trace may have {MAX_TRACE_S:.3g} s"
        raise TraceError(message, hint="timestamp is in milliseconds (Mooncake), and Timestamp in seconds (BurstGPT)")
    return TraceWorkload(tuple(replace(r, time=r.time - start) for r in _link_sessions(requests)), speed)


def _read_json_lines(path: Path, text: str) -> Iterator[TraceRow]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise TraceError(f"{path}, line {number}: it must be a JSON object: {error}") from error
        if not isinstance(fields, dict):
            raise TraceError(f"{path}, line {number}: it must be a JSON object, not {type(fields).__name__}")
        yield TraceRow(path, number, fields)


def _read_csv(path: Path, text: str) -> Iterator[TraceRow]:
    reader = csv.DictReader(text.splitlines())
    try:
        for fields in reader:
            yield TraceRow(path, reader.line_num, {name: value for name, value in fields.items() if name})
    except csv.Error as error:  # such as a field of more than 128 KiB
        raise TraceError(f"{path}, line {reader.line_num + 1}: it is not a row of a CSV file: {error}") from error


def _find_reader(row: TraceRow, trace_format: str) -> ReadRow:
    if trace_format == "auto":
        for needed, read_row in TRACE_FORMATS.values():
            if needed in row.fields:
                return read_row
        found = ", ".join(row.fields)[:200]
        known = ", ".join(f"{needed} ({name})" for name, (needed, _) in TRACE_FORMATS.items())
        message = f"{row.path}, line {row.line}: the format is unknown; its fields are: {found}"
        raise TraceError(message, hint=f"a trace has one of the fields {known}")
    if trace_format not in TRACE_FORMATS:
        known = ", ".join(TRACE_FORMATS)
        raise InvalidRequest(f"the trace format {trace_format[:100]!r} is unknown", param="format", hint=f"use {known}")
    return TRACE_FORMATS[trace_format][1]


def _read_gateway_row(row: TraceRow) -> TraceRequest | None:
    prompt, output = row.tokens("tokens_in"), row.tokens("tokens_out")
    if not prompt or not output:
        return None  # a request that failed, or has no tokens
    segments = (PromptSegment(f"line-{row.line}", prompt),)
    return TraceRequest(row.date("created_at"), segments, output, str(row.fields.get("session_id") or ""))


def _link_sessions(requests: list[TraceRequest]) -> Iterator[TraceRequest]:
    """Yield the requests, with prompts that begin with the previous prompt and reply of the same session.

    A prompt that is too short to contain both stays unchanged. `requests`: in the order of time."""
    last_segments: dict[str, tuple[PromptSegment, ...]] = {}
    for number, request in enumerate(requests):
        if request.session:
            earlier, size = last_segments.get(request.session, ()), request.segments[0].num_tokens
            if (left := size - sum(segment.num_tokens for segment in earlier)) >= 0:
                rest = (PromptSegment(request.segments[0].key, left),) if left else ()
                request = replace(request, segments=earlier + rest)
            reply = PromptSegment(reply_key(number), request.output_tokens)
            last_segments[request.session] = (*request.segments, reply)
        yield request


def _read_mooncake_row(row: TraceRow) -> TraceRequest | None:
    prompt, output = row.tokens("input_length"), row.tokens("output_length")
    ids, needed = row.fields.get("hash_ids"), -(-prompt // MOONCAKE_BLOCK_TOKENS)
    if not isinstance(ids, list) or len(ids) < needed:
        raise row.error("hash_ids", f"it must be a list of at least {needed} ids, one for each 512 tokens")
    sizes = [min(MOONCAKE_BLOCK_TOKENS, prompt - i * MOONCAKE_BLOCK_TOKENS) for i in range(needed)]
    segments = tuple(PromptSegment(f"block-{name}", size) for name, size in zip(ids, sizes, strict=False))
    return TraceRequest(row.number("timestamp") / 1e3, segments, output) if prompt and output else None


def _make_plain_reader(read_time: Callable[[TraceRow], float], prompt: str, output: str) -> ReadRow:
    def read(row: TraceRow) -> TraceRequest | None:
        segments, num_output = (PromptSegment(f"line-{row.line}", row.tokens(prompt)),), row.tokens(output)
        return TraceRequest(read_time(row), segments, num_output) if segments[0].num_tokens and num_output else None

    return read


# A field by which the format is recognised, and the function that reads its rows, by name.
TRACE_FORMATS: dict[str, tuple[str, ReadRow]] = {
    "gateway": ("tokens_in", _read_gateway_row),
    "mooncake": ("input_length", _read_mooncake_row),
    "azure": (
        "ContextTokens",
        _make_plain_reader(lambda row: row.date("TIMESTAMP"), "ContextTokens", "GeneratedTokens"),
    ),
    "burstgpt": (
        "Request tokens",
        _make_plain_reader(lambda row: row.number("Timestamp"), "Request tokens", "Response tokens"),
    ),
}
