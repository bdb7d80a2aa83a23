"""Output files of commands: a path that cannot be written is refused with the option's name; nothing is created."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from emberline.cli.__main__ import main
from emberline.core.errors import InvalidRequest
from emberline.core.output_file import check_output_file


def test_file_that_can_be_written_is_not_created(tmp_path: Path) -> None:
    check_output_file(None, "--json")
    check_output_file(tmp_path / "new.json", "--json")
    check_output_file(tmp_path / "a" / "b" / "new.json", "--json", creates_directory=True)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "old.json").write_text("old")
    check_output_file(tmp_path / "old.json", "--json")
    assert (tmp_path / "old.json").read_text() == "old"


@pytest.mark.parametrize(
    ("name", "creates_directory", "reason"),
    [
        ("", False, "which is a directory"),
        ("absent/new.json", False, "absent is missing"),
        ("file/new.json", False, "file is not a directory"),
        ("file/absent/new.json", True, "file is not a directory"),
    ],
)
def test_unusable_path_is_refused(tmp_path: Path, name: str, creates_directory: bool, reason: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest, match=f"--json is .*{reason}") as refused:
        check_output_file(tmp_path / name, "--json", creates_directory=creates_directory)
    assert refused.value.param == "json" and refused.value.hint


@pytest.mark.parametrize("protected", ["", "old.json"])
def test_missing_permission_is_refused(tmp_path: Path, protected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Permissions are emulated, since tests may run as root."""
    (tmp_path / "old.json").write_text("")
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path / protected)
    with pytest.raises(InvalidRequest, match="may not be written"):
        check_output_file(tmp_path / (protected or "new.json"), "--json")


def test_directory_that_may_not_be_searched_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "is_dir", refuse)
    with pytest.raises(InvalidRequest, match="which cannot be used: Permission denied"):
        check_output_file(tmp_path / "new.json", "--json")


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["bench", "transfer"], "--json"),
        (["bench", "plot", "absent.json"], "--out"),
        (["unweight", "info", "/absent"], "--json"),
        (["unweight", "info", "/absent"], "--svg"),
    ],
)
def test_commands_check_their_output_first(
    words: list[str], option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, option, str(tmp_path)]) == 1
    assert f"{option} is '{tmp_path}', which is a directory" in capsys.readouterr().err
