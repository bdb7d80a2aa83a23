"""Imports point down, without cycles; packages run without torch; optional dependencies have one importer."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

from statements import walk_statements

SRC = Path(__file__).parents[2] / "src"
PACKAGE = SRC / "emberline"

# package -> packages it may import from, besides itself. Entries like "kv.cache" are single modules.
ALLOWED: dict[str, set[str]] = {
    "core": set(),
    "tokens": {"core"},
    "hub": {"core"},
    "kernels": {"core.config", "core.cpus", "core.gpu_kernels", "hub.dequant"},
    "unweight": {"core", "hub.checkpoint", "hub.tensorfile", "kernels.cpu"},
    "models": {
        "core",
        "kernels",
        "hub.checkpoint",
        "hub.dequant",
        "hub.gguf_rows",
        "hub.gguf_tensors",
        "hub.tensorfile",
        "unweight",
    },
    "kv": {"core", "tokens.blockhash", "kernels"},
    "wire": {"core"},
    "api": {"core", "tokens", "wire"},
    "engine": {"core", "tokens", "kv", "kernels", "models", "hub.source", "hub.checkpoint"},
    "drafter": {"core", "tokens", "kv", "kernels", "models", "hub", "engine"},
    "net": {"core"},
    "trace": {"core", "net"},
    "cluster": {"core", "net"},
    "server": {"core", "api", "wire", "net", "trace"},
    "router": {"core", "tokens", "net", "trace"},
    "router.http": {"core", "api", "wire", "net", "trace", "server", "cluster"},
    "gateway": {"core", "api", "wire", "net", "trace"},
    "gateway.http": {"core", "api", "wire", "net", "trace", "server"},
    "worker": {"core", "tokens", "hub", "api", "wire", "engine", "models.config", "net", "trace", "server", "cluster"},
    "autoscaler": {"core", "net", "server"},
    "sim": {"core", "tokens", "kv", "engine", "router", "cluster", "autoscaler", "server.metrics"},
    "planner": {"core", "engine", "models", "sim"},
    "bench": {
        "planner",
        "core",
        "tokens",
        "hub",
        "api",
        "wire",
        "engine",
        "models",
        "kernels",
        "kv",
        "gateway",
        "unweight",
        "sim",
        "net",
        "trace",
        "cluster",
        "autoscaler",
    },
    "chaos": {"core", "net", "wire", "cluster", "router.policy", "bench"},
    "cli": {
        "core",
        "tokens",
        "hub",
        "api",
        "wire",
        "engine",
        "models",
        "kernels",
        "kv",
        "cluster",
        "gateway",
        "router.http",
        "server",
        "worker",
        "bench",
        "unweight",
        "sim",
        "chaos",
        "drafter",
        "planner",
        "autoscaler",
    },
}

TORCH_FREE = [
    "core",
    "wire",
    "tokens",
    "hub",
    "unweight",
    "api",
    "net",
    "trace",
    "router",
    "cluster",
    "gateway",
    "server",
    "worker",
    "sim",
    "chaos",
    "planner",
    "autoscaler",
    "cli",
    "models.config",
    "models.kv_groups",
    "models.reader",
    "models.child_reader",
    "engine.preload",
    "kv.pool",
    "kv.prefix",
    "kv.manager",
    "kv.transfer",
    "kv.tiers.base",
    "kv.tiers.policy",
    "kv.tiers.host",
    "kv.tiers.blockfile",
    "kv.tiers.disk",
    "kv.tiers.stack",
    "engine.scheduler",
    "engine.admission",
    "engine.pacing",
    "engine.memory",
    "engine.gpu_plan",
    "engine.fake",
    "engine.engine",
    "engine.engine_group",
    "engine.gpu.swap",
    "engine.async_engine",
    "engine.messages",
    "engine.grammar",
    "engine.embedder",
]

# dependency -> its adapter; bench may import anything to compare with
ONE_IMPORTER = {
    "yaml": "cli/settings_file.py",
    "huggingface_hub": "hub/huggingface.py",
    "llguidance": "engine/grammar.py",
    "hiredis": "gateway/redis_client.py",
    "asyncpg": "gateway/store/postgres.py",
    "mooncake": "kv/mooncake.py",
    "ray": "engine/ranks/ray_launcher.py",
    "re2": "core/linear_regex.py",
    "gguf": "",
    "transformers": "",
}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


@cache
def parse_imports(path: Path) -> tuple[list[str], list[ast.ImportFrom]]:
    """Return what a module imports anywhere, and its `from` imports at module level."""
    found, tree = [], ast.parse(path.read_text())
    for node in walk_statements(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            found += (
                [f"{node.module}.{alias.name}" for alias in node.names] if node.module == "emberline" else [node.module]
            )
    named = [each for node in tree.body if isinstance(node, ast.If) for each in node.body]
    return found, [node for node in (*tree.body, *named) if isinstance(node, ast.ImportFrom)]


def imports(path: Path) -> list[str]:
    return parse_imports(path)[0]


def package_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    if len(parts) > 2 and parts[1] == "http":
        return f"{parts[0]}.http"
    return parts[0] if len(parts) > 1 else ""


def test_imports_point_down() -> None:
    wrong = []
    for path in modules():
        package = package_of(path)
        if not package:
            continue
        for name in imports(path):
            if not name.startswith("emberline."):
                continue
            target = name.removeprefix("emberline.")
            if target == "__version__":
                continue
            root = package.removesuffix(".http")
            if target.split(".")[0] == root and (package != root or not target.startswith(f"{root}.http")):
                continue
            if not any(target == ok or target.startswith(ok + ".") for ok in ALLOWED[package]):
                wrong.append(f"{path.relative_to(PACKAGE)} imports {name}")
    assert not wrong, wrong


def test_no_cycles_between_modules() -> None:
    names = {".".join(p.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__"): p for p in modules()}
    graph: dict[str, set[str]] = {}
    for name, path in names.items():
        edges: set[str] = set()
        # Module level only: a lazy import cannot close a cycle at import time. What is imported for its name alone
        # counts too.
        for node in parse_imports(path)[1]:
            if node.module in names:
                edges |= {
                    f"{node.module}.{a.name}" if f"{node.module}.{a.name}" in names else node.module for a in node.names
                }
        graph[name] = edges - {name}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join([*trail, name])
        if name not in done:
            for target in graph[name]:
                visit(target, (*trail, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def find_failing_imports(blocked: list[str], packages: list[str]) -> list[str]:
    """Import all modules of packages in a process without the `blocked` ones; return the errors."""
    names = []
    for package in packages:
        base = PACKAGE.joinpath(*package.split("."))
        files = sorted(base.rglob("*.py")) if base.is_dir() else [base.with_suffix(".py")]
        dotted = (".".join(f.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__") for f in files)
        names += [name for name in dotted if not name.endswith("__main__")]
    code = f"""
