"""gguf-flash collect: recorded values against numpy's, interruptions, and what is refused."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from conftest import Cli, Models
from numpy_model import NumpyModel, silence_attention
from tiny_models import make_dense

from gguf_flash import _core
from gguf_flash.calibrate import collect
from gguf_flash.calibrate.collector import Collected
from gguf_flash.calibrate.recording import Recording, decode_magnitudes
from gguf_flash.errors import ArgumentError, FlashError, IoError, UnsupportedError

CTX = 48


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory, english: Path) -> Path:
    """1000 bytes of English, and as many tokens of a tiny model."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(english.read_bytes()[:1000])
    return path


@pytest.fixture(scope="module")
def relu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A squared ReLU model whose attention works."""
    folder = tmp_path_factory.mktemp("relu")
    return make_dense(folder / "relu.gguf", arch="nemotron", n_ff=100, n_layer=3, biases=True)


def record(model: Path, text: Path, out: Path, **options: object) -> Recording:
    collect(model, text, **{"tokens": 4 * CTX, "out": out, "ctx": CTX, **options})  # type: ignore[arg-type]
    return Recording.open(out)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# --- what is recorded -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "type_name", "up_scale", "tolerance"),
    [
        ("nemotron", "F32", 1, 0.01),
        ("nemotron", "F16", 1, 0.01),
        ("nemotron", "Q8_0", 1, 0.1),
        ("nemotron", "Q4_0", 1, 0.1),
        ("llama", "F32", 1, 0.01),
        ("llama", "Q8_0", 1, 0.1),
        ("phi3", "F32", 1, 0.01),
        ("phi3", "Q4_0", 1, 0.1),
        ("starcoder2", "F32", 1000, 0.01),
        ("phi2", "F32", 1000, 0.01),
        ("phi2", "Q8_0", 1000, 0.1),
    ],
)
def test_recorded_values_are_numpys(
    arch: str, type_name: str, up_scale: float, tolerance: float, text: Path, tmp_path: Path
) -> None:
    """x and activity of every layer and token, computed from the token alone.

    Quantized products round their input to 8 bits, so there the last layer's values are near."""
    dense = make_dense(
        tmp_path / "m.gguf", arch=arch, type=type_name, n_ff=160, n_layer=3, up_scale=up_scale
    )
    recording = record(silence_attention(dense), text, tmp_path / "r", magnitudes=True)
    model = NumpyModel(dense)
    tokens = np.asarray(recording.token_ids())
    assert bytes(tokens.astype(np.uint8)) == text.read_bytes()[: 4 * CTX]  # no begin token here
    assert [(x.layer, x.n_ff) for x in recording.layers] == [(0, 160), (1, 160), (2, 160)]
    for layer, (x, _, _) in zip(recording.layers, model.ffns(tokens), strict=True):
        assert np.abs(layer.x() - x).max() < tolerance
        # h from the recorded x, so that errors of the layers before do not count twice.
        before, h = model.hidden(layer.layer, np.asarray(layer.x(), np.float32))
        scale = np.abs(before).max()
        certain = np.abs(before) > scale * tolerance / 5
        if arch in ("starcoder2", "phi2"):  # the GELU of a large negative value is zero
            certain &= np.abs(before) > 10
        assert certain.mean() > 0.8
        active = layer.active(0, recording.tokens)
        assert np.array_equal(active[certain], (h != 0)[certain])
        codes = layer.magnitudes()
        assert codes is not None and np.array_equal(codes != 0, active)
        large = np.abs(h) > np.abs(h).max() * (0.01 if tolerance < 0.1 else 0.2)
        off = np.abs(decode_magnitudes(np.asarray(codes))[large] / np.abs(h)[large] - 1)
        assert off.max() < 0.05 + 3 * tolerance
        norm = np.linalg.norm(model.weights[f"blk.{layer.layer}.ffn_down.weight"], axis=0)
        assert np.allclose(layer.down_norm(), norm, rtol=1e-5)


def test_sparse_models_are_seen_sparse(text: Path, relu: Path, tmp_path: Path) -> None:
    """With attention at work: activity is that of the recorded input, in every layer."""
    done = collect(relu, text, tokens=4 * CTX, out=tmp_path / "r", ctx=CTX)
    recording, model = Recording.open(tmp_path / "r"), NumpyModel(relu)
    for layer, share in zip(recording.layers, done.layers, strict=True):
        x = np.asarray(layer.x(), np.float32)
        before, _ = model.hidden(layer.layer, x)
        active = layer.active(0, recording.tokens)
        certain = np.abs(before) > 0.005
        assert np.array_equal(active[certain], (before > 0)[certain])
        assert share.active_share == pytest.approx(active.mean())
        assert 0.3 < share.active_share < 0.7
        assert layer.magnitudes() is None


