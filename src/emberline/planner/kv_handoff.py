"""HandoffLink: how fast a decode worker copies keys and values from a prefill worker."""

from __future__ import annotations

from dataclasses import dataclass

from emberline.core.errors import InvalidRequest
from emberline.planner.measured_figures import HANDOFF_FILE, HANDOFF_GB_S
from emberline.planner.worker_kind import Basis, WorkerKind

MAX_LINK_GB_S = 10_000.0


@dataclass(frozen=True, slots=True)
class HandoffLink:
    name: str
    bytes_per_second: float
    basis: Basis
    source: str

    @staticmethod
    def parse(text: str) -> HandoffLink:
        """Parse tcp, cuda or a number of GB/s. Raises InvalidRequest."""
        if text in HANDOFF_GB_S:
            return HandoffLink(text, HANDOFF_GB_S[text] * 1e9, "measured", HANDOFF_FILE)
        try:
            speed = float(text)
        except ValueError:
            speed = 0.0
        if not 0 < speed <= MAX_LINK_GB_S:
            message = f"link is {text[:40]!r}; it must be tcp, cuda or GB/s above 0 and at most {MAX_LINK_GB_S:g}"
            raise InvalidRequest(message, param="link", hint="tcp and cuda have measured speeds")
        return HandoffLink(f"{speed:g} GB/s", speed * 1e9, "projected", "as given with --link")

    def transfer_seconds(self, kind: WorkerKind, tokens: float) -> float:
        """Return the seconds in which the keys and values of this many tokens are copied."""
        return tokens * kind.kv_bytes_per_token / self.bytes_per_second

    def handoff_seconds(self, kind: WorkerKind, prompt_tokens: int) -> float:
        """Return the seconds from the end of a prompt's computation until its last chunk is copied."""
        return self.transfer_seconds(kind, min(prompt_tokens, kind.max_batch_tokens))
