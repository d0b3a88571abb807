#!/usr/bin/env bash
# A small planted model and the benchmarks on it: how to use them, not figures to quote.
# 10_bench.sh [OUT]     compares with unpatched llama.cpp if GGUF_FLASH_STOCK names its libraries
set -euo pipefail
out=${1:-$(mktemp -d)}
[ $# -gt 0 ] || trap 'rm -rf "$out"' EXIT

limit=(--ram 300MiB --threads 1) # one thread waits for no other: busy neighbours do not show
if ! reason=$(cd / && python 2>&1 - <<'END'
import sys
from gguf_flash.bench.cgroup import MemoryCgroup
from gguf_flash.errors import ToolError
try:
    with MemoryCgroup(300 << 20):
        pass
except ToolError as error:
    sys.exit(str(error))
END
); then
    echo "No memory limit: $reason"
    limit+=(--no-cgroup)
fi
arms=()
if [ -z "${GGUF_FLASH_STOCK:-}" ]; then
    echo "No comparison with unpatched llama.cpp: set GGUF_FLASH_STOCK (gguf-flash bench build-stock makes it)"
    arms=(--arm naive --arm hybrid --arm ours)
fi

gguf-flash bench make-model --shape custom --n-layer 3 --seed 3 --out "$out"
pair=("$out/dense.gguf" "$out/flash.gguf")
gguf-flash bench io "$out/flash.gguf" --sizes 4KiB,16KiB --depths 1,32 --seconds 0.05 --out "$out/io.json"
gguf-flash bench decode "${pair[@]}" "${limit[@]}" "${arms[@]}" --rounds 2 --tokens 16 --out "$out/decode.json"
gguf-flash bench ablation "${pair[@]}" "${limit[@]}" --rounds 1 --tokens 16
gguf-flash bench memory "${pair[@]}" "${limit[@]}" --shares 200,250 --tokens 16 # buffers are larger than so small a model
gguf-flash bench long "${pair[@]}" "${limit[@]}" --tokens 100
