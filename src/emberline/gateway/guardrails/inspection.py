"""Inspection: the pattern rules applied to all texts of one request or reply.

These are functions of bytes only, so that a large body can be inspected in another process (`core/offload.py`)."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any
from urllib.parse import parse_qsl, urlencode

import msgspec

from emberline.core.errors import BodyTooLarge
from emberline.gateway.body import canonical
from emberline.gateway.cache.key import SECRET
from emberline.gateway.guardrails.finding import Check, Finding
from emberline.gateway.guardrails.policy import PatternRule
from emberline.gateway.guardrails.scanner import Scanner, Span, cuts, redacted
from emberline.gateway.guardrails.texts import Text, conversation, request_texts, silence, texts_of

LARGE = 1 << 15  # larger bodies are inspected in another process
LARGEST_UNPACKED = 64 << 20
LONGEST_SAID = 80_000  # more than judges accept: they refuse a longer text (`judge.py`)
SEAM = 160  # at each end of a part, that may belong to a match across two parts
_GAP = "\x00"  # between the two ends of a long part; no pattern matches it


class Inspected(msgspec.Struct):
    body: bytes | None = None  # with redactions applied; None: unchanged
    findings: list[Finding] = []
    said: str = ""  # the text that judges read


class Unreadable(Exception):
    """The body has an unsupported content-encoding, or is damaged."""


class Inspector:
    """Redacts the texts of one body in place and collects the findings."""

    def __init__(self, rules: Iterable[PatternRule], check: Check) -> None:
        self._scanner = Scanner(rules, check)
        self.findings: list[Finding] = []

    def redact(self, texts: Iterable[Text]) -> bool:
        """Redact the texts in place and return whether any changed."""
        if not self._scanner:
            return False
        changed = False
        for _, group in groupby(list(texts), key=lambda text: text.group):
            parts = list(group)
            if len(parts) > 1:
                changed |= self._redact_across(parts)
            for part in parts:
                changed |= self._redact_within(part)
        return changed

    def _redact_within(self, text: Text) -> bool:
        original = text.holder[text.key]  # matches across parts are redacted already
        new = redacted(original, self._found(self._scanner.find(original)))
        if new == original:
            return False
        text.holder[text.key] = new
        return True

    def _redact_across(self, parts: list[Text]) -> bool:
        """Redact matches across parts of one message, which providers join with or without a line break."""
        changed = False
        for separator in ("", "\n"):
            seams = Seams([part.holder[part.key] for part in parts], separator)
            matches = [match for match in self._scanner.find(seams.text) if seams.crosses(match.start, match.end)]
            self._found(matches)
            for number, new in seams.redacted(matches):
                parts[number].holder[parts[number].key], changed = new, True
        return changed

    def _found(self, matches: list[Span]) -> list[Span]:
        for match in matches:
            finding = self._scanner.finding(match)
            if finding not in self.findings:
                self.findings.append(finding)
        return matches


class Seams:
    """The ends of consecutive texts, joined into one text that is searched for matches across them."""

    def __init__(self, texts: list[str], joint: str) -> None:
        self._texts = texts
        self._pieces: list[tuple[int, int, int, int]] = []  # start, end, number of the text, offset in it
        joined, at = [], 0
        for number, text in enumerate(texts):
            short = len(text) <= 2 * SEAM
            ends = [(text, 0)] if short else [(text[:SEAM], 0), (text[-SEAM:], len(text) - SEAM)]
            for i, (piece, offset) in enumerate(ends):
                between = _GAP if i else joint if number else ""
                at += len(between)
                joined += [between, piece]
                self._pieces.append((at, at + len(piece), number, offset))
                at += len(piece)
        self.text = "".join(joined)

    def crosses(self, start: int, end: int) -> bool:
        return len({number for first, last, number, _ in self._pieces if first < end and start < last}) > 1

    def redacted(self, matches: list[Span]) -> Iterator[tuple[int, str]]:
        """Yield number and new text of each text that changes. The label is put into the first of them."""
        cuts_of_text: dict[int, list[tuple[int, int, str]]] = {}
        for start, end, label in cuts(matches):
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


def inspect_request(body: bytes, rules: tuple[PatternRule, ...], kind: str = "", coding: str = "") -> Inspected:
    """Apply the rules to a request. A body that was decompressed and redacted stays decompressed.

    Raises RecursionError if the JSON is nested too deeply, and UnreadableBody if it cannot be decompressed.
    """
    inspector = Inspector(rules, "REQUEST")
    plain = unpacked(body, coding) if rules and coding else body
    value = decoded(plain)
    if value is None:
        new = _inspect_text(inspector, plain, kind) if rules else None
        return Inspected(new, inspector.findings)
    text = conversation(value)[:LONGEST_SAID]
    if not rules:
        return Inspected(said=text)
    changed = inspector.redact(request_texts(value))
    # JSON that parsers could read in two ways is sent as it was read here.
    ambiguous = not canonical(plain).startswith(b"json:")
    return Inspected(msgspec.json.encode(value) if changed or ambiguous else None, inspector.findings, text)


def inspect_reply(body: bytes, rules: tuple[PatternRule, ...]) -> Inspected:
    """Apply the rules to a reply; the text for judges is the text before redaction."""
    inspector = Inspector(rules, "RESPONSE")
    value = decoded(body)
    if value is None:
        new = _inspect_text(inspector, body, "") if rules else None
        return Inspected(new, inspector.findings, body.decode("utf-8", "ignore")[:LONGEST_SAID])
    text = "\n".join(each.text for each in texts_of(value) if each.grows)[:LONGEST_SAID]
    if not inspector.redact(texts_of(value)):
        return Inspected(None, inspector.findings, text)
    silence(value)
    return Inspected(msgspec.json.encode(value), inspector.findings, text)


def inspect_query(query: str, rules: tuple[PatternRule, ...]) -> tuple[str, list[Finding]]:
    """Return the query with redactions, the same string if there are none, and the findings. Keys stay."""
    inspector = Inspector(rules, "REQUEST")
    pairs = [list(pair) for pair in parse_qsl(query, keep_blank_values=True)]
    texts = ((number, pair, i) for number, pair in enumerate(pairs) for i in (0, 1) if pair[0] not in SECRET)
    changed = inspector.redact(Text(pair, i, pair[i], (number, i)) for number, pair, i in texts)
    return urlencode([(name, value) for name, value in pairs]) if changed else query, inspector.findings


def unpacked(body: bytes, coding: str) -> bytes:
    """Return the decompressed body. Raises UnreadableBody or BodyTooLarge."""
    for each in reversed([name.strip().lower() for name in coding.split(",")]):
        if each in ("gzip", "x-gzip", "deflate"):
            body = _inflated(body)
        elif each not in ("", "identity"):
            raise Unreadable(f"content-encoding {each} is not supported")
    return body


def _inflated(body: bytes) -> bytes:
    """Decompress gzip or deflate; some clients send `deflate` without the zlib wrapper."""
    bits = zlib.MAX_WBITS | 32 if body[:2] == b"\x1f\x8b" or _is_zlib(body) else -zlib.MAX_WBITS
    chunks, size = [], 0
    try:
        while body:  # gzip may have several members
            inflater = zlib.decompressobj(bits)
            chunks.append(inflater.decompress(body, LARGEST_UNPACKED - size + 1))
            size += len(chunks[-1])
            if size > LARGEST_UNPACKED:
                raise BodyTooLarge(f"the decompressed body is larger than {LARGEST_UNPACKED} bytes")
            if not inflater.eof:
                raise Unreadable("the compressed body is truncated")
            body = inflater.unused_data
    except zlib.error as e:
        raise Unreadable(str(e)) from e
    return b"".join(chunks)


def _is_zlib(body: bytes) -> bool:
    return len(body) > 1 and body[0] & 0x0F == 8 and int.from_bytes(body[:2]) % 31 == 0


def _inspect_text(inspector: Inspector, body: bytes, kind: str) -> bytes | None:
    """Return a body that is not JSON with redactions, or None if unchanged. Binary data is skipped."""
    if kind.startswith("multipart/") and (boundary := _boundary(kind)):
        parts = body.split(boundary)
        new_parts = [_inspect_text(inspector, part, "") for part in parts]
        if all(each is None for each in new_parts):
            return None
        return boundary.join(part if new is None else new for part, new in zip(parts, new_parts, strict=True))
    try:
        holder = [body.decode()]
    except UnicodeDecodeError:
        return None
    return holder[0].encode() if inspector.redact([Text(holder, 0, holder[0], ())]) else None


def _boundary(kind: str) -> bytes:
    _, _, rest = kind.partition("boundary=")
    name = rest.partition(";")[0].strip().strip('"')
    return b"--" + name.encode() if name else b""


def decoded(body: bytes) -> Any:
    """Return the decoded JSON, or None if the body is not JSON.

    Invalid UTF-8 is replaced, as lenient parsers do. Raises RecursionError for JSON that is nested too deeply, which
    must not be mistaken for a body that is not JSON.
    """
    if body.lstrip()[:1] not in (b"{", b"["):
        return None
    try:
        return msgspec.json.decode(body)
    except UnicodeDecodeError:
        return decoded(body.decode("utf-8", "replace").encode())
    except msgspec.MsgspecError:
        return None
