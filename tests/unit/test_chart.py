"""The Helm chart: values match their schema, and the manifests that helm rendered are valid, safe and runnable.

Continuous integration has no helm, so `scripts/render-chart` renders the manifests, and a checksum shows whether the
chart has changed since.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.machinery
import importlib.util
import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from emberline.models.coded_tensor_load import MAX_RUN_BYTES
from emberline.models.reader import CHUNK_BYTES
from emberline.models.weight_uploader import DECODE_SLOTS, STAGING_SLOTS

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy/helm/emberline"
CASES = ROOT / "tests/chart"
CASE_NAMES = ("default", "split", "groups")
KUBERNETES_VERSIONS = ("1.27", "1.37")  # the oldest that Chart.yaml allows, and the newest with a schema
# Resources of other projects, which have no schema here.
FOREIGN_KINDS = {"LeaderWorkerSet", "ScaledObject", "ServiceMonitor", "InferencePool"}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("render_chart", str(ROOT / "scripts/render-chart"))
    spec = importlib.util.spec_from_loader("render_chart", loader)
    assert spec is not None
    module = sys.modules["render_chart"] = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@functools.cache
def load_manifests(case: str) -> list[dict[str, Any]]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return [each for each in yaml.load_all((CASES / f"{case}.yaml").read_text(), loader) if each]


def load_all_manifests() -> list[dict[str, Any]]:
    return [manifest for case in CASE_NAMES for manifest in load_manifests(case)]


def find_pods(manifest: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the pod templates in a manifest."""
    spec = manifest.get("spec", {})
    if manifest["kind"] == "LeaderWorkerSet":
        yield from (spec["leaderWorkerTemplate"][name] for name in ("leaderTemplate", "workerTemplate"))
    elif "template" in spec:
        yield spec["template"]


def all_pods() -> list[dict[str, Any]]:
    return [pod for manifest in load_all_manifests() for pod in find_pods(manifest)]


def test_manifests_are_those_of_this_chart(script: ModuleType) -> None:
    assert script.CHECKSUM_FILE.read_text().strip() == script.compute_checksum(), "run scripts/render-chart"


def test_rendering_gives_committed_manifests(script: ModuleType) -> None:
    if (helm := os.environ.get("HELM") or shutil.which("helm")) is None:
        pytest.skip("helm is not installed")
    for case in CASE_NAMES:
        assert script.render_case(helm, CASES / f"{case}.values.yaml").stdout == (CASES / f"{case}.yaml").read_text()
    wrong = script.render_case(helm, CASES / "default.values.yaml", "--set", "gateway.enabled=true,gateway.replicas=2")
    assert "gateway.store.secret" in wrong.stderr
    with_key = ("--set", "gateway.enabled=true", "--set-string", 'gateway.config=a = 1\n api_keys = ["secret"]')
    assert "gateway.adminKey" in script.render_case(helm, CASES / "default.values.yaml", *with_key).stderr


def test_schema_accepts_defaults_and_refuses_typing_errors() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    jsonschema.Draft7Validator.check_schema(schema)
    validator = jsonschema.Draft7Validator(schema)
    validator.validate(defaults)
    pool = defaults["pools"]["mixed"]
    for wrong in (
        {"modle": "smollm2"},
        {"model": ""},
        {"pools": {}},
        {"pools": {"Upper": pool}},
        {"pools": {"mixed": pool | {"role": "mixed"}}},
        {"pools": {"mixed": pool | {"nodes": 2, "gpus": 1}}},
        {"pools": {"mixed": pool | {"nodes": 2, "role": "decode"}}},
        {"pools": {"mixed": pool | {"autoscaling": pool["autoscaling"] | {"kind": "keda", "minReplicas": 0}}}},
        {"router": defaults["router"] | {"replicas": 0}},
        {"clusterKey": {"secret": "", "key": "k"}},
        {"tls": {"secret": "certificates", "names": ""}},
        {"image": {"repository": "x", "digest": "latest"}},
    ):
        assert not validator.is_valid(defaults | wrong), wrong


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
def test_manifests_match_schemas_of_kubernetes(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read_schema = functools.cache(kubernetes_validate.utils.schema_contents)  # which reads 1 MB for each manifest
    monkeypatch.setattr(kubernetes_validate.utils, "schema_contents", read_schema)
    checked = set()
    for manifest in load_all_manifests():
        if manifest["kind"] not in FOREIGN_KINDS:
            kubernetes_validate.validate(manifest, version, strict=True)
            checked.add(manifest["kind"])
        for pod in find_pods(manifest):  # also those in resources without a schema
            body = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": pod["spec"]}
            kubernetes_validate.validate(body, version, strict=True)
    assert checked == {
        *("StatefulSet", "Deployment", "Service", "ConfigMap", "NetworkPolicy"),
        *("PodDisruptionBudget", "HorizontalPodAutoscaler", "ServiceAccount", "Role", "RoleBinding"),
    }


def test_pods_run_without_root_on_a_read_only_file_system() -> None:
    for pod in all_pods():
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] > 0
        calls_kubernetes = spec["containers"][0]["name"] == "autoscaler"
        assert spec.get("automountServiceAccountToken", True) is calls_kubernetes
        for container in spec["containers"]:
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"] and not context["allowPrivilegeEscalation"]
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert "memory" in container["resources"]["limits"]
            assert "/tmp" in [mount["mountPath"] for mount in container["volumeMounts"]]


