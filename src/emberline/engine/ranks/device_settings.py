"""Which GPU each rank of an engine uses, and which settings do not work on several GPUs.

This module does not import torch."""

from __future__ import annotations

from emberline.core.engine_config import EngineConfig
from emberline.core.environment import visible_gpus
from emberline.core.errors import InvalidRequest
from emberline.core.parallel_config import ParallelConfig
from emberline.engine.ranks.layout import Layout
from emberline.engine.ranks.settings import check_dp_attention, check_node_settings
from emberline.models.config import ModelConfig

# Hints for settings that no option of the same name sets.
HINTS = {"overlap": "drop overlap=False"}


def check_device_settings(config: EngineConfig, num_gpus: int) -> None:
    """Raise InvalidRequest for settings that an engine on several GPUs does not support, or if there are too few GPUs.

    `num_gpus`: the number of GPUs that this process can see."""
    check_node_settings(config)
    if config.parallel.dp_attention:
        check_dp_attention(config)
    parallel, field = config.parallel, "tp" if config.parallel.tp > 1 else "pp"
    ranks = f"{parallel.num_ranks} ranks (tp {parallel.tp}, pp {parallel.pp})"
    unsupported = {
        "speculate": parallel.pp > 1 and config.speculation.speculate != "off",
        "launcher": parallel.launcher != "processes",
        "exact": config.gpu.exact,
        "overlap": not config.gpu.overlap,  # set by programs only
    }
    for name, is_set in unsupported.items():
        if is_set:
            hint = HINTS.get(name) or f"drop --{name.replace('_', '-')} or --{field}"
            message = f"the setting {name} does not work with {ranks} on GPUs yet"
            raise InvalidRequest(message, param=name, hint=hint)
    check_gpu_count(parallel, num_gpus)


def check_gpu_count(parallel: ParallelConfig, num_gpus: int) -> None:
    """Raise InvalidRequest if this node has too few GPUs for its ranks. `num_gpus`: GPUs that this process can see."""
    needed = -(-parallel.num_ranks // parallel.nodes // parallel.ranks_per_gpu)
    if needed > num_gpus:
        field, nodes = "tp" if parallel.tp > 1 else "pp", parallel.nodes
        where = f" on each of {nodes} nodes" if nodes > 1 else ""
        seen = "CUDA_VISIBLE_DEVICES lets this process see" if visible_gpus() is not None else "this machine has"
        ranks = f"{parallel.num_ranks} ranks (tp {parallel.tp}, pp {parallel.pp})"
        message = f"{ranks} need {needed} GPUs{where}, and {seen} {num_gpus}"
        raise InvalidRequest(message, param=field, hint=f"lower --{field}, or use --device cpu")


def check_device_drafts(config: EngineConfig, model: ModelConfig) -> None:
    """Raise InvalidRequest if the settings ask for speculation and the model has recurrent layers.

    After a rejected draft, such layers must go back to their states at the last accepted token, which ranks on GPUs do
    not keep."""
    if config.speculation.speculate != "off" and model.parts.attention.state is not None:
        message = f"speculate is {config.speculation.speculate}, but a {model.model_type} model has recurrent layers"
        hint = "drop --speculate, or use one GPU"
        raise InvalidRequest(f"{message}, which several GPUs cannot draft for yet", param="speculate", hint=hint)


def gpu_of_rank(layout: Layout, rank: int, ranks_per_gpu: int) -> int:
    """Return the index of the GPU that a rank uses on its machine.

    The last stage has the first GPUs, so that the leader has GPU 0."""
    stage, tensor_rank = divmod(rank, layout.tp)
    place = (layout.pp - 1 - stage) * layout.tp + tensor_rank
    return place % layout.ranks_per_node // ranks_per_gpu


def order_visible_gpus(layout: Layout, rank: int, ranks_per_gpu: int) -> list[str]:
    """Return the GPUs for CUDA_VISIBLE_DEVICES of a rank's process, which uses the first of them.

    The GPUs of the other ranks follow, because collectives read their memory."""
    count = -(-layout.ranks_per_node // ranks_per_gpu)
    gpus = (visible_gpus() or [str(index) for index in range(count)])[:count]
    own = gpus[gpu_of_rank(layout, rank, ranks_per_gpu)]
    return [own, *(gpu for gpu in gpus if gpu != own)]
