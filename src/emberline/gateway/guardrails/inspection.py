"""Inspection: applies the pattern rules to all texts of one request or reply.

The functions take bytes, so that a large body can be inspected in a child process (`core/offload.py`).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlencode

import msgspec

from emberline.core.errors import BodyTooLarge
from emberline.gateway.cache.key import SECRET_QUERY_PARAMETERS
from emberline.gateway.core.guardrail_finding import Check, GuardrailFinding
from emberline.gateway.core.guardrail_policy import PatternRule
from emberline.gateway.core.request_body import canonicalize_body
from emberline.gateway.guardrails.scanner import PatternMatch, PatternScanner, merge_redaction_ranges, redact_text
from emberline.gateway.guardrails.texts import (
    JsonText,
    extract_conversation_text,
    iter_request_texts,
    iter_texts,
    remove_logprobs,
)

OFFLOAD_MIN_BYTES = 1 << 15  # larger bodies are inspected in another process
MAX_DECOMPRESSED_BYTES = 64 << 20
MAX_JUDGED_CHARS = 80_000  # more than judges accept: they refuse a longer text (`judge.py`)
SEAM_CHARS = 160  # at each end of a part, that may belong to a match across two parts
_GAP = "\x00"  # between the two ends of a long part; no pattern matches it


class InspectionResult(msgspec.Struct):
    body: bytes | None = None  # with redactions applied; None: unchanged
    findings: list[GuardrailFinding] = []
    judged_text: str = ""  # the text that judges read


class UnreadableBody(Exception):
    """The body cannot be decompressed: its content-encoding is not supported, or the data is damaged."""


class Inspector:
    """Redacts the texts of one request or reply in place, and collects the findings."""

    def __init__(self, rules: Iterable[PatternRule], check: Check) -> None:
        self._scanner = PatternScanner(rules, check)
        self.findings: list[GuardrailFinding] = []

    def redact_texts(self, texts: Iterable[JsonText]) -> bool:
        """Redact the texts in place and return whether any changed."""
        if not self._scanner:
            return False
        changed = False
        for _, group in groupby(list(texts), key=lambda text: text.message_key):
            parts = list(group)
            if len(parts) > 1:
                changed |= self._redact_across_parts(parts)
            for part in parts:
                changed |= self._redact_within_text(part)
        return changed

    def _redact_within_text(self, text: JsonText) -> bool:
        original = text.current  # matches across parts are redacted already
        new = redact_text(original, self._record_findings(self._scanner.find_matches(original)))
        if new == original:
            return False
        text.replace(new)
        return True

    def _redact_across_parts(self, parts: list[JsonText]) -> bool:
        """Redact matches that begin in one part of a message and end in a later part.

        Providers join the parts with or without a line break between them, so both forms are searched.
        """
        changed = False
        for separator in ("", "\n"):
            seams = JoinedTextEnds([part.current for part in parts], separator)
            matches = [
                match
                for match in self._scanner.find_matches(seams.text)
                if seams.spans_several_texts(match.start, match.end)
            ]
            self._record_findings(matches)
            for number, new in seams.redact_texts(matches):
                parts[number].replace(new)
                changed = True
        return changed

    def _record_findings(self, matches: list[PatternMatch]) -> list[PatternMatch]:
        for match in matches:
            finding = self._scanner.make_finding(match)
            if finding not in self.findings:
                self.findings.append(finding)
        return matches


class JoinedTextEnds:
    """One string in which matches that span several consecutive texts are found.

    It contains short texts in full. Of a long text it contains only the first and the last SEAM_CHARS characters.
    """

    def __init__(self, texts: list[str], separator: str) -> None:
        self._texts = texts
        self._pieces: list[tuple[int, int, int, int]] = []  # start, end, number of the text, offset in it
        joined, at = [], 0
        for number, text in enumerate(texts):
            short = len(text) <= 2 * SEAM_CHARS
            ends = [(text, 0)] if short else [(text[:SEAM_CHARS], 0), (text[-SEAM_CHARS:], len(text) - SEAM_CHARS)]
            for i, (piece, offset) in enumerate(ends):
                between = _GAP if i else separator if number else ""
                at += len(between)
                joined += [between, piece]
                self._pieces.append((at, at + len(piece), number, offset))
                at += len(piece)
        self.text = "".join(joined)

    def spans_several_texts(self, start: int, end: int) -> bool:
        return len({number for first, last, number, _ in self._pieces if first < end and start < last}) > 1

    def redact_texts(self, matches: list[PatternMatch]) -> Iterator[tuple[int, str]]:
        """Yield (index, new text) for each text that a match touches.

        The label that replaces a match is put into the first of the texts that the match touches.
        """
        cuts_of_text: dict[int, list[tuple[int, int, str]]] = {}
        for start, end, label in merge_redaction_ranges(matches):
            for first, last, number, offset in self._pieces:
                if first < end and start < last:
                    cut = (max(start, first) - first + offset, min(end, last) - first + offset, label)
                    cuts_of_text.setdefault(number, []).append(cut)
                    label = ""
        for number, text_cuts in cuts_of_text.items():
            text = self._texts[number]
            for first, last, label in reversed(text_cuts):
                text = text[:first] + label + text[last:]
            yield number, text


def inspect_request(
    body: bytes, rules: tuple[PatternRule, ...], content_type: str = "", content_encoding: str = ""
) -> InspectionResult:
    """Apply the rules to a request body. If a compressed body is redacted, the result is not compressed.

    Raise RecursionError if the JSON is nested too deeply, and UnreadableBody if the body cannot be decompressed.
    """
    inspector = Inspector(rules, "REQUEST")
    plain = decompress(body, content_encoding) if rules and content_encoding else body
    value = decode_json(plain)
    if value is None:
        new = _redact_plain_text(inspector, plain, content_type) if rules else None
        return InspectionResult(new, inspector.findings)
    text = extract_conversation_text(value)[:MAX_JUDGED_CHARS]
    if not rules:
        return InspectionResult(judged_text=text)
    changed = inspector.redact_texts(iter_request_texts(value))
    # JSON that parsers could read in two ways is sent as it was read here.
    ambiguous = not canonicalize_body(plain).startswith(b"json:")
    return InspectionResult(msgspec.json.encode(value) if changed or ambiguous else None, inspector.findings, text)


def inspect_reply(body: bytes, rules: tuple[PatternRule, ...]) -> InspectionResult:
    """Apply the rules to a reply body. The result's `judged_text` is the text before redaction."""
    inspector = Inspector(rules, "RESPONSE")
    value = decode_json(body)
    if value is None:
        new = _redact_plain_text(inspector, body, "") if rules else None
        return InspectionResult(new, inspector.findings, body.decode("utf-8", "ignore")[:MAX_JUDGED_CHARS])
    text = "\n".join(each.text for each in iter_texts(value) if each.is_streamed)[:MAX_JUDGED_CHARS]
    if not inspector.redact_texts(iter_texts(value)):
        return InspectionResult(None, inspector.findings, text)
    remove_logprobs(value)
    return InspectionResult(msgspec.json.encode(value), inspector.findings, text)