def test_every_layer_sees_every_token(text: Path, relu: Path, tmp_path: Path) -> None:
    """llama.cpp computes the last layer for tokens with logits only: all have them."""
    long = record(relu, text, tmp_path / "long", ctx=300, tokens=300)
    for layer in long.layers:
        assert len(np.unique(np.asarray(layer.x()), axis=0)) > 250


def test_fewer_outputs_than_tokens_are_an_error(relu: Path) -> None:
    """The rows of the last layer are then missing, which must not pass for a recording."""
    from gguf_flash.session import Session

    recorder = _core.Recorder("m", 64, [(n, 100) for n in range(3)], 8)
    with Session(relu) as session:
        session.open_context(n_ctx=8, n_batch=8, n_ubatch=8, n_outputs=8, watcher=recorder)
        session.decode([1, 2, 3, 4], 0, 4)
        recorder.check(4)
        session.decode([5, 6, 7, 8], 4, 1)
        with pytest.raises(
            UnsupportedError, match=r"layer 2 .* expected 8 inputs .* found 5 and 5"
        ):
            recorder.check(8)


def test_layers_of_different_types(text: Path, tmp_path: Path) -> None:
    types = [dict.fromkeys(("gate", "up", "down"), name) for name in ("Q8_0", "F16", "Q4_0")]
    dense = make_dense(tmp_path / "m.gguf", type=types, n_layer=3)
    recording, model = record(dense, text, tmp_path / "r"), NumpyModel(dense)
    for layer in recording.layers:
        norm = np.linalg.norm(model.weights[f"blk.{layer.layer}.ffn_down.weight"], axis=0)
        assert np.allclose(layer.down_norm(), norm, rtol=1e-5)
        assert layer.active(0, recording.tokens).all()  # SiLU
    assert recording.arch == "llama" and recording.n_embd == 64 and recording.n_vocab == 258
    assert recording.model_name == "m.gguf" and recording.text_name == "text.txt"


def test_a_begin_token_opens_each_window(text: Path, tmp_path: Path) -> None:
    dense = make_dense(tmp_path / "m.gguf")
    reader = gguf.GGUFReader(dense, "r+")
    reader.fields["tokenizer.ggml.add_bos_token"].parts[-1][:] = 1
    reader.data.flush()
    tokens = record(dense, text, tmp_path / "r").token_ids()
    assert list(tokens[::CTX]) == [256] * 4
    spoken = text.read_bytes()
    assert bytes(tokens[1:CTX].astype(np.uint8)) == spoken[: CTX - 1]
    assert bytes(tokens[CTX + 1 : 2 * CTX].astype(np.uint8)) == spoken[CTX : 2 * CTX - 1]


def test_nothing_depends_on_threads(text: Path, relu: Path, tmp_path: Path) -> None:
    """Not even the last token of a window, which is decoded alone here."""
    for threads in (1, 2, 3):
        out = tmp_path / str(threads)
        record(relu, text, out, threads=threads, magnitudes=True, ctx=7 * 128 + 1)
    assert contents(tmp_path / "1") == contents(tmp_path / "2") == contents(tmp_path / "3")


