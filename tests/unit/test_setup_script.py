"""scripts/setup with stand-ins for its tools: what it prints, and that it works without apt, as on macOS."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# A python3 that makes an environment whose pip takes longer than the longest silence that is allowed.
PYTHON = """#!/bin/bash
if [ "$1" = -m ]; then
  mkdir -p "$3/bin"
  printf '#!/bin/bash\necho "Collecting x"; echo "  Downloading x-1.whl (5 MB)"\n' >"$3/bin/pip"
  printf 'case $* in *torch*) sleep "${PIP_SLEEPS:-0}" ;; esac\n' >>"$3/bin/pip"
  printf '#!/bin/bash\n' >"$3/bin/python"
  chmod +x "$3/bin/pip" "$3/bin/python"
fi
"""
# A sleep of a tenth of the seconds, for the script and for its pip alike.
SLEEP = """#!/bin/bash
[ "$1" = 0 ] || exec %s "$(( $1 / 10 )).$(( $1 %% 10 ))"
"""
TOOLS = ("bash", "env", "cat", "cut", "dirname", "grep", "mkdir", "chmod", "id", "kill")


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/setup", tmp_path / "scripts/setup")
    (tmp_path / "pyproject.toml").write_text("")
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in TOOLS:
        found = shutil.which(name)
        assert found is not None
        (tools / name).symlink_to(found)
    stand_ins = {
        "python3": PYTHON,
        "shasum": "#!/bin/bash\ncat >/dev/null; echo '0123  -'\n",
        "sleep": SLEEP % shutil.which("sleep"),
    }
    for name, text in stand_ins.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    return tmp_path


def setup(here: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    known = {"PATH": str(here / "tools"), "HOME": os.environ.get("HOME", "/"), **environment}
    return subprocess.run([here / "scripts/setup", "serve"], env=known, capture_output=True, text=True, timeout=60)


def test_setup_works_without_apt_dpkg_sha256sum(here: Path) -> None:
    done = setup(here)
    assert done.returncode == 0, done.stderr
    assert "no C++ compiler" in done.stderr and "xcode-select" in done.stderr
    assert (here / ".venv/ready-serve").read_text() == "0123\n"
    assert setup(here).stderr == ""  # it is ready


def test_setup_shows_downloads_and_progress(here: Path) -> None:
    done = setup(here, PIP_SLEEPS="8")
    assert "setup: Downloading x-1.whl (5 MB)" in done.stderr
    assert re.search(r"setup: still installing, \d+ s", done.stderr)
    assert "emberline on the PATH" in done.stderr


def test_setup_reports_old_python(here: Path) -> None:
    (here / "tools/python3").write_text('#!/bin/bash\n[ "$2" = "import ensurepip" ]\n')
    done = setup(here)
    assert done.returncode == 1 and "Python 3.11 or newer was not found" in done.stderr
