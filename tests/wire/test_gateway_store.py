"""The contract of GatewayStore, on SQLite and on a real PostgreSQL."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
from gateway_records import DAY, NOON, make_record, new_record_id
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from emberline.core.clock import ManualClock
from emberline.gateway.core.errors import Conflict, StoreFailed
from emberline.gateway.core.log_record import LogPayload, LogRecord, utc_day
from emberline.gateway.core.settings import GatewaySettings, LogSettings
from emberline.gateway.logs.retention import LogRetention
from emberline.gateway.store import daily_users, sqlite_database, tables
from emberline.gateway.store.base import AuditEntry, Document, Feedback, GatewayStore, StoreChange
from emberline.gateway.store.factory import open_store
from emberline.gateway.store.filters import ContainsFilter, ExcludeFilter, LogFilters, NumberRange
from emberline.gateway.store.rollup import OTHER_USERS, RollupQuery
from emberline.wire.usage import Usage

T = TypeVar("T")
Run = Callable[[Awaitable[T]], T]


@pytest.fixture
def run() -> Iterator[Callable[..., Any]]:
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture
def url(store_url: str) -> str:
    return store_url


@pytest.fixture
def store(url: str, run: Run[Any]) -> Iterator[GatewayStore]:
    opened = run(open_store(url))
    yield opened
    run(opened.close())


def audit(action: str = "test") -> AuditEntry:
    return AuditEntry(at=NOON, account="acme", actor="root", action=action, target="it")


def put(*documents: Document) -> StoreChange:
    return StoreChange(audit(), put=documents)


def all_records(store: GatewayStore, filters: LogFilters, run: Run[Any], limit: int = 3) -> list[LogRecord]:
    found: list[LogRecord] = []
    before = ""
    while True:
        page = run(store.read_page(filters, before=before, limit=limit, timeout_s=60))
        assert page.complete and len(page.records) <= limit
        found += page.records
        if not page.has_more:
            return found
        assert page.records  # exact: a page that has more is not empty
        before = page.cursor


# Documents


def test_documents_are_stored_and_listed_by_id(store: GatewayStore, run: Run[Any]) -> None:
    names = ["b", "a/2", "a/1", "a", "Z"]
    run(store.commit(put(*(Document("route", "acme", name, name.encode()) for name in names))))
    run(store.commit(put(Document("route", "other", "a", b"theirs"), Document("key", "acme", "a", b"a key"))))
    assert [d.id for d in run(store.list_documents("route", "acme"))] == ["Z", "a", "a/1", "a/2", "b"]
    assert [d.id for d in run(store.list_documents("route", "acme", prefix="a/"))] == ["a/1", "a/2"]
    assert [d.id for d in run(store.list_documents("route", "acme", after=("a", "acme"), limit=2))] == ["a/1", "a/2"]
    assert [d.account for d in run(store.list_documents("route", "", prefix="a", limit=2))] == ["acme", "other"]
    assert [d.account for d in run(store.list_documents("route", "", after=("a", "acme"), limit=1))] == ["other"]
    found = run(store.get("route", "acme", "a"))
    assert (found.body, found.version, found.updated) == (b"a", 1, NOON)
    assert run(store.get("route", "acme", "a/")) is None
    assert run(store.get("budget", "acme", "a")) is None


def test_change_of_an_old_version_is_a_conflict(store: GatewayStore, run: Run[Any]) -> None:
    run(store.commit(put(Document("gateway", "acme", "g", b"1"))))
    first = run(store.get("gateway", "acme", "g"))
    with pytest.raises(Conflict, match="already"):
        run(store.commit(put(Document("gateway", "acme", "g", b"again"))))
    run(store.commit(put(replace(first, body=b"2"))))
    for stale in (put(replace(first, body=b"3")), StoreChange(audit(), delete=[first])):
        with pytest.raises(Conflict, match="by another request"):
            run(store.commit(stale))
    second = run(store.get("gateway", "acme", "g"))
    assert (second.body, second.version) == (b"2", 2)
    run(store.commit(StoreChange(audit(), delete=[second])))
    assert run(store.get("gateway", "acme", "g")) is None


def test_change_is_atomic(store: GatewayStore, run: Run[Any]) -> None:
    run(store.commit(put(Document("price", "acme", "taken", b"1"))))
    before = run(store.version())
    with pytest.raises(Conflict):
        run(store.commit(put(Document("price", "acme", "new", b"1"), Document("price", "acme", "taken", b"2"))))
    assert run(store.get("price", "acme", "new")) is None
    assert run(store.version()) == before
    assert len(run(store.list_audit_entries("acme"))) == 1


def test_commit_increases_version_and_adds_audit_entry(store: GatewayStore, url: str, run: Run[Any]) -> None:
    other = run(open_store(url))  # another replica
    versions = [run(other.version())]
    for i in range(5):
        run(store.commit(StoreChange(audit(f"made.{i}"), put=[Document("budget", "acme", str(i), b"{}")])))
        versions.append(run(other.version()))
    run(other.close())
    assert versions == sorted(set(versions))
    newest = run(store.list_audit_entries("acme", limit=2))
    assert [a.action for a in newest] == ["made.4", "made.3"]
    rest = run(store.list_audit_entries("acme", before=newest[-1].number))
    assert [a.action for a in rest] == ["made.2", "made.1", "made.0"]
    assert run(store.list_audit_entries("nobody")) == []


def test_concurrent_changes_of_a_document_have_one_winner(store: GatewayStore, run: Run[Any]) -> None:
    run(store.commit(put(Document("gateway", "acme", "g", b"0"))))
    base = run(store.get("gateway", "acme", "g"))

    async def race() -> list[object]:
        changes = [store.commit(put(replace(base, body=str(i).encode()))) for i in range(8)]
        return await asyncio.gather(*changes, return_exceptions=True)

    outcomes = run(race())
    assert sum(isinstance(each, int) for each in outcomes) == 1
    assert sum(isinstance(each, Conflict) for each in outcomes) == 7


def test_committed_documents_survive_restart(url: str, run: Run[Any]) -> None:
    first = run(open_store(url))
    run(first.commit(put(Document("gateway", "acme", "g", b"kept"))))
    kept = make_record()
    run(first.append_records([(kept, LogPayload(b"asked", b"answered"))]))
    run(first.close())
    again = run(open_store(url))
    assert run(again.get("gateway", "acme", "g")).body == b"kept"
    assert run(again.get_record("acme", "main", kept.id)) == kept
    run(again.close())


# Logs


def test_record_round_trips(store: GatewayStore, run: Run[Any]) -> None:
    full = make_record(
        path="chat/completions",
        dialect="openai-chat",
        request_type="chat",
        status=502,
        success=False,
        ended="cut",
        cached=False,
        stream=True,
        step=2,
        attempts=4,
        usage=Usage(
            input=100, cached_read=20, cache_write=30, output=50, reasoning=10, audio=5, image=6, cache_write_long=7
        ),
        estimated=True,
        micros=0,
        custom_cost=True,
        duration_ms=1234,
        first_byte_ms=56,
        error="upstream_broken",
        message="the provider's message",
        key_id="k1",
        user="ünì\U0001f600",
        metadata={"team": "x", "n": 1, "f": 1.5, "b": True},
        event_id="e1",
        session_id="s1",
        request_content_type="application/json",
        response_content_type="text/event-stream",
        feedback=-1,
        score=70,
    )
    plain = make_record(NOON + 1)
    payload = LogPayload(b"\x00asked" * 1000, b"")
    run(store.append_records([(full, payload), (plain, None)]))
    assert run(store.get_record("acme", "main", full.id)) == full
    assert run(store.get_record("acme", "main", plain.id)) == plain
    assert run(store.get_payload("acme", "main", full.id)) == payload
    assert run(store.get_payload("acme", "main", plain.id)) is None
    for account, gateway in (("other", "main"), ("acme", "side")):  # the id belongs to another tenant
        assert run(store.get_record(account, gateway, full.id)) is None
        assert run(store.get_payload(account, gateway, full.id)) is None
        assert run(store.add_feedback(account, gateway, full.id, Feedback(1))) is None
    assert run(store.get_record("acme", "main", new_record_id(NOON - 40 * DAY))) is None


def test_day_file_of_an_older_version_gets_the_column_for_messages(tmp_path: Path, run: Run[Any]) -> None:
    sqlite_database.create_database_file(tmp_path / f"logs-{utc_day(NOON)}.db", tables.LOG_MIGRATIONS[:1])
    store = run(open_store(f"sqlite:{tmp_path}"))
    run(store.append_records([(make_record(message="rejected by the provider"), None)]))
    (found,) = run(store.read_page(LogFilters("acme"))).records
    assert found.message == "rejected by the provider"
    run(store.close())


def test_pages_are_exact_over_days_and_equal_milliseconds(store: GatewayStore, run: Run[Any]) -> None:
    records = [make_record(NOON - day * DAY + (i % 3)) for day in range(3) for i in range(7)]
    run(store.append_records([(each, None) for each in records]))
    run(store.append_records([(make_record(gateway="side"), None)]))
    newest_first = sorted(records, key=lambda r: r.id, reverse=True)
    for limit in (1, 3, 7, 20, 21, 22):
        assert all_records(store, LogFilters("acme", "main"), run, limit) == newest_first
    assert len(all_records(store, LogFilters("acme"), run)) == 22
    assert all_records(store, LogFilters("nobody"), run) == []
    some = LogFilters("acme", "main", since=NOON - DAY + 1, until=NOON + 1)
    assert all_records(store, some, run) == [r for r in newest_first if NOON - DAY + 1 <= r.created_ms < NOON + 1]


def test_page_timeout_returns_cursor_to_continue(store: GatewayStore, run: Run[Any]) -> None:
    old = make_record(NOON - DAY * 5 // 8, model="rare")  # a record of the day before
    run(store.append_records([(make_record(NOON - i * DAY // 8), None) for i in range(5)] + [(old, None)]))
    filters, before, found = LogFilters("acme", "main", model=("rare",)), "", []
    while True:
        page = run(store.read_page(filters, before=before, timeout_s=0.0))
        found.append(page.records)
        if page.complete:
            break
        assert page.has_more and page.cursor and (not before or page.cursor < before)
        before = page.cursor
    assert [r for records in found for r in records] == [old] and not page.has_more and len(found) > 2


PARTS: list[tuple[str, Any]] = [
    ("gateway", "main"),
    ("since", NOON - DAY // 2),
    ("until", NOON - DAY // 3),
    *(("success", each) for each in (True, False)),
    *(("cached", each) for each in (True, False)),
    *(("rescued", each) for each in (True, False)),
    *(("status", each) for each in ((200,), (429,), (429, 500), (200, 500))),
    *(("provider", each) for each in (("openai",), ("openai", "groq"))),
    *(("model", each) for each in (("a",), ("a", "b"))),
    ("key_id", ("k1",)),
    *(("user", each) for each in (("ann",), ("ann", "bob"))),
    ("event_id", ("e1",)),
    *(("feedback", each) for each in ((1,), (1, -1))),
    *(
        (name, each)
        for name in ("micros", "tokens_in", "duration_ms")
        for each in (NumberRange(1), NumberRange(maximum=2), NumberRange(1, 2))
    ),
    ("tokens_out", NumberRange(3)),
    *(("tokens", each) for each in (NumberRange(3), NumberRange(1, 4))),
    *(
        ("excluded", each)
        for each in (
            (ExcludeFilter("model", ("a", "b")),),
            (ExcludeFilter("user", ("ann",)), ExcludeFilter("status", (429, 500))),  # most have no user
            (ExcludeFilter("micros", (1,)), ExcludeFilter("feedback", (1, -1))),
            (ExcludeFilter("tokens", (0, 1, 2)),),
        )
    ),
    *(
        ("contains", each)
        for each in (
            (ContainsFilter(("provider",), ("PEN", "gr")),),
            (ContainsFilter(("provider", "user"), ("a",)), ContainsFilter(("model",), ("b", "c"))),
        )
    ),
    *(("metadata", each) for each in ({"team": "x"}, {"n": "1"}, {"b": "true"}, {"team": "x", "n": "1"})),
]


def matches(record: LogRecord, f: LogFilters) -> bool:
    """Return whether a record matches the filters, computed directly."""

    def within(value: int | None, span: NumberRange) -> bool:
        if span.is_unbounded:
            return True
        return value is not None and (span.minimum or 0) <= value <= (9 if span.maximum is None else span.maximum)

    def has(field: str) -> Any:
        match field:
            case "tokens":
                return record.usage.input + record.usage.output
            case _:
                return getattr(record, field)

    texts = {"team": "x", "n": "1", "b": "true"}
    return (
        (not f.gateway or record.gateway == f.gateway)
        and (f.since is None or record.created_ms >= f.since)
        and (f.until is None or record.created_ms < f.until)
        and (f.success is None or record.success == f.success)
        and (f.cached is None or record.cached == f.cached)
        and (f.rescued is None or (record.success and record.step > 0) == f.rescued)
        and all(
            not request or getattr(record, name) in request
            for name in ("status", "provider", "model", "key_id", "user", "event_id", "feedback")
            for request in [getattr(f, name)]
        )
        and within(record.micros, f.micros)
        and within(record.usage.input, f.tokens_in)
        and within(record.usage.output, f.tokens_out)
        and within(record.duration_ms, f.duration_ms)
        and within(has("tokens"), f.tokens)
        and all(has(each.field) not in each.values for each in f.excluded)
        and all(any(t.lower() in has(name) for name in each.fields for t in each.texts) for each in f.contains)
        and all(key in record.metadata and texts[key] == value for key, value in f.metadata.items())
    )


def varied_records() -> list[LogRecord]:
    """Return records with every value of every filter, unsorted."""
    statuses, metadata = (200, 429, 500), ({}, {"team": "x"}, {"team": "x", "n": 1}, {"b": True})
    return [
        make_record(
            NOON - DAY + i * 991_000,
            gateway=("main", "side")[i % 2],
            provider=("openai", "groq", "mistral")[i % 3],
            model="abc"[i // 3 % 3],
            status=statuses[i // 5 % 3],
            success=statuses[i // 5 % 3] == 200 and i % 4 > 0,
            cached=i % 5 == 0,
            step=i % 3,
            key_id=("k1", "")[i * 3 % 2],
            user=("ann", "bob", "")[i // 7 % 3],
            event_id=("e1", "")[i % 7 > 2],
            feedback=(None, 1, -1)[i % 3],
            micros=(None, 0, 1, 3)[i % 4],
            usage=Usage(input=i % 4, output=i * 3 % 5),
            duration_ms=i % 6,
            metadata=metadata[i * 13 % 4],
        )
        for i in range(87)
    ]


def test_filters_match_the_oracle(store: GatewayStore, run: Run[Any]) -> None:
    records = varied_records()
    run(store.append_records([(each, None) for each in records]))

    def check(parts: list[tuple[str, Any]]) -> int:
        filters = LogFilters("acme", **dict(parts))
        wanted = sorted((r for r in records if matches(r, filters)), key=lambda r: r.id, reverse=True)
        assert all_records(store, filters, run, 40) == wanted
        return len(wanted)

    for part in PARTS:
        assert 0 < check([part]) < len(records), part

    @settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(st.sampled_from(PARTS), min_size=2, max_size=4))
    def check_together(parts: list[tuple[str, Any]]) -> None:
        check(parts)

    check_together()
    by_id = LogFilters("acme", id=(records[3].id, records[80].id, new_record_id(NOON)))
    assert all_records(store, by_id, run) == [records[80], records[3]]
    others = LogFilters("acme", excluded=(ExcludeFilter("id", tuple(each.id for each in records[1:])),))
    assert all_records(store, others, run) == records[:1]
    for wild in ("%", "_", "\\"):
        assert all_records(store, LogFilters("acme", contains=(ContainsFilter(("provider",), (wild,)),)), run) == []


def test_feedback_changes_fields_and_labels(store: GatewayStore, run: Run[Any]) -> None:
    one = make_record(metadata={"team": "x"})
    run(store.append_records([(one, None), (make_record(NOON + 1), None)]))
    new = run(store.add_feedback("acme", "main", one.id, Feedback(feedback=1)))
    assert (new.feedback, new.score, new.metadata) == (1, None, {"team": "x"})
    new = run(store.add_feedback("acme", "main", one.id, Feedback(score=5, metadata={"team": "y", "x": True})))
    assert (new.feedback, new.score, new.metadata) == (1, 5, {"team": "y", "x": True})
    assert run(store.get_record("acme", "main", one.id)) == new
    for metadata, wanted in (({"team": "x"}, []), ({"team": "y"}, [new]), ({"x": "true"}, [new])):
        assert all_records(store, LogFilters("acme", metadata=metadata), run) == wanted
    assert all_records(store, LogFilters("acme", feedback=(1,)), run) == [new]


def test_nul_characters_are_stored(store: GatewayStore, run: Run[Any]) -> None:
    one = make_record(model="a\0b", user="\0", metadata={"k\0": "v\0"})
    run(store.append_records([(one, None)]))
    found = run(store.get_record("acme", "main", one.id))
    assert found.model in ("a\0b", "a\ufffdb") and found.metadata == one.metadata
    assert run(store.add_feedback("acme", "main", one.id, Feedback(1, metadata={"k\0": "w"}))).feedback == 1
    for filters in (
        LogFilters("acme", user=("\0",)),
        LogFilters("acme", contains=(ContainsFilter(("model",), ("a\0b",)),)),
    ):
        assert [each.id for each in run(store.read_page(filters)).records] == [one.id]
    assert run(store.read_page(LogFilters("acme", user=("a\0",)))).records == []
    assert run(store.get("gateway", "acme", "a\0b")) is None


# Rollups


def totals(
    store: GatewayStore, run: Run[Any], dimension: Any = "all", unit: Any = "day", **more: Any
) -> dict[str, int]:
    request = RollupQuery("acme", unit, NOON - 9 * DAY, NOON + DAY, dimension=dimension, over_time=False, **more)
    return {cell.value: cell["requests"] for cell in run(store.read_rollups(request))}


def test_rollups_count_appended_records(store: GatewayStore, run: Run[Any]) -> None:
    records = varied_records()
    for start in range(0, len(records), 10):
        run(store.append_records([(each, None) for each in records[start : start + 10]]))
    for unit in ("minute", "hour", "day"):
        (cell,) = run(store.read_rollups(RollupQuery("acme", unit, NOON - DAY, NOON + DAY, over_time=False)))
        assert cell["requests"] == len(records)
        assert cell["errors"] == sum(not r.success for r in records)
        assert cell["micros"] == sum(r.micros or 0 for r in records)
        assert cell["rescued"] == sum(r.success and r.step > 0 for r in records)
        assert cell["unpriced"] == sum(r.micros is None and (r.success or r.usage.total > 0) for r in records)
        assert cell["tokens_out"] == sum(r.usage.output for r in records)
    assert totals(store, run, "model")["groq/a"] == sum(r.provider == "groq" and r.model == "a" for r in records)
    assert totals(store, run, "user") == {u: sum(r.user == u for r in records) for u in ("ann", "bob")}
    assert totals(store, run, "status", "hour") == {
        str(s): sum(r.status == s for r in records) for s in (200, 429, 500)
    }
    assert totals(store, run, gateway="side") == {"": sum(r.gateway == "side" for r in records)}
    hours = run(store.read_rollups(RollupQuery("acme", "hour", NOON - DAY, NOON + DAY)))
    assert [c.start for c in hours] == sorted({r.created_ms - r.created_ms % 3_600_000 for r in records})


def test_repeated_batch_counts_once(store: GatewayStore, run: Run[Any]) -> None:
    batch = [(make_record(NOON + i), LogPayload(b"a", b"b")) for i in range(4)]
    run(store.append_records(batch))
    run(store.append_records(batch))  # as after a lost reply
    assert len(all_records(store, LogFilters("acme"), run)) == 4
    assert totals(store, run) == {"": 4}


def test_concurrent_batches_are_all_counted(store: GatewayStore, url: str, run: Run[Any]) -> None:
    async def both() -> None:
        other = await open_store(url)
        batches = [[(make_record(NOON + 100 * n + i, user=f"u{i}"), None) for i in range(20)] for n in range(10)]
        await asyncio.gather(*((store, other)[n % 2].append_records(batch) for n, batch in enumerate(batches)))
        await other.close()

    run(both())
    assert totals(store, run) == {"": 200}
    assert totals(store, run, "user") == {f"u{i}": 10 for i in range(20)}


def test_daily_users_are_bounded_and_sums_exact(
    store: GatewayStore, url: str, run: Run[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two replicas write, and each checks the number of users after every batch."""
    monkeypatch.setattr(daily_users, "RECHECK_AFTER_USERS", 1)
    few = [make_record(NOON - DAY, user=f"few-{i}", micros=1) for i in range(2 * daily_users.MAX_USERS_PER_DAY)]
    many = [
        make_record(NOON, user=f"u{i}", micros=i, gateway=("main", "side")[i % 2])
        for i in range(3 * daily_users.MAX_USERS_PER_DAY)
    ]
    many.append(make_record(user="rich", micros=10**6))

    async def both() -> None:
        other = await open_store(url)
        for records in (few, many):
            batches = [records[n : n + 250] for n in range(0, len(records), 250)]
            work = ((store, other)[n % 2].append_records([(r, None) for r in batch]) for n, batch in enumerate(batches))
            await asyncio.gather(*work)
        await store.append_records(
            [(make_record(NOON + DAY, user="late"), None)]
        )  # the next day: the previous one is checked again
        await other.close()

    run(both())

    def read_spends(at: int) -> dict[str, tuple[int, int]]:
        request = RollupQuery("acme", "day", at, at + 1, dimension="user", over_time=False)
        return {cell.value: (cell["requests"], cell["micros"]) for cell in run(store.read_rollups(request))}

    assert read_spends(NOON - DAY) == {r.user: (1, 1) for r in few}, "up to this number cells are exact"
    found = read_spends(NOON)
    assert len(found) <= 2 * daily_users.MAX_USERS_PER_DAY + 1 and OTHER_USERS in found
    assert sum(requests for requests, _ in found.values()) == len(many)
    assert sum(micros for _, micros in found.values()) == sum(r.micros or 0 for r in many)
    assert found["rich"] == (1, 10**6) and found[f"u{3 * daily_users.MAX_USERS_PER_DAY - 1}"] == (
        1,
        3 * daily_users.MAX_USERS_PER_DAY - 1,
    )


