#!/usr/bin/env bash
# A small planted model and the benchmarks on it: how to use them, not figures to quote.
# 10_bench.sh [OUT]     compares with unpatched llama.cpp if GGUF_FLASH_STOCK names its libraries
set -euo pipefail
out=${1:-$(mktemp -d)}
[ $# -gt 0 ] || trap 'rm -rf "$out"' EXIT
limit=(--ram 300MiB)
[ "$(id -u)" = 0 ] || limit+=(--no-cgroup)

gguf-flash bench make-model --shape custom --n-layer 3 --seed 3 --out "$out"
pair=("$out/dense.gguf" "$out/flash.gguf")
gguf-flash bench io "$out/flash.gguf" --sizes 4KiB,16KiB --depths 1,32 --seconds 0.05 --out "$out/device.json"
arms=(--arm naive --arm hybrid --arm ours)
[ -z "${GGUF_FLASH_STOCK:-}" ] || arms=()
gguf-flash bench decode "${pair[@]}" "${limit[@]}" "${arms[@]}" --rounds 2 --tokens 16 --out "$out/decode.json"
gguf-flash bench ablation "${pair[@]}" "${limit[@]}" --rounds 1 --tokens 16
gguf-flash bench memory "${pair[@]}" "${limit[@]}" --shares 70,80 --tokens 16
gguf-flash bench long "${pair[@]}" "${limit[@]}" --tokens 100
