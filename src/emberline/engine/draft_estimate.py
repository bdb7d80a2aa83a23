"""estimate_draft_memory: what a draft model adds to the memory of its GPU, before it is loaded.

With several ranks, the leader's GPU has the whole draft model. This module needs no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import prod

from emberline.core.engine_config import EngineConfig
from emberline.engine import memory
from emberline.engine.memory import NO_DRAFT_MODEL, DraftMemory
from emberline.hub.checkpoint import Checkpoint
from emberline.hub.source import resolve_model
from emberline.models.config import EMBEDDING_NAME, HEAD_NAME, ModelConfig
from emberline.models.eagle3_config import EMBEDDING_NAMES, IGNORABLE_TENSORS, Eagle3Config
from emberline.models.mtp_config import check_has_head, name_head_tensors, select_head_layer
from emberline.models.quantised_tensors import QuantisedTensorInfo, list_quantised_sizes, select_model_tensors
from emberline.models.weight_matrices import WeightMatrices

COMPARED_BYTES = 1 << 16  # at each of three places, of tensors that may be copies


def estimate_draft_memory(
    settings: EngineConfig, checkpoint: Checkpoint, target: ModelConfig, dtype: str
) -> DraftMemory:
    """Return the memory that a draft model adds; NO_DRAFT_MODEL if the settings name none.

    `checkpoint`, `target`: checkpoint and config of the whole target model. `dtype`: of its weights. An MTP head's own
    embedding or output head is not counted if it looks like a copy of the target's, because a copy is not loaded.
    Raises EmberlineError if there is no such draft model."""
    speculation, packed = settings.speculation, memory.uses_packed_weights(checkpoint, settings, dtype, target)
    if not speculation.uses_draft_model:
        return NO_DRAFT_MODEL
    counter = WeightCounter(memory.DTYPE_BYTES[dtype], packed=packed)
    # Each rank has only some rows of the embedding and the output head, so the leader needs complete copies.
    copies, shape = int(settings.parallel.num_ranks > 1), (target.vocab, target.hidden)
    embedding = copies * prod(shape) * counter.width  # never packed, unless it is the output head too
    if speculation.draft_source is None:
        check_has_head(checkpoint, target)
        names = name_head_tensors(target)
        selected = select_model_tensors(checkpoint)
        own = {name for name in selected.tensors if name.startswith(target.mtp_tensor_prefix)}
        size = counter.count(selected, own - {names.embedding, names.head})
        target_head = HEAD_NAME if HEAD_NAME in selected.tensors else EMBEDDING_NAME
        has_embedding = names.embedding in own and not _look_equal(selected, names.embedding, EMBEDDING_NAME)
        has_head = names.head in own and not _look_equal(selected, names.head, target_head)
        size += (has_head or copies) * counter.count_matrix(*shape)
        if has_embedding:
            size += prod(shape) * counter.width
        elif has_head or not target.tie_embeddings:
            size += embedding
        return DraftMemory.for_model(size, select_head_layer(target), 1)
    source = Checkpoint.open(resolve_model(speculation.draft_source))
    if speculation.method == "eagle3":
        head = Eagle3Config.from_checkpoint(source, target)
        own = {name for name in source.tensors if not re.fullmatch(IGNORABLE_TENSORS, name)}
        size = counter.count(source, own) + embedding * own.isdisjoint(EMBEDDING_NAMES)
        return DraftMemory.for_model(size, head.model, len(head.captured_layers))
    config = ModelConfig.from_checkpoint(source)
    quantised = list_quantised_sizes(source) if dtype == "bfloat16" else []
    packed = packed and config.experts is None
    return DraftMemory.for_model(
        memory.weight_bytes(config, counter.width, packed=packed, quantised=quantised), config, 0
    )


class WeightCounter:
    """Counts the bytes of tensors on a GPU."""

    def __init__(self, width: int, *, packed: bool) -> None:
        """`width`: bytes per weight of a plain matrix. `packed`: whether matrices are kept in 12 bits per weight."""
        self.width, self._packed = width, packed

    def count(self, checkpoint: Checkpoint, names: Iterable[str]) -> int:
        return sum(self._count_tensor(checkpoint, name) for name in names)

    def count_matrix(self, rows: int, columns: int, count: int = 1) -> int:
        return memory.weight_matrices_bytes(
            WeightMatrices("head", rows, columns, count), self.width, packed=self._packed
        )

    def _count_tensor(self, checkpoint: Checkpoint, name: str) -> int:
        tensor = checkpoint.tensors[name]
        if isinstance(tensor, QuantisedTensorInfo):
            return tensor.kept_bytes
        if tensor.dtype == "I64":
            return tensor.nbytes
        if len(tensor.shape) < 2:  # norms and biases
            return memory.F32_BYTES * prod(tensor.shape)
        *counts, rows, columns = tensor.shape
        return self.count_matrix(rows, columns, prod(counts))


def _look_equal(checkpoint: Checkpoint, name: str, original: str) -> bool:
    """Return whether two tensors have the same type, shape, and bytes at the start, middle and end.

    Return False if `original` does not exist, or one of the two is quantised."""
    one, other = checkpoint.tensors[name], checkpoint.tensors.get(original)
    if other is None or isinstance(one, QuantisedTensorInfo) or isinstance(other, QuantisedTensorInfo):
        return False
    if (one.dtype, one.shape, one.nbytes) != (other.dtype, other.shape, other.nbytes):
        return False
    size = min(COMPARED_BYTES, one.nbytes)
    with one.file.open("rb") as first, other.file.open("rb") as second:
        for at in (0, (one.nbytes - size) // 2, one.nbytes - size):
            first.seek(one.offset + at)
            second.seek(other.offset + at)
            if first.read(size) != second.read(size):
                return False
    return True
