"""connect_device_group: chooses how the GPUs of a group exchange tensors."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import distributed

from emberline.kernels.comm.communicator import CollectivesUnavailable, Communicator, gather_bytes
from emberline.kernels.comm.gloo import GlooGroup
from emberline.kernels.comm.ipc import IpcGroup
from emberline.kernels.comm.nccl import NcclGroup
from emberline.kernels.cuda.ipc import get_device_uuid

log = logging.getLogger("emberline.engine")


def connect_device_group(
    host: Communicator,
    device: torch.device,
    collectives: str,
    *,
    timeout_s: float,
    message_bytes: int = 0,
    senders: Sequence[int] = (),
) -> Communicator:
    """Return a communicator that exchanges tensors on GPUs between the ranks of `host`.

    `host`: exchanges tensors in main memory. The result replaces it: the caller must not use or close `host` any more.
    `collectives`: ipc, nccl or gloo, or auto for the first of these that works. Other arguments are those of IpcGroup.
    Raises CollectivesUnavailable on all ranks if `collectives` does not work here, and RankLost.
    """
    if collectives in ("auto", "ipc"):
        try:
            group = IpcGroup(host, device, timeout_s=timeout_s, message_bytes=message_bytes, senders=senders)
        except CollectivesUnavailable as error:
            if collectives == "ipc":
                raise
            log.warning("GPUs cannot map each other's memory: ranks=%d reason=%s", host.size, error)
        else:
            host.close()
            return group
    if collectives in ("auto", "nccl"):
        if not (obstacle := _find_nccl_obstacle(host, device)):
            assert isinstance(host, GlooGroup)
            return NcclGroup(host, device, timeout_s=timeout_s, sums_in_rank_order=collectives == "auto")
        if collectives == "nccl":
            raise CollectivesUnavailable(obstacle)
        log.warning("NCCL is unavailable: ranks=%d reason=%s", host.size, obstacle)
    log.warning("GPUs exchange tensors through main memory, steps are not captured: ranks=%d", host.size)
    return host


def _find_nccl_obstacle(host: Communicator, device: torch.device) -> str:
    """Return why NCCL cannot connect these GPUs, the same on all ranks, or an empty string."""
    is_possible = distributed.is_nccl_available() and isinstance(host, GlooGroup)
    gpus = gather_bytes(host, get_device_uuid(device.index) if is_possible else b"")
    if b"" in gpus:
        return f"torch on rank {gpus.index(b'')} has no NCCL"
    return "" if len(set(gpus)) == host.size else "ranks share a GPU"
