#!/usr/bin/env bash
# Runs the fuzzers, each for a time; see README.md beside this file.
#   tests/fuzz/run.sh [SECONDS] [layout|kernels|reader|readers]...
# Ends with the first finding. What a machine cannot run is skipped with a word.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$here/../..
seconds=${1:-30}
shift || true
[ $# -gt 0 ] || set -- readers reader layout kernels
work=${GGUF_FLASH_FUZZ_DIR:-$(mktemp -d)}
[ -n "${GGUF_FLASH_FUZZ_DIR:-}" ] || trap 'rm -rf "$work"' EXIT
mkdir -p "$work"/{seeds,layout,kernels,reader,found}

seeds() {
    [ -n "$(ls -A "$work/seeds")" ] && return
    python "$root/tests/hostile/hostile_files.py" "$work/seeds" >/dev/null
    cp "$root"/tests/python/golden/*.gguf "$work/seeds"
    find "$work/seeds" -size +64k -delete
}

# Prints why libFuzzer targets cannot be built here, nothing if they can.
no_libfuzzer() {
    command -v clang++ >/dev/null || { echo 'clang++ was not found; install clang'; return; }
    echo 'extern "C" int LLVMFuzzerTestOneInput(const char *, unsigned long) { return 0; }' |
        clang++ -x c++ -fsanitize=fuzzer,address,undefined -o "$work/probe" - 2>/dev/null ||
        echo 'clang++ has no libFuzzer; install libclang-rt-dev'
}

build() {
    local why
    why=$(no_libfuzzer)
    [ -z "$why" ] || { echo "skipped: $why"; return 1; }
    cmake -S "$root/cpp_patch" -B "$work/build" -G Ninja -D CMAKE_BUILD_TYPE=RelWithDebInfo \
        -D CMAKE_C_COMPILER=clang -D CMAKE_CXX_COMPILER=clang++ \
        -D Python_EXECUTABLE="$(command -v python)" -D GGUF_FLASH_ENGINE_ONLY=ON \
        -D GGUF_FLASH_BUILD_FUZZERS=ON -D GGUF_FLASH_SANITIZE=address,undefined,fuzzer-no-link \
        >"$work/log" 2>&1 && cmake --build "$work/build" >>"$work/log" 2>&1 ||
        { tail -n 50 "$work/log"; exit 1; }
}

# libfuzzer NAME COMMAND...: quiet unless something is found, which stays in found/.
libfuzzer() {
    local name=$1
    shift
    seeds
    "$@" -max_total_time="$seconds" -max_len=65536 -timeout=20 -rss_limit_mb=2560 -verbosity=0 \
        -print_final_stats=1 -artifact_prefix="$work/found/$name-" "$work/$name" \
        $([ "$name" = kernels ] || echo "$work/seeds") >"$work/log" 2>&1 ||
        { tail -n 60 "$work/log"; cp -r "$work/found" "found-$name"; exit 1; }
    grep -E 'number_of_executed_units|peak_rss_mb' "$work/log" || true
}

for name in "$@"; do
    echo "fuzz $name: $seconds s"
    case $name in
        readers) python "$here/fuzz_readers.py" --seconds "$seconds" ;;
        reader)
            if python -c 'import atheris' 2>/dev/null; then
                libfuzzer reader python "$here/fuzz_reader.py"
            else
                echo "skipped: atheris is not installed; pip install 'gguf_flash[fuzz]'"
            fi
            ;;
        layout | kernels) ! build || libfuzzer "$name" "$work/build/bin/fuzz_$name" ;;
        *) echo "no fuzzer '$name'; layout, kernels, reader or readers expected" >&2; exit 2 ;;
    esac
done
