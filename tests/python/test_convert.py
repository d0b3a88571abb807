"""Conversion and its proof: every byte arrives, in any order, and mistakes are found."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from bundles import down_values
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import make_dense

from gguf_flash.converters import convert, verify
from gguf_flash.errors import (
    ArgumentError,
    CorruptFileError,
    FlashError,
    IoError,
    NotFlashError,
    ToolError,
    UnsupportedError,
)
from gguf_flash.format import read_bundle, read_layout

TYPES = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"]


def _values(tensor: Any) -> np.ndarray:
    return gguf.quants.dequantize(tensor.data, tensor.tensor_type)


def _tensors(path: Path) -> dict[str, Any]:
    return {t.name: t for t in gguf.GGUFReader(path).tensors}


def _check_rows(dense: Path, flash: Path) -> None:
    """Gate and up bytes equal, down values equal, through gguf's reader alone."""
    source, layout = _tensors(dense), read_layout(flash)
    for b in layout.layers:
        up = source[f"blk.{b.layer}.ffn_up.weight"].data.view(np.uint8)
        halves = {"gate": up[: b.n_ff], "up": up[b.n_ff :]} if layout.fused else {"up": up}
        if layout.gated and not layout.fused:
            halves["gate"] = source[f"blk.{b.layer}.ffn_gate.weight"].data.view(np.uint8)
        rows = read_bundle(layout, b.layer)
        used = np.zeros(b.stride, bool)
        for part in b.parts:
            used[part.offset : part.end] = True
            if part.name != "down":
                assert np.array_equal(rows[:, part.offset : part.end], halves[part.name])
        assert not rows[:, ~used].any()
        down = b.parts[-1]
        found = down_values(layout, b.layer)
        wanted = _values(source[f"blk.{b.layer}.ffn_down.weight"]).T
        rounded = wanted.astype(np.float16) if down.type.name == "F16" else wanted
        assert np.array_equal(found, rounded.astype(np.float32))


@st.composite
def models(draw: st.DrawFn) -> dict[str, Any]:
    arch = draw(st.sampled_from(["llama", "nemotron", "phi3", "starcoder2"]))
    n_layer = draw(st.integers(1, 3))
    kind = st.sampled_from(TYPES)
    types = [{p: draw(kind) for p in ("gate", "up", "down")} for _ in range(n_layer)]
    return {
        "arch": arch,
        "n_embd": 32 * draw(st.integers(1, 3)),
        "n_ff": 32 * draw(st.integers(1, 12)),
        "n_layer": n_layer,
        "type": types,
        "biases": arch != "phi3" and draw(st.booleans()),
        "seed": draw(st.integers(0, 99)),
    }


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(models(), st.sampled_from(["all", "gate"]), st.sampled_from([32, 512, 4096]), st.booleans())
def test_round_trip(
    tmp_path_factory: pytest.TempPathFactory,
    model: dict[str, Any],
    select: str,
    align: int,
    shuffle: bool,
) -> None:
    folder = tmp_path_factory.mktemp("round")
    dense, flash = make_dense(folder / "d.gguf", **model), folder / "f.gguf"
    rng = np.random.default_rng(model["seed"])
    orders = {0: rng.permutation(model["n_ff"])} if shuffle else None
    layout = convert(dense, flash, select=select, align=align, orders=orders)
    assert layout == read_layout(flash)
    assert all(b.stride % align == 0 and b.offset % 32 == 0 for b in layout.layers)
    if not shuffle:
        _check_rows(dense, flash)
    report = verify(flash, dense)
    assert report.ok, report.summary()
    assert report.permuted_layers == int(shuffle)
    assert report.neurons == model["n_ff"] * model["n_layer"]
    shutil.rmtree(folder)


