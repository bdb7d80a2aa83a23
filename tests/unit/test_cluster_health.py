"""Unavailable workers and held resources, found from the status of router and workers."""

from __future__ import annotations

from typing import Any

from emberline.cluster.cluster_health import describe_held_resources, find_unavailable_workers


def row(name: str, role: str = "decode", health: str = "ready", paired: tuple[str, ...] = ("p",)) -> dict[str, Any]:
    return {"name": name, "role": role, "health": health, "paired": list(paired), "refused": {}}


def status(*rows: dict[str, Any], open_requests: int = 0) -> dict[str, Any]:
    return {"workers": list(rows), "open_requests": open_requests}


def stats(state: str = "ready", **more: int) -> dict[str, Any]:
    kept = dict.fromkeys(("running", "waiting", "open_requests"), 0) | {"blocks_total": 9, "blocks_free": 5}
    moving = dict.fromkeys(("leases", "pinned_blocks", "quarantined_blocks"), 0)
    own = {name: more.pop(name) for name in [*more] if name in moving}
    return {"engine_state": state, "blocks_cached": 4, "transfer": moving | own} | kept | more


def test_unavailable_workers_are_found() -> None:
    well = {"p": stats(), "d": stats()}
    p = row("p", "prefill", paired=())
    assert find_unavailable_workers(status(p, row("d")), well) == {}
    assert find_unavailable_workers(None, well) == {"router": "the router does not answer"}
    assert find_unavailable_workers(status(row("d")), well) == {"p": "the router reports p as unknown"}, (
        "no worker has to be paired with it"
    )
    assert find_unavailable_workers(status(p, row("d", health="lost")), well) == {"d": "the router reports d as lost"}
    assert find_unavailable_workers(status(p, row("d")), well | {"d": None}) == {"d": "d reports its engine as None"}
    assert find_unavailable_workers(status(p, row("d")), well | {"p": stats("restarting")}) == {
        "p": "p reports its engine as restarting"
    }
    assert find_unavailable_workers(status(p, row("d", paired=())), well) == {
        "d": "d is paired with [] only, refused {}"
    }
    assert find_unavailable_workers(status(p, row("d", health="lost")), {"p": stats()}) == {}, "d was not asked for"


def test_held_resources_are_found() -> None:
    assert describe_held_resources(status(), {"a": stats(), "b": stats()}) == ""
    assert describe_held_resources(None, {}) == "the router does not answer"
    assert describe_held_resources(status(open_requests=1), {}) == "the router has open requests"
    assert describe_held_resources(status(), {"a": stats(), "b": None}) == "b does not answer"
    assert describe_held_resources(status(), {"a": stats(blocks_free=3, waiting=1)}) == "a: waiting 1, blocks 2"
    assert (
        describe_held_resources(status(), {"a": stats(leases=1, quarantined_blocks=2)})
        == "a: leases 1, quarantined_blocks 2"
    )
