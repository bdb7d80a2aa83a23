"""The Server-Timing header: how many milliseconds a request waited in the queue and its prefill took."""

from __future__ import annotations

from emberline.core.events import Timing


def server_timing_header(timing: Timing | None) -> dict[str, str]:
    """Return the header. If a different worker computed the prompt, it has that prefill's time and the pull's."""
    if timing is None or timing.queue is None or timing.prefill is None:
        return {}
    phases = {"queue": timing.queue, "prefill": timing.prefill}
    if (pulled := timing.pulled) is not None and pulled.prefill is not None:
        phases |= {"prefill": pulled.prefill, "pull": pulled.ended - pulled.began}
    return {"server-timing": ", ".join(f"{name};dur={1000 * seconds:.1f}" for name, seconds in phases.items())}