def test_keys_and_residents_are_copied(tmp_path: Path) -> None:
    dense = make_dense(tmp_path / "d.gguf", type="Q8_0", other_type="Q4_0", biases=True)
    convert(dense, tmp_path / "f.gguf")
    ours, theirs = gguf.GGUFReader(tmp_path / "f.gguf"), gguf.GGUFReader(dense)
    for key, f in theirs.fields.items():
        if not key.startswith("GGUF."):
            assert ours.fields[key].types == f.types, key
            assert ours.fields[key].contents() == f.contents(), key
    added = set(ours.fields) - set(theirs.fields)
    assert all(k.startswith("flash_ffn.") for k in added)
    source, flash = _tensors(dense), _tensors(tmp_path / "f.gguf")
    assert list(flash)[:2] == ["blk.0.ffn_bundle", "blk.1.ffn_bundle"]
    for name, t in source.items():
        if not name.endswith(("gate.weight", "up.weight", "down.weight")):
            assert flash[name].tensor_type == t.tensor_type
            assert np.array_equal(flash[name].data, t.data)
    assert "blk.0.ffn_up.bias" in flash and "blk.0.ffn_up.weight" not in flash


def test_gate_mode_keeps_the_deciding_matrix(tmp_path: Path) -> None:
    for gated, name, parts in ((True, "gate", ("up", "down")), (False, "up", ("down",))):
        dense = make_dense(tmp_path / "d.gguf", gated=gated)
        layout = convert(dense, tmp_path / "f.gguf", select="gate")
        assert layout.part_names == parts
        key = f"blk.0.ffn_{name}.weight"
        assert np.array_equal(_tensors(tmp_path / "f.gguf")[key].data, _tensors(dense)[key].data)


@pytest.mark.parametrize("kind", ["f32", "q8_0", "q4_0"])
def test_down_type(kind: str, tmp_path: Path) -> None:
    dense = make_dense(tmp_path / "d.gguf", type="Q4_1")
    layout = convert(dense, tmp_path / "f.gguf", down_type=kind)
    down = layout.bundle(0).parts[-1]
    assert down.type.name == kind.upper()
    found = down_values(layout, 0)
    wanted = _values(_tensors(dense)["blk.0.ffn_down.weight"]).T
    report = verify(tmp_path / "f.gguf", dense)
    assert report.ok
    assert np.max(np.abs(found - wanted)) <= report.down_max_abs_error
    assert (report.down_max_abs_error == 0) == (kind == "f32")


@pytest.mark.parametrize(
    ("arch", "hidden", "asked", "expected"),
    [
        ("llama", None, None, "silu"),
        ("nemotron", None, None, "relu_sqr"),
        ("phi2", None, None, "gelu"),
        ("llama", "relu", None, "relu"),
        ("phi2", "gelu_pytorch_tanh", None, "gelu"),
        ("llama", "relu", "silu", "silu"),
    ],
)
def test_activation(
    arch: str, hidden: str | None, asked: str | None, expected: str, tmp_path: Path
) -> None:
    dense = make_dense(tmp_path / "d.gguf", arch=arch, activation=hidden)
    assert convert(dense, tmp_path / "f.gguf", activation=asked).activation == expected


def _edited(path: Path, **changes: Any) -> Path:
    """A GGUF of arch ``x`` with the given tensors (name: array), for sources that are refused."""
    w = gguf.GGUFWriter(path, changes.pop("arch", "llama"))
    for name, array in changes.items():
        w.add_tensor(name.replace("__", "."), array)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


_UP, _DOWN = np.ones((8, 32), np.float32), np.ones((32, 8), np.float32)
REFUSED = {
    "mixture of experts": {"blk__0__ffn_up_exps__weight": np.ones((2, 8, 32), np.float32)},
    "nothing to keep on flash": {"token_embd__weight": _UP},
    "projector": {"arch": "clip", "blk__0__ffn_up__weight": _UP},
    "do not fit together": {"blk__0__ffn_up__weight": _UP, "blk__0__ffn_down__weight": _UP},
    "way of its own": {"arch": "apertus", "blk__0__ffn_up__weight": _UP},
    "of another form": {
        "blk__0__ffn_up__weight": _UP,
        "blk__0__ffn_down__weight": _DOWN,
        "blk__1__ffn_gate__weight": _UP,
        "blk__1__ffn_up__weight": _UP,
        "blk__1__ffn_down__weight": _DOWN,
    },
    "cannot be read as weights": {
        "blk__0__ffn_up__weight": _UP,
        "blk__0__ffn_down__weight": _DOWN.astype(np.int8),
    },
    "scales": {
        "blk__0__ffn_up__weight": _UP,
        "blk__0__ffn_down__weight": _DOWN,
        "blk__0__ffn_up__scale": np.ones(1, np.float32),
    },
}


