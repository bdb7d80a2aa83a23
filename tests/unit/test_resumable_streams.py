"""Streams that a client continues over a new connection, after the last event that it received."""

from __future__ import annotations

import json
from typing import Any

import pytest
from scripted_engine import WorkerHarness
from test_moved_replies import CASES, house_of
from tracked_streams import events_of, groups_of

from emberline.cluster.resumable_streams import (
    MAX_ENDED_STREAMS,
    RESUME_WINDOW_S,
    EventPosition,
    ReclaimRequest,
    ResumableStream,
    ResumableStreams,
    digest_request,
    drop_events,
)
from emberline.core.errors import InvalidRequest, StreamNotResumable
from emberline.core.handoff import Handoff, TokenGroup

IDS = {"x_emberline_event_ids": "1"}


def split_events(stream: bytes) -> tuple[list[bytes], list[str]]:
    """Return the events of a tracked stream without their ids, and the ids."""
    parts = [event.rpartition(b"\nid: ") for event in events_of(groups_of(stream)).split(b"\n\n")[:-1]]
    return [event for event, _, _ in parts], [name.decode() for _, _, name in parts]


def resume(house: WorkerHarness, path: str, body: Any, last_id: str) -> tuple[list[bytes], list[str]]:
    position = EventPosition.parse(last_id)
    digest = digest_request(path, json.dumps(body).encode())
    asked = {"stream": position.stream, "group": position.group, "event": position.event, "request_digest": digest}
    found = house.post("/cluster/reclaim", asked)
    assert found.status == 200, found.body
    if found.json["is_complete"]:
        return [], []
    named = {name: found.json[name] for name in ("handoff", "seed", "id", "created")}
    return split_events(house.post("/cluster/resume", {"path": path, "body": body, **named}, **IDS).body)


@pytest.mark.parametrize("case", CASES)
def test_stream_continues_after_any_event(case: str) -> None:
    path, script, body = CASES[case]
    house = house_of(script)
    house.engine.drafts_per_token = 2
    plain = house.post(path, body, x_emberline_track="1", x_emberline_seed="7", x_emberline_created="5")
    answer = house.post(path, body, x_emberline_track="1", x_emberline_seed="7", x_emberline_created="5", **IDS)
    events, ids = split_events(answer.body)
    assert len(set(ids)) == len(ids) == events_of(groups_of(plain.body)).count(b"\n\n")
    cuts = {*range(3), *range(3, len(events), 7), *range(len(events) - 3, len(events))}
    # Which of several prompts comes first is a matter of chance.
    ordered = sorted if isinstance(body.get("prompt"), list) else list
    for i in sorted(cuts):
        assert ordered(resume(house, path, body, ids[i])[0]) == ordered(events[i + 1 :]), i
    first, first_ids = resume(house, path, body, ids[1])  # and once more, from the stream that continued
    middle = len(first) // 2
    assert ordered(resume(house, path, body, first_ids[middle])[0]) == ordered(first[middle + 1 :])


def test_direct_clients_get_no_event_ids() -> None:
    path, script, body = CASES["text"]
    assert b"\nid: " not in house_of(script).post(path, body, **IDS).body


def open_stream(streams: ResumableStreams, tenant: str = "") -> ResumableStream:
    return streams.open(Handoff(), tenant=tenant, request_digest="d", reply_id="r", created=1, seed=2)


def name_of(stream: ResumableStream) -> str:
    return EventPosition.parse(f"{stream.event_id_prefix.decode()}0.0").stream


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_streams_are_forgotten() -> None:
    clock = Clock()
    streams = ResumableStreams("i", clock)
    first, failed = open_stream(streams), open_stream(streams)
    first.write_group(b"data: 1\n\n", TokenGroup(0, (1,)))
    streams.close(failed, is_resumable=False)
    with pytest.raises(StreamNotResumable):
        streams.reclaim(ReclaimRequest(name_of(failed), 0, 0, "d"), "")
    clock.now = 1e6  # it still runs
    assert streams.reclaim(ReclaimRequest(name_of(first), 0, 1, "d"), "").handoff["skip_events"] == 1
    second = open_stream(streams)
    streams.close(second, is_resumable=True)
    clock.now += RESUME_WINDOW_S - 1
    streams.reclaim(ReclaimRequest(name_of(second), 0, 0, "d"), "")
    clock.now += 2
    with pytest.raises(StreamNotResumable):
        streams.reclaim(ReclaimRequest(name_of(second), 0, 0, "d"), "")
    third = open_stream(streams)
    streams.close(third, is_resumable=True)
    for _ in range(MAX_ENDED_STREAMS):
        streams.close(open_stream(streams), is_resumable=True)
    with pytest.raises(StreamNotResumable):
        streams.reclaim(ReclaimRequest(name_of(third), 0, 0, "d"), "")


def test_stream_belongs_to_its_request_and_tenant() -> None:
    streams = ResumableStreams("i", Clock())
    stream = open_stream(streams, "alice")
    for digest, tenant in (("d", ""), ("d", "bob"), ("e", "alice")):
        with pytest.raises(StreamNotResumable):
            streams.reclaim(ReclaimRequest(name_of(stream), 0, 0, digest), tenant)
    for group, event in ((1, 0), (0, 1)):
        with pytest.raises(InvalidRequest, match="beyond the end"):
            streams.reclaim(ReclaimRequest(name_of(stream), group, event, "d"), "alice")


def test_running_stream_ends_when_another_router_continues_it() -> None:
    streams = ResumableStreams("i", Clock())
    stream = open_stream(streams)
    stream.write_group(b"data: 1\n\n", TokenGroup(0, (1,)))
    streams.reclaim(ReclaimRequest(name_of(stream), 1, 0, "d"), "")
    with pytest.raises(StreamNotResumable, match="over another connection"):
        stream.write_group(b"data: 2\n\n", TokenGroup(0, (2,)))


def test_drop_events() -> None:
    assert [drop_events(b"a\n\nb\n\n", count) for count in range(4)] == [b"a\n\nb\n\n", b"b\n\n", b"", b""]


def test_number_of_events_that_a_client_claims_to_have_costs_no_time() -> None:
    class CountingBytes(bytes):
        searches = 0

        def find(self, *args: Any) -> int:
            type(self).searches += 1
            return super().find(*args)

    assert drop_events(CountingBytes(b"a\n\nb\n\n"), 10_000) == b""
    assert CountingBytes.searches == 3


def test_stream_can_be_continued_again_after_a_continuation_that_failed() -> None:
    streams = ResumableStreams("i", Clock())
    stream = open_stream(streams)
    stream.write_group(b"data: 1\n\n", TokenGroup(0, (1,)))
    position = ReclaimRequest(name_of(stream), 1, 0, "d")
    first = streams.reclaim(position, "")
    streams.close(stream, is_resumable=False)  # the error says that another connection continues it
    assert streams.reclaim(position, "") == first


def test_ids_of_other_services_are_rejected() -> None:
    for bad in ("", "1", "a.b.1.1", "a.0123456789abcdef.1", "a.0123456789abcdef.-1.1", "é.0123456789abcdef.1.1"):
        with pytest.raises(InvalidRequest, match="Last-Event-ID"):
            EventPosition.parse(bad)
