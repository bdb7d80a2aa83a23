"""load_model, load_or_list_missing: load a model, and list all missing tensors if the checkpoint lacks one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from emberline.core.errors import ModelFileError
from emberline.hub.checkpoint import MissingTensor, format_names
from emberline.kernels import ops
from emberline.models.config import ModelConfig
from emberline.models.decoder import DecoderModel
from emberline.models.registry import ARCHITECTURES
from emberline.models.stage import Stage
from emberline.models.weights import Weights

Model = TypeVar("Model")
MIN_CHECKED_BYTES = 1 << 30  # of a checkpoint whose names and shapes are checked before values are read
# Of older checkpoints: the rotary frequencies, which are computed from config.json. Of Qwen3-Next and Qwen3.5: the head
# for multi-token prediction.
IGNORABLE_TENSORS = r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq|model\.rotary_emb\.inv_freq|mtp\..*"


def ignorable_tensors(config: ModelConfig, stage: Stage | None = None) -> str:
    """Return a pattern of names of tensors that the model does not use, such as those for multi-token prediction.

    With `stage`, the pattern also matches the tensors that only other stages of the pipeline use.
    """
    if stage is not None and (foreign := stage.foreign_tensors(config)):
        return f"{ignorable_tensors(config)}|{foreign}"
    in_layers = config.mtp_layers and not ARCHITECTURES[config.model_type].mtp_module
    layers = "|".join(str(config.layers + index) for index in range(config.mtp_layers)) if in_layers else ""
    return rf"{IGNORABLE_TENSORS}|model\.layers\.(?:{layers})\..*" if layers else IGNORABLE_TENSORS


def load_model(config: ModelConfig, weights: Weights, context: int, stage: Stage | None = None) -> DecoderModel:
    """Load the decoder, or one stage of it, without a fingerprint.

    Raise ModelFileError if the checkpoint lacks tensors; the message lists the missing and the unused ones.
    """
    return load_or_list_missing(
        lambda source: DecoderModel.load(config, source, context, "", stage), weights, ignorable_tensors(config, stage)
    )


def load_or_list_missing(load: Callable[[Weights], Model], weights: Weights, ignorable_pattern: str) -> Model:
    """Return what `load` loads from the weights.

    Raise ModelFileError if the checkpoint lacks tensors; the message lists the missing and the unused ones. On a CPU,
    all names and shapes of a large checkpoint are checked before values are read."""
    if weights.device.type == "cpu" and _count_bytes(weights) >= MIN_CHECKED_BYTES:  # on a GPU, `finish` reads values
        names = TensorNameScan(weights, ignorable_pattern)
        load(names)
        names.check_missing()
    try:
        return load(weights)
    except MissingTensor as first:
        names = TensorNameScan(weights, ignorable_pattern)
        try:
            load(names)
        except ModelFileError:
            raise first from None
        raise names.make_error() from first


def _count_bytes(weights: Weights) -> int:
    return sum(info.nbytes for info in weights.checkpoint.tensors.values())


class TensorNameScan(Weights):
    """Collects the tensors that a model loads but the checkpoint lacks, and checks the shapes of the others.

    The load methods return tensors without values and read no file."""

    device = torch.device("meta")

    def __init__(self, weights: Weights, ignorable_pattern: str) -> None:
        super().__init__(weights.checkpoint, weights.dtype)
        self.shard, self.comm = weights.shard, weights.comm
        self._ignorable_pattern = ignorable_pattern
        self._missing: list[str] = []

    def check_missing(self) -> None:
        """Raise ModelFileError if a tensor was requested that the checkpoint lacks."""
        if self._missing:
            raise self.make_error()

    def make_error(self) -> ModelFileError:
        unused = self.unused_names(self._ignorable_pattern)
        also = f"; unused tensors ({len(unused)}): {format_names(unused)}" if unused else ""
        return ModelFileError(
            f"{self.checkpoint.directory} lacks tensors that config.json requires ({len(self._missing)}): "
            f"{format_names(self._missing)}{also}",
            hint="check that config.json belongs to this model, and that all its files are there",
        )

    def load_vector(self, name: str, *shape: int, offset: float = 0.0) -> Tensor:
        return self._record(name, *shape)

    def load_integers(self, name: str, size: int) -> Tensor:
        return self._record(name, size)

    def stack(self, parts: Sequence[tuple[str, int]], columns: int, *, gated: bool = False) -> Tensor:
        return torch.cat([self._record(name, rows, columns) for name, rows in parts])

    def linear(
        self,
        parts: Sequence[tuple[str, int]],
        columns: int,
        *,
        gated: bool = False,
        full_precision: bool = False,
        packable: bool = True,
    ) -> ops.PackedWeight:
        whole = self.stack(parts, columns)
        return ops.empty_weight(len(whole), columns, whole.dtype, self.device, gated=gated)

    def experts_linear(
        self, name: str, shape: tuple[int, ...], arrange: Callable[[Tensor], Tensor], *, gated: bool = False
    ) -> list[ops.PackedWeight]:
        count, (n, k) = shape[0], arrange(self._record(name, *shape)[0]).shape
        return [ops.empty_weight(n, k, self.dtype or torch.float32, self.device, gated=gated) for _ in range(count)]

    def pack(self, matrix: Tensor) -> ops.PackedWeight:
        return ops.empty_weight(len(matrix), matrix.shape[1], matrix.dtype, self.device)

    def pack_latent_products(self, matrix: Tensor, heads: int, plain_dim: int) -> ops.LatentProducts:
        return ops.LatentProducts(ops.PerHeadWeights(matrix), ops.PerHeadWeights(matrix))

    def drop_duplicate(self, name: str, original: str, rows: int, columns: int) -> bool:
        self._unused.discard(name)
        return True

    def _record(self, name: str, *shape: int) -> Tensor:
        if name in self.checkpoint.tensors:
            self._check_shape(name, shape)
            self._unused.discard(name)
        else:
            self._missing.append(name)
        return torch.empty(shape, dtype=self.dtype or torch.float32, device=self.device)
