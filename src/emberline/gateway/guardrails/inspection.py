"""Inspection: all texts of one request or reply, looked at by the pattern rules in one go. Functions of bytes alone, so
that a large body can be looked at in another process (`core/offload.py`)."""

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

LARGE = 1 << 15  # bytes: larger bodies are looked at in another process
LARGEST_UNPACKED = 64 << 20  # bytes that a packed body may become
LONGEST_SAID = 80_000  # characters for judges, which refuse a longer text (`judge.py`)
SEAM = 160  # characters of a part that may belong to something which began in the part before
_GAP = "\x00"  # between the ends of a long part: no pattern matches it


class Inspected(msgspec.Struct):
    body: bytes | None = None  # without what is to be redacted; None: as it was
    findings: list[Finding] = []
    said: str = ""  # the conversation, for judges


class Unreadable(Exception):
    """The body is packed in a way that cannot be read here."""


class Inspector:
    """Collects what the rules find; in place, so for one body."""

    def __init__(self, rules: Iterable[PatternRule], check: Check) -> None:
        self._scanner = Scanner(rules, check)
        self.findings: list[Finding] = []

    def redact(self, texts: Iterable[Text]) -> bool:
        """False: there was nothing to redact."""
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
        written = text.holder[text.key]  # what lies across parts is redacted already
        made = redacted(written, self._found(self._scanner.find(written)))
        if made == written:
            return False
        text.holder[text.key] = made
        return True

    def _redact_across(self, parts: list[Text]) -> bool:
        """What is spread over parts of one message, which providers join with or without a line between."""
        changed = False
        for joint in ("", "\n"):
            seams = Seams([part.holder[part.key] for part in parts], joint)
            spans = [span for span in self._scanner.find(seams.text) if seams.crosses(span.start, span.end)]
            self._found(spans)
            for number, made in seams.redacted(spans):
                parts[number].holder[parts[number].key], changed = made, True
        return changed

    def _found(self, spans: list[Span]) -> list[Span]:
        for span in spans:
            finding = self._scanner.finding(span)
            if finding not in self.findings:
                self.findings.append(finding)
        return spans


class Seams:
    """The ends of texts that follow each other, joined."""

    def __init__(self, texts: list[str], joint: str) -> None:
        self._texts = texts
        self._pieces: list[tuple[int, int, int, int]] = []  # where it is here, of which text, and from where on
        made, at = [], 0
        for number, text in enumerate(texts):
            short = len(text) <= 2 * SEAM
            ends = [(text, 0)] if short else [(text[:SEAM], 0), (text[-SEAM:], len(text) - SEAM)]
            for i, (piece, offset) in enumerate(ends):
                between = _GAP if i else joint if number else ""
                at += len(between)
                made += [between, piece]
                self._pieces.append((at, at + len(piece), number, offset))
                at += len(piece)
        self.text = "".join(made)

    def crosses(self, start: int, end: int) -> bool:
        return len({number for first, last, number, _ in self._pieces if first < end and start < last}) > 1

    def redacted(self, spans: list[Span]) -> Iterator[tuple[int, str]]:
        """The texts that change, by their number. The label stands in the first of them."""
        made: dict[int, list[tuple[int, int, str]]] = {}
        for start, end, label in cuts(spans):
            for first, last, number, offset in self._pieces:
                if first < end and start < last:
                    cut = (max(start, first) - first + offset, min(end, last) - first + offset, label)
                    made.setdefault(number, []).append(cut)
                    label = ""
        for number, places in made.items():
            text = self._texts[number]
            for first, last, label in reversed(places):
                text = text[:first] + label + text[last:]
            yield number, text


def inspect_request(body: bytes, rules: tuple[PatternRule, ...], kind: str = "", coding: str = "") -> Inspected:
    """`kind`, `coding`: the headers content-type and content-encoding. A body that was unpacked and redacted stays
    unpacked. RecursionError: it is nested too deep; Unreadable: it cannot be unpacked."""
    inspector = Inspector(rules, "REQUEST")
    read = unpacked(body, coding) if rules and coding else body
    found = decoded(read)
    if found is None:
        made = _inspect_text(inspector, read, kind) if rules else None
        return Inspected(made, inspector.findings)
    said = conversation(found)[:LONGEST_SAID]
    if not rules:
        return Inspected(said=said)
    changed = inspector.redact(request_texts(found))
    ambiguous = not canonical(read).startswith(b"json:")  # could be read in two ways: it is sent as it was read
    return Inspected(msgspec.json.encode(found) if changed or ambiguous else None, inspector.findings, said)


