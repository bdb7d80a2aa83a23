"""What the router tells of a request besides that it came: how it was decided, every leg of it, and where it moved."""

from __future__ import annotations

from typing import TYPE_CHECKING

from emberline.router.policy import Decision, Why
from emberline.trace.span import Kind, Span

if TYPE_CHECKING:
    from emberline.server.routing.leg import Leg
    from emberline.server.routing.trip import Setback, Trip

AFFINITY = {Why.SESSION: "kept", Why.PREFIX: "kept", Why.YIELDED: "lost", Why.AWAY: "lost"}


def leg_begun(request: Span, decision: Decision, kind: str, attempt: int) -> Span:
    """`kind`: plain, prefill or resume."""
    if decision.why not in (Why.SPLIT, Why.AGAIN):
        request.about |= {
            "emberline.route.why": decision.why.value,
            "emberline.route.affinity": AFFINITY.get(decision.why, "none"),
        }
    span = request.child(f"{kind} leg", Kind.CLIENT)
    span.about |= {
        "emberline.leg.kind": kind,
        "emberline.leg.attempt": attempt,
        "emberline.worker": decision.worker.name,
        "emberline.route.why": decision.why.value,
        "emberline.route.known_tokens": round(decision.known),  # these two are estimates
        "emberline.route.missing_tokens": round(decision.load.prefill),
    }
    return span


def leg_ended(leg: Leg, span: Span) -> None:
    span.about |= {
        "emberline.leg.outcome": leg.outcome,
        "emberline.leg.lost": leg.lost or None,
        "emberline.leg.first_byte_seconds": None if leg.first is None else leg.first - leg.began,
        "http.response.status_code": leg.status or None,
    }
    refused = str(leg.status) if leg.status >= 400 else ""
    span.end((refused or leg.lost or leg.outcome) if leg.outcome in ("refused", "failed") else "")


def fell_back(request: Span, setback: Setback, worker: str, *, started: bool) -> None:
    """`started`: its client has the beginning of a reply, which goes on elsewhere, or not at all."""
    name = "emberline.migration" if started else "emberline.retry"
    request.event(name, worker=worker, reason=setback.reason, status=setback.status or None)


def trip_ended(request: Span, trip: Trip) -> None:
    request.about |= {
        "gen_ai.request.model": trip.ask.model or None,
        "emberline.worker": str(trip.x.note["worker"]) if "worker" in trip.x.note else None,
        "emberline.split": trip.prefill is not None,
        "emberline.attempts": trip.legs,
        "emberline.migrations": trip.moves,
        "emberline.stream": trip.ask.stream,
    }
