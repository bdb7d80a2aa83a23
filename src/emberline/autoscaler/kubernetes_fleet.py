"""KubernetesFleet: workers as pods of Deployments, StatefulSets or LeaderWorkerSets, scaled by their scale subresource.

When the number of replicas is lowered, Kubernetes chooses which pod it removes. A Deployment removes the pod with the
lowest deletion cost, so the drained pod gets the lowest. A StatefulSet and a LeaderWorkerSet always remove the pod with
the highest number. Like every worker, a pod drains itself when it gets SIGTERM. A pod that hangs is deleted without a
change of the number of replicas, so that Kubernetes creates another; if it leads a group of a LeaderWorkerSet, the
whole group is replaced. A worker must register with the router under the name of its pod."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

from emberline.autoscaler.fleet import FleetWorker
from emberline.autoscaler.kubernetes_api import API_BY_KIND, KubernetesAPI, KubernetesConflict, Pod, Scale
from emberline.core.errors import InvalidRequest

DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
LEADER_LABEL = "leaderworkerset.sigs.k8s.io/worker-index"  # "0" on the pod of a group that registers with the router


class KubernetesFleet:
    def __init__(self, api: KubernetesAPI, targets: Mapping[str, str]) -> None:
        """`targets`: the object that runs the workers of each role, such as deployment/decode.

        Raises InvalidRequest for an object of a kind that cannot be scaled."""
        for role, target in targets.items():
            kind, _, name = target.partition("/")
            if kind not in API_BY_KIND or not name:
                kinds = ", ".join(API_BY_KIND)
                message = f"pool {role} has the target {target[:100]!r}; it must be of the form KIND/NAME"
                hint = f"KIND is one of {kinds}: --pool {role}:target=deployment/NAME"
                raise InvalidRequest(message, param="pool", hint=hint)
        self._api = api
        self._targets = dict(targets)
        self._listed_replicas: dict[str, int] = {}  # replicas by role, as of the last list of workers or change

    async def list_workers(self) -> list[FleetWorker]:
        """Return the pods that run or start, and a placeholder for each pod that Kubernetes has not created yet."""
        workers = []
        for role, target in self._targets.items():
            scale = await self._api.read_scale(target)
            self._listed_replicas[role] = scale.spec.replicas
            pods = await self._list_pods(scale)
            missing = scale.spec.replicas - sum(map(_is_live, pods))
            names = [f"{target}/pending-{i}" for i in range(missing)]
            workers += [self._describe(role, pod) for pod in pods]
            workers += [FleetWorker(name, role, False, 1 << 30, is_placeholder=True) for name in names]
        return workers

    def _describe(self, role: str, pod: Pod) -> FleetWorker:
        rank = 0 if self._targets[role].startswith("deployment/") else _ordinal(pod.metadata.name)
        return FleetWorker(pod.metadata.name, role, not _is_live(pod), rank, age_s=_age_s(pod))

    async def start_workers(self, role: str, count: int) -> None:
        """Raise the number of replicas, unless another client has changed it since the workers were listed."""
        scale = await self._api.read_scale(self._targets[role])
        replicas = scale.spec.replicas
        if replicas != (listed := self._listed_replicas.get(role, replicas)):
            message = f"{self._targets[role]} has {replicas} replicas, and had {listed} when its pods were listed"
            raise KubernetesConflict(message, hint="only one autoscaler may scale it; it is tried again")
        await self._write_replicas(role, scale, replicas + count)

    async def stop_worker(self, name: str) -> None:
        for role, target in self._targets.items():
            scale = await self._api.read_scale(target)
            live = [pod for pod in await self._list_pods(scale) if _is_live(pod)]
            is_live = name in (pod.metadata.name for pod in live)
            if is_live:
                # Kubernetes has not yet acted on an earlier call if there are more pods than replicas.
                if scale.spec.replicas < len(live):
                    return
                if target.startswith("deployment/"):
                    # Lower than the cost of a pod whose removal was planned earlier but cancelled.
                    cost = min(0, *map(_deletion_cost, live)) - 1
                    await self._api.annotate_pod(name, {DELETION_COST: str(cost)})
            if is_live or name.startswith(f"{target}/pending-"):
                await self._write_replicas(role, scale, max(scale.spec.replicas - 1, 0))
                return

    async def _write_replicas(self, role: str, scale: Scale, replicas: int) -> None:
        await self._api.write_scale(self._targets[role], scale, replicas)
        self._listed_replicas[role] = replicas

    async def replace_worker(self, name: str) -> bool:
        """Delete the pod, so that its controller creates another. The number of replicas stays the same.

        A pod that Kubernetes has not created yet cannot be replaced."""
        if not any(name.startswith(f"{target}/pending-") for target in self._targets.values()):
            await self._api.delete_pod(name)
        return True

    async def _list_pods(self, scale: Scale) -> list[Pod]:
        """Return the pods that have not ended; of a group of pods, only its leader."""
        pods = await self._api.list_pods(scale.status.selector) if scale.status.selector else []
        return [
            pod
            for pod in pods
            if pod.status.phase not in ("Succeeded", "Failed")
            and (pod.metadata.labels or {}).get(LEADER_LABEL, "0") == "0"
        ]

    async def close(self, *, stop_workers: bool) -> None:
        """Do nothing: pods belong to the cluster, so they are not stopped when the autoscaler stops."""


def _is_live(pod: Pod) -> bool:
    return pod.metadata.deletion_timestamp is None


def _age_s(pod: Pod) -> float:
    """Return the seconds for which all containers of a pod have been running; 0 if one of them is not running."""
    states = [each.state.running for each in pod.status.container_statuses or ()]
    starts = [state.started_at for state in states if state is not None and state.started_at is not None]
    if not starts or len(starts) < len(states):
        return 0.0
    return max((datetime.now(UTC) - max(starts)).total_seconds(), 0.0)


def _deletion_cost(pod: Pod) -> int:
    try:
        return int((pod.metadata.annotations or {}).get(DELETION_COST, "0"))
    except ValueError:
        return 0


def _ordinal(pod_name: str) -> int:
    """Return the number at the end of the name of a StatefulSet's pod."""
    last = pod_name.rpartition("-")[2]
    return int(last) if last.isdigit() else 0