@pytest.mark.slow
def test_a_real_model(cli: Cli, models: Models, english: Path, tmp_path: Path) -> None:
    """SmolLM2's SiLU leaves next to nothing at exactly zero."""
    out = tmp_path / "r"
    words = ("collect", models.source, "--text", english, "--tokens", 300, "--ctx", 128)
    figures = cli.json(*words, "--out", out)
    assert figures["tokens"] == 384
    assert [x["layer"] for x in figures["layers"]] == list(range(30))
    assert all(x["n_ff"] == 1536 and x["active_share"] > 0.99 for x in figures["layers"])
    row = 30 * (2 * 576 + 1536 // 8)
    assert figures["peak_buffer_bytes"] == 128 * row
    assert (
        figures["bytes"]
        == 384 * (row + 4) + 30 * 4 * 1536 + (out / "recording.json").stat().st_size
    )
    last = cli(*words, "--out", out).stdout.splitlines()[-1]
    for part in ("384 tokens of 30 layers", "% of the neurons active", "MiB", "tokens/s"):
        assert part in last


# --- resuming -------------------------------------------------------------------------------------

# Kills itself at the n-th write, half of which is done; writes nothing else but the recording.
KILLED = """
import os, signal, sys
from gguf_flash.calibrate import collect
left, pwrite = int(sys.argv[4]), os.pwrite
def dying(file, data, offset):
    global left
    left -= 1
    if left == 0:
        pwrite(file, data[: len(data) // 2], offset)
        os.kill(os.getpid(), signal.SIGKILL)
    return pwrite(file, data, offset)
os.pwrite = dying
collect(sys.argv[1], sys.argv[2], tokens=240, out=sys.argv[3], ctx=48, magnitudes=True)
"""


def test_killed_and_resumed(text: Path, relu: Path, tmp_path: Path) -> None:
    """A window is 11 writes, the start 3: kills in the start, in data and in recording.json."""
    whole, out = tmp_path / "whole", tmp_path / "out"
    record(relu, text, whole, tokens=240, magnitudes=True)
    ends = []
    for write in (1, 3, 4, 14, 15, 12, 20, 1, 50):
        words = [sys.executable, "-c", KILLED, str(relu), str(text), str(out), str(write)]
        ends.append(subprocess.run(words, cwd=tmp_path, check=False).returncode)
    assert ends == [-9] * 8 + [0]
    assert contents(out) == contents(whole)


def test_interrupted_and_resumed(text: Path, relu: Path, tmp_path: Path) -> None:
    def interrupt(done: int, total: int, what: str) -> None:
        if done == 2 * CTX and what == "recording":
            raise KeyboardInterrupt

    record(relu, text, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        record(relu, text, tmp_path / "out", progress=interrupt)
    assert Recording.open(tmp_path / "out").tokens == 2 * CTX
    done = collect(relu, text, tokens=4 * CTX, out=tmp_path / "out", ctx=CTX)
    assert (done.tokens, done.new_tokens) == (4 * CTX, 2 * CTX)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_extended(text: Path, relu: Path, tmp_path: Path) -> None:
    record(relu, text, tmp_path / "whole", tokens=200)  # five windows
    for tokens in (CTX, 1, 3 * CTX, 200):
        record(relu, text, tmp_path / "out", tokens=tokens)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    done = collect(relu, text, tokens=10, out=tmp_path / "out", ctx=CTX)
    assert (done.tokens, done.new_tokens, done.peak_buffer_bytes) == (5 * CTX, 0, 0)
    for path in Recording.open(tmp_path / "out").files():
        if path.suffix not in (".json", ".f32"):  # a killed collect leaves the others longer
            path.write_bytes(path.read_bytes() + b"part of a window")
    record(relu, text, tmp_path / "out", tokens=10)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_the_text_ends_first(cli: Cli, text: Path, relu: Path, tmp_path: Path) -> None:
    words = ("collect", relu, "--text", text, "--tokens", 5000, "--ctx", 400)
    done = cli(*words, "--out", tmp_path / "r")
    assert "the text has 1000 tokens, in whole windows 800 of the 5000 wanted" in done.stdout
    assert cli.json(*words, "--out", tmp_path / "r")["tokens"] == 800


@pytest.mark.parametrize("what", ["model", "text", "ctx", "magnitudes"])
def test_something_else_is_not_mixed_in(what: str, text: Path, relu: Path, tmp_path: Path) -> None:
    out, other = tmp_path / "r", {"model": relu, "text": text, "ctx": CTX, "magnitudes": False}
    record(relu, text, out)
    before = contents(out)
    changed = {
        "model": make_dense(tmp_path / "o.gguf", arch="nemotron", n_layer=1),
        "text": tmp_path / "o.txt",
        "ctx": 30,
        "magnitudes": True,
    }
    changed["text"].write_text("Some other text, long enough for some windows. " * 5)
    other[what] = changed[what]

    def again(force: bool) -> Collected:
        options = {"ctx": other["ctx"], "magnitudes": other["magnitudes"], "force": force}
        return collect(other["model"], other["text"], tokens=60, out=out, **options)

    with pytest.raises(ArgumentError, match=rf"something else \((--)?{what} .*--force") as info:
        again(False)
    assert "\n" not in str(info.value)
    assert contents(out) == before
    again(True)
    fresh = tmp_path / "fresh"
    collect(other["model"], other["text"], tokens=60, out=fresh, ctx=other["ctx"],
            magnitudes=other["magnitudes"])  # fmt: skip
    assert contents(out) == contents(fresh)


# --- refusals -------------------------------------------------------------------------------------


def refused(cli: Cli, *words: object) -> str:
    done = cli("collect", *words, code=2)
    (line,) = done.stderr.splitlines()
    return line


def test_flash_gguf_and_no_model(
    cli: Cli, text: Path, tiny: tuple[Path, Path], tmp_path: Path
) -> None:
    rest = ("--text", text, "--tokens", 10, "--ctx", 10, "--out", tmp_path / "r")
    assert "give the dense GGUF" in refused(cli, tiny[1], *rest)
    assert str(text) in refused(cli, text, *rest)
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (b"ffn_up_exps.wei", "mixture of experts"),
        (b"ffn_gate_shexp.", "mixture of experts"),
        (b"ffn_down.0.weig", "mixture of experts"),
        (b"ffn_dawn.weight", "no block has"),
    ],
)
def test_models_without_a_plain_ffn(
    name: bytes, words: str, text: Path, relu: Path, tmp_path: Path
) -> None:
    model = tmp_path / "m.gguf"
    data = relu.read_bytes()
    assert data.count(b"ffn_down.weight") == 3
    model.write_bytes(data.replace(b"ffn_down.weight", name))
    with pytest.raises(UnsupportedError, match=words) as info:
        collect(model, text, tokens=10, out=tmp_path / "r", ctx=10)
    assert str(model) in str(info.value) and "\n" not in str(info.value)
    assert not (tmp_path / "r").exists()


