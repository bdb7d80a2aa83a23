"""The tracker passes on complete groups only and keeps their tokens, wherever the bytes are cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberline.cluster.fake_completion import FakeCompletion, FakeRequest
from emberline.core.handoff import TokenGroup
from emberline.router.stream_tracker import MAX_GROUP_BYTES, InvalidWorkerReply, StreamTracker

TOKENS = st.lists(st.integers(0, 1 << 20), max_size=3).map(tuple)
EVENTS = st.lists(st.sampled_from([b"data: {}\n\n", b"event: x\ndata: : said 0 1 2\n\n"]), max_size=3).map(b"".join)
GROUPS = st.lists(st.tuples(st.integers(0, 2), TOKENS, st.sampled_from(["", "stop"]), EVENTS), max_size=8)


def feed(track: StreamTracker, stream: bytes, cuts: list[int]) -> bytes:
    ends = [*sorted(cut for cut in cuts if 0 < cut < len(stream)), len(stream)]
    return b"".join(track.push(stream[a:b]) for a, b in zip([0, *ends], ends, strict=False) if b > a)


@given(GROUPS, st.lists(st.integers(0, 400), max_size=8), st.integers(0, 400), st.integers(0, 9))
def test_only_complete_groups_pass(
    made: list[tuple[int, tuple[int, ...], str, bytes]], cuts: list[int], broken: int, cached: int
) -> None:
    said = [TokenGroup(index, tokens, finish) for index, tokens, finish, _ in made]
    writes = [s.to_comment(len(events)) + events for s, (*_, events) in zip(said, made, strict=True)]
    if writes:
        writes[0] = b": cached %d\n\n: odd\n\n: drafts 9 %d\n\n" % (cached, cached) + writes[0]
    stream = b"".join(writes)[:broken]
    track = StreamTracker()
    out = feed(track, stream, cuts)
    whole = 0
    while whole < len(writes) and len(b"".join(writes[: whole + 1])) <= broken:
        whole += 1
    assert out == b"".join(events for *_, events in made[:whole])
    if stream[:1] == b":":
        handoff = track.build_handoff()
        assert handoff.groups == tuple(said[:whole]) and track.event_count == out.count(b"\n\n")
        assert handoff.started == bool(out) and handoff.cached_tokens == (cached if whole else None)
        assert handoff.drafts == ((9, cached) if whole else (0, 0))


@given(st.booleans(), st.data())
def test_resumed_stream_completes_output(uneven: bool, data: st.DataObject) -> None:
    """Every cut of the bytes, several times over: the client's stream is the one that never moved."""
    speech = FakeCompletion(data.draw(st.integers(0, 99)), FakeRequest(max_tokens=9, uneven=uneven))
    track, out = StreamTracker(), b""
    for leg in range(5):
        after = sum(len(group.tokens) for group in track.build_handoff().groups)
        stream = b"".join(speech.stream_chunks(7, after, True))
        broken = len(stream) if leg == 4 else data.draw(st.integers(0, len(stream)))
        out += feed(track, stream[:broken], data.draw(st.lists(st.integers(0, len(stream)), max_size=4)))
        if track.has_ended:
            break
        track.discard_partial_group()
    assert track.has_ended and not track.is_movable and out == b"".join(speech.stream_chunks(7, 0, False))
    assert track.reply_id_and_created() == (speech.id, 1) and track.event_count == out.count(b"\n\n")


def test_cut_at_every_byte() -> None:
    speech = FakeCompletion(5, FakeRequest(max_tokens=8, uneven=True))
    whole, plain = b"".join(speech.stream_chunks(7, 0, True)), b"".join(speech.stream_chunks(7, 0, False))
    for cut in range(len(whole) + 1):
        track = StreamTracker()
        out = feed(track, whole[:cut], [])
        track.discard_partial_group()
        after = sum(len(group.tokens) for group in track.build_handoff().groups)
        assert out + (b"" if track.has_ended else track.push(b"".join(speech.stream_chunks(7, after, True)))) == plain


