"""The tables of architectures against the pinned source, so that moving the pin shows what is new.

A graph that multiplies FFN matrices itself gets around build_ffn, which is all that our hooks
serve: such an architecture must be refused, or have a hook in its own graph.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from apply_series import read_series
from unidiff import PatchSet

from gguf_flash.converters import architectures

ROOT = Path(__file__).resolve().parents[2]
PATCHES = ROOT / "cpp_patch" / "patches"
OURS = {"opt", "persimmon"}  # cpp_patch/models

_PRODUCT = re.compile(r"\b(?:ggml_mul_mat(?:_id)?|build_\w*mm(?:_id)?)\s*\(")
_FFN_CALL = re.compile(r"\bbuild_ffn\s*\(")
_MATRIX = re.compile(r"\b(?:ffn_(?:up|gate|down)(?:_enc)?|channel_mix_\w+)\b")
_DOWN = 7  # of build_ffn's arguments


def uncommented(text: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)


def arguments(text: str, start: int) -> list[str]:
    """Those of the call whose parenthesis is at `start`."""
    depth, found = 0, [""]
    for c in text[start:]:
        depth += (c in "([{") - (c in ")]}")
        if depth == 0:
            return found
        if c == "," and depth == 1:
            found.append("")
        elif not (c == "(" and depth == 1):
            found[-1] += c
    raise AssertionError("a call does not end")


def multiplies_itself(source: str) -> bool:
    """True when FFN matrices of layers are used outside build_ffn, or it is not given them all."""
    source = uncommented(source)
    for match in _PRODUCT.finditer(source):
        if any(_MATRIX.search(a) for a in arguments(source, match.end() - 1)):
            return True
    calls = (arguments(source, m.end() - 1) for m in _FFN_CALL.finditer(source))
    return any(len(c) > _DOWN and c[_DOWN].strip() in ("NULL", "nullptr") for c in calls)


@pytest.fixture(scope="module")
def classes(pristine: Path) -> dict[str, str]:
    """The class of each architecture that llama.cpp can make."""
    names = dict(
        re.findall(r'\{ (LLM_ARCH_\w+),\s+"([^"]+)"', (pristine / "src/llama-arch.cpp").read_text())
    )
    create = (pristine / "src/llama-model.cpp").read_text().split("unsupported model arch")[0]
    found = re.finditer(r"((?:case LLM_ARCH_\w+:\s*)+)return new (llama_model_\w+)", create)
    return {
        names[enum]: match[2] for match in found for enum in re.findall(r"LLM_ARCH_\w+", match[1])
    }


def bases(pristine: Path) -> dict[str, str]:
    """What each class of a model or of its graph is derived from."""
    header = (pristine / "src/models/models.h").read_text()
    return dict(re.findall(r"struct (llama_model_\w+) : public (llama_model_\w+)", header))


def bypassing(pristine: Path, classes: dict[str, str]) -> Iterator[str]:
    own: set[str] = set()
    for path in (pristine / "src" / "models").glob("*.cpp"):
        source = path.read_text()
        if multiplies_itself(source):
            own |= set(re.findall(r"\b(llama_model_\w+)::", source))
            own |= {f"{path.stem}.cpp"}
    derived = bases(pristine)
    for arch, name in classes.items():
        line = [name]
        while line[-1] in derived:
            line.append(derived[line[-1]])
        file = name.removeprefix("llama_model_")
        if own & set(line) or {f"{file}-base.cpp", f"{file}.cpp"} & own:
            yield arch


def test_every_architecture_is_in_the_table(classes: dict[str, str]) -> None:
    assert set(classes) | OURS == architectures._KNOWN


def test_graphs_that_multiply_ffn_matrices_themselves(
    pristine: Path, classes: dict[str, str]
) -> None:
    found = set(bypassing(pristine, classes))
    patched = {c.path for p in read_series(PATCHES) for c in PatchSet(p.read_text())}
    hooked = {a for a in found if f"src/models/{a}.cpp" in patched}
    assert hooked == {"bitnet", "gemma3n"}
    refused = {a for a in architectures._KNOWN if architectures.computes_own_ffn(a)}
    assert found - hooked == refused


def test_the_hooks_refuse_the_same(pristine: Path) -> None:
    """At load, whoever wrote the file."""
    names = dict(
        re.findall(r'\{ (LLM_ARCH_\w+),\s+"([^"]+)"', (pristine / "src/llama-arch.cpp").read_text())
    )
    source = (ROOT / "cpp_patch/hooks/open.cpp").read_text()
    listed = source.split("own_ffns[] = {")[1].split("}")[0]
    found = {names[enum] for enum in re.findall(r"LLM_ARCH_\w+", listed)}
    assert found == {a for a in architectures._KNOWN if architectures.computes_own_ffn(a)}


@pytest.mark.parametrize(
    ("source", "own"),
    [
        (
            "cur = build_ffn(cur, l.ffn_up, NULL, NULL, l.ffn_gate, NULL, NULL, l.ffn_down, NULL);",
            0,
        ),
        (
            "cur = build_ffn(cur, l.ffn_up, NULL, NULL, l.ffn_gate, NULL, NULL, NULL, NULL, NULL);",
            1,
        ),
        ("cur = build_lora_mm(model.layers[il].ffn_down, cur);", 1),
        ("// cur = build_lora_mm(model.layers[il].ffn_down, cur);", 0),
        ("cur = ggml_mul_mat(ctx0, l.wo, build_norm(cur, l.ffn_norm));", 0),
        ("cur = build_lora_mm(l.ffn_gate_inp, cur);", 0),
        ("k = build_lora_mm(layer->channel_mix_key, xk);", 1),
    ],
)
def test_what_counts(source: str, own: int) -> None:
    assert multiplies_itself(source) == bool(own)


def test_activations_are_the_graphs(pristine: Path, classes: dict[str, str]) -> None:
    """Of each listed architecture whose own file names one kind of operation."""
    known = {
        "SILU": "silu", "SWIGLU": "silu", "GELU": "gelu", "GEGLU": "gelu", "RELU": "relu",
        "RELU_SQR": "relu_sqr",
    }  # fmt: skip
    compared = 0
    for path in (pristine / "src" / "models").glob("*.cpp"):
        source = uncommented(path.read_text())
        kinds = set(re.findall(r"\bLLM_FFN_([A-Z_]+)\b", source)) - {"PAR", "SEQ"}
        names = {known.get(k, "") for k in kinds}
        owners = set(re.findall(r"\b(llama_model_\w+)::build_arch_graph", source))
        for arch, name in classes.items():
            usual = architectures.usual_activation(arch)
            if name in owners and len(names) == 1 and usual and arch != "t5":
                assert names == {usual}, arch
                compared += 1
    assert compared > 60
