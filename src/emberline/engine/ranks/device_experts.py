"""Moves of experts between ranks with GPUs, while no step runs.

A rank sends the weights of an expert from its GPU to the ranks that keep a copy from now on. The weights are sent in
the form in which kernels read them, so copies are equal bit for bit in every format. A copy is written to a slot that
was allocated at the start, because captured steps read fixed addresses. All ranks make the same transfers in the same
order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass

import torch
from torch import Tensor

from emberline.core.errors import UnsupportedModel
from emberline.engine.gpu.runner import GPURunner
from emberline.engine.ranks.expert_moves import ExpertMoves
from emberline.kernels.comm.communicator import Communicator
from emberline.kernels.cuda.narrow_layout import FourBitWeight, use_common_factor
from emberline.kernels.expert_slots import ExpertSlots
from emberline.kernels.mixture import StackedExperts
from emberline.kernels.packed_weight import PackedExperts
from emberline.models.decoder import DecoderModel
from emberline.models.expert_placement import EMPTY_SLOT, Placement
from emberline.models.sleep import iter_instances

PIECE_BYTES = 16 << 20  # sent at a time, which limits the memory for received weights


@dataclass(frozen=True, slots=True)
class ExpertTransfer:
    """A copy of an expert from one slot to another. A slot is given by a group of ranks and an index in this group."""

    source: tuple[int, int]
    target: tuple[int, int]


def list_transfers(before: Placement, after: Placement) -> list[ExpertTransfer]:
    """Return the copies of experts that turn the placement `before` into the placement `after`."""
    first: dict[int, tuple[int, int]] = {}
    for group, experts in enumerate(before):
        for place, expert in enumerate(experts):
            first.setdefault(expert, (group, place))
    return [
        ExpertTransfer(first[expert], (group, place))
        for group, experts in enumerate(after)
        for place, expert in enumerate(experts)
        if expert not in (EMPTY_SLOT, before[group][place])
    ]


def order_transfers(transfers: list[ExpertTransfer]) -> Iterator[tuple[ExpertTransfer, bool]]:
    """Yield the transfers in an order in which no slot is overwritten before it was read.

    The second value of each pair is whether the received weights must be held back and written after all transfers,
    because a later transfer still reads the target slot. When two experts swap slots, this is so for one of them."""
    pending = list(transfers)
    while pending:
        sources = {each.source for each in pending}
        chosen = next((each for each in pending if each.target not in sources), pending[0])
        pending.remove(chosen)
        yield chosen, any(each.source == chosen.target for each in pending)


def move_device_experts(runner: GPURunner, moves: ExpertMoves) -> None:
    """Move experts between ranks, so that the next step finds them in these placements.

    All ranks must call this between the same two steps. Raises RankLost."""
    comm, layers = runner.rank.shards, runner.model.movable_layers
    assert comm is not None
    with torch.inference_mode(), runner.step_stream.activate():
        for layer, placement in moves.items():
            network = layers[layer]
            assert network.movable is not None and isinstance(network.mixture.experts, StackedExperts)
            tensors = list_expert_tensors(network.mixture.experts)
            move_weights(tensors, list_transfers(network.movable.placement, placement), network.movable.slots, comm)
            network.movable.set_placement(placement)


def prepare_movable_experts(model: DecoderModel) -> None:
    """Give all movable 4-bit experts the same global scale factor, on all ranks. Call this before steps are captured.

    Raises UnsupportedModel if the scales of some experts do not allow that."""
    for layer, network in model.movable_layers.items():
        experts = network.mixture.experts
        assert isinstance(experts, StackedExperts)
        for matrices in (experts.gate_up, experts.down):
            if isinstance(matrices, PackedExperts) and isinstance(matrices.handle, FourBitWeight):
                if (found := use_common_factor(matrices.handle)) is None:
                    message = f"redundant_experts is set, but scales of the experts of layer {layer} differ too much"
                    raise UnsupportedModel(f"{message} to move experts between GPUs", hint="drop --redundant-experts")
                matrices.handle = found


def describe_expert_forms(model: DecoderModel) -> str:
    """Return a hash of how movable experts are stored: dtypes, shapes and factors. It must be equal on all ranks."""
    forms = [_describe_form(network.mixture.experts) for network in model.movable_layers.values()]
    return hashlib.sha256("".join(forms).encode()).hexdigest()[:16] if forms else ""


def _describe_form(value: object) -> str:
    """Return a text of all fields of a structure, with only the dtype and the shape of tensors."""
    if isinstance(value, Tensor):
        return f"{value.dtype}{list(value.shape)}"
    if is_dataclass(value):
        parts = [_describe_form(getattr(value, each.name)) for each in fields(value)]
        return f"{type(value).__name__}({', '.join(parts)})"
    return repr(value)


def list_expert_tensors(experts: StackedExperts) -> list[Tensor]:
    """Return the tensors of a layer's experts. Their first dimension is the index of an expert's slot on this rank."""
    tensors = list(iter_instances(Tensor, experts))
    assert all(len(each) == experts.count and each.is_contiguous() for each in tensors)
    return tensors


def move_weights(
    tensors: list[Tensor], transfers: list[ExpertTransfer], slots: ExpertSlots, comm: Communicator
) -> None:
    """Copy experts between the tensors of the ranks. `slots`: tells which slots this rank has."""
    kept: list[tuple[int, list[Tensor]]] = []
    for transfer, is_kept in order_transfers(transfers):
        group, place = transfer.target
        is_target = slots.local_slots.start == group * slots.per_group
        received = [_exchange(tensor, transfer, slots, comm, to_host=is_kept) for tensor in tensors]
        if is_kept and is_target:
            kept.append((place, received))
        elif is_target:
            _write(tensors, place, received)
    for place, received in kept:
        _write(tensors, place, received)


def _write(tensors: list[Tensor], place: int, received: list[Tensor]) -> None:
    for tensor, data in zip(tensors, received, strict=True):
        tensor[place].view(-1).view(torch.uint8).copy_(data)


def _exchange(
    tensor: Tensor, transfer: ExpertTransfer, slots: ExpertSlots, comm: Communicator, *, to_host: bool
) -> Tensor:
    """Send one expert's part of a tensor from one group of ranks to another.

    Return the bytes of this part on the ranks of the target group, no bytes on other ranks. A group divides each expert
    by columns: each rank sends to the rank of the target group that has the same columns. `to_host`: whether the result
    is in main memory."""
    ranks_per_group = comm.size // slots.groups
    group, column = divmod(comm.rank, ranks_per_group)
    (source, place), target = transfer.source, transfer.target[0]
    sends, receives = [0] * comm.size, [0] * comm.size
    sends[target * ranks_per_group + column] = int(group == source)
    receives[source * ranks_per_group + column] = int(group == target)
    data = tensor[place].view(-1).view(torch.uint8)
    pieces = []
    for piece in data.split(PIECE_BYTES):
        sent = piece[None] if group == source else piece.new_empty(0, len(piece))
        received = comm.all_to_all(sent, sends, receives).view(-1)
        pieces.append(received.cpu() if to_host else received)
    return torch.cat(pieces)
