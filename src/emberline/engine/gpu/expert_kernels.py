"""launch_expert_kernels: compiles the kernels of experts for steps that are not captured."""

from __future__ import annotations

import torch

from emberline.kernels import expert_ops, ops
from emberline.kernels.mixture import Mixture
from emberline.models.decoder import DecoderModel
from emberline.models.draft_model import DraftModel
from emberline.models.sleep import iter_instances


def launch_expert_kernels(model: DecoderModel, draft_model: DraftModel | None, max_tokens: int) -> None:
    """Run a layer's experts on zeros with several numbers of rows, since each tile size is a kernel of its own."""
    for structure in (model.layers, draft_model):
        if (mixture := next(iter_instances(Mixture, structure), None)) is None:
            continue
        for rows in {-(-max_tokens // part) for part in (1, 2, 4, 8)}:
            run = ops.run_mixture if mixture.slots is None else expert_ops.sum_local_experts
            run(torch.zeros(rows, mixture.router.k, dtype=model.dtype, device=mixture.norm.device), mixture)
