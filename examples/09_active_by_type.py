"""How many neurons are active, layer by layer, when a ReLU model is quantized (paper, Table 6).

Each type's bundles are read token by token with `--select gate`, where the neurons that the engine
selects are the active ones; the text is the same for all.

    python examples/09_active_by_type.py model.gguf --text book.txt --types f16 q4_0

Without arguments: the small OPT of the tests.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from gguf_flash.cli.convert import thresholds
from gguf_flash.converters import convert
from gguf_flash.perplexity import token_windows
from gguf_flash.session import Session

DATA = Path(__file__).resolve().parents[1] / "tests" / "data"


def active_shares(flash: Path, text: str, args: argparse.Namespace) -> dict[int, float]:
    """The mean share, 0 to 1, of each layer's neurons that a token selects."""
    with Session(flash) as session:
        windows, _ = token_windows(session, text, args.ctx, -(-args.tokens // args.ctx))
        session.open_context(
            n_ctx=args.ctx, n_batch=1, n_ubatch=1, n_outputs=1, threads=args.threads
        )
        for window in windows:
            session.clear()
            for i, token in enumerate(window):
                session.decode([token], i, 1)
        layers = session.engine.stats()["layers"]
    return {x["layer"]: x["selected"] / x["tokens"] / x["n_ff"] for x in layers}


def measure(args: argparse.Namespace) -> dict[str, dict[int, float]]:
    """Shares by type and layer."""
    text, found = args.text.read_text(encoding="utf-8", errors="replace"), {}
    for kind in args.types:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            flash = Path(folder) / "model.gguf"
            convert(
                args.model, flash, select="gate", outtype=kind, down_type=kind,
                threshold=args.threshold,
            )  # fmt: skip
            found[kind] = active_shares(flash, text, args)
    return found


def mean(shares: dict[int, float]) -> float:
    return sum(shares.values()) / len(shares)


def table(found: dict[str, dict[int, float]]) -> str:
    """The shares in Markdown, in percent."""
    rows: list[list[Any]] = [["layer", *(k.upper() for k in found)], ["---"] * (len(found) + 1)]
    rows += [
        [n, *(f"{100 * shares[n]:.2f} %" for shares in found.values())]
        for n in next(iter(found.values()))
    ]
    rows.append(["mean", *(f"{100 * mean(shares):.2f} %" for shares in found.values())])
    return "\n".join("| " + " | ".join(map(str, cells)) + " |" for cells in rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, nargs="?", help="a dense GGUF with ReLU")
    parser.add_argument("--text", type=Path, default=DATA / "english.txt")
    parser.add_argument("--types", nargs="+", default=["f16", "q4_0"])
    parser.add_argument("--threshold", type=thresholds, help="as gguf-flash convert takes it")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--ctx", type=int, default=256)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where converted models lie for a while")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.add_argument("--out", type=Path, help="FILE, without ending, for .json and .md")
    args = parser.parse_args()
    args.model = args.model or DATA / "small-opt" / "dense-f16.gguf"
    found = measure(args)
    said = {
        "model": args.model.name,
        "text": args.text.name,
        "tokens": args.tokens,
        "mean": {kind: mean(shares) for kind, shares in found.items()},
        "layers": found,
    }
    print(json.dumps(said) if args.json else table(found), end="\n" if args.json else "")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.with_suffix(".json").write_text(json.dumps(said, indent=1) + "\n")
        args.out.with_suffix(".md").write_text(table(found))


if __name__ == "__main__":
    main()
