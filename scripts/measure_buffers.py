"""Asks llama.cpp how large its compute buffers would be, without weights: a check of ``kimi_gguf.cluster.memory``.

    python scripts/measure_buffers.py MODEL LOAD...
    python scripts/measure_buffers.py --shape k3.1-pro --work DIR [--rpc HOST:PORT,... --split N,N,...] LOAD...

LOAD is CONTEXT,UBATCH,SEQUENCES. Memory is simulated (``no_alloc``), but for the KDA states. --shape writes a file of
the released sizes that has a header and no data, 6 MB on a disk with sparse files. With --rpc the layers are split over
workers, which need no memory either. Prints a JSON list of {context, ubatch, parallel, buffers: {device: bytes}}.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from convert.gguf_file import TensorEntry, lay_out  # noqa: E402
from convert.shapes import released_config, released_specs  # noqa: E402
from kimi_gguf.cluster import runtime  # noqa: E402
from kimi_gguf.reference.gguf_maker import model_keys  # noqa: E402
from quant.types import QuantType  # noqa: E402

_BUFFER = re.compile(r"\s(\S+) compute buffer size =\s+([\d.]+) MiB")
_MIB = 1 << 20


def header_only(shape: str, path: Path) -> Path:
    """A GGUF of a released model's sizes whose data is a hole; types do not matter to compute buffers."""
    config = released_config(shape)
    entries = [
        TensorEntry(s.name, s.shape, QuantType.F32 if s.shape[-1] % 32 or len(s.shape) == 1 else QuantType.MXFP4)
        for s in released_specs(config)
    ]
    layout = lay_out(model_keys(config), entries)
    with path.open("wb") as file:
        file.write(layout.header)
        file.truncate(layout.nbytes)
    return path


def measure(
    model: Path, rpc: list[str], split: list[float], layers: int, loads: list[tuple[int, ...]]
) -> list[dict[str, Any]]:
    """Load once, make a context for each of ``loads``, read the sizes from the log."""
    import llama_cpp.llama_cpp as api

    lines: list[str] = []

    def log(level: int, text: bytes, _: Any) -> None:
        lines.append(text.decode(errors="replace"))

    callback = api.llama_log_callback(log)
    api.llama_log_set(callback, None)
    api.llama_backend_init()
    folder = Path(os.environ["LLAMA_CPP_LIB_PATH"])
    add = ctypes.CDLL(str(folder / "libggml-rpc.so")).ggml_backend_rpc_add_server
    register = ctypes.CDLL(str(folder / "libggml.so")).ggml_backend_register
    add.argtypes, add.restype = [ctypes.c_char_p], ctypes.c_void_p
    register.argtypes, register.restype = [ctypes.c_void_p], None
    for endpoint in rpc:
        register(add(endpoint.encode()))
    parameters = api.llama_model_default_params()
    # A mapped file of holes would become pages of zeros.
    parameters.no_alloc, parameters.load_mode, parameters.n_gpu_layers = True, 0, layers if rpc else 0
    shares = (ctypes.c_float * 16)(*split)
    parameters.tensor_split = shares
    loaded = api.llama_model_load_from_file(str(model).encode(), parameters)
    if not loaded:
        raise SystemExit("".join(lines[-20:]))
    results = []
    for context, ubatch, parallel in loads:
        lines.clear()
        options = api.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch = context * parallel, max(ubatch, 2048), ubatch
        options.n_seq_max, options.flash_attn_type, options.n_threads = parallel, 1, 1
        api.llama_free(api.llama_init_from_model(loaded, options))
        found = [(name, round(float(size) * _MIB)) for name, size in _BUFFER.findall("".join(lines))]
        results.append({"context": context, "ubatch": ubatch, "parallel": parallel, "buffers": found})
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=("k3", "k3.1-pro"))
    parser.add_argument("--work", type=Path, default=Path())
    parser.add_argument("--rpc", default="")
    parser.add_argument("--split", default="")
    parser.add_argument("--gpu-layers", type=int, default=99, help="the layers before these stay with the head")
    parser.add_argument("words", nargs="+", metavar="MODEL|LOAD")
    given = parser.parse_args()
    if "LLAMA_CPP_LIB_PATH" not in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.argv], runtime.find().environment())
    model = (
        header_only(given.shape, given.work / f"{given.shape}.header.gguf") if given.shape else Path(given.words.pop(0))
    )
    loads = [tuple(map(int, word.split(","))) for word in given.words]
    split = [float(part) for part in given.split.split(",") if part]
    print(json.dumps(measure(model, [e for e in given.rpc.split(",") if e], split, given.gpu_layers, loads)))


if __name__ == "__main__":
    main()
