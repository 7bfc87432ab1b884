#!/bin/sh
# Builds the encoders' shared library into quant/kernels/ for use from the tree, with the flags of CMakeLists.txt.
# Usage: scripts/build_kernels.sh [more cmake options, for example -DCMAKE_C_COMPILER=clang]
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
build="$root/build/kernels"
mkdir -p "$root/build"
cmake -S "$root" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release \
    -DCMAKE_LIBRARY_OUTPUT_DIRECTORY="$root/quant/kernels" "$@" >"$build.log" 2>&1 ||
    { cat "$build.log" >&2; exit 1; }
cmake --build "$build" -- -j2
