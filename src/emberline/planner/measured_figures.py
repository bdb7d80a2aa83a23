"""Measured figures besides step costs, copied from benchmarks/results, which a wheel does not have.

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
START_S = 7.7271  # from the start of the process to the first token, Llama-3.1-8B from a disk
