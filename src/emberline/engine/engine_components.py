"""The parts of an engine besides its model and runner: tiers, KV transfer, grammars, and the size of the KV cache.

Engines with one rank and with several use these functions."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from emberline.core.engine_config import EngineConfig
from emberline.core.errors import InvalidRequest
from emberline.core.transfer_config import TransferConfig
from emberline.engine.loaded_engine import dtype_name
from emberline.kv.checksum import select_crc
from emberline.kv.codec import select_kv_codec
from emberline.kv.confine import LOOPBACK, resolve_ipv4_address
from emberline.kv.tiers.base import Tier, buffer_bytes_for
from emberline.kv.tiers.host import MIN_BUFFERS, HostTier
from emberline.kv.tiers.stack import TierStack
from emberline.kv.transfer.endpoint import (
    STORE_PORT_OFFSET,
    SameHostAccess,
    TransferEndpoint,
    TransferOptions,
    port_at_offset,
)
from emberline.kv.transfer.region import Region
from emberline.models.config import ModelConfig
from emberline.models.weight_dtype import default_kv_dtype

if TYPE_CHECKING:
    from emberline.engine.grammar import GrammarCompiler

KV_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}  # on a CPU
STAGING_BLOCKS = 128  # buffers for blocks on their way to disk and back, if kv_host_memory is 0
DEFAULT_KV_CONTEXTS = 8  # full contexts that the CPU's cache holds by default, if memory allows


def make_host_tier(
    config: EngineConfig,
    block_bytes: int,
    snapshot_blocks: int = 0,
    allocate: Callable[[int, int], memoryview] | None = None,
) -> HostTier:
    """Return the first KV tier, which is in main memory. `allocate`: see HostTier.

    `snapshot_blocks`: number of blocks that hold a snapshot of the model's recurrent states; 0: there are none. Up to
    half of the tier's buffers may wait to be written to lower tiers, so this half must have room for a snapshot."""
    tiers = config.tiers
    staging_bytes = (STAGING_BLOCKS + 2 * snapshot_blocks) * buffer_bytes_for(block_bytes)
    min_buffers = MIN_BUFFERS + 2 * snapshot_blocks
    memory_bytes = tiers.kv_host_memory or staging_bytes
    return HostTier(block_bytes, memory_bytes, tiers.kv_policy, min_buffers=min_buffers, allocate=allocate)


def make_tiers(
    config: EngineConfig,
    layout: str,
    block_bytes: int,
    dtype: torch.dtype,
    library: ctypes.CDLL | None,
    host: HostTier,
    snapshot_blocks: int = 0,
) -> TierStack:
    """Return all tiers. `host`: the first one. `dtype`: of keys and values. `snapshot_blocks`: see `make_host_tier`."""
    tiers, network = config.tiers, config.network
    size, crc = block_bytes, select_crc(library)
    codec, coding = select_kv_codec(network.kv_codec, library, str(dtype)), network.kv_codec
    below: list[Tier] = []
    if tiers.kv_disk is not None and tiers.kv_disk_size is not None:
        from emberline.kv.tiers.disk import DiskTier  # imported only if needed, like the others, to start sooner

        directory, quota, policy = Path(tiers.kv_disk), tiers.kv_disk_size, tiers.kv_policy
        below.append(DiskTier(directory, layout, size, quota, policy=policy, crc=crc, codec=codec, codec_choice=coding))
    if tiers.kv_store is not None:
        from emberline.kv.tiers.remote import RemoteTier
        from emberline.kv.tiers.storeclient import StoreListenAddress

        memory = tiers.kv_store_memory
        address = StoreListenAddress(network.kv_mooncake_host, port_at_offset(network.kv_port, STORE_PORT_OFFSET))
        tier = RemoteTier(tiers.kv_store, layout, size, memory, address, crc=crc, codec=codec, codec_choice=coding)
        below.append(tier)
    return TierStack(host, below, snapshot_blocks=snapshot_blocks)


def open_transfer_endpoint(
    config: EngineConfig,
    transfer: TransferConfig,
    region: Region,
    same_host: SameHostAccess | None,
    library: ctypes.CDLL | None,
) -> TransferEndpoint | None:
    network = config.network
    codec = select_kv_codec(network.kv_codec, library, region.layout.dtype)
    mooncake = (
        resolve_ipv4_address(network.kv_mooncake_host or LOOPBACK, "kv_mooncake_host") if network.kv_mooncake else None
    )
    options = TransferOptions(select_crc(library), codec, network.kv_codec == "uw", mooncake, network.uses_checksums)
    try:
        return TransferEndpoint.open(transfer, region, same_host, options)
    except OSError as error:
        if transfer.required:
            address = f"{transfer.listen_host}:{transfer.listen_port}"
            raise InvalidRequest(
                f"the engine cannot listen at {address} for KV transfers: {error}",
                param="transfer",
                hint="choose another --kv-port",
            ) from error
        return None


def make_grammar_compiler(directory: Path, config: ModelConfig) -> GrammarCompiler:
    from emberline.engine.grammar import GrammarCompiler

    return GrammarCompiler(directory / "tokenizer.json", config.vocab, sorted(set(config.eos)))


def choose_kv_dtype(requested: str, weight_dtype: torch.dtype) -> torch.dtype:
    name = default_kv_dtype(dtype_name(weight_dtype)) if requested == "auto" else requested
    if name not in KV_DTYPES:
        choices = ", ".join(("auto", *KV_DTYPES))
        raise InvalidRequest(f"kv_dtype is {name!r}; on a CPU it must be one of {choices}", param="kv_dtype")
    return KV_DTYPES[name]


def max_kv_tokens(config: EngineConfig, context: int) -> int:
    if config.kv_cache.kv_memory is not None:
        return 1 << 40  # kv_memory is set: use all of it
    return min(DEFAULT_KV_CONTEXTS, config.scheduler.max_running) * context
