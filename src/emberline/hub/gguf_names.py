"""Names of GGUF files: the parts of a split model, and the choice of one model among several files.

A split model has files NAME-00001-of-00003.gguf to NAME-00003-of-00003.gguf. A repository usually holds one model in
several quantisations, each of which has its label in the file's name: NAME-Q4_K_M.gguf.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from emberline.core.errors import ModelError, ModelFileError

CONVERSION_VERSION = 5  # part of the path of a GGUF model's checkpoint: raise it when the files in it change
PART_NAME_PATTERN = re.compile(r"(?P<stem>.*[^/])-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf", re.IGNORECASE)
LABEL_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
MAX_LISTED_MODELS = 40


@dataclass(frozen=True)
class GGUFPartName:
    stem: str
    number: int  # of this part, from 1
    count: int

    @staticmethod
    def parse(path: str) -> GGUFPartName | None:
        """Return the part that a path names, or None if it is not the name of a part.

        Raise ModelFileError if the numbers contradict each other.
        """
        match = PART_NAME_PATTERN.fullmatch(path)
        if match is None:
            return None
        part = GGUFPartName(match["stem"], int(match["number"]), int(match["count"]))
        if not 1 <= part.number <= part.count:
            raise ModelFileError(f"{path} names part {part.number} of {part.count}, which cannot exist")
        return part

    def list_all_parts(self) -> list[str]:
        return [f"{self.stem}-{number:05}-of-{self.count:05}.gguf" for number in range(1, self.count + 1)]


def choose_gguf_files(paths: Iterable[str], choice: str | None, source: str) -> list[str]:
    """Return the files of one model, in the order of its parts.

    `choice`: a path that ends in .gguf, or a label such as Q4_K_M; None: there must be only one model. `source`: what
    contains the files, for error messages. Raise ModelError if no model or several models match, or a part is missing.
    """
    present = sorted(path for path in paths if path.lower().endswith(".gguf") and not _is_auxiliary(path))
    models = {_model_name(path): path for path in reversed(present)}  # to the first file of each
    if choice is None:
        matching = dict(models)
    elif choice.lower().endswith(".gguf"):
        matching = {_model_name(choice): choice} if choice in present else {}
    else:
        matching = {name: path for name, path in models.items() if _has_label(name, choice)}
    if len(matching) != 1:
        raise _make_choice_error(sorted(models), sorted(matching), choice, source)
    first = next(iter(matching.values()))
    part = GGUFPartName.parse(first)
    files = [first] if part is None else part.list_all_parts()
    missing = sorted(set(files) - set(present))
    if missing:
        more = f" and {len(missing) - 1} more parts" if len(missing) > 1 else ""
        hint = "choose another model, or add the missing files"
        raise ModelError(f"{source} has {first}, but not {missing[0]}{more} of the same model", hint=hint)
    return files


def group_gguf_files(paths: Iterable[str]) -> dict[str, list[str]]:
    """Return the files of each GGUF model among the paths, by the model's first file."""
    groups: dict[str, list[str]] = {}
    for path in sorted(path for path in paths if path.lower().endswith(".gguf") and not _is_auxiliary(path)):
        groups.setdefault(_model_name(path), []).append(path)
    return {files[0]: files for files in groups.values()}


def _is_auxiliary(path: str) -> bool:
    """Return whether a file holds the vision part of a model or quantisation statistics, instead of a model."""
    name = path.rpartition("/")[2].lower()
    return "mmproj" in name or name.endswith("imatrix.gguf")


def _model_name(path: str) -> str:
    part = GGUFPartName.parse(path)
    return path[: -len(".gguf")] if part is None else part.stem


def _has_label(model_name: str, label: str) -> bool:
    """Return whether the label is a whole word of the path: Q4_K is not a word of NAME-Q4_K_M."""
    return re.search(rf"(^|[-._/]){re.escape(label)}($|[-./])", model_name, re.IGNORECASE) is not None


def _make_choice_error(models: list[str], matching: list[str], choice: str | None, source: str) -> ModelError:
    if not models:
        hint = "name a repository or a directory with .gguf files"
        return ModelError(f"{source} has no .gguf file of a model", hint=hint)
    listed = matching or models
    names = ", ".join(listed[:MAX_LISTED_MODELS])
    if len(listed) > MAX_LISTED_MODELS:
        names += f" and {len(listed) - MAX_LISTED_MODELS} more"
    asked = "" if choice is None else f" for {choice!r}"
    found = f"several GGUF models{asked}" if matching else f"no GGUF model{asked}; it has"
    separator = ": " if matching else " "
    hint = "name one: hf:org/name:Q4_K_M, hf:org/name/FILE.gguf, or the path of a local file"
    return ModelError(f"{source} has {found}{separator}{names}", hint=hint)