@pytest.mark.parametrize("message", REFUSED)
def test_sources_that_cannot_be_served(message: str, tmp_path: Path) -> None:
    src = _edited(tmp_path / "s.gguf", **REFUSED[message])
    with pytest.raises(UnsupportedError, match=message):
        convert(src, tmp_path / "f.gguf")
    assert [p.name for p in tmp_path.iterdir()] == ["s.gguf"]


def test_blocks_without_an_ffn_stay_as_they_are(tmp_path: Path) -> None:
    src = _edited(
        tmp_path / "s.gguf", blk__2__ffn_up__weight=_UP, blk__2__ffn_down__weight=_DOWN,
        blk__0__attn_q__weight=_UP,
    )  # fmt: skip
    layout = convert(src, tmp_path / "f.gguf")
    assert [b.layer for b in layout.layers] == [2]
    assert [t.name for t in layout.resident] == ["blk.0.attn_q.weight"]
    assert verify(tmp_path / "f.gguf", src).ok


def test_bad_arguments(tmp_path: Path) -> None:
    dense, out = make_dense(tmp_path / "d.gguf", n_embd=32, n_ff=32), tmp_path / "f.gguf"
    for options in (
        {"select": "oracle"},
        {"align": 500},
        {"align": 16},
        {"down_type": "q9"},
        {"down_type": "i8"},
        {"down_type": "q4_k"},
        {"activation": "tanh"},
        {"outtype": "q9"},
        {"orders": {0: np.zeros(32, np.int64)}},
    ):
        with pytest.raises(ArgumentError):
            convert(dense, out, **options)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="part of the source"):
        convert(dense, dense)
    with pytest.raises(IoError, match="does not exist"):
        convert(dense, tmp_path / "no" / "f.gguf")
    with pytest.raises(IoError, match="no such file"):
        convert(tmp_path / "none.gguf", out)
    assert not out.exists()


def test_values_beyond_f16_are_not_made_infinite(tmp_path: Path) -> None:
    down = np.full((32, 32), 1e6, np.float32)
    src = _edited(
        tmp_path / "s.gguf", blk__0__ffn_up__weight=np.ones((32, 32), np.float32),
        blk__0__ffn_down__weight=down,
    )  # fmt: skip
    with pytest.raises(ArgumentError, match="--down-type f32"):
        convert(src, tmp_path / "f.gguf", down_type="f16")
    assert [p.name for p in tmp_path.iterdir()] == ["s.gguf"]


def test_flash_is_not_converted_again(tmp_path: Path) -> None:
    dense = make_dense(tmp_path / "d.gguf")
    convert(dense, tmp_path / "f.gguf")
    with pytest.raises(UnsupportedError, match="already"):
        convert(tmp_path / "f.gguf", tmp_path / "g.gguf")
    with pytest.raises(NotFlashError):
        verify(dense, dense)


def test_truncated_source(tmp_path: Path) -> None:
    data = make_dense(tmp_path / "d.gguf").read_bytes()
    src, out = tmp_path / "s.gguf", tmp_path / "f.gguf"
    for cut in (*range(0, len(data), 9973), len(data) - 33):
        src.write_bytes(data[:cut])
        with pytest.raises((CorruptFileError, NotFlashError)):
            convert(src, out)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d.gguf", "s.gguf"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_nothing_is_left_after_a_failure(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = make_dense(tmp_path / "d.gguf")
    calls, write = 0, os.write

    def failing(fd: int, data: Any) -> int:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise error
        return write(fd, data)

    monkeypatch.setattr(os, "write", failing)
    with pytest.raises(IoError if isinstance(error, OSError) else KeyboardInterrupt):
        convert(dense, tmp_path / "f.gguf")
    assert [p.name for p in tmp_path.iterdir()] == ["d.gguf"]


def _flip(path: Path, offset: int) -> None:
    with open(path, "r+b") as f:
        f.seek(offset)
        byte = f.read(1)[0]
        f.seek(offset)
        f.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("part", ["gate", "up", "down", "padding"])
