"""Unusual notations of a card number that guardrails must find, and similar text that they must not find."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from typing import Any

import pytest
from gateway_requests import call

from emberline.core.clock import ManualClock
from emberline.core.errors import InvalidRequest
from emberline.gateway.core.guardrail_policy import PatternRule
from emberline.gateway.core.request import GatewayReply, GatewayRequest
from emberline.gateway.core.settings import GatewaySettings
from emberline.gateway.guardrails.inspection import inspect_query, inspect_request
from emberline.gateway.guardrails.normalized import NormalizedText
from emberline.gateway.guardrails.scanner import PatternScanner, redact_text
from emberline.gateway.guardrails.text_window import TextWindow, WindowPiece
from emberline.gateway.guardrails.texts import JsonText
from emberline.gateway.layers.guardrail_checks import GuardrailLayer

CARD = "4111111111111111"
GROUPS = ("4111", "1111", "1111", "1111")
RULE = PatternRule(name="r", find=("payment_card", "iban", "us_ssn", "api_key", "email", "phone"), action="redact")
SCANNER = PatternScanner([RULE], "REQUEST")
FULL_WIDTH = str.maketrans("0123456789", "０１２３４５６７８９")  # noqa: RUF001
ARABIC = str.maketrans("0123456789", "٠١٢٣٤٥٦٧٨٩")
ZERO_WIDTH = "\u200b"

EVASIONS = {
    "dots": ".".join(GROUPS),
    "newlines": "\n".join(GROUPS),
    "windows newlines": "\r\n".join(GROUPS),
    "wrapped line": "4111 1111\n1111 1111",
    "no-break space": "\u00a0".join(GROUPS),
    "narrow no-break space": "\u202f".join(GROUPS),
    "no-break hyphen": "\u2011".join(GROUPS),
    "en dash": "\u2013".join(GROUPS),
    "minus": "\u2212".join(GROUPS),
    "middle dot": "\u00b7".join(GROUPS),
    "tab": "\t".join(GROUPS),
    "two spaces": "  ".join(GROUPS),
    "spaced dashes": " - ".join(GROUPS),
    "zero width": ZERO_WIDTH.join(CARD),
    "zero width between groups": "\u2060 ".join(GROUPS),
    "soft hyphen": "\u00ad".join(GROUPS),
    "byte order mark": "\ufeff".join(GROUPS),
    "full width": CARD.translate(FULL_WIDTH),
    "full width in groups": "\u3000".join(GROUPS).translate(FULL_WIDTH),
    "arabic": CARD.translate(ARABIC),
    "keycaps": "".join(f"{digit}\ufe0f\u20e3" for digit in CARD),
    "digit by digit": " ".join(CARD),
    "digit by digit with dots": ".".join(CARD),
    "json escape": "".join(f"\\u{ord(digit):04x}" for digit in CARD),
    "json newlines": "\\n".join(GROUPS),
    "card and code": "4111 1111 1111 1111 123",
    "spaced dots": " . ".join(GROUPS),
    "slashes": "/".join(GROUPS),
    "spaced slashes": " / ".join(GROUPS),
    "underscores": "_".join(GROUPS),
    "commas": ",".join(GROUPS),
    "commas and spaces": ", ".join(GROUPS),
    "digit by digit with spaced dots": " . ".join(CARD),
    "digit by digit with slashes": "/".join(CARD),
    "digit by digit with underscores": "_".join(CARD),
    "digit by digit with commas": ", ".join(CARD),
}
SURROUNDED = {
    "emphasis": "_{}_",
    "after an underscore": "card_{}",
    "row with a number before": "7,{}",
    "row with an expiry after": "{},12/25",
    "abbreviation": "no.{}",
    "path": "/cards/{}/charge",
}
ORDINARY = (
    "2021\n2022\n2023\n2024",
    "4111\n1111\n1111\n1111\n1111\n1111",  # rows of a column
    "3000\n4111\n1111\n1111\n1111\n9000",
    "4111.1111 1111.1111",  # decimals
    "4111 1111-1111 1111",
    "v4111.1111.1111.1111",
    "4111.1111.1111.1112",
    "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16",
    "4 1 1 1 1 1 1 1 1 1 1 1 1 1 1 2",
    " ".join("4111111111111111" * 3),  # more digits than any card has
    "3.14159265358979 2.71828182845904",
    "sum of 4111, 1111, 1111 and 1111",
    "12:30:45.678 13:30:45.678",
    "٢٠٢٤-٠١-١٥",  # noqa: RUF001
    "请拨打电话。谢谢，再见！",  # noqa: RUF001
    "caf\u00e9 na\u00efve \u2014 d\u00e9j\u00e0 vu \U0001f600\ufe0f",
    "192.168.10.25 10.0.0.1",
    "4111,1111,1111,1111,1111",
    "2021, 2022, 2023, 2024",
    "0.4111111111111111 and 0,4111111111111111",
    "GET /v1/files/123/45/6789/content",
    "run_123_45_6789.log and img_640_480_2024.png",
    "100,20,3000\n123,45,6789",
    "17,4111\n1111, 1111, 1111",
    "1. 2. 3. 4. first, second",
    "[0, 1, 0, 1, 1, 0, 0, 1, 0, 1, 1, 0, 1]",
    "1.000.000 2.500.000",
)


@pytest.mark.parametrize("name", EVASIONS)
def test_card_is_redacted_in_every_notation(name: str) -> None:
    written = EVASIONS[name]
    for before, after in (("", ""), ("my card: ", " thanks"), ("\u200bkarte ", "\u200b!"), ("é中\u00ad", "\nend")):
        text = before + ("" if before[-1:].isspace() or not before else " ") + written + after
        made = redact_text(text, SCANNER.find_matches(text))
        assert "[payment_card]" in made, text
        assert not any(c.isdecimal() for c in made.replace(" 123", "")), made
        assert made.startswith(before) and made.endswith(after.lstrip(ZERO_WIDTH))


@pytest.mark.parametrize("name", SURROUNDED)
def test_card_is_redacted_beside_punctuation(name: str) -> None:
    for text in (SURROUNDED[name].format(CARD), f"it is {SURROUNDED[name].format(CARD)} now"):
        assert redact_text(text, SCANNER.find_matches(text)) == text.replace(CARD, "[payment_card]")


@pytest.mark.parametrize("text", ORDINARY)
def test_ordinary_text_has_no_match(text: str) -> None:
    assert SCANNER.find_matches(text) == []
    assert SCANNER.find_matches(f"see {text} there") == []


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("iban", "DE89\u00a03704\u00a00044\u00a00532\u00a00130\u00a000"),
        ("iban", "DE89.3704.0044.0532.0130.00"),
        ("iban", "DE89 3704 0044\n0532 0130 00"),
        ("us_ssn", "123\u201145\u20116789"),
        ("us_ssn", "123.45.6789"),
        ("us_ssn", "１２３-４５-６７８９"),  # noqa: RUF001
        ("email", "ada＠example．com"),  # noqa: RUF001
        ("email", "ada\u200b@example.com"),
        ("phone", "+1\u00a0415\u2011555\u20112671"),
        ("api_key", "sk-Zk3v9Qw8Lp2Xr7Tn\u200b5Yb1Hc6Md4Fs0Jg"),
        ("iban", "DE89/3704/0044/0532/0130/00"),
        ("iban", "DE89_3704_0044_0532_0130_00"),
        ("iban", "DE89 . 3704 . 0044 . 0532 . 0130 . 00"),
        ("iban", "DE89, 3704, 0044, 0532, 0130, 00"),
        ("us_ssn", "123/45/6789"),
        ("us_ssn", "123_45_6789"),
        ("us_ssn", "123 . 45 . 6789"),
        ("phone", "+1/415/555/2671"),
        ("phone", "+1_415_555_2671"),
        ("phone", "415 . 555 . 2671"),
    ],
)
def test_other_kinds_are_found_in_unusual_notation(kind: str, text: str) -> None:
    assert redact_text(f"is {text} ok", SCANNER.find_matches(f"is {text} ok")) == f"is [{kind}] ok"


def test_numbers_on_separate_lines_are_found() -> None:
    assert len(SCANNER.find_matches("123-45-6789\n234-56-7890\n345-67-8901")) == 3
    assert len(SCANNER.find_matches("4111 1111 1111 1111\n5555 5555 5555 4444")) == 2


def test_normalized_positions_map_to_the_original() -> None:
    read = NormalizedText("a\u200b\u200bb\\u0034c\u200b")
    assert read.text == "ab4c"
    assert [read.to_original(at) for at in range(5)] == [0, 3, 4, 10, 12]
    assert [read.to_normalized(at) for at in (0, 1, 3, 4, 10)] == [0, 1, 1, 2, 3]


@pytest.mark.parametrize("name", EVASIONS)
def test_no_digit_of_a_card_leaves_a_split_stream(name: str) -> None:
    text = f"it is {EVASIONS[name]} now, see you later"
    for size in (1, 3, 7):
        window, pieces = TextWindow(SCANNER), []
        for at in range(0, len(text), size):
            holder = [text[at : at + size]]
            pieces.append((holder, WindowPiece(JsonText(holder, 0, holder[0], ()))))
            window.add_piece(pieces[-1][1])
            window.scan()
            assert name == "card and code" or all(
                c not in "0123456789"
                for _, p in pieces
                if p.can_be_released and not p.redactions
                for c in p.source.text
            )
        window.scan(is_last=True)
        for _, piece in pieces:
            piece.apply_redactions()
        made = "".join(holder[0] for holder, _ in pieces)
        assert made.replace(" 123", "") == "it is [payment_card] now, see you later"


# -- request fields ----------------------------------------------------------------------------------------------------


def inspect(body: Any, **headers: str) -> tuple[Any, list[str]]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    seen = inspect_request(data, (RULE,), headers.get("kind", ""), headers.get("coding", ""))
    return seen.body, [finding.entry for finding in seen.findings]


@pytest.mark.parametrize(
    "body",
    [
        {"model": "m", "messages": [], "user": CARD},
        {"model": "m", "messages": [], "metadata": {"order": CARD}},
        {"model": "m", "messages": [{"role": "user", "name": f"n {CARD}", "content": "hi"}]},
        {"model": "m", "messages": [], "safety_identifier": CARD},
        {"model": "m", "messages": [], "prompt_cache_key": CARD},
        {"model": "m", "messages": [{"role": "user", "content": f"data:;base64, {CARD}"}]},
        {"model": "m", "input": {"data": f"my card is {CARD}"}},
        {"model": "m", "metadata": {"order": int(CARD)}},
        {"model": "m", "metadata": {"order": float(CARD)}},
        {"model": "m", "metadata": {"orders": [1, -int(CARD)]}},
        {"model": "m", "metadata": {CARD: "x", "other": CARD}},
        {"model": "m", "metadata": {CARD: {CARD: CARD}}},
        {"model": "m", "tools": [{"function": {"parameters": {"properties": {"4111-1111-1111-1111": {}}}}}]},
    ],
)
def test_every_field_sent_to_the_provider_is_inspected(body: dict[str, Any]) -> None:
    made, found = inspect(body)
    assert found == ["payment_card"] and made is not None and CARD.encode() not in made


def test_redacted_keys_stay_different() -> None:
    made, _ = inspect({"metadata": {CARD: 1, "4111-1111-1111-1111": 2, "a": 3}})
    assert json.loads(made) == {"metadata": {"[payment_card]": 1, "[payment_card]_": 2, "a": 3}}


@pytest.mark.parametrize(
    "body",
    [
        {"model": "m", "seed": int(CARD), "max_tokens": 100},
        {"model": "m", "metadata": {"at": 1763590000000, "ns": 1763590000000000000, "share": 4.111111111111111}},
        {"model": "m", "logit_bias": {"50256": -100, "4111": 1}},
    ],
)
def test_ordinary_numbers_and_keys_pass(body: dict[str, Any]) -> None:
    assert inspect(body) == (None, [])


@pytest.mark.parametrize("texts", [("4111 1111", "1111 1111"), ("my 4111 11", "11 1111", " 1111 ok"), GROUPS])
@pytest.mark.parametrize("shape", ["chat", "system", "gemini"])
def test_card_across_parts_of_one_message_is_found(texts: tuple[str, ...], shape: str) -> None:
    parts = [{"type": "text", "text": text} for text in texts]
    body: dict[str, Any] = {
        "chat": {"messages": [{"role": "user", "content": parts}]},
        "system": {"system": parts},
        "gemini": {"contents": [{"parts": [{"text": text} for text in texts]}]},
    }[shape]
    made, found = inspect(body)
    assert found == ["payment_card"] and made is not None
    assert made.count(b"[payment_card]") == 1 and b"1111" not in made and (b"ok" in made) == (" 1111 ok" in texts)


def test_card_across_long_parts_is_found() -> None:
    long = "word " * 500
    body = {"messages": [{"content": [{"text": f"{long}4111 1111"}, {"text": f" 1111 1111 {long}"}]}]}
    made, found = inspect(body)
    assert (
        found == ["payment_card"] and json.loads(made)["messages"][0]["content"][0]["text"] == f"{long}[payment_card]"
    )


def test_separate_messages_and_embedding_inputs_are_not_joined() -> None:
    assert inspect({"messages": [{"content": "4111 1111"}, {"content": "1111 1111"}]}) == (None, [])
    assert inspect({"input": ["4111 1111", "1111 1111"]}) == (None, [])


@pytest.mark.parametrize(
    "query", [f"q={CARD}", "q=4111+1111+1111+1111", "q=4111%E2%80%911111%E2%80%911111%E2%80%911111"]
)
def test_query_is_inspected(query: str) -> None:
    made, found = inspect_query(f"a=1&{query}", (RULE,))
    assert made == "a=1&q=%5Bpayment_card%5D" and [each.entry for each in found] == ["payment_card"]


@pytest.mark.parametrize("written", [CARD, "4111%201111%201111%201111", "4111/1111/1111/1111"])
@pytest.mark.parametrize("method", ["POST", "GET"])
def test_path_is_inspected(written: str, method: str) -> None:
    request = call(b"", dialect="raw", endpoint=f"files/{written}/content")
    request.method = method
    (sent,) = send_guarded(request, "redact")
    assert sent.endpoint == "files/%5Bpayment_card%5D/content"
    assert send_guarded(call(b"", dialect="raw", endpoint=f"files/{written}"), "block") == []
    (clean,) = send_guarded(call(b"", dialect="raw", endpoint="files/file-123%20a"), "block")
    assert clean.endpoint == "files/file-123%20a"


def test_provider_key_in_the_query_is_kept() -> None:
    query = "key=AIzaZk3v9Qw8Lp2Xr7Tn5Yb1Hc6Md4Fs0Jgabc4"
    assert inspect_query(query, (RULE,)) == (query, [])


def raw_deflate(data: bytes) -> bytes:
    compressor = zlib.compressobj(wbits=-15)
    return compressor.compress(data) + compressor.flush()


@pytest.mark.parametrize("compress", [gzip.compress, zlib.compress, raw_deflate])
def test_compressed_body_is_inspected(compress: Any) -> None:
    coding = "gzip" if compress is gzip.compress else "deflate"
    made, found = inspect(compress(f"card {CARD}".encode()), coding=coding)
    assert (made, found) == (b"card [payment_card]", ["payment_card"])


def test_text_of_a_multipart_form_is_inspected() -> None:
    form = b"--x\r\n\r\ncard %b\r\n--x\r\n\r\n\xff\xfe\x00\r\n--x--" % CARD.encode()
    made, found = inspect(form, kind="multipart/form-data; boundary=x")
    assert found == ["payment_card"] and made == form.replace(CARD.encode(), b"[payment_card]")


def send_guarded(request: GatewayRequest, action: str) -> list[GatewayRequest]:
    sent: list[GatewayRequest] = []

    async def inner(call: GatewayRequest) -> GatewayReply:
        sent.append(call)
        return GatewayReply(200, {}, b"{}", ended="complete")

    rule = {"name": "r", "find": ["payment_card"], "action": action}
    request.settings = GatewaySettings.parse({"guardrails": {"patterns": [rule]}})
    asyncio.run(GuardrailLayer(inner, ManualClock()).wrap(inner)(request))
    return sent


def test_redacted_body_is_sent_uncompressed() -> None:
    request = call(gzip.compress(f"card {CARD}".encode()), headers={"content-encoding": "gzip"}, dialect="raw")
    (sent,) = send_guarded(request, "redact")
    assert sent.body == b"card [payment_card]" and "content-encoding" not in sent.headers
    clean = call(gzip.compress(b"no card"), headers={"content-encoding": "gzip"}, dialect="raw")
    (sent,) = send_guarded(clean, "redact")
    assert sent.body is clean.body and sent.headers["content-encoding"] == "gzip"


@pytest.mark.parametrize(
    ("coding", "body"),
    [("br", b"\x0b\x02\x80"), ("gzip", b"no gzip"), ("gzip", gzip.compress(b"x", mtime=0)[:-6])],
    ids=["br", "not gzip", "truncated"],
)
def test_body_that_cannot_be_decompressed_is_rejected(coding: str, body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="cannot read the body"):
        send_guarded(call(body, headers={"content-encoding": coding}, dialect="raw"), "block")
    flagged = call(body, headers={"content-encoding": coding}, dialect="raw")
    assert len(send_guarded(flagged, "flag")) == 1 and [each.entry for each in flagged.findings] == ["unchecked"]


def test_get_with_a_query_is_inspected() -> None:
    request = call(b"", dialect="raw")
    request.method, request.query = "GET", f"q={CARD}"
    assert send_guarded(request, "block") == []
    assert [each.action for each in request.findings] == ["block"]