# Retention


def test_days_are_dropped_and_rollups_stay(store: GatewayStore, url: str, run: Run[Any]) -> None:
    records = [make_record(NOON - day * DAY, metadata={"d": day}) for day in range(4)]
    run(store.append_records([(each, LogPayload(b"q", b"a")) for each in records]))
    assert len(all_records(store, LogFilters("acme"), run)) == 4  # readers have the files open
    today = utc_day(NOON)
    assert run(store.list_days()) == [today - timedelta(days=d) for d in (3, 2, 1, 0)]
    gone = run(store.delete_days_before(today - timedelta(days=1)))
    assert gone == [today - timedelta(days=d) for d in (3, 2)]
    assert run(store.list_days()) == [today - timedelta(days=1), today]
    assert all_records(store, LogFilters("acme"), run) == records[:2]
    assert run(store.get_record("acme", "main", records[3].id)) is None
    assert run(store.get_payload("acme", "main", records[3].id)) is None
    assert run(store.get_payload("acme", "main", records[1].id)) == LogPayload(b"q", b"a")
    minutes = run(store.read_rollups(RollupQuery("acme", "minute", NOON - 9 * DAY, NOON + DAY)))
    assert totals(store, run) == {"": 4} and sum(cell["requests"] for cell in minutes) == 2
    late = make_record(NOON - 3 * DAY)  # a record of a deleted day creates that day again
    run(store.append_records([(late, None)]))
    assert run(store.get_record("acme", "main", late.id)) == late