def test_untracked_stream_passes_and_cannot_move() -> None:
    for begin in (b"", b": ping\n\n"):
        track = StreamTracker()
        assert (
            track.push(begin + b"data: 1\n\nda") == b"data: 1\n\n" and not track.is_movable and not track.is_mid_event
        )
        assert (
            track.push(b"ta: 2\n\n: ping\n\ndata") == b"data: 2\n\n"
            and track.take_remaining_bytes() == b"data"
            and track.event_count == 2
        )


@pytest.mark.parametrize("begin", [b"", b": ping\r\n\r\n", b": ping\n\n"])
def test_any_line_end_at_any_cut(begin: bytes) -> None:
    stream = begin + b"event: a\r\ndata: 1\r\n\r\n: ping\r\n\r\ndata: [DONE]\r\n\r\n"
    for cut in range(len(stream) + 1):
        track = StreamTracker()
        assert feed(track, stream, [cut]) == b"event: a\ndata: 1\n\ndata: [DONE]\n\n"
        assert track.has_ended and track.event_count == 2 and not track.is_mid_event and not track.is_movable


@pytest.mark.parametrize(
    "next_",
    [
        b"data: 1\n\n",
        b": said 0 1\n\n",
        b": said 0 1 x\n\n",
        b": cached -1\n\n",
        b": said 0 1 %d\n\n" % MAX_GROUP_BYTES,
    ],
)
def test_tracked_stream_must_continue_with_groups(next_: bytes) -> None:
    track = StreamTracker()
    track.push(b": said 0 1 9\n\ndata: 1\n\n")
    with pytest.raises(InvalidWorkerReply):
        track.push(next_)


@pytest.mark.parametrize("rubbish", [b"data: 1\n\n", b": said 0 1\n\n", b": cached -1\n\n", b": chain x\n\n"])
def test_handoff_excludes_incomplete_groups(rubbish: bytes) -> None:
    """A group that comes in one read with what is garbled: who goes on says it again."""
    track, said = StreamTracker(), b": said 0 %d 9\n\ndata: 1\n\n"
    assert track.push(b": cached 3\n\n" + said % 1) == b"data: 1\n\n"
    with pytest.raises(InvalidWorkerReply):
        track.push(b": cached 5\n\n" + said % 2 + rubbish)
    handoff = track.build_handoff()
    assert [each.tokens for each in handoff.groups] == [(1,)] and handoff.cached_tokens == 3


@pytest.mark.parametrize(
    ("stream", "ended"),
    [
        (b"data: {}\n\ndata: [DONE]\n\n", True),
        (b"event: message_stop\ndata: {}\n\n", True),
        (b'event: response.completed\ndata: {"x": 1}\n\n', True),
        (b'data: {"content": "data: [DONE]"}\n\n', False),
        (b"data: [DONE]\n\ndata: {}\n\n", False),
        (b"data: {}\n\n", False),
    ],
)
def test_final_events_are_recognized(stream: bytes, ended: bool) -> None:
    for written in (stream, b": said 0 - %d\n\n" % len(stream) + stream):
        track = StreamTracker()
        track.push(written)
        assert track.has_ended is ended


@pytest.mark.parametrize(
    ("opening", "named"),
    [
        (b'data: {"id":"chatcmpl-1","created":5,"choices":[]}\n\n', ("chatcmpl-1", 5)),
        (b'event: message_start\ndata: {"type":"message_start","message":{"id":"msg_1"}}\n\n', ("msg_1", None)),
        (b'event: response.created\ndata: {"response":{"id":"resp_1","created_at":7}}\n\n', ("resp_1", 7)),
        (b"data: what\n\n", (None, None)),
    ],
)
def test_reply_id_and_created_are_kept(opening: bytes, named: tuple[str | None, int | None]) -> None:
    track = StreamTracker()
    track.push(TokenGroup(0, (1,)).to_comment(len(opening)) + opening)
    assert track.reply_id_and_created() == named
