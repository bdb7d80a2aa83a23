"""Refuses settings and models that do not work on several ranks. This module does not import torch."""

from __future__ import annotations

import sys

from emberline.core.cpus import core_count
from emberline.core.engine_config import EngineConfig
from emberline.core.errors import InvalidRequest, UnsupportedModel
from emberline.engine.ranks.layout import Layout
from emberline.models.config import ModelConfig


def check_rank_settings(config: EngineConfig) -> None:
    """Raise InvalidRequest for settings that an engine on several ranks of a CPU does not support."""
    parallel = config.parallel
    field = "tp" if parallel.tp > 1 else "pp"
    ranks = f"{parallel.num_ranks} ranks (tp {parallel.tp}, pp {parallel.pp})"
    check_node_settings(config)
    if sys.platform != "linux":
        message = f"{field} is {getattr(parallel, field)}, but several ranks need Linux, and this is {sys.platform}"
        raise InvalidRequest(message, param=field, hint=f"drop --{field}")
    num_local, where = parallel.num_ranks // parallel.nodes, " of each node" if parallel.nodes > 1 else ""
    if not config.threads and num_local > core_count():
        raise InvalidRequest(
            f"{ranks} need {num_local} cores{where}, and this process may use {core_count()}",
            param=field,
            hint=f"lower --{field}, or set --threads 1 to let ranks share cores",
        )
    if parallel.dp_attention:
        check_dp_attention(config)
    if parallel.collectives not in ("auto", "gloo"):
        message = f"collectives is {parallel.collectives}, which connects GPUs, but these ranks compute on CPUs"
        raise InvalidRequest(message, param="collectives", hint="drop --collectives, or use --device cuda")


def check_node_settings(config: EngineConfig) -> None:
    """Raise InvalidRequest for settings that an engine on several nodes does not support."""
    parallel = config.parallel
    if parallel.node_rank:
        message = f"node_rank is {parallel.node_rank}, but only node 0 has an engine"
        raise InvalidRequest(message, param="node_rank", hint="run emberline serve on the other nodes")
    unsupported = {  # these use memory that all ranks share
        "kv_host_memory": config.tiers.kv_host_memory > 0,
        "kv_disk": config.tiers.kv_disk is not None,
        "kv_store": config.tiers.kv_store is not None,
        "kv_mooncake": config.network.kv_mooncake,
        "transfer": config.transfer is not None and config.transfer.required,
    }
    for name, is_set in unsupported.items():
        if is_set and parallel.nodes > 1:
            what = "the exchange of KV blocks with other workers" if name == "transfer" else f"the setting {name}"
            hint = "use --role both" if name == "transfer" else f"drop --{name.replace('_', '-')} or --nodes"
            raise InvalidRequest(f"{what} does not work with {parallel.nodes} nodes yet", param=name, hint=hint)


def check_dp_attention(config: EngineConfig) -> None:
    """Raise InvalidRequest for settings that do not work with data-parallel attention."""
    if config.speculation.uses_draft_model:
        message = "dp_attention is set, and a draft model does not work with it yet"
        raise InvalidRequest(message, param="speculate", hint="drop --speculate or --dp-attention")


def check_transfer(config: EngineConfig, model: ModelConfig) -> None:
    """Raise InvalidRequest if the engine must exchange KV blocks with other engines and its ranks cannot."""
    if not (obstacle := transfer_obstacle(config, model)):
        return
    message = f"several ranks cannot exchange KV blocks with other workers yet if {obstacle}"
    if config.transfer is not None and config.transfer.required:
        hint = "use --role both, which exchanges no KV blocks then, or one rank"
        raise InvalidRequest(message, param="transfer", hint=hint)
    if config.network.kv_mooncake:
        raise InvalidRequest(f"kv_mooncake is set, but {message}", param="kv_mooncake", hint="drop --kv-mooncake")


def transfer_obstacle(config: EngineConfig, model: ModelConfig) -> str:
    """Return why the ranks cannot exchange KV blocks with other engines; empty: they can."""
    if config.parallel.nodes > 1:
        return "they are on several nodes, which share no memory"
    if config.parallel.dp_attention:
        return "dp_attention is set"
    return "the model has recurrent layers" if model.parts.attention.state is not None else ""


def possible_tensor_ranks(config: ModelConfig, max_ranks: int) -> list[int]:
    """Return the values of tp, up to `max_ranks`, that can divide a model."""
    return [tp for tp in range(1, max_ranks + 1) if _can_divide(Layout(tp), config)]


def _can_divide(layout: Layout, config: ModelConfig) -> bool:
    try:
        check_divisible(layout, config)
    except InvalidRequest:
        return False
    return True


def check_divisible(layout: Layout, config: ModelConfig) -> None:
    """Raise InvalidRequest if the layout's ranks cannot divide the model."""
    if layout.ep > 1 and config.experts is None:
        message = f"ep is {layout.ep}, but a {config.model_type} model has no experts"
        raise InvalidRequest(message, param="ep", hint="drop --ep")
    if config.experts is not None and config.experts.count % layout.ep:
        message = f"ep is {layout.ep}, which does not divide the {config.experts.count} experts of the model"
        raise InvalidRequest(message, param="ep", hint="choose another --ep")
    if config.experts is not None and layout.redundant_experts > (
        most := config.experts.count * (layout.ep - 1) // layout.ep
    ):
        message = f"redundant_experts is {layout.redundant_experts}, but each group of ranks lacks only {most} experts"
        raise InvalidRequest(message, param="redundant_experts", hint="lower --redundant-experts")
    layout.stage(0, config)
    for rank in range(layout.tp):
        try:
            layout.shard(rank).shard_config(config)
        except UnsupportedModel as error:
            raise InvalidRequest(
                f"tp is {layout.tp}, but {error.message}", param="tp", hint="choose another --tp, or use --pp"
            ) from error