def inspect_query(query: str, rules: tuple[PatternRule, ...]) -> tuple[str, list[GuardrailFinding]]:
    """Apply the rules to a URL's query. Return the query, redacted if a rule matched, and the findings.

    Parameters that contain credentials are not inspected.
    """
    inspector = Inspector(rules, "REQUEST")
    pairs = [list(pair) for pair in parse_qsl(query, keep_blank_values=True)]
    texts = (
        (number, pair, i) for number, pair in enumerate(pairs) for i in (0, 1) if pair[0] not in SECRET_QUERY_PARAMETERS
    )
    changed = inspector.redact_texts(JsonText(pair, i, pair[i], (number, i)) for number, pair, i in texts)
    return urlencode([(name, value) for name, value in pairs]) if changed else query, inspector.findings


def inspect_path(path: str, rules: tuple[PatternRule, ...]) -> tuple[str, list[GuardrailFinding]]:
    """Apply the rules to the path of a URL. Return the path, redacted if a rule matched, and the findings."""
    inspector = Inspector(rules, "REQUEST")
    holder = [unquote(path)]
    changed = inspector.redact_texts([JsonText(holder, 0, holder[0], ())])
    return quote(holder[0], safe="/:@!$&'()*+,;=~") if changed else path, inspector.findings


def decompress(body: bytes, content_encoding: str) -> bytes:
    """Return the decompressed body.

    Raise UnreadableBody if the body cannot be decompressed, and BodyTooLarge if the result is too large.
    """
    for each in reversed([name.strip().lower() for name in content_encoding.split(",")]):
        if each in ("gzip", "x-gzip", "deflate"):
            body = _inflate(body)
        elif each not in ("", "identity"):
            raise UnreadableBody(f"content-encoding {each!r} is not supported; gzip and deflate are")
    return body


