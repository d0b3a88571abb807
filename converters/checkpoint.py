"""What a checkpoint's folder from a stranger must not do: make the converter read elsewhere.

Upstream's converter and transformers take names of files from JSON in the folder, join them to it
and open them, and follow links.  A shard called ``../../id_rsa``, or a ``chat_template.jinja`` that
is a link to it, would end in a model that somebody passes on.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gguf_flash.errors import ArgumentError

__all__ = ["check_checkpoint"]

_WEIGHTS = (".safetensors", ".bin")
_TOKENIZER = "tokenizer_config.json"


def check_checkpoint(folder: Path) -> None:
    """Raise ArgumentError if something in ``folder`` leads out of it, or is no file or folder.

    Links to weights may lead anywhere, for they are read as weights or refused; other links only
    to the cache of huggingface_hub, of which ``folder`` then is a snapshot.
    """
    roots = [folder.resolve()]
    if folder.resolve().parent.name == "snapshots":
        roots.append(folder.resolve().parent.parent / "blobs")
    for path in _entries(folder):
        if path.suffix not in _WEIGHTS and not _inside(path.resolve(), roots):
            raise _error(
                folder, f"'{path.name}' is a link to '{path.resolve()}' outside the folder",
                "copy what it links to into the folder if it belongs to the model",
            )  # fmt: skip
        mode = path.stat().st_mode if path.exists() else stat.S_IFREG
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise _error(folder, f"'{path.name}' is no regular file", "remove it")
        for name in _names_in(path):
            if not _inside((folder / name).resolve(), roots) or Path(name).is_absolute():
                raise _error(
                    folder, f"its '{path.name}' names the file '{name}' outside the folder",
                    "get the checkpoint from somebody you trust",
                )  # fmt: skip


def _error(folder: Path, what: str, advice: str) -> ArgumentError:
    return ArgumentError(f"cannot convert '{folder}': {what}, expected files in it only; {advice}")


def _entries(folder: Path) -> Iterator[Path]:
    """Everything in ``folder`` and below, links not followed."""
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            yield Path(parent, name)


def _inside(path: Path, roots: list[Path]) -> bool:
    return any(path == root or root in path.parents for root in roots)


def _names_in(path: Path) -> list[str]:
    """The names of files that the JSON file ``path`` gives and its readers open."""
    index = path.name.endswith(".index.json")
    if not (index or path.name in (_TOKENIZER, "modules.json")):
        return []
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return []  # upstream says what is wrong with it
    if index:
        return _strings(found.get("weight_map") if isinstance(found, dict) else None)
    if path.name == _TOKENIZER:
        return [name for name in _tokenizer_files(found) if os.path.exists(path.parent / name)]
    modules = [m for m in found if isinstance(m, dict)] if isinstance(found, list) else []
    return [name for module in modules for name in _strings(module.get("path"))]


def _tokenizer_files(config: Any) -> list[str]:
    """Old ones name paths on their authors' machines, which lead nowhere and are no harm."""
    items = config.items() if isinstance(config, dict) else ()
    opened = [v for k, v in items if k.endswith(("_file", "_files")) or k == "init_inputs"]
    return [name for value in opened for name in _strings(value)]


def _strings(value: Any) -> list[str]:
    """The strings in ``value``, a string, list or object of such."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [s for v in value for s in _strings(v)]
    return [value] if isinstance(value, str) else []
