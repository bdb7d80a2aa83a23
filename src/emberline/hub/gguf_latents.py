"""JoinedLatents: the matrix of latent attention that GGUF files store as two tensors.

The keys and values of each head are computed from a latent. A checkpoint has one matrix kv_b_proj for this, with the
rows of a head's keys and then those of its values. llama.cpp stores two tensors, the one for keys transposed.
"""

from __future__ import annotations

from dataclasses import dataclass

from emberline.core.errors import ModelFileError
from emberline.hub.gguf import GGUFTensor, GGUFTensorType

KEYS, VALUES, JOINED = ".self_attn.k_b_proj.weight", ".self_attn.v_b_proj.weight", ".self_attn.kv_b_proj.weight"


@dataclass(frozen=True)
class JoinedLatents:
    keys: GGUFTensor  # [heads, rank, size of a key]
    values: GGUFTensor  # [heads, size of a value, rank]

    @property
    def name(self) -> str:
        return self.keys.name

    @property
    def type(self) -> GGUFTensorType:
        """The type of the keys, or of the values if the keys are F32 or F16: one of the two may be quantised."""
        return self.values.type if self.keys.type.name in ("F32", "F16") else self.keys.type

    @property
    def shape(self) -> tuple[int, ...]:
        heads, rank, key_size = self.keys.shape
        return (heads * (key_size + self.values.shape[1]), rank)


def join_latents(tensors: dict[str, GGUFTensor]) -> dict[str, GGUFTensor | JoinedLatents]:
    """Return the tensors, with each pair of keys and values of latent attention joined into one."""
    out: dict[str, GGUFTensor | JoinedLatents] = {}
    for name, tensor in tensors.items():
        if name.endswith(KEYS) and (values := tensors.get(name.replace(KEYS, VALUES))) is not None:
            _check_pair(tensor, values)
            out[name.replace(KEYS, JOINED)] = JoinedLatents(tensor, values)
        elif not (name.endswith(VALUES) and name.replace(VALUES, KEYS) in tensors):
            out[name] = tensor
    return out


def _check_pair(keys: GGUFTensor, values: GGUFTensor) -> None:
    same = len(keys.shape) == len(values.shape) == 3
    if not same or keys.shape[0] != values.shape[0] or keys.shape[1] != values.shape[2]:
        raise ModelFileError(
            f"GGUF tensors {keys.name!r} and {values.name!r} have the shapes {keys.shape} and {values.shape}; "
            "they must be (heads, rank, n) and (heads, m, rank)"
        )
