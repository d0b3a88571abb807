"""Every verb that opens a model refuses every hostile file: code 2 and one sentence.

A verb judges all files in one child process, since llama.cpp takes a second to start and a crash of
it must not be ours.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hostile_files import ALL_CASES, write_case
from tiny_models import make_dense

from gguf_flash import FlashLlama
from gguf_flash.errors import CorruptFileError

# Reads argument lists, one JSON list on each line; answers each with code and outputs.
_CHILD = """
import json, sys
from click.testing import CliRunner
from gguf_flash.cli import main
answers = open(sys.argv[1], "w")
for line in sys.stdin:
    result = CliRunner().invoke(main, json.loads(line))
    failed = result.exception is not None and not isinstance(result.exception, SystemExit)
    answer = [result.exit_code, result.output, repr(result.exception) if failed else ""]
    print(json.dumps(answer), file=answers, flush=True)
"""

VERBS = {
    "inspect": lambda file, source, out: ["inspect", file, "--json"],
    "verify": lambda file, source, out: ["verify", file, "--against", source],
    "convert": lambda file, source, out: ["convert", file, "--out", out],
    "plan": lambda file, source, out: ["plan", file, "--ram", "50%", "--json"],
    "order": lambda file, source, out: ["order", file, out, "--text", source],
    "run": lambda file, source, out: ["run", file, "--prompt", "x", "--tokens", "1"],
}


@pytest.mark.parametrize("verb", VERBS)
def test_hostile_files_are_refused_in_one_sentence(verb: str, tmp_path: Path) -> None:
    source, out, answers = (tmp_path / n for n in ("source.gguf", "out.gguf", "answers"))
    make_dense(source, n_embd=32, n_ff=64, n_layer=2, type="F32")
    files = [str(write_case(tmp_path, name)) for name in ALL_CASES]
    lines = [json.dumps(VERBS[verb](file, str(source), str(out))) for file in files]
    child = subprocess.run(
        [sys.executable, "-c", _CHILD, str(answers)],
        input="\n".join(lines),
        text=True,
        capture_output=True,
        timeout=600,
    )
    found = [json.loads(line) for line in answers.read_text().splitlines()]
    problems = [
        f"{name}: code {code}, {text!r} {error}"
        for name, (code, text, error) in zip(ALL_CASES, found, strict=False)
        if code != 2 or error or not _is_refusal(text, verb, name)
    ]
    if len(found) < len(ALL_CASES):
        problems.append(f"{ALL_CASES[len(found)]} ended the process: {child.stderr[-2000:]}")
    assert not problems, "\n".join(problems)
    assert not out.exists()


def _is_refusal(text: str, verb: str, name: str) -> bool:
    line = text.removesuffix("\n")
    # To convert, a flash-GGUF is as wrong as it can be; an ordinary one may be run.
    named = verb == "convert" or (name == "r04_no_version" and verb == "run")
    rule = "" if named else f"(SPEC R{int(name[1:3])})"
    sentence = line.startswith("gguf-flash: ") and line.isprintable() and len(line) < 800
    return sentence and line.endswith(rule)


def test_a_line_of_the_log_as_long_as_a_name_takes_no_time() -> None:
    from gguf_flash import llama_log
    from gguf_flash.llama_api import low_level

    log = llama_log.LlamaLog(low_level())
    start = time.monotonic()
    log._receive(2, b"k" * 40_000 + b" buffer size", None)
    assert time.monotonic() - start < 5
    log._receive(2, b"llama_kv_cache: CPU KV buffer size = 2.00 MiB", None)
    assert log.kv_bytes == 2 << 20


def test_llama_refuses_by_the_rule(tmp_path: Path) -> None:
    with pytest.raises(CorruptFileError, match=r"\(SPEC R24\)"):
        FlashLlama(str(write_case(tmp_path, "r24_zeros_large")))