import importlib, sys
sys.modules.update(dict.fromkeys({blocked!r}))
sys.path.insert(0, {str(SRC)!r})
for name in {names!r}:
    try:
        importlib.import_module(name)
    except ImportError as error:
        print(f"{{name}}: {{error!r}}")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


def test_packages_run_without_torch() -> None:
    """All in one process: what one imports, the others need not import again."""
    assert not find_failing_imports(["torch"], TORCH_FREE)


def test_compute_packages_need_only_torch_and_numpy() -> None:
    """A GPU machine may have no other packages, and the code must run there from a checkout."""
    others = ["msgspec", "tokenizers", "jinja2", "llguidance", "uvloop", "httptools", "huggingface_hub"]
    compute = ["core", "kernels", "unweight", "models", "kv", "engine.engine_group_boot", "engine.fake"]
    assert not find_failing_imports(others, compute)


def test_routing_policy_is_pure() -> None:
    """The router package uses no clock, no network and no randomness."""
    for path in sorted((PACKAGE / "router").glob("*.py")):
        impure = {"time", "asyncio", "aiohttp", "random", "socket", "os", "logging"} & set(imports(path))
        assert not impure, f"{path.name} imports {impure}"


# Packages and modules of the gateway, from the lowest to the highest.
GATEWAY_ORDER = [
    "core",
    "costs",
    "dialects",
    "store",
    "logs",
    "error_replies",
    "upstream",
    "streams",
    "providers",
    "keys",
    "redis_client",
    "limits",
    "routes",
    "settings_checks",
    "admin",
    "cache",
    "fakes",
    "gateway",
    "guardrails",
    "realtime",
    "layers",
    "model_lister",
    "run",
    "settings_store",
    "stack",
    "http",
]


def test_imports_inside_gateway_point_down() -> None:
    rank = {name: number for number, name in enumerate(GATEWAY_ORDER)}
    wrong = []
    for path in sorted((PACKAGE / "gateway").rglob("*.py")):
        here = path.relative_to(PACKAGE / "gateway").parts[0].removesuffix(".py")
        for name in imports(path):
            target = name.removeprefix("emberline.gateway.").split(".")[0]
            if name.startswith("emberline.gateway.") and rank[target] > rank[here]:
                wrong.append(f"{path.relative_to(PACKAGE)} imports {name}")
    assert not wrong, wrong


def test_optional_dependencies_have_one_importer() -> None:
    wrong = []
    for path in modules():
        where = str(path.relative_to(PACKAGE))
        for name in imports(path):
            home = ONE_IMPORTER.get(name.split(".")[0])
            if home is not None and where != home and not where.startswith("bench/"):
                wrong.append(f"{where} imports {name}")
    assert not wrong, wrong