def inspect_reply(body: bytes, rules: tuple[PatternRule, ...]) -> Inspected:
    """`said` is what it said before anything was redacted."""
    inspector = Inspector(rules, "RESPONSE")
    found = decoded(body)
    if found is None:
        made = _inspect_text(inspector, body, "") if rules else None
        return Inspected(made, inspector.findings, body.decode("utf-8", "ignore")[:LONGEST_SAID])
    said = "\n".join(text.text for text in texts_of(found) if text.grows)[:LONGEST_SAID]
    if not inspector.redact(texts_of(found)):
        return Inspected(None, inspector.findings, said)
    silence(found)
    return Inspected(msgspec.json.encode(found), inspector.findings, said)


def inspect_query(query: str, rules: tuple[PatternRule, ...]) -> tuple[str, list[Finding]]:
    """The query without what is to be redacted; the same string if there was nothing. The provider's key stays."""
    inspector = Inspector(rules, "REQUEST")
    pairs = [list(pair) for pair in parse_qsl(query, keep_blank_values=True)]
    texts = ((number, pair, i) for number, pair in enumerate(pairs) for i in (0, 1) if pair[0] not in SECRET)
    changed = inspector.redact(Text(pair, i, pair[i], (number, i)) for number, pair, i in texts)
    return urlencode([(name, value) for name, value in pairs]) if changed else query, inspector.findings


def unpacked(body: bytes, coding: str) -> bytes:
    """Unreadable: no reader for this coding, or it is damaged. BodyTooLarge: it becomes too large."""
    for each in reversed([name.strip().lower() for name in coding.split(",")]):
        if each in ("gzip", "x-gzip", "deflate"):
            body = _inflated(body)
        elif each not in ("", "identity"):
            raise Unreadable(each)
    return body


def _inflated(body: bytes) -> bytes:
    """Some senders of `deflate` leave out the wrapping."""
    bits = zlib.MAX_WBITS | 32 if body[:2] == b"\x1f\x8b" or _is_zlib(body) else -zlib.MAX_WBITS
    made, size = [], 0
    try:
        while body:  # gzip may have several members
            inflater = zlib.decompressobj(bits)
            made.append(inflater.decompress(body, LARGEST_UNPACKED - size + 1))
            size += len(made[-1])
            if size > LARGEST_UNPACKED:
                raise BodyTooLarge(f"the body becomes more than {LARGEST_UNPACKED} bytes when it is unpacked")
            if not inflater.eof:
                raise Unreadable("cut off")
            body = inflater.unused_data
    except zlib.error as e:
        raise Unreadable(str(e)) from e
    return b"".join(made)


def _is_zlib(body: bytes) -> bool:
    return len(body) > 1 and body[0] & 0x0F == 8 and int.from_bytes(body[:2]) % 31 == 0


def _inspect_text(inspector: Inspector, body: bytes, kind: str) -> bytes | None:
    """Of what is no JSON. Of a form, each part by itself; what is no text is not looked into."""
    if kind.startswith("multipart/") and (boundary := _boundary(kind)):
        parts = body.split(boundary)
        made = [_inspect_text(inspector, part, "") for part in parts]
        if all(each is None for each in made):
            return None
        return boundary.join(part if new is None else new for part, new in zip(parts, made, strict=True))
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
    """None: it is no JSON. What is no UTF-8 in it is read as lenient readers would. RecursionError: it is nested too
    deep, which must not pass for none."""
    if body.lstrip()[:1] not in (b"{", b"["):
        return None
    try:
        return msgspec.json.decode(body)
    except UnicodeDecodeError:
        return decoded(body.decode("utf-8", "replace").encode())
    except msgspec.MsgspecError:
        return None