def _inflate(body: bytes) -> bytes:
    """Decompress gzip or deflate data. Data without a zlib header, as some clients send it, is accepted."""
    bits = zlib.MAX_WBITS | 32 if body[:2] == b"\x1f\x8b" or _has_zlib_header(body) else -zlib.MAX_WBITS
    chunks, size = [], 0
    try:
        while body:  # gzip may have several members
            inflater = zlib.decompressobj(bits)
            chunks.append(inflater.decompress(body, MAX_DECOMPRESSED_BYTES - size + 1))
            size += len(chunks[-1])
            if size > MAX_DECOMPRESSED_BYTES:
                raise BodyTooLarge(f"the decompressed body is larger than {MAX_DECOMPRESSED_BYTES} bytes")
            if not inflater.eof:
                raise UnreadableBody("the compressed body is truncated")
            body = inflater.unused_data
    except zlib.error as e:
        raise UnreadableBody(str(e)) from e
    return b"".join(chunks)


def _has_zlib_header(body: bytes) -> bool:
    return len(body) > 1 and body[0] & 0x0F == 8 and int.from_bytes(body[:2]) % 31 == 0


def _redact_plain_text(inspector: Inspector, body: bytes, content_type: str) -> bytes | None:
    """Redact a body that is not JSON. Return None if nothing changed. Binary data is skipped."""
    if content_type.startswith("multipart/") and (boundary := _multipart_boundary(content_type)):
        parts = body.split(boundary)
        new_parts = [_redact_plain_text(inspector, part, "") for part in parts]
        if all(each is None for each in new_parts):
            return None
        return boundary.join(part if new is None else new for part, new in zip(parts, new_parts, strict=True))
    try:
        holder = [body.decode()]
    except UnicodeDecodeError:
        return None
    return holder[0].encode() if inspector.redact_texts([JsonText(holder, 0, holder[0], ())]) else None


def _multipart_boundary(content_type: str) -> bytes:
    _, _, rest = content_type.partition("boundary=")
    name = rest.partition(";")[0].strip().strip('"')
    return b"--" + name.encode() if name else b""


def decode_json(body: bytes) -> Any:
    """Return the decoded JSON, or None if the body is not JSON.

    Invalid UTF-8 is replaced, as lenient parsers do. Raise RecursionError for JSON that is nested too deeply, so that
    the caller does not take it for plain text.
    """
    if body.lstrip()[:1] not in (b"{", b"["):
        return None
    try:
        return msgspec.json.decode(body)
    except UnicodeDecodeError:
        return decode_json(body.decode("utf-8", "replace").encode())
    except msgspec.MsgspecError:
        return None
