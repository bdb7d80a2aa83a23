"""How much work a step's decode rows may have at most, by which memory is planned. This module needs no numpy."""

from __future__ import annotations

CTAS_PER_SM = 2  # CTAs, and so parts, that a multiprocessor (SM) computes at the same time
MAX_ROW_HEADS = 32  # queries of a decode row times query heads per KV head
MAX_LATENT_PAIRS = 64  # pairs (query, head) of a program of latent attention, whose sums fit into registers
MAX_EXPANDED_HEADS = 1 << 18  # cached tokens times heads for which latent attention has keys and values at a time


def max_work_items(rows: int, kv_heads: int, num_sms: int) -> int:
    """Return an upper bound of the work items of `rows` rows of any lengths.

    Each row has one item, and cutting adds more. The maximum part size is at least about a quarter of a CTA's fair
    share of all tiles, which bounds the number of cuts.
    """
    return rows + -(-5 * CTAS_PER_SM * num_sms // kv_heads)


def max_latent_queries(heads: int) -> int:
    """Return the number of queries that a decode row of latent attention may have, for which scratch is allocated."""
    return max(2, MAX_ROW_HEADS // heads)


def count_latent_programs(pairs: int) -> int:
    """Return how many programs compute a work item of latent attention with this many pairs (query, head)."""
    return -(-pairs // MAX_LATENT_PAIRS)


def max_latent_items(rows: int, heads: int, num_sms: int) -> int:
    """Return an upper bound of the work items of `rows` decode rows of latent attention."""
    return max_work_items(rows, count_latent_programs(heads), num_sms)


def max_latent_places(rows: int, heads: int, num_sms: int) -> int:
    """Return how many partial results latent attention has memory for: one for each item, and one for each row."""
    return max_latent_items(rows, heads, num_sms) + rows
