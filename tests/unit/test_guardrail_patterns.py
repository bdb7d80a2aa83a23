"""What the guardrail patterns find in a text, and similar text that they do not find."""

from __future__ import annotations

import pytest

from emberline.gateway.core.guardrail_policy import PatternRule
from emberline.gateway.guardrails.patterns import FINDERS, entropy_bits_per_character, iban_remainder, passes_luhn_check
from emberline.gateway.guardrails.scanner import PatternScanner, redact_text

KEY = "Zk3v9Qw8Lp2Xr7Tn5Yb1Hc6Md4Fs0Jg"
PEM = "-----BEGIN RSA PRIVATE KEY-----\nMIIEpAIBAAKCAQEA7bq8\nZk3v9Qw8Lp2Xr7Tn\n-----END RSA PRIVATE KEY-----"

FOUND = {
    "payment_card": [
        "4111111111111111",
        "4111 1111 1111 1111",
        "4111-1111-1111-1111",
        "378282246310005",
        "3782 822463 10005",
        "5555555555554444",
        "2223003122003222",
        "6011000990139424",
        "3530111333300000",
        "30569309025904",
        "4222222222222",
        "6221 2612 3456 7890 004",
    ],
    "iban": [
        "DE89370400440532013000",
        "DE89 3704 0044 0532 0130 00",
        "GB29 NWBK 6016 1331 9268 19",
        "gb29nwbk60161331926819",
        "NO93 8601 1117 947",
        "FR14 2004 1010 0505 0001 3M02 606",
        "MT84MALT011000012345MTLCAST001S",
    ],
    "api_key": [
        f"sk-{KEY}",
        f"sk-ant-{KEY}",
        f"sk-proj-{KEY}_{KEY}",
        "AKIA3J5K7L9M2N4P6Q8R",
        f"ghp_{KEY}12345",
        f"glpat-{KEY[:20]}",
        f"xoxb-123456789012-{KEY}",
        f"AIza{KEY}abc4",
        f"sk_live_{KEY}",
        f"SG.{KEY[:22]}.{KEY}{KEY[:11]}",
        f"hf_{KEY}",
        f"egt_{KEY}",
    ],
    "private_key": [PEM, PEM.replace("RSA ", ""), PEM.replace("\n", "\\n")],
    "email": ["ada@example.com", "a.b+c@mail.example.co.uk", "x_1%y@sub-domain.example.org"],
    "phone": [
        "+1 415 555 2671",
        "+49 (30) 1234567",
        "+442071838750",
        "(415) 555-2671",
        "415-555-2671",
        "1-415-555-2671",
    ],
    "ipv4": ["192.168.0.1", "8.8.8.8", "255.255.255.255"],
    "ipv6": ["2001:db8::1", "fe80::1", "::1", "2001:0db8:85a3:0000:0000:8a2e:0370:7334", "::ffff:192.0.2.1"],
    "us_ssn": ["123-45-6789", "123 45 6789"],
}
NOT_FOUND = {
    "payment_card": [
        "4111111111111112",  # wrong check digit
        "41111111111111111",  # one digit too many
        "a4111111111111111",
        "0.4111111111111111",
        "4111111111111111.5",
        "1234567890123452",  # valid check digit, but no issuer
        "4111 1111-1111 1111",
        "41111111-1111-1111-1111-111111111111",
    ],
    "iban": [
        "DE88370400440532013000",
        "DE8937040044053201300",
        "DE893704004405320130000",
        "ZZ89370400440532013000",
        "XDE89370400440532013000",
        "DE89 3704  0044 0532 0130 00",
    ],
    "api_key": [
        "sk-xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx",
        "AKIAIOSFODNN7EXAMPLE",
        "sk-learn-is-a-library-for-machine-learning",
        "sk-your-api-key-goes-here-1234567890",
        "risk-" + KEY,
        "sk-abc123",
        "hf_hub_download_of_a_model_file_name",
        "AKIA3J5K7L9M2N4P6Q8R9",
    ],
    "private_key": [
        "-----BEGIN PUBLIC KEY-----\nMIIEpAIBAAKCAQEA7bq8\n-----END PUBLIC KEY-----",
        "a file that starts with -----BEGIN PRIVATE KEY----- is a secret",
        "-----BEGIN CERTIFICATE-----\nMIIEpAIBAAKCAQEA7bq8",
    ],
    "email": ["user@localhost", "@example.com", "a@b", "foo@bar..com", "foo@-bar.com", "a @ example.com", "x@y.c"],
    "phone": ["123-456-7890", "2024-01-15", "415-155-2671", "+12345", "+1234567890123456", "1.2.3.4", "555-2671"],
    "ipv4": ["256.1.1.1", "1.2.3", "1.2.3.4.5", "01.2.3.4", "v1.2.3.4", "1.2.3.4-beta"],
    "ipv6": ["12:30:45", "std::vector", "a::b", "::", "1:2:3:4:5:6:7", "2001:db8::1::2", "00:1b:44:11:3a:b7"],
    "us_ssn": [
        "000-45-6789",
        "666-45-6789",
        "923-45-6789",
        "123-00-6789",
        "123-45-0000",
        "123-456-789",
        "9123-45-6789",
    ],
}


