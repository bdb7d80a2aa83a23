"""Functions that find card numbers, keys, e-mail addresses and other sensitive data in a text.

Each finder recognises one kind of data by its shape and check digits, and yields ranges that do not overlap. The
characters before and after a range matter too, so when more text arrives, the end of the text is searched again
(`text_window.py`).
"""

from __future__ import annotations

import heapq
import ipaddress
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import TypeAlias

from emberline.gateway.core.guardrail_policy import PatternKind

TextRange: TypeAlias = tuple[int, int]
PatternFinder: TypeAlias = Callable[[str, int], Iterator[TextRange]]  # takes the text and a start position

MAX_MATCH_CHARS = 512  # of every kind but private keys
MIN_PHONE_DIGITS, MAX_PHONE_DIGITS = 8, 15

# Where each kind can begin. These searches run at C speed and find little in ordinary text. None of them begins with a
# lookbehind, which would be tried at every character.
_TWO_DIGITS = re.compile(r"[0-9]{2,}")
_THREE_DIGITS = re.compile(r"[0-9]{3,}+")
_FOUR_DIGITS = re.compile(r"[0-9]{4,}+")
_PHONE_BEGINS = re.compile(r"\+(?=[1-9])|\((?=[2-9])|1(?=[ ./_-][ (2-9])|[2-9][0-9]{2}(?=[ ./_-])")
_OCTET_BEGINS = re.compile(r"[0-9]{1,3}(?=\.[0-9]| \. [0-9])")
_KEY_BEGINS = re.compile(
    r"A[KS]IA|AIza|gh[pousr]_|github_pat_|glpat-|xox[abeoprs]-|[rs]k_(?:live|test)_|SG\.|sk-|pypi-"
    r"|(?:hf|npm|gsk|xai|r8|egt|evk|csk|pplx|nvapi|dop_v1)[_-]"
)
# Every key contains one; most texts contain none, which is quick to test.
_KEY_PREFIXES = (
    "AKIA", "ASIA", "AIza", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-", "xox", "k_live_",
    "k_test_", "SG.", "sk-", "pypi-", "hf_", "npm_", "gsk_", "xai_", "r8_", "egt_", "evk_", "csk_", "pplx_", "nvapi_",
    "dop_v1_", "hf-", "npm-", "gsk-", "xai-", "r8-", "egt-", "evk-", "csk-", "pplx-", "nvapi-", "dop_v1-",
)  # fmt: skip


def _iter_matches_at_starts(
    start_pattern: re.Pattern[str], pattern: re.Pattern[str], text: str, start: int
) -> Iterator[re.Match[str]]:
    """Yield the matches of `pattern`, which is tried only at the positions where `start_pattern` matches.

    `start_pattern` is fast to search and matches rarely.
    """
    for found in start_pattern.finditer(text, start):
        if (whole := pattern.match(text, found.start())) is not None:
            yield whole


def _skip_overlapping_matches(matches: Iterator[re.Match[str]], start: int) -> Iterator[re.Match[str]]:
    for each in matches:
        if each.start() >= start:
            start = each.end()
            yield each


# -- payment cards -----------------------------------------------------------------------------------------------------

# Card numbers are written in one piece, in the printed groups, or digit by digit. A line may end between groups. Every
# group of digits is tried as the start, because other digits may stand before the number.
_SEPARATOR = r"(?:[ \t]?[\n\r]{1,2}[ \t]?|[ \t]?[.\-/_,][ \t]?|[ \t]|[ ]{2})"
_NO_LETTER_BEFORE, _NO_LETTER_AFTER = r"(?<![^\W_])", r"(?![^\W_])"  # nor a digit; an underscore may be emphasis
_CARD_BEGINS = rf"{_NO_LETTER_BEFORE}(?<!(?<![A-Za-z])\.)(?<!(?<!\d)0,)"  # not inside a decimal number
_CARD_ENDS = rf"{_NO_LETTER_AFTER}(?!\.\d)"
_GROUPED = re.compile(
    rf"{_CARD_BEGINS}(?P<n>\d{{13,19}}|\d{{4}}(?:{_SEPARATOR}\d{{4}}){{3}}(?:{_SEPARATOR}\d{{3}})?"
    rf"|\d{{4}}{_SEPARATOR}\d{{6}}{_SEPARATOR}\d{{4,5}}){_CARD_ENDS}"
)
_SIXTEEN = re.compile(rf"(?P<n>\d{{4}}(?:{_SEPARATOR}\d{{4}}){{3}}){_CARD_ENDS}")
_DIGIT_BY_DIGIT = re.compile(rf"{_CARD_BEGINS}\d(?:{_SEPARATOR}\d){{12,}}+{_CARD_ENDS}")
_FOUR_BEFORE = re.compile(rf"(?<!\d)\d{{4}}{_SEPARATOR}\Z")
_FOUR_AFTER = re.compile(rf"{_SEPARATOR}\d{{4}}(?!\d)")
MAX_SEPARATOR_CHARS = 4
_ISSUERS = re.compile(
    r"4(?:\d{12}|\d{15}|\d{18})|(?:5[1-5]\d\d|222[1-9]|22[3-9]\d|2[3-6]\d\d|27[01]\d|2720)\d{12}|3[47]\d{13}"
    r"|3(?:0[0-5]|[689]\d)\d{11}|(?:6011|64[4-9]\d|65\d\d|62\d\d)\d{12,15}|35(?:2[89]|[3-8]\d)\d{12,15}"
)