def test_verify_finds_one_wrong_bit_in_a_bundle(part: str, tmp_path: Path) -> None:
    dense = make_dense(tmp_path / "d.gguf", type="Q8_0")
    layout = convert(dense, tmp_path / "f.gguf")
    b = layout.bundle(1)
    p = b.part(part)
    _flip(tmp_path / "f.gguf", b.offset + 77 * b.stride + (p.offset if p else b.stride - 1))
    report = verify(tmp_path / "f.gguf", dense)
    assert report.differences == [f"layer 1, neuron 77, {part} differs from the source"]


def test_verify_finds_a_wrong_resident_and_key(tmp_path: Path) -> None:
    dense = make_dense(tmp_path / "d.gguf", seed=1)
    layout = convert(dense, tmp_path / "f.gguf")
    _flip(tmp_path / "f.gguf", next(t for t in layout.resident if "attn_q" in t.name).offset)
    _flip(tmp_path / "f.gguf", (tmp_path / "f.gguf").read_bytes().index(b"tiny"))
    report = verify(tmp_path / "f.gguf", dense)
    assert [d.split("'")[1] for d in report.differences] == ["blk.0.attn_q.weight", "general.name"]
    assert report.summary().startswith("not equal: tensor 'blk.0.attn_q.weight'")


def test_verify_finds_another_model(tmp_path: Path) -> None:
    dense = make_dense(tmp_path / "d.gguf")
    convert(dense, tmp_path / "f.gguf")
    for options in ({"seed": 9}, {"n_ff": 160}, {"gated": False}, {"type": "F16"}):
        other = make_dense(tmp_path / "o.gguf", **options)  # type: ignore[arg-type]
        assert not verify(tmp_path / "f.gguf", other).ok


def test_verify_finds_a_bias_that_did_not_follow(tmp_path: Path) -> None:
    dense = make_dense(tmp_path / "d.gguf", biases=True)
    order = {0: np.roll(np.arange(128), 1)}
    layout = convert(dense, tmp_path / "f.gguf", orders=order)
    assert verify(tmp_path / "f.gguf", dense).permuted_layers == 1
    bias = next(t for t in layout.resident if t.name == "blk.0.ffn_up.bias")
    source = _tensors(dense)["blk.0.ffn_up.bias"]
    with open(tmp_path / "f.gguf", "r+b") as f:
        f.seek(bias.offset)
        f.write(source.data.tobytes())
    assert not verify(tmp_path / "f.gguf", dense).ok


def test_split_source_and_split_flash(tmp_path: Path) -> None:
    """A split source is joined; a split flash-GGUF is read where its tensors are."""
    dense = make_dense(tmp_path / "d.gguf")
    reader = gguf.GGUFReader(dense)
    w = gguf.GGUFWriter(tmp_path / "s.gguf", "llama", split_max_tensors=5)
    for t in reader.tensors:
        w.add_tensor(t.name, np.array(t.data))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    first = min(tmp_path.glob("s-00001-of-*.gguf"))
    layout = convert(first, tmp_path / "f.gguf")
    assert not any(k.startswith("split.") for k in layout.kv)
    assert verify(tmp_path / "f.gguf", first).ok
    _check_rows(dense, tmp_path / "f.gguf")


def test_folder_without_config_or_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    with pytest.raises(ArgumentError, match=r"config\.json"):
        convert(folder, tmp_path / "f.gguf")
    (folder / "config.json").write_text("{}")
    with pytest.raises(ArgumentError, match="no weights"):
        convert(folder, tmp_path / "f.gguf")
    (folder / "model.safetensors").touch()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ToolError, match=r"gguf_flash\[hf\]"):
        convert(folder, tmp_path / "f.gguf")
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


