"""The Server-Timing header: how many milliseconds a request waited in the queue and its prefill took."""

from __future__ import annotations

from emberline.core.events import Timing


def build_server_timing_header(timing: Timing | None) -> dict[str, str]:
    """Return the Server-Timing header, or {} if the times are unknown.

    If a different worker computed the prompt, the header has the time of that prefill, and the time to fetch its KV
    blocks."""
    if timing is None or timing.queue is None or timing.prefill is None:
        return {}
    phases = {"queue": timing.queue, "prefill": timing.prefill}
    if (pulled := timing.pulled) is not None and pulled.prefill is not None:
        phases |= {"prefill": pulled.prefill, "pull": pulled.ended - pulled.began}
    return {"server-timing": ", ".join(f"{name};dur={1000 * seconds:.1f}" for name, seconds in phases.items())}
