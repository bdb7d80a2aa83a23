"""`emberline doctor --gpus`: prints how a model would use the memory of a set of GPUs, from its config.json."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emberline.core.errors import EmberlineError
from emberline.core.jsonfile import read_object

if TYPE_CHECKING:
    from emberline.core.engine_config import EngineConfig
    from emberline.engine.gpu_plan import GPUPlan, GPUSetPlan, WeightShare
    from emberline.models.kv_groups import KVGroup

CONTEXTS = (8192, 32768, 131072)  # tokens of the sequences that are counted, besides the planned context
QUANTISED_FORMATS = ("fp8", "int4", "mxfp4", "nvfp4")
SPLIT_NOTES = (
    "this is a calculation: the engine has not been run on several GPUs",
    "weights are divided evenly, the vocabulary in multiples of 64 rows; norms and routers are on every GPU",
    "every GPU has the logits of all tokens; buffers of collectives are part of the reserve",
)
MARGIN_NOTE = "spare is mostly what --gpu-memory-utilization leaves to other processes and fragmentation"
DRAFT_NOTE = "layers for multi-token prediction are not counted without --mtp"
WHOLE_HEAD_NOTE = (
    "the head for multi-token prediction is divided here, but the engine keeps it whole on one GPU, and not with"
    " --dp-attention; doctor --model DIR --tp N --speculate mtp plans that"
)
FORMATS_NOTE = (
    "{} weights stay quantised on a GPU; a matrix whose parts have different formats becomes bf16. --weights packed"
    " packs the others"
)
BLOCKS_NOTE = "the layers form {groups} groups; a KV block has keys and values of {layers} layers (ungrouped: of all)"
ONE_TABLE_NOTE = "all layers share one block table, so layers with a window keep every token too"
STATES_NOTE = (
    "the engine gives states at most half of the memory of the KV cache, and 3 slots per request of --max-running"
)


def print_plan(args: argparse.Namespace, settings: EngineConfig) -> int:
    """Print the plan of `args.model` on `args.gpus`, and return the exit status."""
    from emberline.engine.gpu_plan import plan_gpus
    from emberline.engine.gpu_set import GPUSet

    try:
        gpus = GPUSet.parse(args.gpus)
        plan = plan_gpus(read_model_config(args.model, allow_download=args.pull), gpus, settings)
    except EmberlineError as e:
        if args.json:
            print(json.dumps({"error": e.message, "hint": e.hint}))
        else:
            print(f"!!  plan  {e.message}" + (f"\n          hint: {e.hint}" if e.hint else ""))
        return 1
    print(json.dumps(plan_as_dict(args.model, plan)) if args.json else "\n".join(_format_plan(plan)))
    return 0


def read_model_config(name: str, *, allow_download: bool = False) -> dict[str, Any]:
    """Return the config.json of a model name, of a directory, or at a path that ends in .json. Raises ModelError."""
    path = Path(name).expanduser()
    if path.suffix == ".json" and path.is_file():
        return read_object(path)
    if (path / "config.json").is_file():
        return read_object(path / "config.json")
    from emberline.hub.source import resolve_model

    return read_object(resolve_model(name, allow_download=allow_download) / "config.json")


def plan_as_dict(model: str, plan: GPUSetPlan) -> dict[str, Any]:
    """Return a plan as a JSON object.

    The sizes in `one_gpu` are for the way of dividing the model among GPUs that leaves room for the most tokens."""
    from emberline.engine.layout_choice import choose_layout

    best = plan.best
    return {
        "model": model,
        "model_type": plan.model_type,
        "gpus": {"name": best.gpus.name, "count": best.gpus.count, "gib_each": _gib(best.gpus.memory_bytes)},
        "is_calculation_only": best.gpus.count > 1,
        "parameters": sum(share.num_weights for share in plan.weights),
        "weights_gib": _gib(_weight_bytes(plan.weights)),
        "weights_gib_by_format": _weights_by_format(plan),
        "weights": [
            {
                "kind": share.kind,
                "format": share.format,
                "parameters": share.num_weights,
                "gib": _gib(share.num_bytes),
            }
            for share in plan.weights
        ],
        "kv_sharing": best.sharing,
        "kv_gib": _gib(best.total_kv_bytes),
        "kv_tokens": best.kv_tokens,
        "kv_groups": [_group_as_dict(group) for group in plan.groups],
        "one_gpu": {f"{name}_gib": _gib(size) for name, size in _gpu_sizes(best)},
        "sharing": [_sharing_as_dict(each) for each in plan.plans],
        "does_not_fit": dict(plan.rejected),
        "layout": None if (layout := choose_layout(plan)) is None else layout._asdict(),
        "notes": _notes(plan),
    }


def _group_as_dict(group: KVGroup) -> dict[str, Any]:
    return {
        "kind": group.kind,
        "span": group.span,
        "layers": list(group.layers),
        "dtype": group.dtype,
        "bytes_per_token": group.bytes_per_token,
        "bytes_per_sequence": group.bytes_per_sequence,
        "max_tokens": group.max_tokens,
    }


def _sharing_as_dict(plan: GPUPlan) -> dict[str, Any]:
    return {
        "name": plan.sharing,
        "kv_gib": _gib(plan.total_kv_bytes),
        "kv_tokens": plan.kv_tokens,
        "ungrouped_tokens": plan.ungrouped_tokens,
        "max_context": plan.max_context,
        "concurrent_sequences": {str(tokens): plan.concurrent_sequences(tokens) for tokens in _contexts(plan)},
    }


def _contexts(plan: GPUPlan) -> list[int]:
    return sorted({*(tokens for tokens in CONTEXTS if tokens < plan.max_context), plan.max_context})


def _gpu_sizes(plan: GPUPlan) -> list[tuple[str, int]]:
    spare = plan.gpus.memory_bytes - sum(plan.fixed.values()) - plan.kv_bytes
    return [*plan.fixed.items(), ("kv_cache", plan.kv_bytes), ("spare", spare)]


def _weights_by_format(plan: GPUSetPlan) -> dict[str, float]:
    names = sorted({share.format for share in plan.weights})
    return {name: _gib(_weight_bytes(s for s in plan.weights if s.format == name)) for name in names}


def _weight_bytes(shares: Iterator[WeightShare] | tuple[WeightShare, ...]) -> int:
    return sum(share.num_bytes for share in shares)


def _notes(plan: GPUSetPlan) -> list[str]:
    several = SPLIT_NOTES if plan.best.gpus.count > 1 else ()
    grouped = (_groups_note(plan),) if any(group.is_bounded for group in plan.groups) else ()
    names = sorted({share.format for share in plan.weights} & set(QUANTISED_FORMATS))
    formats = (FORMATS_NOTE.format(", ".join(names)),) if names else ()
    uncounted = () if plan.has_mtp_head else (DRAFT_NOTE,)
    heads = (WHOLE_HEAD_NOTE,) if plan.has_mtp_head and several else ()
    return [*several, *heads, *grouped, *formats, MARGIN_NOTE, *uncounted]


def _groups_note(plan: GPUSetPlan) -> str:
    tables = plan.best.tables
    if tables is None:
        return STATES_NOTE
    if tables.is_single:
        return ONE_TABLE_NOTE
    return BLOCKS_NOTE.format(groups=len(tables.windows), layers=tables.block_layers)


def _format_plan(plan: GPUSetPlan) -> Iterator[str]:
    from emberline.engine.layout_choice import choose_layout

    best = plan.best
    yield f"{plan.model_type} on {best.gpus} ({_gib(best.gpus.memory_bytes):.2f} GiB each), from config.json alone"
    yield f"{'weights':<22}{'GiB':>9}{'parameters':>14}  format"
    for share in plan.weights:
        yield f"  {share.kind:<20}{_gib(share.num_bytes):>9.2f}{share.num_weights / 1e9:>12.3f} B  {share.format}"
    total = sum(share.num_weights for share in plan.weights)
    formats = ", ".join(f"{name} {size:.2f}" for name, size in _weights_by_format(plan).items())
    yield f"  {'all':<20}{_gib(_weight_bytes(plan.weights)):>9.2f}{total / 1e9:>12.3f} B  {formats}"
    yield f"{'KV groups':<22}{'layers':>9}{'bytes/token':>14}  kept of a sequence"
    for group in plan.groups:
        name = f"{group.kind} {group.span}" if group.span else group.kind
        kept = f"{group.max_tokens} tokens" if group.max_tokens else "all tokens"
        kept, dtype = (
            (f"{group.bytes_per_sequence / 1e6:.1f} MB", "float32") if group.kind == "state" else (kept, group.dtype)
        )
        yield f"  {name:<20}{len(group.layers):>9}{group.bytes_per_token:>14}  {kept} ({dtype})"
    yield f"{f'one GPU, {best.sharing}':<32}{'GiB':>9}" if best.gpus.count > 1 else f"{'GPU':<22}{'GiB':>9}"
    for part, size in _gpu_sizes(best):
        yield f"  {part.replace('_', ' '):<20}{_gib(size):>9.2f}"
    yield f"{'KV cache, all GPUs':<26}{'GiB':>9}{'tokens':>11}{'ungrouped':>11}  sequences x tokens at the same time"
    for each in plan.plans:
        counts = ", ".join(f"{each.concurrent_sequences(tokens)} x {tokens}" for tokens in _contexts(each))
        amounts = f"{_gib(each.total_kv_bytes):>9.2f}{each.kv_tokens:>11}{each.ungrouped_tokens:>11}"
        yield f"  {each.sharing:<24}{amounts}  {counts}"
    for sharing, reason in plan.rejected.items():
        yield f"  {sharing:<24}{reason.partition(';')[0]}"
    if (layout := choose_layout(plan)) is not None:
        yield f"serve with {layout.settings}: {layout.reason}"
    yield from (f"note: {note}" for note in _notes(plan))


def _gib(num_bytes: int) -> float:
    return round(num_bytes / 2**30, 3)
