"""$regex of dynamic routes: the same results as Python's `re`, linear time, and the errors of unsupported patterns."""

from __future__ import annotations

import re
import subprocess
import sys
import time

import pytest
import re2
from hypothesis import given, settings
from hypothesis import strategies as st

from emberline.core.errors import InvalidRequest
from emberline.gateway.routes.graph import RouteGraph
from emberline.gateway.routes.pattern import MAX_TEXT_CHARS, compile_pattern

CLASSES = [r"\d", r"\D", r"\w", r"\W", r"\s", r"\S"]
atoms = st.sampled_from(
    ["a", "b", ".", "[ab]", "[^a]", r"\.", "c", "é", "[^é]", "[]a]", r"[\W_]", r"[^\W\d]", *CLASSES]
)
patterns = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda p: f"({p[0]}|{p[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{0,2}", "{1,}", "*?"])).map(
            lambda p: f"(?:{p[0]}){p[1]}"
        ),
    ),
    max_leaves=6,
)
texts = st.text("abcA.1_- \n\u2003éÉж\u03b9\u0663²!\x1c]", max_size=10)


@settings(max_examples=300, deadline=None)
@given(patterns, texts, st.booleans(), st.booleans(), st.booleans())
def test_patterns_match_like_re(text: str, on: str, start: bool, end: bool, any_case: bool) -> None:
    pattern = ("(?i)" if any_case else "") + ("^" if start else "") + text
    found = re.search(pattern + (r"\Z" if end else ""), on) is not None
    assert compile_pattern(pattern + ("$" if end else "")).is_found_in(on) == found


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from([*CLASSES, *"[]^-a:(|)", "[:", r"\\", r"\]", r"\x41"]), max_size=8).map("".join))
def test_translation_keeps_the_structure(pattern: str) -> None:
    """RE2 itself accepts the same patterns, and finds the same in ASCII."""
    options = re2.Options()
    options.log_errors = False
    try:
        untranslated = re2.compile(pattern, options=options)
    except re2.error:
        with pytest.raises(ValueError, match="RE2 reports"):
            compile_pattern(pattern)
    else:
        compiled = compile_pattern(pattern)
        for on in ("", *"aA1_ -[]:^\\(|)", "aa", "a-", "1]", "-a]", "[:a"):
            assert compiled.is_found_in(on) == (untranslated.search(on) is not None), on


@pytest.mark.parametrize("pattern", [*CLASSES, *(f"[{each}]" for each in CLASSES), *(f"[^{each}]" for each in CLASSES)])
def test_classes_are_unicode(pattern: str) -> None:
    ours, python = compile_pattern(pattern), re.compile(pattern)
    # blocks without letters that are newer than the Unicode of Python 3.11 (RE2's is newer)
    code_points = [
        *range(0x1000),
        0x1680,
        0x180E,
        *range(0x2000, 0x2070),
        *range(0x3000, 0x3100),
        *range(0xFE00, 0x10000),
    ]
    differ = [
        character
        for character in map(chr, code_points)
        if ours.is_found_in(character) != (python.search(character) is not None)
    ]
    assert set(differ) <= {"\u0345"}  # in [\W] the combining iota is missing, because (?i) would add the letter iota


@pytest.mark.parametrize(
    ("pattern", "on", "found"),
    [
        (r"\bcat\b", "a cat!", True),
        (r"\bcat\b", "concat", False),
        ("^a|b", "cb", True),
        ("^a|b", "ca", False),
        ("(?i)[\\W_]", "\u03b9\u0399", False),  # iota
        (r"[\d-z]", "-", True),
        (r"[\s-z]", "b", False),
        (r"[\W-z]", "b", False),
        (r"\[\d]", "[3]", True),
        (r"[\]\d]x", "]x", True),
        (r"[[:alpha:]\d]x", "5x", True),
        (r"\p{Greek}", "λ", True),
        ("a\\\u2014b", "a\u2014b", True),
        ("a.b", "a\ud800b", True),
        ("a$", "a\n", False),
        ("(?m)a$", "a\n", True),
        ("x$", "a" * MAX_TEXT_CHARS + "x", False),
        ("", "", True),
        (r"^\w{256}$", "é" * 256, True),
    ],
)
def test_pattern_is_found(pattern: str, on: str, found: bool) -> None:
    assert compile_pattern(pattern).is_found_in(on) == found


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|a)*b", "(a*)*b", "a*a*a*a*a*a*b", "(?:a?){30}a{30}b"])
def test_search_takes_linear_time(pattern: str) -> None:
    """Eight times the text takes about eight times the CPU; quadratic time would be 64 times."""
    compiled = compile_pattern(pattern)

    def cpu_time(chars: int) -> float:
        text = "a" * (chars - 1) + "!"
        durations = []
        for _ in range(5):
            began = time.thread_time()
            for _ in range(10):
                assert not compiled.is_found_in(text)
            durations.append(time.thread_time() - began)
        return min(durations)

    assert cpu_time(MAX_TEXT_CHARS) < 32 * cpu_time(MAX_TEXT_CHARS // 8)


@pytest.mark.parametrize(
    "text", [r"(a)\1", "(?=a)", "(?<!a)b", "a**", "*a", "(a", "a)", "[a", r"[\w", "a{3,2}", "a{1001}", r"[a-\w]",
             r"[\x00-\s]", r"[\x00-\S]", r"[\x00-\W]", "((((a{9}){9}){9}){9})", "((){99}){99}", r"\w{999}",
             "x" * 600, "\\", r"\C", r"\Qa", r"\Z", r"\é", "\ud800", "[z-a]", "(?x)a"]
)  # fmt: skip
def test_unsupported_pattern_is_rejected(text: str) -> None:
    with pytest.raises(ValueError) as raised:
        compile_pattern(text)
    assert not isinstance(raised.value, UnicodeError)


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(a", "RE2 reports 'missing ): (a'"),
        (r"[\d", r"RE2 reports 'missing ]: [\\d'"),  # not its translation
        ("(?=a)", "RE2 reports 'invalid perl operator: (?='"),
        ("x" * 600, "at most 512 characters, not 600"),
    ],
)
def test_error_names_the_pattern_and_the_reason(pattern: str, reason: str) -> None:
    condition = {"id": "c", "type": "conditional", "properties": {"condition": {"body.x": {"$regex": pattern}}}}
    graph = [
        {"id": "s", "type": "start", "outputs": {"next": {"elementId": "c"}}},
        {**condition, "outputs": {"true": {"elementId": "e"}, "false": {"elementId": "e"}}},
        {"id": "e", "type": "end"},
    ]
    with pytest.raises(InvalidRequest) as raised:
        RouteGraph.parse({"elements": graph})
    assert repr(pattern[:80]) in str(raised.value) and reason in str(raised.value)
    assert "re2/wiki/Syntax" in str(raised.value.hint)


def test_re2_writes_nothing_to_stderr_and_is_imported_at_the_first_pattern() -> None:
    program = (
        "import sys\nfrom emberline.gateway.routes.pattern import compile_pattern\nassert 're2' not in sys.modules\n"
        "try: compile_pattern('(a')\nexcept ValueError: assert 're2' in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