def test_folder_goes_through_upstreams_converter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for the script, which needs torch: how it is called and cleaned up after."""
    source, folder = tmp_path / "llama", tmp_path / "hf"
    source.mkdir()
    folder.mkdir()
    (folder / "config.json").write_text('{"hidden_act": "relu"}')
    (folder / "model.safetensors").touch()
    make_dense(folder / "model.gguf")
    script = """
        import shutil, sys
        src, _, out, _, outtype = sys.argv[1:]
        if outtype != "auto":
            sys.exit(f"no type {outtype} today")
        shutil.copy(src + "/model.gguf", out)
    """
    (source / "convert_hf_to_gguf.py").write_text(textwrap.dedent(script))
    monkeypatch.setattr("gguf_flash.runtime.upstream_dir", lambda: tmp_path / "nowhere")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setenv("GGUF_FLASH_LLAMA_SOURCE", str(source))
    layout = convert(folder, tmp_path / "f.gguf")
    assert layout.text("flash_ffn.source.name") == "hf"
    assert layout.activation == layout.text("llama.hidden_activation") == "relu"
    assert verify(tmp_path / "f.gguf", folder).ok
    with pytest.raises(ToolError, match="no type f16 today"):
        convert(folder, tmp_path / "g.gguf", outtype="f16")
    monkeypatch.delenv("GGUF_FLASH_LLAMA_SOURCE")
    with pytest.raises(ToolError, match="GGUF_FLASH_LLAMA_SOURCE"):
        convert(folder, tmp_path / "g.gguf")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["f.gguf", "hf", "llama"]


def test_outtype_goes_through_llama_quantize(tmp_path: Path) -> None:
    from gguf_flash import runtime

    try:
        runtime.tool_path("llama-quantize")
    except FlashError:
        pytest.skip("llama-quantize is not installed")
    dense = make_dense(tmp_path / "d.gguf", n_embd=64, n_ff=128)
    layout = convert(dense, tmp_path / "f.gguf", outtype="q8_0")
    assert [p.type.name for p in layout.bundle(0).parts] == ["Q8_0", "Q8_0", "I8"]
    report = verify(tmp_path / "f.gguf", dense)
    assert report.ok, report.summary()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d.gguf", "f.gguf"]


def _make_big(path: Path, n_layer: int, n_embd: int, n_ff: int) -> Path:
    """Half-precision layers of zeros but one value a row; sparse on disk where that is known."""
    w = gguf.GGUFWriter(path, "nemotron")
    layer = np.zeros((n_ff, n_embd), np.float16)
    layer[:, 0] = np.arange(n_ff) % 1000
    for i in range(n_layer):
        w.add_tensor(f"blk.{i}.ffn_up.weight", layer)
        w.add_tensor(f"blk.{i}.ffn_down.weight", layer.reshape(n_embd, n_ff))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    src = _make_big(tmp_path / "big.gguf", 5, 2048, 16384)
    assert src.stat().st_size > 600 << 20
    script = """
        import resource, sys
        from gguf_flash.converters import convert, verify
        def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        before = peak()
        convert(sys.argv[1], sys.argv[2])
        after = peak()
        assert verify(sys.argv[2], sys.argv[1]).ok
        print(after - before, peak() - before)
    """
    out = subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(script), str(src), str(tmp_path / "f.gguf")]
        if sys.version_info >= (3, 11)
        else [sys.executable, "-c", textwrap.dedent(script), str(src), str(tmp_path / "f.gguf")],
        capture_output=True, text=True, cwd=tmp_path, check=True,
    ).stdout  # fmt: skip
    converting, verifying = (int(v) for v in out.split())
    assert converting < 400 << 20
    assert verifying < 400 << 20


def test_command_line(tmp_path: Path) -> None:
    from click.testing import CliRunner

    from gguf_flash.cli import convert as cli_convert
    from gguf_flash.cli import inspect as cli_inspect
    from gguf_flash.cli import verify as cli_verify

    dense, flash = str(make_dense(tmp_path / "d.gguf")), str(tmp_path / "f.gguf")
    run = CliRunner().invoke
    made = run(cli_convert.command, [dense, "--out", flash, "--json"])
    assert made.exit_code == 0 and json.loads(made.output)["neurons"] == 256
    shown = run(cli_inspect.command, [flash])
    assert shown.exit_code == 0 and "silu" in shown.output
    layers = json.loads(run(cli_inspect.command, [flash, "--json"]).output)["layers"]
    assert [x["types"] for x in layers] == [["F32"] * 3] * 2
    proof = run(cli_verify.command, [flash, "--against", dense])
    assert proof.exit_code == 0 and proof.output.startswith("verified: 2 layers, 256 neurons")
    _flip(Path(flash), layers[1]["offset"])
    wrong = run(cli_verify.command, [flash, "--against", dense, "--json"])
    assert wrong.exit_code == 1
    assert json.loads(wrong.output)["differences"][0].startswith("layer 1, neuron 0, gate")
    refused = run(cli_inspect.command, [dense])
    assert isinstance(refused.exception, NotFlashError)
