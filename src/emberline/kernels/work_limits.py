"""How much work a step's decode rows may have at most, by which memory is planned. This module needs no numpy."""

from __future__ import annotations

CTAS_PER_SM = 2  # CTAs, and so parts, that a multiprocessor (SM) computes at the same time
MAX_ROW_HEADS = 32  # queries of a decode row times query heads per KV head
MAX_HEADS_OF_SMALL_CTA = 16  # rows with more of these take a CTA of twice the size, of which an SM computes one
MAX_SMALL_HEAD_DIM = 128  # the sums of larger heads leave room for only one CTA on an SM
MAX_LATENT_PAIRS = 64  # pairs (query, head) of a program of latent attention, whose sums fit into registers
MAX_EXPANDED_HEADS = 1 << 18  # cached tokens times heads for which latent attention has keys and values at a time


def max_work_items(rows: int, kv_heads: int, num_sms: int) -> int:
    """Return an upper bound of the work items of `rows` rows of any lengths.

    Each row has one item, and cutting adds more. The maximum part size is at least about a quarter of a CTA's fair
    share of all tiles, which bounds the number of cuts.
    """
    return rows + -(-5 * CTAS_PER_SM * num_sms // kv_heads)


def list_row_queries(max_queries: int, group: int, head_dim: int) -> tuple[int, ...]:
    """Return the numbers of queries per row for which rows of up to `max_queries` are planned, ascending.

    Besides `max_queries`, it is the most that a small CTA can compute, for which an SM has room twice."""
    small = MAX_HEADS_OF_SMALL_CTA // group
    return (small, max_queries) if 1 < small < max_queries and head_dim <= MAX_SMALL_HEAD_DIM else (max_queries,)


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
