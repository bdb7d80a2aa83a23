"""torch without the modules that an engine on a CPU does not need."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from emberline.engine import torch_import
from emberline.engine.torch_import import ReplacedModule, ReplacedModuleFinder

SCRIPT = """
import copy, io, pickle, sys
from emberline.engine.torch_import import KNOWN_VERSION, ReplacedModule, import_torch_for_cpu
import_torch_for_cpu()
import torch
import emberline.engine.boot
x = torch.arange(6.0).view(2, 3)
assert torch.equal(x @ x.t(), torch.tensor([[5.0, 14.0], [14.0, 50.0]]))
assert repr(x[0]) == "tensor([0., 1., 2.])" and torch.equal(copy.deepcopy(x), pickle.loads(pickle.dumps(x)))
assert torch.rand(2, generator=torch.Generator().manual_seed(1)).max() < 1
saved = io.BytesIO()
torch.save(x, saved)
saved.seek(0)
assert torch.equal(torch.load(saved), x)
assert torch.nn.functional.silu(torch.nn.Linear(3, 2)(x)).shape == (2, 2)
replaced = isinstance(sys.modules["torch.export"], ReplacedModule)
assert replaced == bool(KNOWN_VERSION.match(torch.__version__)), torch.__version__
if replaced:
    assert "asyncio" not in sys.modules and "torch.fx.graph" not in sys.modules
    try:
        torch.testing.assert_close(x, x + 1)
    except RuntimeError as error:
        assert "torch.testing.assert_close" in str(error)
    else:
        raise AssertionError("a replaced function did nothing")
print("done")
"""


def test_torch_computes_without_the_replaced_modules() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "done\n", done.stderr


def test_any_gpu_driver_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [str(path) for path in torch_import.GPU_DRIVERS] == ["/proc/driver/nvidia", "/dev/dxg"]
    monkeypatch.setattr(torch_import, "GPU_DRIVERS", (tmp_path / "linux", tmp_path / "windows"))
    assert not torch_import.has_gpu_driver()
    (tmp_path / "windows").touch()
    assert torch_import.has_gpu_driver()


def test_only_named_modules_are_replaced() -> None:
    finder = ReplacedModuleFinder()
    found = {name for name in ("torch.export", "torch.export.unflatten", "torch.nn.qat") if finder.find_spec(name)}
    assert len(found) == 3
    for name in ("torch", "torch.nn", "torch.nn.functional", "torch.exporter", "other.export", "export", "unittest"):
        assert finder.find_spec(name) is None
    module = ReplacedModule("torch.export", finder)
    decorator = module.any_name("argument")
    assert decorator(len) is len and issubclass(type("Sub", (module.Base,), {}), module.Base)
    with pytest.raises(AttributeError, match=r"'torch\.export' has no attribute '__path__'"):
        _ = module.__path__


def test_other_versions_are_imported_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = list(sys.meta_path)
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sys, "meta_path", list(before))
    for name in [name for name in sys.modules if name == "torch"]:
        monkeypatch.delitem(sys.modules, name)
    torch_import.prepare_torch_import()  # no version.py
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.14.0+cpu'\n")
    torch_import.prepare_torch_import()
    assert sys.meta_path == before
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.13.1'\n")
    torch_import.prepare_torch_import()
    assert len(sys.meta_path) == len(before) + 1