def _find_cards(text: str, start: int) -> Iterator[TextRange]:
    end = start
    by_digit = (
        found.span()
        for found in _DIGIT_BY_DIGIT.finditer(text, start)
        if found.end() - found.start() <= MAX_MATCH_CHARS and _is_card_number(_keep_digits(found[0]))
    )
    grouped = filter(
        None, (_find_card_range(text, found) for found in _iter_matches_at_starts(_FOUR_DIGITS, _GROUPED, text, start))
    )
    for span in heapq.merge(by_digit, grouped):
        if span[0] >= end:
            end = span[1]
            yield span


def _find_card_range(text: str, match: re.Match[str]) -> TextRange | None:
    """Return the range of a card number, or None if the digits are not a card number.

    If three more digits follow four groups of four, they may be the card's security code; the range then ends before
    them.
    """
    for whole in (match, _SIXTEEN.match(text, match.start()) if match.end() - match.start() > 19 else None):
        if (
            whole is not None
            and _is_card_number(_keep_digits(whole["n"]))
            and _groups_form_one_number(text, *whole.span("n"))
        ):
            return whole.span("n")
    return None


def _groups_form_one_number(text: str, start: int, end: int) -> bool:
    """Return whether groups of digits belong to one number: all separators between them are the same.

    Line ends between the groups are not compared. If there is a line end, or a separator other than a space or a dash,
    the groups could be decimals or rows in a column of numbers. They then count as one number only if no other group of
    four digits comes before or after them.
    """
    between = {each.strip(" ") or " " for each in re.findall(r"\D+", text[start:end])}
    signs = {each for each in between if "\n" not in each and "\r" not in each}
    if len(signs) > 1 or (signs == {","} and len(between) > 1):  # lists of numbers on several lines
        return False
    if between <= {" "} or between <= {"-"}:
        return True
    before, after = text[max(0, start - 4 - MAX_SEPARATOR_CHARS) : start], text[end : end + 5 + MAX_SEPARATOR_CHARS]
    return not _FOUR_BEFORE.search(before) and not _FOUR_AFTER.match(after)


def _keep_digits(text: str) -> str:
    return "".join(filter(str.isdecimal, text))


def _is_card_number(digits: str) -> bool:
    return _ISSUERS.fullmatch(digits) is not None and passes_luhn_check(digits)


def passes_luhn_check(digits: str) -> bool:
    """Return whether the check digit of a payment card number is right (ISO/IEC 7812)."""
    doubled = (int(d) * 2 for d in digits[-2::-2])
    return (sum(map(int, digits[-1::-2])) + sum(d - 9 if d > 9 else d for d in doubled)) % 10 == 0


# -- bank accounts -----------------------------------------------------------------------------------------------------

_BETWEEN = r"(?: ?[./_,-] ?| |[ \t]?[\n\r]{1,2})?"
_IBAN = re.compile(rf"{_NO_LETTER_BEFORE}([A-Z]{{2}})\d{{2}}(?={_BETWEEN}[A-Z0-9])", re.IGNORECASE)
_IBAN_COUNTRIES = """
AD24 AE23 AL28 AT20 AZ28 BA20 BE16 BG22 BH22 BR29 BY28 CH21 CR22 CY28 CZ24 DE22 DK18 DO28
EE20 EG29 ES24 FI18 FO18 FR27 GB22 GE22 GI23 GL18 GR27 GT28 HR21 HU28 IE22 IL23 IQ23 IS26
IT27 JO30 KW30 KZ20 LB28 LC32 LI21 LT20 LU20 LV21 LY25 MC27 MD24 ME22 MK19 MR27 MT31 MU30
NL18 NO15 PK24 PL28 PS29 PT25 QA29 RO24 RS22 SA24 SC31 SE24 SI19 SK24 SM27 ST25 SV28 TL23
TN24 TR26 UA29 VA22 VG24 XK20
"""  # country code and length of its IBANs
_IBAN_LENGTHS = {each[:2]: int(each[2:]) for each in _IBAN_COUNTRIES.split()}


