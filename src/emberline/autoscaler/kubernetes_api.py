"""KubernetesAPI: the few calls of the Kubernetes API that scaling needs, with the service account of this pod."""

from __future__ import annotations

import asyncio
import http.client
import os
import ssl
import time
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from emberline.autoscaler.fleet import FleetError
from emberline.core.errors import InvalidRequest
from emberline.net.json_errors import JSON_DECODE_ERRORS

SERVICE_ACCOUNT_DIR = Path("/var/run/secrets/kubernetes.io/serviceaccount")
CALL_TIMEOUT_S = 5.0
MAX_REPLY_BYTES = 64 << 20  # a pod has about 10 KB
READ_BYTES = 1 << 20
API_BY_KIND = {
    "deployment": "apis/apps/v1/namespaces/{}/deployments/{}",
    "statefulset": "apis/apps/v1/namespaces/{}/statefulsets/{}",
    "leaderworkerset": "apis/leaderworkerset.x-k8s.io/v1/namespaces/{}/leaderworkersets/{}",
}


Reply = TypeVar("Reply")


class PodMetadata(msgspec.Struct, rename="camel"):
    name: str
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    deletion_timestamp: str | None = None  # set while the pod ends


class RunningState(msgspec.Struct, rename="camel"):
    started_at: datetime | None = None


class ContainerState(msgspec.Struct):
    running: RunningState | None = None


class ContainerStatus(msgspec.Struct):
    state: ContainerState = msgspec.field(default_factory=ContainerState)


class PodStatus(msgspec.Struct, rename="camel"):
    phase: str = ""
    container_statuses: list[ContainerStatus] | None = None


class Pod(msgspec.Struct):
    metadata: PodMetadata
    status: PodStatus = msgspec.field(default_factory=PodStatus)


class PodList(msgspec.Struct):
    items: list[Pod] | None = None  # Go writes an empty list as null


class ScaleSpec(msgspec.Struct):
    replicas: int = 0  # Kubernetes leaves out 0


class ScaleStatus(msgspec.Struct):
    selector: str = ""


class Scale(msgspec.Struct):
    """The scale subresource of an object. `metadata` contains the resource version, which an update must repeat."""

    metadata: dict[str, Any]
    spec: ScaleSpec = msgspec.field(default_factory=ScaleSpec)
    status: ScaleStatus = msgspec.field(default_factory=ScaleStatus)


class KubernetesConflict(FleetError):
    """The object was changed by another client after it was read."""

    code = "fleet_conflict"


