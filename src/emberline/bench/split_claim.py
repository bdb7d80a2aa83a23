"""`emberline bench split-claim`: the published gain of splitting prefill from decode, on a virtual clock.

Cloudflare reports that inter-token time (p90) fell from about 100 ms to 20-30 ms with the same number of GPUs. Here
simulated H200s serve a model of Llama 3.1 8B's shape: prompts of 4,096 tokens and replies of 256. Colocated workers
compute whole prompts between the steps of their streams. Split ones pass prompts to prefill workers. The bench looks
for the smallest split cluster that keeps the targets, at the load that 6 colocated GPUs get with 8 requests per second
each, and compares clusters of equal size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from emberline.bench.report import BenchReport
from emberline.core.errors import EmberlineError
from emberline.sim.cluster import SimCluster, SimClusterConfig
from emberline.sim.costs import find_cost_table
from emberline.sim.link import KVLink
from emberline.sim.result import Distribution, RequestRecord
from emberline.sim.workloads.requests import make_request_sessions

GPU, SHAPE = "h200", "llama-8b"
PROMPT_TOKENS, OUTPUT_TOKENS = 4096, 256
BATCH_TOKENS, MAX_RUNNING, BLOCK_SIZE = 8192, 256, 64  # the engine's defaults on a GPU
# Blocks go from GPU to GPU of one machine: handoff_cuda and handoff_cuda_overhead_ms in h200-handoff.json.
LINK = KVLink(bytes_per_second=203.03e9, latency_s=4.5506e-3)
