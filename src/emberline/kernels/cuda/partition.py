"""split: the device's multiprocessors in two parts, each with a stream of its own, so that two kinds of work run side
by side without waiting for each other's blocks. The driver calls the parts green contexts."""

from __future__ import annotations

import ctypes

import torch

from emberline.kernels.cuda.driver import check, driver

SM = 1  # CU_DEV_RESOURCE_TYPE_SM
DEFAULT_STREAM = 1  # CU_GREEN_CTX_DEFAULT_STREAM, which must be given
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING


class _Resource(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("padding", ctypes.c_ubyte * 92),
        ("count", ctypes.c_uint),
        ("rest", ctypes.c_ubyte * 44),
    )


def split(count: int, device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """A stream with `count` multiprocessors, rounded up as the chip wants it, and one with all others. They last as
    long as the process."""
    torch.cuda.current_stream(device)  # makes the device's context current
    index = ctypes.c_int(device.index or 0)
    whole, few, many = _Resource(), _Resource(), _Resource()
    check(driver().cuDeviceGetDevResource(index, ctypes.byref(whole), SM))
    groups = ctypes.c_uint(1)
    check(
        driver().cuDevSmResourceSplitByCount(
            ctypes.byref(few), ctypes.byref(groups), ctypes.byref(whole), ctypes.byref(many), 0, count
        )
    )
    return _stream(few, index, device), _stream(many, index, device)


def _stream(part: _Resource, index: ctypes.c_int, device: torch.device) -> torch.cuda.Stream:
    described, context, stream = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    check(driver().cuDevResourceGenerateDesc(ctypes.byref(described), ctypes.byref(part), 1))
    check(driver().cuGreenCtxCreate(ctypes.byref(context), described, index, DEFAULT_STREAM))
    check(driver().cuGreenCtxStreamCreate(ctypes.byref(stream), context, NON_BLOCKING, 0))
    return torch.cuda.ExternalStream(stream.value or 0, device)