class KubernetesAPI:
    def __init__(self, host: str, port: int, account_dir: Path = SERVICE_ACCOUNT_DIR, namespace: str = "") -> None:
        """`account_dir`: the directory with token, CA certificate and namespace that Kubernetes mounts into a pod."""
        self._host, self._port = host, port
        self._token_file = account_dir / "token"
        try:
            self.namespace = namespace or (account_dir / "namespace").read_text().strip()
            self._tls = ssl.create_default_context(cafile=str(account_dir / "ca.crt"))
            self._token_file.read_text()
        except (OSError, ssl.SSLError) as e:
            raise InvalidRequest(
                f"the Kubernetes service account in {account_dir} cannot be read: {e}",
                param="adapter",
                hint="run the autoscaler in a pod whose service account may get and update the scale of the pools",
            ) from e

    @staticmethod
    def from_environment(namespace: str = "") -> KubernetesAPI:
        """Return the API of the cluster in which this process runs. Raises InvalidRequest outside of a cluster."""
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not host or not port.isdigit():
            raise InvalidRequest(
                "adapter is kubernetes, but KUBERNETES_SERVICE_HOST is not set: this process runs in no pod",
                param="adapter",
                hint="run the autoscaler in the cluster, as the Helm chart does",
            )
        return KubernetesAPI(host, int(port), namespace=namespace)

    async def read_scale(self, target: str) -> Scale:
        return self._convert(await self._call("GET", f"{self._path(target)}/scale"), Scale)

    async def write_scale(self, target: str, scale: Scale, replicas: int) -> None:
        """Set the number of replicas. Raises KubernetesConflict if the scale was changed after it was read."""
        kind = {"kind": "Scale", "apiVersion": "autoscaling/v1"}
        body = {**kind, "metadata": scale.metadata, "spec": {"replicas": replicas}}
        await self._call("PUT", f"{self._path(target)}/scale", body)

    async def list_pods(self, selector: str) -> list[Pod]:
        query = urlencode({"labelSelector": selector})
        path = f"api/v1/namespaces/{quote(self.namespace, safe='')}/pods?{query}"
        return self._convert(await self._call("GET", path), PodList).items or []

    async def annotate_pod(self, name: str, annotations: dict[str, str]) -> None:
        path = f"api/v1/namespaces/{quote(self.namespace, safe='')}/pods/{quote(name, safe='')}"
        await self._call("PATCH", path, {"metadata": {"annotations": annotations}}, "application/merge-patch+json")

    async def delete_pod(self, name: str) -> None:
        """Delete a pod. Do nothing if it does not exist or is being deleted."""
        path = f"api/v1/namespaces/{quote(self.namespace, safe='')}/pods/{quote(name, safe='')}"
        await self._call("DELETE", path, is_missing_allowed=True)

    def _convert(self, document: Any, kind: type[Reply]) -> Reply:
        try:
            return msgspec.convert(document, kind)
        except msgspec.ValidationError as e:
            message = f"the Kubernetes API at {self._host}:{self._port} answered with another {kind.__name__}: {e}"
            raise FleetError(message, hint="check that no proxy answers in its place") from e

    def _path(self, target: str) -> str:
        kind, _, name = target.partition("/")
        return API_BY_KIND[kind].format(quote(self.namespace, safe=""), quote(name, safe=""))

    async def _call(
        self,
        method: str,
        path: str,
        body: Any = None,
        media_type: str = "application/json",
        *,
        is_missing_allowed: bool = False,
    ) -> Any:
        try:
            # Three time limits add up: for connecting, for the reply's first byte, and for the reply's last byte.
            async with asyncio.timeout(3 * CALL_TIMEOUT_S):
                return await asyncio.to_thread(self._call_blocking, method, path, body, media_type, is_missing_allowed)
        except (OSError, http.client.HTTPException, ValueError, *JSON_DECODE_ERRORS) as e:
            message = f"the Kubernetes API at {self._host}:{self._port} does not answer: {e}"
            raise FleetError(message, hint="check the network policies of the autoscaler's pod") from e

    def _call_blocking(self, method: str, path: str, body: Any, media_type: str, is_missing_allowed: bool) -> Any:
        connection = http.client.HTTPSConnection(self._host, self._port, timeout=CALL_TIMEOUT_S, context=self._tls)
        try:
            headers = {"authorization": f"Bearer {self._token_file.read_text().strip()}", "accept": "application/json"}
            data = None
            if body is not None:
                data, headers["content-type"] = msgspec.json.encode(body), media_type
            connection.request(method, f"/{path}", data, headers)
            reply = connection.getresponse()
            content = _read_content(reply, time.monotonic() + CALL_TIMEOUT_S)
        finally:
            connection.close()
        if reply.status == 409:
            raise KubernetesConflict(
                f"Kubernetes object {path} was changed by another client", hint="it is tried again"
            )
        if reply.status >= 300 and not (reply.status == 404 and is_missing_allowed):
            message = f"Kubernetes answered {reply.status} to {method} {path}: {_read_message(content)}"
            raise FleetError(message, hint=_hint_for(reply.status, path))
        return msgspec.json.decode(content)


def _read_content(reply: http.client.HTTPResponse, end: float) -> bytes:
    """Return the body of a reply. Raises TimeoutError at the time `end`, ValueError for a body that is too large."""
    content = bytearray()
    while chunk := reply.read1(READ_BYTES):
        content += chunk
        if len(content) > MAX_REPLY_BYTES:
            raise ValueError(f"the reply has more than {MAX_REPLY_BYTES} bytes")
        if time.monotonic() > end:
            raise TimeoutError(f"only {len(content)} bytes of the reply within {CALL_TIMEOUT_S:g} s")
    return bytes(content)


def _read_message(content: bytes) -> str:
    """Return the message of a Status object, or the start of the reply."""
    try:
        return str(msgspec.json.decode(content)["message"])[:300]
    except (*JSON_DECODE_ERRORS, KeyError, TypeError):
        return content[:200].decode(errors="replace")


def _hint_for(status: int, path: str) -> str:
    if status in (401, 403):
        return "give the service account the verbs get and update on the scale of the pools, list and patch on pods"
    return "check the target of the pool" if status == 404 and "/scale" in path else "see the API server's log"