def test_more_days_than_open_files(store: GatewayStore, run: Run[Any]) -> None:
    records = [make_record(NOON - day * DAY) for day in range(45)]
    run(store.append_records([(each, None) for each in records]))
    assert all_records(store, LogFilters("acme"), run, 100) == records
    assert totals(store, run, unit="hour") == {"": 10}  # of the requested days


def test_erase_deletes_payloads_and_labels(store: GatewayStore, run: Run[Any]) -> None:
    records = [make_record(NOON - day * DAY, metadata={"d": "x"}) for day in range(3)]
    run(store.append_records([(each, LogPayload(b"q", b"a")) for each in records]))
    run(store.erase_records([records[0], records[2], make_record(NOON - 50 * DAY)]))
    assert all_records(store, LogFilters("acme"), run) == [records[1]]
    assert all_records(store, LogFilters("acme", metadata={"d": "x"}), run) == [records[1]]
    assert [run(store.get_payload("acme", "main", each.id)) is None for each in records] == [True, False, True]
    assert totals(store, run) == {"": 3}


def test_retention_follows_each_gateways_days(store: GatewayStore, run: Run[Any]) -> None:
    def settings(gateway: str, days: int) -> GatewaySettings:
        return GatewaySettings(account="acme", gateway=gateway, logs=LogSettings(days=days))

    short = msgspec.json.encode(settings("short", 2))
    run(store.commit(put(Document("gateway", "acme", "short", short))))
    records = [
        make_record(NOON - day * DAY, gateway=gateway) for day in range(6) for gateway in ("short", "long", "gone")
    ]
    run(store.append_records([(each, None) for each in records]))
    retention = LogRetention(store, {("acme", "long"): settings("long", 4)}, ManualClock(NOON / 1e3))
    gone, erased = run(retention.run_once())
    assert (len(gone), erased) == (2, 2)
    for gateway, days in (("short", 2), ("long", 4), ("gone", 4)):
        assert len(all_records(store, LogFilters("acme", gateway), run)) == days, gateway
    assert run(retention.run_once()) == ([], 0)


