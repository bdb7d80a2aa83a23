"""A request that moves between engines gives the same tokens, whatever happens to its KV blocks."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest

from emberline.core.clock import ManualClock
from emberline.core.engine_config import SchedulerConfig
from emberline.core.errors import InvalidRequest
from emberline.core.events import Output
from emberline.core.handoff import DraftCounts, Handoff, PrefillResult, TokenGroup
from emberline.core.params import SamplingParams
from emberline.core.request import FinishReason, Priority, Submission
from emberline.core.transfer_config import TransferConfig
from emberline.engine.engine import Engine
from emberline.engine.fake import FakePipelinedRunner, FakeRunner
from emberline.kv.transfer.base import PieceFetch
from emberline.kv.transfer.endpoint import TransferEndpoint
from emberline.kv.transfer.errors import TransferCorrupted
from emberline.kv.transfer.lease import LeaseEndReason
from emberline.kv.transfer.local import LocalLink, LocalTransport, advertise_local
from emberline.kv.transfer.piece import TransferPiece
from emberline.kv.transfer.receiver import Receiver
from emberline.kv.transfer.sender import Sender
from emberline.kv.transfer.ticket import Peer


def test_handoff_json_round_trip() -> None:
    handoff = Handoff(
        (TokenGroup(1, (2, 3)), TokenGroup(0, (4,)), TokenGroup(1, (5,))), True, 7, {"id": "x"}, DraftCounts(9, 4)
    )
    assert Handoff.parse(json.loads(json.dumps(handoff.as_dict()))) == handoff
    assert handoff.tokens_by_choice(2) == ((4,), (2, 3, 5))
    assert Handoff.parse({}) == Handoff() and Handoff().tokens_by_choice(3) == ()
    with pytest.raises(InvalidRequest, match="choice 1"):
        handoff.tokens_by_choice(1)
    for wrong in (
        [],
        {"said": [[0, [-1]]]},
        {"said": [[0]]},
        {"started": 1},
        {"source": []},
        {"cached_tokens": "1"},
        {"drafts": [1, -1]},
    ):
        with pytest.raises(InvalidRequest, match="cannot be parsed"):
            Handoff.parse(wrong)
    note = PrefillResult((5,), True, 3, 0.5)
    assert (
        PrefillResult.parse(str(note)) == note and PrefillResult.parse("") is None and PrefillResult.parse("{}") is None
    )


def engine(
    name: str = "", blocks: int = 64, size: int = 8, *, runner: type[FakeRunner] = FakeRunner, **others: object
) -> Engine:
    """Return an engine; with a name, other engines can pull from it, and it pulls from all in `PEERS`."""
    made = runner(blocks, size, **({"eos": others.pop("eos")} if "eos" in others else {}))  # type: ignore[arg-type]
    config = SchedulerConfig(block_size=size, **{"max_batch_tokens": 16, **others})  # type: ignore[arg-type]
    if not name:
        return Engine(config, made)
    region = made.region()
    sender = Sender(region, name)
    advertise_local(sender, name)
    return Engine(
        config, made, transfer_endpoint=TransferEndpoint(sender, Receiver(region, []), config=TransferConfig(name))
    )


def connect_engines(*engines: Engine) -> None:
    """Let each engine reach all others."""
    for one in engines:
        assert one.transfer_endpoint is not None
        senders = [
            other.transfer_endpoint.sender
            for other in engines
            if other is not one and other.transfer_endpoint is not None
        ]
        one.transfer_endpoint.receiver._transports = [LocalTransport(senders)]


def make_submission(name: str = "r", length: int = 41, start: int = 0, **params: object) -> Submission:
    wishes = {"max_tokens": 6, "seed": 11, **params}
    prompt = [(start + 7 * i) % 1000 for i in range(length)]
    return Submission(name, prompt, SamplingParams(**wishes))  # type: ignore[arg-type]


def run(e: Engine, *submissions: Submission, beside: Engine | None = None) -> list[Output]:
    for submission in submissions:
        e.add(submission)
    outputs: list[Output] = []
    ends = time.monotonic() + 30
    while not e.idle and time.monotonic() < ends:
        outputs += e.step()
        e.kv.check_invariants()
        if beside is not None:
            beside.step()
            beside.kv.check_invariants()
    assert e.idle, "the engine did not finish"
    return outputs


def tokens(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.tokens]


def run_until_settled(*engines: Engine) -> None:
    """Run until no lease and no pull is left, and every block is free or cached."""
    ends = time.monotonic() + 30
    while time.monotonic() < ends:
        for one in engines:
            one.step()
            one.kv.check_invariants()
        if all(one.kv.num_free_blocks + one.kv.num_cached_blocks == one.kv.num_blocks for one in engines):
            return
        time.sleep(0.005)
    raise AssertionError("blocks are still held")


def publish_prefill(e: Engine, submission: Submission) -> list[Output]:
    return run(e, replace(submission, publish=True))


# -- resuming from tokens alone ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("runner", [FakeRunner, FakePipelinedRunner])
@pytest.mark.parametrize("n", [1, 3])
def test_resume_after_any_token(n: int, runner: type[FakeRunner]) -> None:
    whole: dict[int, list[int]] = {i: [] for i in range(n)}
    for output in run(engine(), make_submission(n=n, max_tokens=9)):
        whole[output.index] += output.tokens
    for cut in range(10):
        known = tuple(tuple(whole[i][: max(0, cut - i)]) for i in range(n))
        rest: dict[int, list[int]] = {i: [] for i in range(n)}
        finishes = []
        for output in run(engine(runner=runner), replace(make_submission(n=n, max_tokens=9), resumed=known)):
            rest[output.index] += output.tokens
            finishes += [output.finish] if output.finish else []
        assert {i: [*known[i], *rest[i]] for i in range(n)} == whole
        assert finishes == [FinishReason.LENGTH] * n


def test_resuming_finished_output_ends_at_once() -> None:
    e = engine(eos=frozenset({5}))
    for params, known, finish in (
        ({"max_tokens": 2}, (7, 8), FinishReason.LENGTH),
        ({"max_tokens": 2}, (7, 8, 9), FinishReason.LENGTH),
        ({"max_tokens": 9}, (7, 5), FinishReason.STOP),
        ({"max_tokens": 2}, (7, 5), FinishReason.STOP),
        ({"max_tokens": 9, "stop_token_ids": (8,)}, (7, 8), FinishReason.STOP),
    ):
        outputs = run(e, replace(make_submission(**params), resumed=(known,)))
        assert [(o.tokens, o.finish) for o in outputs] == [([], finish)]
    assert e.stats().step == 0
    assert len(tokens(run(e, replace(make_submission(max_tokens=3, ignore_eos=True), resumed=((7, 5),))))) == 1


def test_unsupported_handoffs_are_refused() -> None:
    e = engine()
    for wrong, param in (
        ({"resumed": ((1,), (2,))}, "resumed"),
        ({"resumed": ((1000,),)}, "resumed"),
        ({"publish": True}, "publish"),
    ):
        with pytest.raises(InvalidRequest) as refusal:
            e.add(replace(make_submission(), **wrong))
        assert refusal.value.param == param
    with pytest.raises(InvalidRequest, match="publish is set; it needs n = 1"):
        engine("p").add(replace(make_submission(n=2), publish=True))
    assert e.idle


# -- blocks from another engine ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("theirs", "ours"), [(8, 8), (8, 16), (16, 8), (8, 32), (32, 8)])
@pytest.mark.parametrize("length", [1, 7, 8, 9, 31, 32, 33, 64, 65])
def test_prefill_of_any_prompt_length(theirs: int, ours: int, length: int) -> None:
    expected = tokens(run(engine(), make_submission(length=length)))
    p, d = engine("p", size=theirs), engine("d", size=ours)
    connect_engines(p, d)
    *early, last = publish_prefill(p, make_submission(length=length))
    assert last.finish is FinishReason.HANDOFF and last.tokens == expected[:1]
    full = length // theirs * theirs
    assert (last.ticket is not None) == (full > 0) == bool(early)
    if last.ticket is None:
        run_until_settled(p)
        return
    assert early[0].ticket is not None and not early[0].ticket["complete"]
    got = run(d, replace(make_submission(length=length), source=early[0].ticket))
    assert tokens(got) == expected
    assert got[-1].finish is FinishReason.LENGTH
    stats = d.stats().transfer
    assert stats is not None and (stats.pulls, stats.pull_failures, stats.recomputed) == (1, {}, 0)
    assert stats.hit_tokens == full and d.stats().prompt_tokens == length - full
    run_until_settled(p, d)
    stats = p.stats().transfer
    assert stats is not None and stats.ended == {"acknowledged": 1} and (stats.leases, stats.pinned_blocks) == (0, 0)
    assert stats.published_blocks == length // theirs


def test_pull_overlaps_with_prefill() -> None:
    expected = tokens(run(engine(), make_submission(length=100)))
    p, d = engine("p"), engine("d")
    connect_engines(p, d)
    p.add(replace(make_submission(length=100), publish=True))
    (first,) = p.step()
    assert first.ticket is not None and len(first.ticket["blocks"]) == 2 and not first.ticket["complete"]
    d.add(replace(make_submission(length=100), source=first.ticket))
    d.step()
    for computed in (16, 32, 48):  # blocks are confirmed when the next ones are published
        ends = time.monotonic() + 30
        p.step()
        while d.scheduler.requests["r#0"].num_computed < computed and time.monotonic() < ends:
            d.step()
        assert d.scheduler.requests["r#0"].num_computed == computed
    assert tokens(run(d, beside=p)) == expected
    assert d.stats().prompt_tokens == 4
    run_until_settled(p, d)


@pytest.mark.parametrize("runner", [FakeRunner, FakePipelinedRunner])
def test_handoff_between_asynchronous_engines(runner: type[FakeRunner]) -> None:
    for length in (40, 41):
        expected = tokens(run(engine(), make_submission(length=length)))
        p, d = engine("p", runner=FakePipelinedRunner), engine("d", runner=runner)
        connect_engines(p, d)
        p.add(replace(make_submission(length=length), publish=True))
        while not (outputs := p.step()):
            pass
        d.add(replace(make_submission(length=length), source=outputs[0].ticket))
        assert tokens(run(d, beside=p)) == expected
        run(p)
        run_until_settled(p, d)


def test_cached_blocks_are_not_pulled() -> None:
    expected = tokens(run(engine(), make_submission()))
    for theirs, cached, pulled in ((8, 24, 16), (16, 16, 16), (32, 0, 32)):  # a pull never writes to shared blocks
        p, d = engine("p", size=theirs), engine("d")
        connect_engines(p, d)
        run(d, Submission("before", make_submission().prompt[:24], SamplingParams(max_tokens=1)))
        ticket = publish_prefill(p, make_submission())[-1].ticket
        before = d.stats().prefix_hits
        assert tokens(run(d, replace(make_submission(), source=ticket))) == expected
        stats = d.stats().transfer
        assert stats is not None and stats.hit_tokens == pulled and stats.pulled_bytes == 8 * pulled
        assert d.stats().prefix_hits - before == cached
        run_until_settled(p, d)


def make_engine_pair(**others: object) -> tuple[Engine, Engine]:
    p, d = engine("p"), engine("d", **others)  # type: ignore[arg-type]
    connect_engines(p, d)
    return p, d


def pull_failures(e: Engine) -> dict[str, int]:
    stats = e.stats().transfer
    assert stats is not None and stats.recomputed == sum(stats.pull_failures.values())
    return stats.pull_failures


EXPECTED = tokens(run(engine(), make_submission()))


def test_note_carries_first_token_stats() -> None:
    p, d = make_engine_pair()
    run(p, make_submission("before"))
    ticket = publish_prefill(p, make_submission())[-1].ticket
    assert ticket is not None and ticket["complete"]
    note = PrefillResult.parse(ticket["note"])
    assert note is not None and note.tokens == tuple(EXPECTED[:1]) and note.cached == 40 and not note.stop
    got = run(d, replace(make_submission(), source=ticket))
    assert got[0].cached_tokens == 40 and got[0].timing is not None
    assert sum(output.cached_tokens for output in got) == 40
    assert d.stats().generated_tokens == 5, "the first token was generated by the other engine"
    run_until_settled(p, d)


@pytest.mark.parametrize(
    ("params", "count", "finish"),
    [
        ({"max_tokens": 1}, 1, FinishReason.LENGTH),
        ({"stop_token_ids": (EXPECTED[0],)}, 1, FinishReason.STOP),
        ({"max_tokens": 2}, 2, FinishReason.LENGTH),
        ({"logprobs": 1}, 6, FinishReason.LENGTH),
    ],
)
def test_first_token_may_end_the_output(params: dict[str, object], count: int, finish: FinishReason) -> None:
    p, d = make_engine_pair()
    ticket = publish_prefill(p, make_submission(**params))[-1].ticket
    got = run(d, replace(make_submission(**params), source=ticket))
    assert tokens(got) == EXPECTED[:count] and [o.finish for o in got if o.finish] == [finish]
    assert pull_failures(d) == {}
    run_until_settled(p, d)


def test_logprobs_request_samples_first_token_itself() -> None:
    """It computes the last token of the prompt, although the peer has its block."""
    expected = tokens(run(engine(), make_submission(length=40)))
    p, d = make_engine_pair()
    ticket = publish_prefill(p, make_submission(length=40))[-1].ticket
    assert tokens(run(d, replace(make_submission(length=40, logprobs=1), source=ticket))) == expected
    assert d.stats().prompt_tokens == 1 and d.stats().generated_tokens == 6
    run_until_settled(p, d)


def test_receiver_releases_unneeded_blocks() -> None:
    p = engine("p")
    p.add(replace(make_submission(), publish=True))
    (first,) = p.step()
    assert first.ticket is not None and p.transfer_endpoint is not None
    p.transfer_endpoint.sender.end_lease(first.ticket["id"], LeaseEndReason.RELEASED)
    *_, last = run(p)
    assert last.finish is FinishReason.HANDOFF and last.tokens == EXPECTED[:1] and last.ticket is None
    run_until_settled(p)


def test_resume_with_a_source() -> None:
    p, d = make_engine_pair()
    ticket = publish_prefill(p, make_submission())[-1].ticket
    assert tokens(run(d, replace(make_submission(), source=ticket, resumed=(tuple(EXPECTED[:2]),)))) == EXPECTED[2:]
    assert d.stats().prompt_tokens == 1
    run_until_settled(p, d)


@pytest.mark.parametrize(("theirs", "ours"), [(8, 8), (8, 16), (16, 8)])
@pytest.mark.parametrize("known", [1, 6, 7, 8, 30, 39])
def test_output_is_handed_over_with_the_prompt(theirs: int, ours: int, known: int) -> None:
    wish = make_submission(max_tokens=40)
    expected = tokens(run(engine(), wish))
    p, d = engine("p", size=theirs), engine("d", size=ours)
    connect_engines(p, d)
    resumed = replace(wish, resumed=(tuple(expected[:known]),))
    *_, last = publish_prefill(p, resumed)
    assert last.finish is FinishReason.HANDOFF and last.tokens == expected[known : known + 1]
    got = run(d, replace(resumed, source=last.ticket))
    assert tokens(got) == expected[known:] and got[-1].finish is FinishReason.LENGTH
    stats = d.stats().transfer
    assert stats is not None and stats.hit_tokens == (41 + known) // theirs * theirs and stats.recomputed == 0
    run_until_settled(p, d)


def test_known_tickets_and_tokens_need_no_step() -> None:
    """A step on a CPU may take long, so what a moving stream waits for is sent before it."""
    p, d = make_engine_pair()
    run(p, make_submission())  # its blocks are then cached
    p.add(replace(make_submission("again"), publish=True))
    steps = p.stats().step
    (early,) = p.step()
    assert early.ticket is not None and p.stats().step == steps and not p.idle
    *_, last = run(p)
    assert last.finish is FinishReason.HANDOFF and last.tokens == EXPECTED[:1]
    d.add(replace(make_submission(), source=early.ticket))
    outputs: list[Output] = []
    ends = time.monotonic() + 30
    while not outputs and time.monotonic() < ends:
        outputs = d.step()
    assert tokens(outputs) == EXPECTED[:1] and d.stats().step == 0, "the token came with the blocks"
    assert tokens(run(d)) == EXPECTED[1:]
    run_until_settled(p, d)


def test_ticket_for_other_output_is_refused() -> None:
    """A ticket covers the output so far: its blocks would be wrong after other tokens."""
    p, d = make_engine_pair()
    ticket = publish_prefill(p, replace(make_submission(max_tokens=40), resumed=(tuple(range(20)),)))[-1].ticket
    other = replace(make_submission(max_tokens=40), resumed=(tuple(range(1, 21)),))
    assert tokens(run(d, replace(other, source=ticket))) == tokens(run(engine(), other))
    stats = d.stats().transfer
    assert stats is not None and stats.hit_tokens == 0 and stats.recomputed == 1


def test_logprobs_request_samples_next_token_itself() -> None:
    p, d = make_engine_pair()
    wish = make_submission(max_tokens=40, logprobs=1)
    expected = tokens(run(engine(), wish))
    resumed = replace(wish, resumed=(tuple(expected[:20]),))
    ticket = publish_prefill(p, resumed)[-1].ticket
    assert tokens(run(d, replace(resumed, source=ticket))) == expected[20:] and d.stats().generated_tokens == 20
    run_until_settled(p, d)


def test_ticket_is_valid_until_acknowledged() -> None:
    p, d = make_engine_pair()
    ticket = publish_prefill(p, make_submission())[-1].ticket
    assert tokens(run(d, replace(make_submission(), source=ticket))) == EXPECTED
    run_until_settled(p, d)
    other = engine("other")
    connect_engines(p, other)
    assert tokens(run(other, replace(make_submission(), source=ticket))) == EXPECTED
    assert pull_failures(other) == {"ticket_over": 1} and other.stats().prompt_tokens == 41


def test_aborted_prefill_closes_its_lease() -> None:
    p, d = make_engine_pair()
    p.add(replace(make_submission(), publish=True))
    (first,) = p.step()
    p.abort("r")
    assert tokens(run(d, replace(make_submission(), source=first.ticket))) == EXPECTED
    assert pull_failures(d) == {"ticket_over": 1}
    run_until_settled(p, d)
    assert p.stats().transfer.ended == {"closed": 1}  # type: ignore[union-attr]


def test_sender_stops_during_prefill() -> None:
    p, d = make_engine_pair()
    assert d.kv.pulls is not None
    d.kv.pulls._stall_timeout_s = 0.2
    p.add(replace(make_submission(), publish=True))
    (first,) = p.step()
    got = run(d, replace(make_submission(), source=first.ticket))  # p makes no more steps
    assert tokens(got) == EXPECTED and pull_failures(d) == {"transfer_timeout": 1}
    assert d.stats().prompt_tokens == 41 - 16, "the blocks that had arrived were used"
    run_until_settled(d)
    p.abort("r")
    run_until_settled(p)


def test_missing_sender_is_recomputed() -> None:
    p, d = make_engine_pair()
    ticket = publish_prefill(p, make_submission())[-1].ticket
    connect_engines(d)
    assert tokens(run(d, replace(make_submission(), source=ticket))) == EXPECTED
    assert pull_failures(d) == {"peer_unreachable": 1}


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda ticket: {**ticket, "subject": "0" * 32}, "bad_transfer"),
        (lambda ticket: {"id": ticket["id"]}, "bad_transfer"),
        (lambda ticket: {**ticket, "blocks": ticket["blocks"][::-1]}, "bad_transfer"),
        (lambda ticket: {**ticket, "peer": {**ticket["peer"], "incarnation": "another"}}, "peer_changed"),
        (
            lambda ticket: {**ticket, "peer": {**ticket["peer"], "layout": {**ticket["peer"]["layout"], "width": 4}}},
            "incompatible",
        ),
        (
            lambda ticket: {**ticket, "peer": {**ticket["peer"], "layout": {**ticket["peer"]["layout"], "tokens": 12}}},
            "incompatible",
        ),
    ],
)
def test_malformed_tickets_are_recomputed(change: Callable[[Any], Any], code: str) -> None:
    p, d = make_engine_pair()
    early = publish_prefill(p, make_submission())[0].ticket
    assert tokens(run(d, replace(make_submission(), source=change(early)))) == EXPECTED
    assert pull_failures(d) == {code: 1}


def test_ticket_of_another_tenant_is_refused() -> None:
    p, d = make_engine_pair()
    ticket = publish_prefill(p, replace(make_submission(), salt="one"))[-1].ticket
    assert tokens(run(d, replace(make_submission(), source=ticket, salt="two"))) == EXPECTED
    assert pull_failures(d) == {"bad_transfer": 1}


class CorruptingTransport(LocalTransport):
    """A transport that writes wrong bytes and reports it."""

    def connect(self, peer: Peer, deadline: float) -> LocalLink:
        link = super().connect(peer, deadline)

        def fetch(asked: PieceFetch) -> None:
            for view in asked.region.piece_views(TransferPiece(0, 1, 0, len(asked.ticket.blocks)), asked.target_blocks):
                view[:] = bytes(len(view))
            raise TransferCorrupted("a checksum is wrong")

        link.fetch = fetch  # type: ignore[method-assign]
        return link


def test_corrupted_blocks_are_recomputed() -> None:
    p, d = make_engine_pair()
    assert p.transfer_endpoint is not None and d.transfer_endpoint is not None
    d.transfer_endpoint.receiver._transports = [CorruptingTransport([p.transfer_endpoint.sender])]
    ticket = publish_prefill(p, make_submission())[-1].ticket
    assert tokens(run(d, replace(make_submission(), source=ticket))) == EXPECTED
    assert pull_failures(d) == {"corrupted": 1} and d.stats().prompt_tokens == 41
    run_until_settled(p, d)
    assert p.stats().transfer.ended == {"released": 1}  # type: ignore[union-attr]


def test_pinned_blocks_are_not_reused_during_lease() -> None:
    p = engine("p", blocks=12)
    clock = ManualClock()
    assert p.transfer_endpoint is not None
    p.transfer_endpoint.sender._clock = p.transfer_endpoint.sender._leases._clock = clock
    publish_prefill(p, make_submission())
    p.add(make_submission("next", start=500, length=60))
    for _ in range(5):
        assert p.step() == []
        p.kv.check_invariants()
    stats = p.stats().transfer
    assert stats is not None and (stats.leases, stats.pinned_blocks) == (1, 5) and stats.pinned_by_age == {"0-1": 5}
    clock.advance(9.0)
    p.step()
    stats_now = p.stats().transfer
    assert (
        p.needs_polling
        and stats_now is not None
        and (stats_now.oldest_lease, stats_now.pinned_by_age) == (9.0, {"1-10": 5})
    )
    clock.advance(1.0)
    assert len(tokens(run(p))) == 6
    assert not p.needs_polling and p.stats().transfer.ended == {"expired": 1}  # type: ignore[union-attr]
    run_until_settled(p)


def test_lease_lasts_while_prefill_runs() -> None:
    p, d = make_engine_pair()
    clock = ManualClock()
    assert p.transfer_endpoint is not None
    p.transfer_endpoint.sender._clock = p.transfer_endpoint.sender._leases._clock = clock
    p.add(replace(make_submission(), publish=True))
    (first,) = p.step()
    for _ in range(2):
        clock.advance(60.0)  # a slow step
        outputs = p.step()
    assert outputs[-1].ticket is not None and outputs[-1].ticket["complete"]
    assert tokens(run(d, replace(make_submission(), source=first.ticket))) == EXPECTED and pull_failures(d) == {}
    run_until_settled(p, d)


def test_preemption_keeps_published_blocks() -> None:
    expected = tokens(run(engine(), make_submission(length=100)))
    p, d = engine("p", blocks=22), engine("d")
    connect_engines(p, d)
    p.add(replace(make_submission(length=100), publish=True, priority=Priority.BATCH))
    (first,) = p.step()
    p.step()
    p.add(make_submission("other", start=500, length=64, max_tokens=100))
    outputs: list[Output] = []
    while p.scheduler.preemptions == 0:
        outputs += p.step()
        p.kv.check_invariants()
    d.add(replace(make_submission(length=100), source=first.ticket))
    assert tokens(run(d, beside=p)) == expected
    run(p)
    run_until_settled(p, d)


def test_new_content_bumps_generation() -> None:
    p = engine("p", blocks=12)
    assert p.transfer_endpoint is not None
    for i in range(4):
        run(p, make_submission(f"r{i}", start=100 * i, length=60, max_tokens=4))
    assert p.transfer_endpoint.sender.region.generations.min() > 1
    assert p.transfer_endpoint.sender.region.generations.sum() == 4 * 8


def test_leases_of_waiting_requests_are_renewed() -> None:
    p, d = make_engine_pair(max_running=1)
    clock = ManualClock(time.monotonic())
    assert p.transfer_endpoint is not None and d.kv.pulls is not None
    p.transfer_endpoint.sender._clock = p.transfer_endpoint.sender._leases._clock = clock
    tickets = [publish_prefill(p, make_submission(name))[-1].ticket for name in ("one", "two")]
    d.add(make_submission("busy", length=9, max_tokens=50))
    d.step()
    for name, ticket in zip(("one", "two"), tickets, strict=True):
        d.add(replace(make_submission(name), source=ticket))
    d.abort("two")  # the request never starts, so its blocks are not needed
    for _ in range(4):
        clock.advance(4.0)
        for expected in d.kv.pulls._waiting_leases.values():
            expected.renewed_at -= 4.0
        d.kv.pulls.renew_leases()
        p.step()
    got = [o for o in run(d) if o.id == "one"]
    assert tokens(got) == EXPECTED and pull_failures(d) == {}
    run_until_settled(p, d)
    assert p.stats().transfer.ended == {"acknowledged": 1, "released": 1}  # type: ignore[union-attr]


def test_peer_with_invalid_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    p, d = make_engine_pair()
    assert p.transfer_endpoint and d.transfer_endpoint and d.pairing

    def fails(peer: object, deadline: float) -> None:
        "\ud800".encode("idna")

    monkeypatch.setattr(d.transfer_endpoint.receiver, "connect", fails)
    d.pairing.set_peers([asdict(p.transfer_endpoint.sender.peer)])
    ends, pairs = time.monotonic() + 30, None
    while time.monotonic() < ends and (pairs is None or not pairs.failures):
        pairs = d.pairing.take_state_change() or pairs
        time.sleep(0.005)
    assert pairs is not None and "Unicode" in pairs.failures[p.transfer_endpoint.sender.peer.incarnation]


def test_only_compatible_reachable_peers_are_paired() -> None:
    p, d = make_engine_pair()
    other, wide = engine("other"), engine("wide", size=24)
    assert (
        p.transfer_endpoint and d.transfer_endpoint and d.pairing and other.transfer_endpoint and wide.transfer_endpoint
    )
    peers = [asdict(one.transfer_endpoint.sender.peer) for one in (p, other, wide)]
    newer = {**peers[0], "incarnation": "newer", "layout": {**peers[0]["layout"], "unheard": 1}}
    d.pairing.set_peers([*peers, {"incarnation": "broken"}, newer])
    ends, pairs = time.monotonic() + 30, None
    while time.monotonic() < ends and (pairs is None or len(pairs.paired) + len(pairs.failures) < 5):
        pairs = d.pairing.take_state_change() or pairs
        time.sleep(0.005)
    assert pairs is not None and pairs.paired == [peers[0]["incarnation"]]
    assert pairs.failures.keys() == {"broken", "newer", *(peer["incarnation"] for peer in peers[1:])}
    assert "reached" in pairs.failures[peers[1]["incarnation"]]
    connect_engines(p, d, other)  # the peer has started
    ends = time.monotonic() + 30
    while time.monotonic() < ends and len(pairs.paired) < 2:
        pairs = d.pairing.take_state_change() or pairs
        time.sleep(0.005)
    assert len(pairs.paired) == 2 and len(pairs.failures) == 3
    assert len(d.transfer_endpoint.receiver._links) == 2
    d.pairing.close()
    assert d.pairing.take_state_change() == ([], {}) and d.transfer_endpoint.receiver._links == {}
    for one in (p, d, other, wide):
        one.close()
