"""From what the user has to a dense GGUF: upstream's own converter and quantizer, run for him.

A Hugging Face folder goes through llama.cpp's ``convert_hf_to_gguf.py``, and a change of type
through its ``llama-quantize``; neither is written again here.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import dropwhile
from pathlib import Path

from gguf_flash import runtime
from gguf_flash.converters.activations import differs_from_table
from gguf_flash.converters.checkpoint import check_checkpoint
from gguf_flash.converters.dense import DenseModel
from gguf_flash.converters.unchanged import Unchanged
from gguf_flash.errors import ArgumentError, FlashError, IoError, ToolError
from gguf_flash.format.container import encode_value
from gguf_flash.format.partial import create_sibling, remove_stale, write_refused
from gguf_flash.format.reader import read_set

__all__ = ["open_source"]

_HF_TYPES = ("f32", "f16", "bf16", "q8_0", "auto")
_QUANTIZE_TYPES = """
F32 F16 BF16 Q1_0 Q2_0 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q2_K_S Q3_K Q3_K_S Q3_K_M Q3_K_L Q4_K Q4_K_S
Q4_K_M Q5_K Q5_K_S Q5_K_M Q6_K IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S IQ2_M IQ3_XXS IQ3_XS IQ3_S IQ3_M
IQ4_NL IQ4_XS TQ1_0 TQ2_0
""".split()
_ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}
_SCRIPT = "convert_hf_to_gguf.py"
# Gemma's, which overrules its next; Llama's and most others'; GPT-2's; Falcon's; T5's.
_ACTIVATION_KEYS = (
    "hidden_activation", "hidden_act", "activation_function", "activation", "dense_act_fn",
)  # fmt: skip
_WEIGHTS = (".safetensors", ".bin")
# Of this thread's temporary files, for its tools: one that outlives us keeps its file.
_locks: ContextVar[tuple[int, ...]] = ContextVar("locks", default=())


@contextmanager
def open_source(src: Path | str, outtype: str | None, beside: Path) -> Iterator[DenseModel]:
    """The dense model ``src`` in type ``outtype`` (None: as it is, or upstream's ``auto``).

    What has to be made from ``src`` first is a temporary file next to ``beside``, removed
    afterwards.  An activation in the folder's ``config.json`` other than the one that llama.cpp
    runs for the architecture is added as ``<arch>.hidden_activation``, for upstream drops it, and
    ``fatrelu`` (ProSparse, MiniCPM-S) as ``relu`` with its threshold.
    Raises ToolError when a tool fails or is missing, ArgumentError or IoError for a ``src`` that
    is neither a GGUF file nor a Hugging Face folder, and what DenseModel raises.
    """
    src = Path(src)
    with _dense_file(src, outtype, beside) as path, DenseModel(path, shown=src) as dense:
        hidden, cut = _hidden_act(src) if src.is_dir() else ("", 0.0)
        if cut > 0 and not dense.thresholds:
            dense.thresholds = [cut]
        key = f"{dense.arch}.hidden_activation"
        gated = any(".ffn_gate." in name for name in dense.tensors)
        if key not in dense.kv and differs_from_table(dense.arch, hidden, gated):
            dense.kv[key] = encode_value("str", hidden)
        yield dense


def _hidden_act(folder: Path) -> tuple[str, float]:
    """The activation of the text model in ``config.json``, or "", and FATReLU's threshold."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text = config.get("text_config")
    found = text if isinstance(text, dict) else config
    name = next((v for k in _ACTIVATION_KEYS if isinstance(v := found.get(k), str)), "")
    cut = found.get("hidden_act_param")
    if name != "fatrelu" or cut is None:  # without a threshold nobody knows what it is
        return name, 0.0
    if isinstance(cut, bool) or not isinstance(cut, int | float) or not 0 <= cut < math.inf:
        raise ArgumentError(
            f"cannot convert '{folder}': its config.json has hidden_act_param {cut!r}, expected "
            "fatrelu's threshold, a number of zero or more; correct it"
        )
    return "relu", float(cut)


@contextmanager
def _dense_file(src: Path, outtype: str | None, beside: Path) -> Iterator[Path]:
    """``src`` itself when it fits already, else a temporary file made from it."""
    if not src.exists():
        raise IoError(f"cannot read '{src}': no such file or folder")
    if outtype and outtype.upper() not in (*_QUANTIZE_TYPES, "AUTO"):
        raise ArgumentError(
            f"type '{outtype}' is unknown, expected one of {' '.join(_QUANTIZE_TYPES).lower()}"
        )
    made = _Temporary(beside)
    try:
        dense = src
        if src.is_dir():
            direct = (outtype or "auto").lower()
            dense = made.new("hf")
            direct = direct if direct in _HF_TYPES else "auto"
            with _watched(_folder_files(src), src):
                _convert_folder(src, dense, direct)
        if outtype and outtype.lower() != "auto" and not _has_type(dense, outtype):
            quantized = made.new(outtype.lower())
            with _watched([c.path for c in read_set(dense, versions=(2, 3))], src):
                _quantize(dense, quantized, outtype)
            dense = quantized
        yield dense
    finally:
        made.remove()


@contextmanager
def _watched(files: Iterable[Path], shown: Path) -> Iterator[None]:
    """Raises IoError if ``files`` changed while a tool read them, whatever the tool says."""
    before = Unchanged(files, shown)
    try:
        yield
    except ToolError:
        before.check()  # then that is the reason
        raise
    before.check()


def _folder_files(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_file()]


class _Temporary:
    """Files beside ``beside``, each locked until it is removed."""

    def __init__(self, beside: Path) -> None:
        self._beside = beside
        self._made: list[tuple[Path, int]] = []

    def new(self, label: str) -> Path:
        try:
            remove_stale(self._beside)
            path, fd = create_sibling(self._beside, f"{label}.gguf")
        except OSError as e:
            raise write_refused(self._beside, e) from e
        self._made.append((path, fd))
        _locks.set((*_locks.get(), fd))
        return path

    def remove(self) -> None:
        for path, fd in self._made:
            path.unlink(missing_ok=True)
            _locks.set(tuple(lock for lock in _locks.get() if lock != fd))
            os.close(fd)


def _has_type(path: Path, outtype: str) -> bool:
    """True when ``general.file_type`` says that ``path`` is of ``outtype``."""
    from gguf import LlamaFileType

    value = read_set(path, versions=(2, 3))[0].kv.get("general.file_type")
    if value is None or value.type in ("str", "arr"):
        return False
    name = _ALIASES.get(outtype.upper(), outtype.upper())
    wanted = "ALL_F32" if name == "F32" else f"MOSTLY_{name}"
    known = {int(t): t.name for t in LlamaFileType}
    return known.get(int(value.decode()), "") == wanted


def _converter_script() -> Path:
    try:
        script = runtime.upstream_dir() / _SCRIPT
    except FlashError:
        script = Path(_SCRIPT)
    source = os.environ.get("GGUF_FLASH_LLAMA_SOURCE")
    if not script.is_file() and source:
        root = Path(source)
        script = next(
            (p / _SCRIPT for p in (root, root / "vendor/llama.cpp") if (p / _SCRIPT).is_file()),
            script,
        )
    if not script.is_file():
        raise ToolError(
            f"cannot convert a Hugging Face folder: '{_SCRIPT}' is not installed with gguf_flash; "
            "reinstall it, or set GGUF_FLASH_LLAMA_SOURCE to a llama.cpp source folder"
        )
    return script


def _convert_folder(src: Path, out: Path, outtype: str) -> None:
    if not (src / "config.json").is_file():
        raise ArgumentError(
            f"cannot convert '{src}': it has no 'config.json', so it is no Hugging Face model; "
            "give such a folder or a GGUF file"
        )
    if not any(path.suffix in _WEIGHTS for path in src.iterdir()):
        raise ArgumentError(
            f"cannot convert '{src}': it has a 'config.json' but no weights, expected "
            f"{' or '.join(_WEIGHTS)} files; complete the download"
        )
    check_checkpoint(src)
    _require_torch()
    script = _converter_script()
    env = dict(os.environ)
    paths = [str(script.parent / "gguf-py"), str(script.parent), env.get("PYTHONPATH", "")]
    env.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1")
    env["PYTHONPATH"] = os.pathsep.join(p for p in paths if p)
    command = [sys.executable, "-m", "gguf_flash.converters.hf_script", str(script), str(src)]
    command += ["--outfile", str(out), "--outtype", outtype]
    _run(command, f"convert '{src}' with upstream's {_SCRIPT}", env)


def _require_torch() -> None:
    from importlib.util import find_spec

    missing = [m for m in ("torch", "transformers") if find_spec(m) is None]
    if missing:
        raise ToolError(
            f"cannot convert a Hugging Face folder: {' and '.join(missing)} not installed; run "
            "pip install 'gguf_flash[hf]'"
        )


def _quantize(dense: Path, out: Path, outtype: str) -> None:
    tool = runtime.tool_path("llama-quantize")
    name = outtype.upper()
    command = [str(tool), "--allow-requantize", str(dense), str(out), name]
    _run(command, f"change the type of '{dense}' to {name} with llama-quantize", dict(os.environ))


def _run(command: list[str], doing: str, env: dict[str, str]) -> None:
    """Run a tool quietly, with our locks; why it failed becomes the error's text."""
    locks = _locks.get()
    try:
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, errors="replace", pass_fds=locks
        )
    except OSError as e:
        raise ToolError(f"cannot {doing}: '{command[0]}' does not start ({e.strerror})") from e
    if done.returncode:
        said = _reason(done.stderr) or _reason(done.stdout) or "it said nothing"
        raise ToolError(f"cannot {doing}: it ended with {_status(done.returncode)}: {said}")


def _status(code: int) -> str:
    if code >= 0:
        return f"status {code}"
    return f"signal {-code} ({signal.strsignal(-code) or 'unknown'})"


def _reason(output: str) -> str:
    """The exception under the last Python traceback, else logged errors, else the last lines."""
    _, traceback, tail = output.rpartition("Traceback (most recent call last):\n")
    lines = [line.rstrip() for line in tail.splitlines() if line.strip()]
    if traceback:
        lines = list(dropwhile(lambda line: line.startswith(" "), lines))[:3]
    else:
        logged = [m[1] for line in lines if (m := re.match(r"ERROR:[^:]*:(.*)", line))]
        lines = (logged or lines)[-3:]
    return " / ".join(line.strip() for line in lines)
