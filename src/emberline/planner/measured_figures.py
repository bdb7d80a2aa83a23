"""Measured figures besides step costs, copied from benchmarks/results because a wheel does not contain that directory.

tests/unit/test_plan_costs.py compares them with the files."""

from __future__ import annotations

from typing import NamedTuple


class DraftedStep(NamedTuple):
    """A decode step of Llama-3.1-8B that verifies 4 drafted tokens of an EAGLE-3 head."""

    batch: int
    ms_per_token: float
    tokens_per_step: float  # drafted tokens were accepted at a set rate


DRAFTS_FILE, DRAFTS_SHAPE = "h200-spec.json", "llama-8b"
DRAFTED_STEPS = {
    "plain": (
        DraftedStep(1, 1.5941, 3.0476),
        DraftedStep(8, 1.9708, 2.7234),
        DraftedStep(32, 2.0582, 2.9767),
        DraftedStep(64, 3.0562, 2.7234),
    ),
    "packed": (
        DraftedStep(1, 1.2851, 3.0476),
        DraftedStep(8, 1.5216, 2.9767),
        DraftedStep(32, 2.0117, 2.9767),
        DraftedStep(64, 3.2917, 2.6667),
    ),
}
MAX_DRAFT_TOKENS = 4
DRAFT_HEAD_BYTES = {"plain": 849_412_096, "packed": 638_850_816}

HANDOFF_FILE = "h200-handoff.json"
# GB/s between two engines: over TCP with 8 connections, and between processes of one machine that share GPU memory.
HANDOFF_GB_S = {"tcp": 7.3517, "cuda": 203.03}

START_FILE = "h200-engine.json"
START_S = 7.7271  # seconds from the start of the process to the first token, Llama-3.1-8B from a disk

RANK_SHAPE = "llama-3.3-70b"
# Milliseconds of a decode step of one rank, without its collectives, by weights, ranks and batch.
RANK_STEPS_MS: dict[tuple[str, int], dict[int, float]] = {
    ("plain", 2): {1: 17.824, 8: 17.847, 64: 20.868},
    ("plain", 4): {1: 9.6167, 8: 9.7437, 64: 11.575},
    ("plain", 8): {1: 5.4867, 8: 5.7005, 64: 7.0806},
    ("packed", 2): {1: 13.185, 8: 13.421, 64: 18.868},
    ("packed", 4): {1: 7.6881, 8: 8.0105, 64: 12.255},
    ("packed", 8): {1: 4.8948, 8: 5.084, 64: 7.5055},
    ("fp8", 2): {1: 10.211, 8: 10.393, 64: 13.514},
    ("fp8", 4): {1: 6.1001, 8: 6.3209, 64: 8.1084},
    ("fp8", 8): {1: 4.0536, 8: 4.1397, 64: 5.8432},
}


def rank_file(weights: str, ranks: int) -> str:
    """Return the name of the result file with measured steps of one rank, if `ranks` ranks divide the model."""
    return f"h200-rank-{RANK_SHAPE}-tp{ranks}{'' if weights == 'plain' else f'-{weights}'}.json"
