#!/bin/sh
# The command line, and llama.cpp's own tools, on a flash-GGUF.
# sh 05_tools.sh [DENSE.gguf]
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

dense=${1:-$(cd / && python -c 'from gguf_flash.demo import demo_model; print(demo_model())')}
flash=$folder/model.flash.gguf
gguf-flash doctor
gguf-flash convert "$dense" --out "$flash"
gguf-flash verify "$flash" --against "$dense"
gguf-flash inspect "$flash"
gguf-flash run "$flash" --prompt "The sea is" --tokens 24 --ram 60%
gguf-flash exec -- llama-bench -m "$flash" -p 32 -n 8 -r 1