def test_secrets_are_references_only() -> None:
    kinds = [manifest["kind"] for manifest in load_all_manifests()]
    assert "Secret" not in kinds
    for pod in all_pods():
        for variable in pod["spec"]["containers"][0].get("env", ()):
            if variable["name"].endswith(("_KEY", "_TOKEN", "_URL")):
                assert "secretKeyRef" in variable["valueFrom"], variable
                for argument in pod["spec"]["containers"][0]["args"]:  # users of the node see arguments
                    assert f"$({variable['name']})" not in argument


def test_selectors_match_pods_and_ports() -> None:
    """Every Service, PodDisruptionBudget and NetworkPolicy selects pods of its release, and names a port of theirs."""
    for case in CASE_NAMES:
        manifests = load_manifests(case)
        pods = [pod for manifest in manifests for pod in find_pods(manifest)]
        for manifest in manifests:
            spec = manifest.get("spec", {})
            selector = spec.get("podSelector", spec.get("selector"))
            if selector is None or manifest["kind"] == "ServiceMonitor":
                continue
            wanted = selector if manifest["kind"] == "Service" else selector["matchLabels"]
            found = [pod for pod in pods if wanted.items() <= pod["metadata"]["labels"].items()]
            assert found, manifest["metadata"]["name"]
            if manifest["kind"] == "Service":
                names = {port["name"] for pod in found for port in pod["spec"]["containers"][0].get("ports", ())}
                assert {port["targetPort"] for port in spec["ports"]} <= names, manifest["metadata"]["name"]


def test_network_policies_without_clients_admit_no_client() -> None:
    policies = [each for each in load_all_manifests() if each["kind"] == "NetworkPolicy"]
    for rule in (rule for policy in policies for rule in policy["spec"]["ingress"]):
        assert rule["from"], "an empty list admits everyone"
    policies = {each["metadata"]["name"]: each for each in load_manifests("groups") if each["kind"] == "NetworkPolicy"}
    assert policies["emberline-gateway"]["spec"]["ingress"] == []
    (rule,) = policies["emberline-router"]["spec"]["ingress"]
    assert len(rule["from"]) == 1  # workers and gateways


def test_workers_register_with_every_router() -> None:
    for case in CASE_NAMES:
        manifests = load_manifests(case)
        (routers,) = (each for each in manifests if each["kind"] == "StatefulSet")
        name, domain = routers["metadata"]["name"], routers["spec"]["serviceName"]
        assert any(each["kind"] == "Service" and each["metadata"]["name"] == domain for each in manifests)
        expected = {f"{name}-{index}.{domain}:8000" for index in range(routers["spec"]["replicas"])}
        for pod in (pod for manifest in manifests for pod in find_pods(manifest)):
            arguments = pod["spec"]["containers"][0]["args"]
            if arguments[0] == "worker":
                urls = [each.removeprefix("--router=") for each in arguments if each.startswith("--router=")]
                assert {url.partition("://")[2] for url in urls} == expected