def _find_ibans(text: str, start: int) -> Iterator[TextRange]:
    end = start
    for number in _TWO_DIGITS.finditer(text, start):
        found = _IBAN.match(text, number.start() - 2) if number.start() - 2 >= end else None
        length = _IBAN_LENGTHS.get(found[1].upper()) if found is not None else None
        if found is None or length is None:
            continue
        whole = _iban_pattern_of_length(length).match(text, found.start())
        if whole is not None and iban_remainder("".join(filter(str.isalnum, whole[0])).upper()) == 1:
            end = whole.end()
            yield whole.span()


@cache
def _iban_pattern_of_length(length: int) -> re.Pattern[str]:
    return re.compile(rf"[A-Za-z]{{2}}\d{{2}}(?:{_BETWEEN}[A-Za-z0-9]){{{length - 4}}}{_NO_LETTER_AFTER}")


def iban_remainder(iban: str) -> int:
    """Return the remainder of an IBAN modulo 97 (ISO 7064), which is 1 if the IBAN is valid."""
    return int("".join(str(int(c, 36)) for c in iban[4:] + iban[:4])) % 97


# -- secrets -----------------------------------------------------------------------------------------------------------

_KEY = re.compile(
    r"(?<![A-Za-z0-9-])(?:"
    r"(?:AKIA|ASIA)(?P<aws>[A-Z0-9]{16})"
    r"|AIza(?P<google>[A-Za-z0-9_-]{35})"
    r"|gh[pousr]_(?P<github>[A-Za-z0-9]{36,255})|github_pat_(?P<pat>[A-Za-z0-9_]{40,255})"
    r"|glpat-(?P<gitlab>[A-Za-z0-9_-]{20,255})"
    r"|xox[abeoprs]-(?P<slack>[A-Za-z0-9-]{20,255})"
    r"|[rs]k_(?:live|test)_(?P<stripe>[A-Za-z0-9]{20,255})"
    r"|SG\.(?P<sendgrid>[A-Za-z0-9_-]{16,64}\.[A-Za-z0-9_-]{32,64})"
    r"|(?:hf|npm|gsk|xai|r8|egt|evk|csk|pplx|nvapi|dop_v1)[_-](?P<others>[A-Za-z0-9_-]{30,255})"
    r"|pypi-(?P<pypi>[A-Za-z0-9_-]{50,400})"
    r"|sk-(?:ant-|proj-|svcacct-|or-v1-)?(?P<sk>[A-Za-z0-9_-]{20,255})"
    r")(?![A-Za-z0-9-])"
)
_MIN_ENTROPY_BITS = 3.0  # per character of a random secret; words and placeholders such as xxxx have less
_PLACEHOLDER = re.compile(r"example|your|placeholder|redacted|dummy|xxxx|\.\.\.", re.IGNORECASE)


def _find_api_keys(text: str, start: int) -> Iterator[TextRange]:
    if len(text) > MAX_MATCH_CHARS and not any(each in text for each in _KEY_PREFIXES):
        return
    for found in _skip_overlapping_matches(_iter_matches_at_starts(_KEY_BEGINS, _KEY, text, start), start):
        secret = found[found.lastgroup or 0]
        if (
            entropy_bits_per_character(secret) >= _MIN_ENTROPY_BITS
            and _has_letters_and_digits(secret)
            and not _PLACEHOLDER.search(secret)
        ):
            yield found.span()


def _has_letters_and_digits(secret: str) -> bool:
    """Return whether the text has letters and digits. Random secrets have both; identifiers rarely do."""
    return any(c.isdecimal() for c in secret) and any(c.isalpha() for c in secret)


def entropy_bits_per_character(text: str) -> float:
    """Return the Shannon entropy of the text in bits per character."""
    return -sum(n / len(text) * math.log2(n / len(text)) for n in Counter(text).values())


# The first line followed by data (a text that only mentions a key has none), and the last line, which may still follow.
_PRIVATE_KEY = re.compile(
    r"-----BEGIN (?:[A-Z0-9]{1,12} ){0,3}PRIVATE KEY-----\s{0,4}[A-Za-z0-9+/=]{16}[A-Za-z0-9+/=\s]{0,16000}"
    r"(?:-----END [A-Z0-9 ]{0,48}-----|-{0,5}(?:E[A-Z0-9 ]{0,48}-{0,4})?\Z)?"
)


def _find_private_keys(text: str, start: int) -> Iterator[TextRange]:
    return (found.span() for found in _PRIVATE_KEY.finditer(text, start))


