"""Write the table of supported families into converters/README.md, from what the tests measured.

The tests note their results, one a line, in the file that $GGUF_FLASH_FAMILIES names:

    cd tests/python
    GGUF_FLASH_FAMILIES=/tmp/results.jsonl pytest test_families.py test_families_hf.py \\
        test_native_hf.py test_opt_hf.py test_persimmon_hf.py
    python families_table.py /tmp/results.jsonl

RESULTS are kept in tests/data/families.json. Without them the table is written from those kept.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from families import FAMILIES

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "tests" / "data" / "families.json"
README = ROOT / "converters" / "README.md"
BEGIN, END = "<!-- families: begin -->\n", "<!-- families: end -->\n"
TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0")
Result = dict[str, Any]


def merged(lines: str) -> list[Result]:
    """The last result of each check of each test, in the order of FAMILIES."""
    found = [json.loads(line) for line in lines.splitlines()]
    last = {(r["family"], r["test"], r["check"], r["type"]): r for r in found}
    order = list(FAMILIES)
    return sorted(last.values(), key=lambda r: (order.index(r["family"]), r["test"], r["check"]))


def _each(results: list[Result], key: str) -> str:
    return ", ".join(dict.fromkeys(f"`{r[key]}`" for r in results))


def _checks(results: list[Result]) -> str:
    """Of each kind of check and tolerance the worst measured, with the number of checks."""
    kinds: dict[tuple[str, float], list[Result]] = {}
    for r in results:
        kinds.setdefault((_kind(r["check"]), r["tolerance"]), []).append(r)
    shown = []
    for (kind, tolerance), of_kind in sorted(kinds.items()):
        types = "/".join(t for t in TYPES if any(r["type"] == t for r in of_kind))
        worst = max(r["measured"] for r in of_kind)
        shown.append(f"{kind} {types}: {worst:.0e} < {tolerance:.0e} ({len(of_kind)})")
    return "<br>".join(shown)


def _kind(check: str) -> str:
    """Without the select mode: "KL, select gate, to numpy" is "KL to numpy"."""
    for select in ("all", "gate"):
        check = check.replace(f", select {select},", "").replace(f"select {select}", "flash")
    return check


def _row(name: str, results: list[Result]) -> str:
    family = FAMILIES[name]
    types = ", ".join(t for t in TYPES if any(r["type"] == t for r in results))
    tests = ", ".join(sorted({f"`{r['test'].split(' ')[0].split('/')[-1]}`" for r in results}))
    forms = ", ".join(dict.fromkeys(r["form"] for r in results))
    cells = (
        family.models, _each(results, "architecture"), _each(results, "activation"), family.sparse,
        forms, types, _checks(results), tests,
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def table(results: list[Result]) -> str:
    """Markdown, a line for each family that has results."""
    head = ("models", "architecture", "activation", "what makes it sparse", "FFN", "types")
    rows = [f"| {' | '.join((*head, 'worst measured (checks)', 'tests'))} |", f"|{'---|' * 8}"]
    for name in FAMILIES:
        own = [r for r in results if r["family"] == name]
        if own:
            rows.append(_row(name, own))
    return "\n".join(rows) + "\n"


def written(readme: str, results: list[Result]) -> str:
    """``readme`` with the table of ``results`` between its marks."""
    before, rest = readme.split(BEGIN)
    _, after = rest.split(END)
    return before + BEGIN + table(results) + END + after


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="?", type=Path, metavar="RESULTS")
    given = parser.parse_args().results
    if given is not None:
        results = merged(given.read_text())
        RESULTS.write_text("[\n" + ",\n".join(map(json.dumps, results)) + "\n]\n")
    README.write_text(written(README.read_text(), json.loads(RESULTS.read_text())))


if __name__ == "__main__":
    main()