def build_parser(command: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(exit_on_error=False)
    importlib.import_module(f"emberline.cli.{command}").add_arguments(parser)
    return parser


def test_commands_accept_their_arguments() -> None:
    seen = set()
    for pod in all_pods():
        (container,) = pod["spec"]["containers"]
        if container["name"] == "master":
            assert container["command"] == ["mooncake_master"]
            continue
        command, *arguments = container["args"]
        variables = {"LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "leader"}
        variables |= {variable["name"]: "10.0.0.1" for variable in container["env"]}
        for name, value in variables.items():
            arguments = [argument.replace(f"$({name})", value) for argument in arguments]
        assert not any("$(" in argument for argument in arguments), arguments
        build_parser(command).parse_args(arguments)
        seen.add(command)
    assert seen == {"router", "worker", "gateway", "autoscale"}


def test_probes_and_drain() -> None:
    for pod in all_pods():
        (container,) = pod["spec"]["containers"]
        if "ports" not in container or container["name"] in ("master", "autoscaler"):
            continue
        assert container["livenessProbe"]["httpGet"]["path"] == "/health/live"
        assert container["readinessProbe"]["httpGet"]["path"] in ("/health/ready", "/health/live")
        command = container["lifecycle"]["preStop"]["exec"]["command"]
        if container["name"] == "worker":
            words = command[-1].replace('"$POD_NAME"', "name").split()
            assert words[:4] == ["exec", "timeout", "90", "emberline"] and words[4] == "drain"
            build_parser("drain").parse_args(words[5:])
            assert pod["spec"]["terminationGracePeriodSeconds"] > 90 + 15  # a worker drains itself for 15 s more


def test_the_autoscaler_reads_all_routers_with_a_certificate_and_may_replace_pods() -> None:
    manifests = [each for each in load_manifests("groups") if each["metadata"]["name"] == "emberline-autoscaler"]
    (pod,) = (pod["spec"] for each in manifests if each["kind"] == "Deployment" for pod in find_pods(each))
    options = pod["containers"][0]["args"]
    routers = [each for each in options if each.startswith("--router=")]
    assert routers == [f"--router=https://emberline-router-{i}.emberline-routers:8000" for i in range(2)]
    assert {"--tls-cert=/tls/tls.crt", "--tls-key=/tls/tls.key", "--tls-ca=/tls/ca.crt"} <= {*options}
    assert "/tls" in [mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]]
    (role,) = (each for each in manifests if each["kind"] == "Role")
    assert {"list", "patch", "delete"} == {*next(r["verbs"] for r in role["rules"] if r["resources"] == ["pods"])}


def parse_memory(text: str) -> int:
    assert text.endswith("Gi"), text
    return int(text.removesuffix("Gi")) << 30


def list_gpu_pools() -> list[dict[str, Any]]:
    """Return the pools with GPUs in the examples of docs/deploy.md and of tests/chart."""
    guide = (ROOT / "docs/deploy.md").read_text()
    blocks = re.findall(r"(?:^ {4}\S.*\n)*^ {4}pools:\n(?:^ {4}.*\n)+", guide, re.MULTILINE)
    texts = [*map(textwrap.dedent, blocks), *(file.read_text() for file in CASES.glob("*.values.yaml"))]
    documents = [yaml.safe_load(text) or {} for text in texts]
    pools = [pool for document in documents for pool in (document.get("pools") or {}).values()]
    return [pool for pool in pools if pool and pool.get("gpus")]


def test_examples_with_a_gpu_have_memory_for_a_model_of_any_size() -> None:
    """Buffers take half of the limit while the model loads; values.yaml explains what the other half must hold."""
    pools, defaults = list_gpu_pools(), yaml.safe_load((CHART / "values.yaml").read_text())
    pinned = STAGING_SLOTS * CHUNK_BYTES + DECODE_SLOTS * MAX_RUN_BYTES
    needed = (4 << 30) + pinned + parse_memory(defaults["pools"]["decode"]["sharedMemory"])
    limits = [parse_memory(pool.get("resources", {}).get("limits", {}).get("memory", "6Gi")) for pool in pools]
    assert len(pools) == 6 and all(limit // 2 >= needed for limit in limits)
    containers = [pod["spec"]["containers"][0] for pod in all_pods()]
    workers = [each for each in containers if "nvidia.com/gpu" in each["resources"]["limits"]]
    assert len(workers) == 2
    for worker in workers:
        resources = worker["resources"]
        assert "--kv-store-memory=4G" in worker["args"]
        assert parse_memory(resources["limits"]["memory"]) // 2 >= needed + 4 * 10**9  # of the store
        assert resources["requests"]["memory"] == resources["limits"]["memory"]
