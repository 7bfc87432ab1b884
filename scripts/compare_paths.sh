#!/bin/sh
# Checks that every path of the encoders, on this processor and on emulated 64-bit ARM, writes the same bytes.
# Needs: cmake, ninja, a C compiler; for ARM aarch64-linux-gnu-gcc and qemu-aarch64 (Debian: gcc-aarch64-linux-gnu,
# libc6-dev-arm64-cross, qemu-user).
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# build NAME [cmake options]: the program "$work/NAME/compare_paths"
build() {
    name=$1
    shift
    cmake -S "$root" -B "$work/$name" -G Ninja -DCMAKE_BUILD_TYPE=Release -DKIMI_QUANT_COMPARE=ON "$@" >"$work/log" ||
        { cat "$work/log" >&2; exit 1; }
    cmake --build "$work/$name" --target compare_paths -- -j2 >"$work/log" || { cat "$work/log" >&2; exit 1; }
}

build here
here=$("$work/here/compare_paths")
echo "this processor: $here"
if command -v aarch64-linux-gnu-gcc >/dev/null && command -v qemu-aarch64 >/dev/null; then
    build arm -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_C_COMPILER=aarch64-linux-gnu-gcc \
        -DCMAKE_EXE_LINKER_FLAGS=-static
    arm=$(qemu-aarch64 "$work/arm/compare_paths")
    echo "64-bit ARM:     $arm"
    [ "${here%% *}" = "${arm%% *}" ] || { echo "the two processors disagree" >&2; exit 1; }
else
    echo "64-bit ARM:     not checked (no cross compiler or emulator)"
fi
