"""What sparsity without training costs, and what it saves: a table for any dense GGUF.

For each share of zeros and each criterion the model is converted with `--select gate`, its quality
is measured on text that the thresholds were not chosen on, and then the same text is read token by
token with room for half of the neurons: bytes are what the SSD gave for a token.

    python examples/09_target_sparsity.py model.gguf --text book.txt --out figures/model

prints the table and writes figures/model.json, .md and (with pip install 'gguf_flash[plot]') .png.
Without arguments: a short run on the small OPT of the tests, nearly all zeros as it is.
"""

import argparse
import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from gguf_flash.calibrate.sparsity import find_thresholds, parse_share, split_text
from gguf_flash.converters import convert
from gguf_flash.format.thresholds import CRITERIA
from gguf_flash.measure import difference
from gguf_flash.perplexity import perplexity
from gguf_flash.session import Session
from gguf_flash.settings import Settings

DATA = Path(__file__).resolve().parents[1] / "tests" / "data"
PROMPT = 64  # tokens read before bytes are counted
COLUMNS = (
    ("zeros asked for", lambda r: f"{100 * r['target']:g} %"),
    ("criterion", lambda r: r["criterion"] or "none"),
    ("zeros found", lambda r: f"{100 * r['zeros']:.1f} %"),
    ("perplexity", lambda r: f"{r['perplexity']:.2f}"),
    ("mean KL", lambda r: f"{r['mean_kl']:.3g}"),
    ("read per token", lambda r: f"{r['bytes_per_token'] / 2**20:.2f} MiB"),
)


def read_tokens(flash: Path, text: str, args: argparse.Namespace) -> dict[str, float]:
    """Read `text` token by token; what a token selects and what it reads."""
    with Session(flash, Settings(ram=args.ram)) as session:
        tokens = session.tokenize(text)[: PROMPT + args.read]
        session.open_context(
            n_ctx=len(tokens), n_batch=PROMPT, n_ubatch=PROMPT, n_outputs=1, threads=args.threads
        )
        session.decode(tokens[:PROMPT], 0, 1)
        before = session.engine.stats()["total"]
        for i, token in enumerate(tokens[PROMPT:], PROMPT):
            session.decode([token], i, 1)
        stats = session.engine.stats()
        gain = difference(before, stats["total"])
    neurons = sum(layer["n_ff"] for layer in stats["layers"])
    return {
        "bytes_per_token": gain["bytes_read"] / gain["tokens"],
        "zeros_read": 1 - gain["selected"] / gain["tokens"] / neurons,
    }


def row(target: float, criterion: str, text: str, args: argparse.Namespace) -> dict[str, Any]:
    """One line of the table; without a criterion the dense model's."""
    find = partial(
        find_thresholds, share=target, text=text, criterion=criterion, ctx=args.ctx,
        tokens=args.tokens, chunks=args.chunks, threads=args.threads,
    )  # fmt: skip
    sparsify = (lambda dense, act: find(dense.paths[0], activation=act)) if criterion else None
    held_out = split_text(text)[1]
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        flash = Path(folder) / "model.gguf"
        layout = convert(args.model, flash, select="gate", sparsify=sparsify)
        scored = perplexity(
            flash, held_out, against=args.model, ctx=args.ctx, batch=args.ctx, chunks=args.chunks,
            threads=args.threads,
        )  # fmt: skip
        read = read_tokens(flash, held_out, args)
    told = layout.sparsity
    return {
        "target": target,
        "criterion": criterion,
        "zeros": sum(told.zeros) / len(told.zeros) if told else read["zeros_read"],
        **{name: scored[name] for name in ("perplexity", "mean_kl", "top1_agreement", "tokens")},
        "dense_perplexity": scored["against_perplexity"],
        **read,
        "bundle_bytes": layout.bundle_bytes,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The rows in Markdown."""
    lines = [[name for name, _ in COLUMNS], ["---"] * len(COLUMNS)]
    lines += [[show(r) for _, show in COLUMNS] for r in rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


def plot(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Perplexity and bytes per token over the zeros that were found."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(8, 3), layout="constrained")
    for criterion in CRITERIA:
        found = [r for r in rows if r["criterion"] in ("", criterion)]
        zeros = [100 * r["zeros"] for r in found]
        left.plot(zeros, [r["perplexity"] for r in found], "o-", label=criterion)
        right.plot(zeros, [r["bytes_per_token"] / 2**20 for r in found], "o-", label=criterion)
    left.set(yscale="log", ylabel="perplexity", xlabel="zeros, %", title=title)
    right.set(ylim=0, ylabel="MiB read per token", xlabel="zeros, %")
    left.legend()
    figure.savefig(path, dpi=80)


def write(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """What --out asks for."""
    said = {k: str(v) for k, v in vars(args).items() if k in ("ram", "ctx", "chunks", "tokens")}
    found = {"model": args.model.name, "text": args.text.name, **said, "rows": rows}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    args.out.with_suffix(".md").write_text(table(rows))
    try:
        plot(rows, args.model.stem, args.out.with_suffix(".png"))
    except ImportError:
        print("no plot: pip install 'gguf_flash[plot]'")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, nargs="?", help="a dense GGUF")
    parser.add_argument("--text", type=Path, default=DATA / "english.txt")
    parser.add_argument("--targets", nargs="+", help="shares of zeros [default: 0 30%% 50%% 70%%]")
    parser.add_argument("--criteria", nargs="+", choices=CRITERIA, default=CRITERIA)
    parser.add_argument("--ram", default="50%", help="as gguf-flash run takes it")
    parser.add_argument("--ctx", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=4096, help="to choose thresholds on")
    parser.add_argument("--chunks", type=int, default=8, help="windows to score")
    parser.add_argument("--read", type=int, default=128, help="tokens to read one by one")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--folder", type=Path, help="where converted models lie for a while")
    parser.add_argument("--json", action="store_true", help="print one JSON object a row instead")
    parser.add_argument("--out", type=Path, help="FILE, without ending, for .json, .md and .png")
    args = parser.parse_args()
    targets = args.targets or ["0", "30%", "50%", "70%"]
    if args.model is None:
        args.model, args.ctx, args.tokens = DATA / "small-opt" / "dense-f16.gguf", 128, 1024
        targets = args.targets or ["0", "98%"]
    text, rows = args.text.read_text(encoding="utf-8", errors="replace"), []
    for target in map(parse_share, targets):
        for criterion in args.criteria if target else ("",):
            rows.append(row(target, criterion, text, args))
            if args.json:
                print(json.dumps(rows[-1]), flush=True)
            if args.out:  # after each row: a large model takes hours
                write(rows, args)
    if not args.json:
        print(table(rows), end="")


if __name__ == "__main__":
    main()
