#!/bin/sh
# llama-cpp-python's server on a flash-GGUF (needs the extra: pip install '.[demo,server]').
# sh 04_server.sh [MODEL.flash.gguf]
set -eu
folder=$(mktemp -d)
server=
trap 'status=$?; test -z "$server" || kill "$server"; test $status = 0 || cat "$folder/log"; rm -rf "$folder"' EXIT

model=${1:-}
if [ -z "$model" ]; then
    model=$folder/model.flash.gguf
    source=$(cd / && python -c 'from gguf_flash.demo import demo_model; print(demo_model())')
    gguf-flash convert "$source" --out "$model"
fi

eval "$(gguf-flash env)"
export GGUF_FLASH_RAM=150MiB
python -m llama_cpp.server --model "$model" --n_ctx 256 --port 8642 >"$folder/log" 2>&1 &
server=$!

python - <<'END'
import json, time, urllib.request

request = urllib.request.Request(
    "http://127.0.0.1:8642/v1/completions",
    json.dumps({"prompt": "The sea is", "max_tokens": 24, "temperature": 0}).encode(),
    {"Content-Type": "application/json"},
)
for attempt in range(60):
    try:
        answer = json.load(urllib.request.urlopen(request, timeout=60))
        break
    except OSError:
        time.sleep(1)
else:
    raise SystemExit("the server did not answer in a minute")
print(answer["choices"][0]["text"])
END