# Schema


def test_day_file_appears_with_its_tables(tmp_path: Path, run: Run[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    opened = run(open_store(f"sqlite:{tmp_path}"))
    real, seen = sqlite_database.migrate, list[str]()

    def watching_migrate(*args: Any) -> None:
        seen.extend(path.name for path in tmp_path.glob("*-*.db"))
        real(*args)

    monkeypatch.setattr(sqlite_database, "migrate", watching_migrate)
    run(opened.append_records([(make_record(), None)]))
    assert seen == [] and run(opened.list_days()) == [utc_day(NOON)]
    run(opened.close())
    assert not [path.name for path in tmp_path.iterdir() if path.suffix != ".db"], "no temporary file is left"


def test_next_day_partition_is_created_in_advance(store: GatewayStore, url: str, run: Run[Any]) -> None:
    async def both() -> list[str]:
        others = [await open_store(url) for _ in range(3)]
        for at in (NOON, NOON + DAY // 2):  # the second is for tomorrow
            await asyncio.gather(
                *(each.append_records([(make_record(at + i), None)]) for i, each in enumerate([store, *others]))
            )
        for each in others:
            await each.close()
        return await partitions(url)

    names = run(both())
    today = utc_day(NOON)
    assert run(store.list_days()) == [today, today + timedelta(days=1)], "an empty partition is not a day of the log"
    assert len(all_records(store, LogFilters("acme"), run)) == 8
    if url.startswith("postgres"):
        assert names == [f"logs_{today + timedelta(days=i):%Y%m%d}" for i in range(3)]


async def partitions(url: str) -> list[str]:
    if not url.startswith("postgres"):
        return []
    import asyncpg

    connection = await asyncpg.connect(url)
    rows = await connection.fetch("SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = 'logs'::regclass")
    await connection.close()
    return sorted(name for (name,) in rows)


def test_migrations_apply_once_and_newer_schema_is_refused(
    url: str, run: Run[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def with_store(act: Callable[[GatewayStore], Awaitable[Any]]) -> Any:
        found = await open_store(url)
        try:
            return await act(found)
        finally:
            await found.close()

    kept = make_record()
    run(with_store(lambda s: s.append_records([(kept, None)])))
    with monkeypatch.context() as newer:
        newer.setattr(tables, "LOG_MIGRATIONS", (*tables.LOG_MIGRATIONS, ("ALTER TABLE logs ADD COLUMN extra {int}",)))
        assert run(with_store(lambda s: s.get_record("acme", "main", kept.id))) == kept
        assert run(with_store(lambda s: s.list_days())) == [utc_day(NOON)]  # one try is enough
    with pytest.raises(StoreFailed, match="newer version"):
        run(open_store(url))
