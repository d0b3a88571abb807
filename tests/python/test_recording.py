"""The folder of a recording: what is read back, what is refused, and the figures drawn from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gguf_flash import _core
from gguf_flash.calibrate.recording import Recording, RecordingInfo, decode_magnitudes
from gguf_flash.calibrate.recording_writer import LayerRows, RecordingWriter
from gguf_flash.calibrate.usage import active_share, aggregated_usage
from gguf_flash.errors import ArgumentError, CorruptFileError, FlashError, VersionError

N_EMBD = 4


def write(folder: Path, activity: dict[int, np.ndarray[Any, Any]], ctx: int) -> Recording:
    """A recording of given activity: bool (tokens, n_ff) for each layer, whole windows."""
    tokens = len(next(iter(activity.values())))
    info = RecordingInfo(
        model_name="m.gguf",
        model_sha256="1" * 64,
        arch="llama",
        n_embd=N_EMBD,
        text_name="t.txt",
        text_sha256="2" * 64,
        text_bytes=100,
        n_vocab=258,
        ctx=ctx,
        tokens_wanted=tokens,
        tokens=0,
        magnitudes=True,
        layers=(),
    )
    with RecordingWriter(folder, info) as writer:
        shapes = [(layer, a.shape[1]) for layer, a in sorted(activity.items())]
        writer.start(shapes, lambda layer: np.arange(activity[layer].shape[1], dtype=np.float32))
        for begin in range(0, tokens, ctx):
            part = {layer: a[begin : begin + ctx] for layer, a in activity.items()}
            writer.append(
                range(begin, begin + ctx), {k: _rows(k, begin, a) for k, a in part.items()}
            )
    return Recording.open(folder)


def _rows(layer: int, begin: int, active: np.ndarray[Any, Any]) -> LayerRows:
    x = np.full((len(active), N_EMBD), layer, np.float16)
    x[:, 0] += np.arange(begin, begin + len(active), dtype=np.float16)
    bits = np.packbits(active, axis=1, bitorder="little")
    return LayerRows(x, bits, active.astype(np.uint8) * np.uint8(161))


@pytest.fixture
def recording(tmp_path: Path) -> Recording:
    rng = np.random.default_rng(0)
    activity = {n: rng.random((24, n_ff)) < 0.3 for n, n_ff in ((0, 13), (7, 16), (1234, 5))}
    return write(tmp_path / "r", activity, 6)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    activity = {n: rng.random((18, n_ff)) < 0.5 for n, n_ff in ((2, 13), (10, 8))}
    recording = write(tmp_path / "r", activity, 6)
    assert (recording.tokens, recording.ctx, recording.n_embd) == (18, 6, N_EMBD)
    assert (recording.arch, recording.model_sha256, recording.text_name) == (
        "llama", "1" * 64, "t.txt",
    )  # fmt: skip
    assert list(recording.token_ids()) == list(range(18))
    for layer in recording.layers:
        expected = activity[layer.layer]
        assert np.array_equal(layer.active(0, 18), expected)
        assert np.array_equal(layer.active(5, 13), expected[5:13])
        assert layer.active(3, 3).shape == (0, layer.n_ff)
        codes, x = layer.magnitudes(), layer.x()
        assert codes is not None and np.array_equal(codes == 161, expected)
        assert x.dtype == np.float16 and x.shape == (18, N_EMBD)
        assert list(x[:, 0]) == [layer.layer + i for i in range(18)]
        assert list(layer.down_norm()) == list(range(layer.n_ff))
    assert {p.name for p in recording.files()} == {p.name for p in recording.path.iterdir()}


def test_layers_by_number(recording: Recording) -> None:
    assert recording.layer(1234).n_ff == 5
    with pytest.raises(ArgumentError, match="no layer 1, it has 0, 7, 1234"):
        recording.layer(1)


@pytest.mark.parametrize(("share", "held_out"), [(0, 1), (0.1, 1), (0.5, 2), (0.8, 3), (1, 3)])
def test_split_is_at_a_window(recording: Recording, share: float, held_out: int) -> None:
    assert recording.split(share) == (4 - held_out) * 6


def test_split_needs_two_windows(tmp_path: Path, recording: Recording) -> None:
    one = write(tmp_path / "one", {0: np.ones((6, 8), bool)}, 6)
    with pytest.raises(ArgumentError, match="one window of 6 tokens"):
        one.split()
    with pytest.raises(ArgumentError, match=r"from 0 to 1, found 1\.5"):
        recording.split(1.5)


# --- refusals -------------------------------------------------------------------------------------


def refused(folder: Path, kind: type[FlashError], words: str) -> None:
    with pytest.raises(kind, match=words) as info:
        Recording.open(folder)
    assert str(folder) in str(info.value) and "\n" not in str(info.value)


def test_no_recording(tmp_path: Path) -> None:
    refused(tmp_path, ArgumentError, "is no recording")
    refused(tmp_path / "none", ArgumentError, "is no recording")
    (tmp_path / "file").touch()
    refused(tmp_path / "file", ArgumentError, "is no recording")


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"format": 2}, VersionError, "format 1 expected, found 2"),
        ({"format": None}, VersionError, "found None"),
        ({"tokens": 0}, ArgumentError, "is empty"),
        ({"tokens": 7}, CorruptFileError, "multiple of 'ctx'"),
        ({"tokens": -6}, CorruptFileError, "multiple of 'ctx'"),
        ({"tokens": 30}, CorruptFileError, "bytes expected for 30 tokens"),
        ({"tokens": "24"}, CorruptFileError, "'tokens' of type int"),
        ({"tokens": True}, CorruptFileError, "'tokens' of type int"),
        ({"ctx": 0}, CorruptFileError, "'ctx' must be at least 1"),
        ({"model": []}, CorruptFileError, "'model' of type dict"),
        ({"text": {"name": "t", "sha256": "2"}}, CorruptFileError, "'bytes' of type int"),
        ({"magnitudes": 1}, CorruptFileError, "'magnitudes' of type bool"),
        ({"layers": []}, CorruptFileError, "layers in ascending order"),
        ({"layers": [1]}, CorruptFileError, "'layer' of type int"),
        ({"layers": [{"layer": 0, "n_ff": 0}]}, CorruptFileError, "at least one neuron"),
        ({"layers": [{"layer": 0, "n_ff": 12}]}, CorruptFileError, r"layer-000\.down_norm"),
        ({"layers": [{"layer": 0, "n_ff": 300}]}, CorruptFileError, r"layer-000\.active"),
        ({"layers": [{"layer": 0, "n_ff": 13}] * 2}, CorruptFileError, "ascending order"),
        ({"layers": [{"layer": 3, "n_ff": 13}]}, CorruptFileError, "layer-003"),
    ],
)
def test_bad_descriptions(
    recording: Recording, change: dict[str, Any], kind: type[FlashError], words: str
) -> None:
    path = recording.path / "recording.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    refused(recording.path, kind, words)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\xfd", b"{}", b"[]", b"7"])
def test_descriptions_that_are_none(recording: Recording, content: bytes) -> None:
    (recording.path / "recording.json").write_bytes(content)
    refused(recording.path, FlashError, r"cannot read '.*recording\.json'")


def test_short_and_missing_files(recording: Recording) -> None:
    for path in recording.files():
        data = path.read_bytes()
        if path.name != "recording.json":
            path.write_bytes(data[:-1])
            refused(recording.path, CorruptFileError, path.name)
            path.unlink()
            refused(recording.path, CorruptFileError, f"{path.name}.* found 0")
            path.write_bytes(data)
    assert Recording.open(recording.path).tokens == 24


def test_more_data_than_tokens_is_not_seen(recording: Recording) -> None:
    """A killed collect leaves part of a window behind the valid tokens."""
    expected = np.array(recording.layers[0].x())
    for path in recording.files():
        if path.name.endswith((".f16", ".bits", ".u8", ".i32")):
            with path.open("ab") as file:
                file.write(b"half a window")
    again = Recording.open(recording.path)
    assert np.array_equal(again.layers[0].x(), expected)


def test_the_writer_refuses_rows_of_other_sizes(tmp_path: Path, recording: Recording) -> None:
    rows = {x.layer: _rows(x.layer, 0, x.active(0, 6)) for x in recording.layers}
    wrong = {
        "tokens": (range(5), rows),
        "layers": (range(6), {0: rows[0]}),
        "columns": (range(6), {**rows, 7: rows[0]}),
        "magnitudes": (range(6), {**rows, 7: rows[7]._replace(magnitudes=None)}),
    }
    before = {p.name: p.read_bytes() for p in recording.path.iterdir()}
    with RecordingWriter(recording.path, recording.info) as writer:
        for tokens, given_rows in wrong.values():
            with pytest.raises(ValueError):
                writer.append(tokens, given_rows)
    assert {p.name: p.read_bytes() for p in recording.path.iterdir()} == before


# --- magnitudes and usage -------------------------------------------------------------------------


def test_magnitudes_are_decoded_to_the_middle() -> None:
    values = np.exp2(np.random.default_rng(2).uniform(-20, 11.7, 5000)).astype(np.float32)
    codes = np.array([_core.magnitude_code(float(v)) for v in values], np.uint8)
    decoded = decode_magnitudes(codes)
    assert decoded.dtype == np.float32
    assert np.abs(np.log2(decoded / values)).max() < 1.001 / 16
    assert list(decode_magnitudes(np.array([[0, 1, 161, 255]], np.uint8))[0]) == pytest.approx(
        [0, 2**-20, 1, 2**11.75]
    )
    for value in (0.0, -0.0):
        assert _core.magnitude_code(value) == 0
    assert _core.magnitude_code(-1.0) == 161


def plain_usage(active: np.ndarray[Any, Any], ctx: int, k: int) -> float:
    total = 0
    for token in range(len(active)):
        first = max(token - token % ctx, token - k + 1)
        total += sum(
            any(active[t][i] for t in range(first, token + 1)) for i in range(active.shape[1])
        )
    return total / active.size


@settings(max_examples=40, deadline=None)
@given(
    ctx=st.integers(1, 9),
    windows=st.integers(1, 4),
    n_ff=st.integers(1, 20),
    density=st.sampled_from([0.02, 0.2, 0.9]),
    ks=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    seed=st.integers(0, 1000),
)
def test_usage_is_that_of_a_plain_loop(
    tmp_path_factory: pytest.TempPathFactory,
    ctx: int, windows: int, n_ff: int, density: float, ks: list[int], seed: int,
) -> None:  # fmt: skip
    active = np.random.default_rng(seed).random((ctx * windows, n_ff)) < density
    recording = write(tmp_path_factory.mktemp("usage") / "r", {3: active}, ctx)
    found = aggregated_usage(recording, 3, ks)
    assert list(found) == list(dict.fromkeys(ks))
    for k in ks:
        assert found[k] == pytest.approx(plain_usage(active, ctx, k), abs=1e-12)
    assert active_share(recording, 3) == pytest.approx(active.mean(), abs=1e-12)


def test_usage_of_wrong_windows(recording: Recording) -> None:
    with pytest.raises(ArgumentError, match=r"at least one token expected, found \[3, 0\]"):
        aggregated_usage(recording, 0, (3, 0))
    with pytest.raises(ArgumentError, match="no layer 5"):
        aggregated_usage(recording, 5)
    assert aggregated_usage(recording, 0, ()) == {}