# -- personal data -----------------------------------------------------------------------------------------------------

_EMAIL = re.compile(
    r"(?<![\w.%+-])[A-Za-z0-9_%+-](?:[A-Za-z0-9_.%+-]{0,62}[A-Za-z0-9_%+-])?"
    r"@(?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.){1,8}[A-Za-z]{2,24}(?![\w-])(?!\.\w)(?!@)"
)
# Neither kind has a check digit, so commas, which separate the numbers of a list, are not accepted in them.
_PHONE_SEPARATOR = r"(?: [./_-] |[ ./_-])"
_PHONE = re.compile(
    rf"{_NO_LETTER_BEFORE}(?<![.+-])\+[1-9]\d*+"
    rf"(?:{_PHONE_SEPARATOR}?+\(\d{{1,4}}\)|{_PHONE_SEPARATOR}\d++|(?<=\))\d++)*+{_NO_LETTER_AFTER}(?![.-]\d)"
    rf"|(?<![\w.+-])(?:1{_PHONE_SEPARATOR})?(?:\([2-9]\d\d\) ?|[2-9]\d\d{_PHONE_SEPARATOR})[2-9]\d\d"
    rf"{_PHONE_SEPARATOR}\d{{4}}(?!\w)(?![.-]\d)"
)
_AREA, _GROUP, _SERIAL = r"(?!000|666|9)\d{3}", r"(?!00)\d\d", r"(?!0000)\d{4}"
# With slashes or underscores, the number must not be a part of a longer path or name.
_SSN = re.compile(
    rf"{_NO_LETTER_BEFORE}(?<!-){_AREA}(?P<a> [.-] |[- .\n]){_GROUP}(?P=a){_SERIAL}"
    rf"{_NO_LETTER_AFTER}(?!-)(?! \d)(?!(?P=a)\d)"
    rf"|(?<![\w/-]){_AREA}(?P<b> [/_] |[/_]){_GROUP}(?P=b){_SERIAL}(?![\w/-])"
)


def _find_emails(text: str, start: int) -> Iterator[TextRange]:
    if "@" in text:
        for found in _EMAIL.finditer(text, start):
            if ".." not in found[0] and found.end() - found.start() <= 254:
                yield found.span()


def _find_phones(text: str, start: int) -> Iterator[TextRange]:
    for found in _skip_overlapping_matches(_iter_matches_at_starts(_PHONE_BEGINS, _PHONE, text, start), start):
        number = found[0]
        while number.startswith("+") and sum(map(str.isdecimal, number)) > MAX_PHONE_DIGITS:
            number = number.rstrip("0123456789()").rstrip(" ./_-") if number.strip("+()0123456789") else ""
        if sum(map(str.isdecimal, number)) >= MIN_PHONE_DIGITS:
            yield found.start(), found.start() + len(number)


def _find_ssns(text: str, start: int) -> Iterator[TextRange]:
    return (
        found.span()
        for found in _skip_overlapping_matches(_iter_matches_at_starts(_THREE_DIGITS, _SSN, text, start), start)
    )


# -- addresses ---------------------------------------------------------------------------------------------------------

_OCTET = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_IPV4 = re.compile(rf"(?<![\w.-]){_OCTET}(?:(?:\.{_OCTET}){{3}}|(?: \. {_OCTET}){{3}})(?![\w-])(?!\.\d)")
_IPV6 = re.compile(r"(?<![\w:.])[0-9A-Fa-f:]{2,39}(?:\d{1,3}(?:\.\d{1,3}){3})?(?![\w:])(?!\.\d)")


def _find_ipv4(text: str, start: int) -> Iterator[TextRange]:
    return (
        found.span()
        for found in _skip_overlapping_matches(_iter_matches_at_starts(_OCTET_BEGINS, _IPV4, text, start), start)
    )


def _find_ipv6(text: str, start: int) -> Iterator[TextRange]:
    """Yield IPv6 addresses that contain a digit. Without a digit, `a::b` is probably a name in a program."""
    if text.count(":", start) < 2:
        return
    for found in _IPV6.finditer(text, start):
        if found[0].count(":") >= 2 and any(c.isdecimal() for c in found[0]) and _is_ipv6(found[0]):
            yield found.span()


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


FINDERS: Mapping[PatternKind, PatternFinder] = {
    "payment_card": _find_cards,
    "iban": _find_ibans,
    "api_key": _find_api_keys,
    "private_key": _find_private_keys,
    "email": _find_emails,
    "phone": _find_phones,
    "ipv4": _find_ipv4,
    "ipv6": _find_ipv6,
    "us_ssn": _find_ssns,
}
