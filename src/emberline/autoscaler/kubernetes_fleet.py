"""KubernetesFleet: workers as pods of Deployments, StatefulSets or LeaderWorkerSets, scaled by their scale subresource.

Kubernetes chooses which pod it removes. For a Deployment, the drained pod gets the lowest deletion cost, so that it is
that one. A StatefulSet and a LeaderWorkerSet always remove the pod with the highest number. The pods drain themselves
when they get SIGTERM, as every worker does. A pod that hangs is deleted, with the same number of replicas, so that
Kubernetes creates another; the leader of a LeaderWorkerSet's group takes its group with it. A worker's name at the
router must be the name of its pod."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from emberline.autoscaler.fleet import FleetWorker
from emberline.autoscaler.kubernetes_api import API_BY_KIND, KubernetesAPI
from emberline.core.errors import InvalidRequest

DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
LEADER_LABEL = "leaderworkerset.sigs.k8s.io/worker-index"  # "0" on the pod of a group that registers with the router


class KubernetesFleet:
    def __init__(self, api: KubernetesAPI, targets: Mapping[str, str]) -> None:
        """`targets`: the object of each role, such as deployment/decode. Raises InvalidRequest for other kinds."""
        for role, target in targets.items():
            kind, _, name = target.partition("/")
            if kind not in API_BY_KIND or not name:
                kinds = ", ".join(API_BY_KIND)
                message = f"pool {role} has the target {target[:100]!r}; it must be of the form KIND/NAME"
                hint = f"KIND is one of {kinds}: --pool {role}:target=deployment/NAME"
                raise InvalidRequest(message, param="pool", hint=hint)
        self._api = api
        self._targets = dict(targets)

    async def list_workers(self) -> list[FleetWorker]:
        """Return the pods that run or start, and a placeholder for each pod that Kubernetes has not created yet."""
        workers = []
        for role, target in self._targets.items():
            scale = await self._api.read_scale(target)
            pods = await self._list_pods(role, scale)
            missing = _replicas(scale) - sum(not pod.is_stopping for pod in pods)
            names = [f"{target}/pending-{i}" for i in range(missing)]
            workers += [*pods, *(FleetWorker(name, role, False, 1 << 30, is_placeholder=True) for name in names)]
        return workers

    async def start_workers(self, role: str, count: int) -> None:
        scale = await self._api.read_scale(self._targets[role])
        await self._api.write_scale(self._targets[role], scale, _replicas(scale) + count)

    async def stop_worker(self, name: str) -> None:
        for role, target in self._targets.items():
            scale = await self._api.read_scale(target)
            live = [pod.name for pod in await self._list_pods(role, scale) if not pod.is_stopping]
            if name in live:
                # Kubernetes has not yet acted on an earlier call if there are more pods than replicas.
                if _replicas(scale) < len(live):
                    return
                if target.startswith("deployment/"):
                    await self._api.annotate_pod(name, {DELETION_COST: "-1000"})
            if name in live or name.startswith(f"{target}/pending-"):
                await self._api.write_scale(target, scale, max(_replicas(scale) - 1, 0))
                return

    async def replace_worker(self, name: str) -> bool:
        """Delete the pod, whose controller creates another, of a StatefulSet or LeaderWorkerSet with the same number.

        A pod that Kubernetes has not created yet cannot be replaced."""
        if not any(name.startswith(f"{target}/pending-") for target in self._targets.values()):
            await self._api.delete_pod(name)
        return True

    async def _list_pods(self, role: str, scale: Mapping[str, Any]) -> list[FleetWorker]:
        selector = scale.get("status", {}).get("selector", "")
        workers = []
        for pod in await self._api.list_pods(selector) if selector else []:
            metadata = pod["metadata"]
            has_ended = pod.get("status", {}).get("phase") in ("Succeeded", "Failed")
            if not has_ended and metadata.get("labels", {}).get(LEADER_LABEL, "0") == "0":
                rank = 0 if self._targets[role].startswith("deployment/") else _ordinal(metadata["name"])
                workers.append(FleetWorker(metadata["name"], role, "deletionTimestamp" in metadata, rank))
        return workers

    async def close(self, *, stop_workers: bool) -> None:
        """Pods belong to the cluster: they are never stopped with the autoscaler."""


def _replicas(scale: Mapping[str, Any]) -> int:
    return int(scale.get("spec", {}).get("replicas", 0))


def _ordinal(pod_name: str) -> int:
    """Return the number at the end of the name of a StatefulSet's pod."""
    last = pod_name.rpartition("-")[2]
    return int(last) if last.isdigit() else 0
