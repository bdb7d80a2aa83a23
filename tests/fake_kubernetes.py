"""A server with the paths of the Kubernetes API that scaling uses, and the behaviour of its controllers in small.

It creates and deletes pods when the replicas of a scale subresource change, as a Deployment or StatefulSet does: the
pod with the lowest deletion cost, or with the highest number, is deleted first."""

from __future__ import annotations

import json
import ssl
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

TOKEN = "service-account-token"
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"


class FakeKubernetes:
    def __init__(self, home: Path) -> None:
        self.account_dir = home
        self.replicas = {("deployments", "decode"): 2, ("statefulsets", "prefill"): 1}
        self.version = 1
        self.pods: dict[str, dict[str, Any]] = {}
        self.creates_pods = True
        self.calls: list[tuple[str, str]] = []
        _write_account(home)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._make_handler())
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(home / "ca.crt", home / "ca.key")
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        self.reconcile()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def reconcile(self) -> None:
        """Create or delete pods until there are as many as replicas."""
        for (kind, name), replicas in self.replicas.items():
            pods = [pod for pod in self.pods.values() if pod["metadata"]["labels"]["app"] == name]
            pods.sort(key=lambda pod: int(pod["metadata"].get("annotations", {}).get(DELETION_COST, 0)))
            if kind == "statefulsets":
                pods.sort(key=lambda pod: -int(pod["metadata"]["name"].rpartition("-")[2]))
            for pod in pods[: max(len(pods) - replicas, 0)]:
                del self.pods[pod["metadata"]["name"]]
            taken = {pod["metadata"]["name"] for pod in pods}
            numbers = (f"{name}-{i}" for i in range(replicas + len(pods)))
            for pod_name in [each for each in numbers if each not in taken][: max(replicas - len(pods), 0)]:
                self.pods[pod_name] = {
                    "metadata": {"name": pod_name, "labels": {"app": name}},
                    "status": {"phase": "Running"},
                }

    def answer(self, method: str, path: str, query: str, body: Any) -> tuple[int, Any]:
        words = path.strip("/").split("/")
        match [method, *words]:
            case ["GET", "apis", "apps", "v1", "namespaces", "serving", kind, name, "scale"]:
                return (200, self._scale(kind, name)) if (kind, name) in self.replicas else (404, _status("not found"))
            case ["PUT", "apis", "apps", "v1", "namespaces", "serving", kind, name, "scale"]:
                if body["metadata"]["resourceVersion"] != str(self.version):
                    return 409, _status("the object has been modified")
                self.replicas[kind, name] = body["spec"]["replicas"]
                self.version += 1
                if self.creates_pods:
                    self.reconcile()
                return 200, self._scale(kind, name)
            case ["GET", "api", "v1", "namespaces", "serving", "pods"]:
                app = parse_qs(query)["labelSelector"][0].removeprefix("app=")
                items = [pod for pod in self.pods.values() if pod["metadata"]["labels"]["app"] == app]
                return 200, {"kind": "PodList", "items": items}
            case ["PATCH", "api", "v1", "namespaces", "serving", "pods", name]:
                self.pods[name]["metadata"].setdefault("annotations", {}).update(body["metadata"]["annotations"])
                return 200, self.pods[name]
            case ["DELETE", "api", "v1", "namespaces", "serving", "pods", name]:
                if self.pods.pop(name, None) is None:
                    return 404, _status("not found")
                if self.creates_pods:
                    self.reconcile()
                return 200, _status("deleted")
        return 404, _status(f"no such path: {path}")

    def _scale(self, kind: str, name: str) -> dict[str, Any]:
        return {
            "kind": "Scale",
            "apiVersion": "autoscaling/v1",
            "metadata": {"name": name, "namespace": "serving", "resourceVersion": str(self.version)},
            "spec": {"replicas": self.replicas[kind, name]},
            "status": {"replicas": self.replicas[kind, name], "selector": f"app={name}"},
        }

    def _make_handler(self) -> type[BaseHTTPRequestHandler]:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def _handle(self) -> None:
                parts = urlsplit(self.path)
                body = json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)) or "null")
                fake.calls.append((self.command, parts.path))
                if self.headers["authorization"] != f"Bearer {TOKEN}":
                    status, reply = 401, _status("Unauthorized")
                else:
                    status, reply = fake.answer(self.command, parts.path, parts.query, body)
                data = json.dumps(reply).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_PUT = do_PATCH = do_DELETE = _handle

            def log_message(self, *args: Any) -> None:
                pass

        return Handler


def _status(message: str) -> dict[str, Any]:
    return {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message}


def _write_account(home: Path) -> None:
    """Write what Kubernetes mounts into a pod; the server's own certificate is the CA."""
    (home / "token").write_text(TOKEN)
    (home / "namespace").write_text("serving")
    names = "subjectAltName=IP:127.0.0.1"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=kubernetes", "-addext", names, "-keyout", home / "ca.key", "-out", home / "ca.crt"],
        check=True, capture_output=True, timeout=20,
    )  # fmt: skip
