"""Server-Timing: in what time a reply could begin, as browsers and proxies know the header; in milliseconds."""

from __future__ import annotations

from emberline.core.events import Timing


def server_timing(timing: Timing | None) -> dict[str, str]:
    """Of a prompt that another worker computed, that one's own time, which nobody else knows, and the pull's."""
    if timing is None or timing.queue is None or timing.prefill is None:
        return {}
    spans = {"queue": timing.queue, "prefill": timing.prefill}
    if (pulled := timing.pulled) is not None and pulled.prefill is not None:
        spans |= {"prefill": pulled.prefill, "pull": pulled.ended - pulled.began}
    return {"server-timing": ", ".join(f"{name};dur={1000 * seconds:.1f}" for name, seconds in spans.items())}
