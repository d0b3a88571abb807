#!/usr/bin/env bash
# The paper's way, end to end: record a dense model, train predictors, choose thresholds, convert, run.
# 08_predictors.sh [MODEL.gguf TEXT]      (default: the small OPT of the tests; needs the extra `train`)
set -euo pipefail
data=$(dirname "${BASH_SOURCE[0]}")/../tests/data
model=${1:-$data/small-opt/dense-f16.gguf} text=${2:-$data/english.txt}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

gguf-flash collect "$model" --text "$text" --tokens 8192 --ctx 256 --out "$work/recording"
gguf-flash train "$work/recording" --epochs 6 --out "$work/predictor.safetensors"
gguf-flash calibrate "$work/recording" --predictor "$work/predictor.safetensors" --target fn=5% \
    --out "$work/calibrated.safetensors"
gguf-flash convert "$model" --predictor "$work/calibrated.safetensors" --out "$work/flash.gguf"
gguf-flash inspect "$work/flash.gguf"
gguf-flash perplexity "$work/flash.gguf" --against "$model" --text "$text" --ctx 256 --chunks 4
gguf-flash run "$work/flash.gguf" --prompt "The old man" --tokens 32 --policy window --window 5