def find(kind: str, text: str) -> list[str]:
    return [text[start:end] for start, end in FINDERS[kind](text.replace("\\n", "  "), 0)]  # type: ignore[index]


@pytest.mark.parametrize(("kind", "text"), [(kind, text) for kind, texts in FOUND.items() for text in texts])
def test_pattern_is_found_alone_and_in_a_sentence(kind: str, text: str) -> None:
    for sentence in (text, f"It is {text}, see?", f"({text})", f"über:\n{text}\nende", f'{{"a": "{text}"}}'):
        assert find(kind, sentence) == [text], sentence


@pytest.mark.parametrize(("kind", "text"), [(kind, text) for kind, texts in NOT_FOUND.items() for text in texts])
def test_similar_text_is_not_found(kind: str, text: str) -> None:
    assert find(kind, text) == []
    assert find(kind, f"It is {text} see?") == []


def test_every_pattern_kind_has_cases() -> None:
    assert set(FOUND) == set(NOT_FOUND) == set(FINDERS)


def test_card_after_other_digits_is_found() -> None:
    assert find("payment_card", "no. 12 4111 1111 1111 1111") == ["4111 1111 1111 1111"]
    assert find("payment_card", "1234 4111 1111 1111 1111") == ["4111 1111 1111 1111"]
    assert find("iban", "DE89 3704 0044 0532 0130 00 IS MINE") == ["DE89 3704 0044 0532 0130 00"]


def test_phone_number_before_a_year_is_found() -> None:
    assert find("phone", "+1 415 555 2671 in 2024") == ["+1 415 555 2671"]
    assert find("phone", "+1 415 555 2671 2024 2025 2026") == ["+1 415 555 2671 2024"]


@pytest.mark.parametrize("kind", FINDERS)
def test_patterns_take_linear_time(kind: str) -> None:
    """Texts with almost a match are the worst case: a finder that backtracks would not end."""
    for hostile in (
        "+" + "1" * 60,
        "1 " * 30,
        "1" * 60,
        "a@" * 30,
        "a." * 40 + "@",
        "x@" + "a-" * 40 + ".",
        "DE89 " + "A " * 40,
        "sk-" + "a1" * 200,
        ":" * 60,
        "1:" * 30,
        "-----BEGIN PRIVATE KEY-----\n" + "A" * 17,
        "(415) ",
        "\\n",
    ):
        find(kind, (hostile + "_ ") * (40_000 // len(hostile)))


def test_checksums_and_entropy() -> None:
    assert passes_luhn_check("79927398713") and not passes_luhn_check("79927398710")
    assert iban_remainder("GB82WEST12345698765432") == 1
    assert entropy_bits_per_character("aaaa") == 0 and entropy_bits_per_character("abcd") == 2


def test_redaction_and_findings() -> None:
    rules = [
        PatternRule(name="r", find=("email", "us_ssn"), action="redact"),
        PatternRule(name="f", find=("ipv4",), action="flag"),
    ]
    text = "mail ada@example.com from 10.0.0.1 about 123-45-6789."
    scanner = PatternScanner(rules, "REQUEST")
    spans = scanner.find_matches(text)
    assert redact_text(text, spans) == "mail [email] from 10.0.0.1 about [us_ssn]."
    assert [str(scanner.make_finding(span)) for span in spans] == [
        "request:email:redact",
        "request:ipv4:flag",
        "request:us_ssn:redact",
    ]