def test_values_that_are_not_finite(text: Path, tmp_path: Path) -> None:
    dense = make_dense(tmp_path / "m.gguf", n_layer=2)  # a ReLU would turn NaN into zero
    reader = gguf.GGUFReader(dense, "r+")
    next(t for t in reader.tensors if t.name == "blk.1.ffn_up.weight").data[0, 0] = np.nan
    reader.data.flush()
    with pytest.raises(UnsupportedError, match=r"layer 1 .* token 0 .* not finite"):
        record(dense, text, tmp_path / "r")


def test_a_text_shorter_than_a_window(cli: Cli, relu: Path, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("short")
    rest = ("--text", tmp_path / "t.txt", "--tokens", 10, "--out", tmp_path / "r")
    assert "5 tokens and one window takes 512" in refused(cli, relu, *rest)
    assert not (tmp_path / "r").exists()


def test_folders_that_are_not_ours(text: Path, relu: Path, tmp_path: Path) -> None:
    (tmp_path / "diary.txt").write_text("dear diary")
    for force in (False, True):
        with pytest.raises(ArgumentError, match=r"holds 'diary\.txt'"):
            record(relu, text, tmp_path, force=force)
    with pytest.raises(IoError, match="File exists"):
        record(relu, text, tmp_path / "diary.txt")
    with pytest.raises(IoError, match="No such file"):
        record(relu, text, tmp_path / "none" / "r")
    assert contents(tmp_path) == {"diary.txt": b"dear diary"}


def test_two_at_once(text: Path, relu: Path, tmp_path: Path) -> None:
    def second(done: int, total: int, what: str) -> None:
        if what == "recording" and done == CTX:
            with pytest.raises(ArgumentError, match="another process is writing"):
                record(relu, text, tmp_path / "r")
            seen.append(done)

    seen: list[int] = []
    record(relu, text, tmp_path / "r", progress=second)
    assert seen == [CTX]


def test_a_full_disk(cli: Cli, text: Path, relu: Path, tmp_path: Path) -> None:
    """A limit on the size of files stands in for it: the system refuses a write in the same way."""
    record(relu, text, tmp_path / "whole")
    rest = ("--text", text, "--tokens", 4 * CTX, "--ctx", CTX, "--out", tmp_path / "r")
    done = subprocess.run(
        [sys.executable, "-m", "gguf_flash", "collect", str(relu), *map(str, rest)],
        cwd=tmp_path,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (15000, 15000)),
        capture_output=True,
        text=True,
        check=False,
    )
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2
    assert "File too large" in line and "layer-000.x.f16" in line and "goes on" in line
    assert 0 < Recording.open(tmp_path / "r").tokens < 4 * CTX
    cli("collect", relu, *rest)
    assert contents(tmp_path / "r") == contents(tmp_path / "whole")


def test_arguments(text: Path, relu: Path, tmp_path: Path) -> None:
    for options in ({"tokens": 0}, {"ctx": 0}):
        with pytest.raises(ArgumentError, match="at least 1"):
            record(relu, text, tmp_path / "r", **options)
    with pytest.raises(FlashError, match=r"cannot read the text .*No such file"):
        record(relu, tmp_path / "none.txt", tmp_path / "r")
    assert os.listdir(tmp_path) == []
