"""Evaluates one MoE layer of the released K3.1 Pro's true shapes, source against GGUF, and shows time and peak memory.

    python scripts/show_real_eval.py [--dir build/real-eval] [--tokens 96] [--memory 20G] [--quant MXFP4_MOE] [--keep]

Writes a checkpoint of one MLA layer with 896 experts (17 GB of made-up weights), converts it (another 16 GB), and runs
`kimi-gguf eval` on both with the stream engine in a process of its own, whose peak memory is measured. Then the
forecast for the whole model is printed with the rates measured here, and how it comes about.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from convert.flags import parse_size
from convert.shapes import released_config
from kimi_gguf import convert
from kimi_gguf.reference.checkpoint_maker import make_checkpoint, make_sparse_release, released_shape
from kimi_gguf.reference.checkpoint_store import open_checkpoint
from kimi_gguf.verify.observations import TokenSet
from kimi_gguf.verify.stream_plan import human_time, measure_rates, plan_memory, run_bytes, run_flops

ROOT = Path(__file__).resolve().parent.parent
VOCAB = 2048
WHOLE = ((32_768, 512), (32_768, 4096))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=ROOT / "build" / "real-eval")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--memory", default="20G")
    parser.add_argument("--quant", default="MXFP4_MOE")
    parser.add_argument("--keep", action="store_true", help="keep the files")
    args = parser.parse_args()
    args.dir.mkdir(parents=True, exist_ok=True)
    checkpoint = make_layer(args.dir / "one-layer")
    gguf = args.dir / f"one-layer-{args.quant}.gguf"
    if not gguf.exists():
        began = time.monotonic()
        convert(checkpoint, quant=args.quant, outfile=gguf)
        print(f"converted to {args.quant}: {gguf.stat().st_size:,} bytes in {time.monotonic() - began:.0f} s")
    measure(gguf, checkpoint, args.dir, args.tokens, args.memory)
    foretell(checkpoint, args.memory)
    if not args.keep:
        shutil.rmtree(args.dir)


def make_layer(folder: Path) -> Path:
    """A checkpoint of one MLA layer with routed experts, of the release's sizes but for the vocabulary."""
    if (folder / "model.safetensors.index.json").exists():
        return folder
    shape = replace(
        released_shape("k3.1-pro"), layers=1, layer_kinds=("mla",), dense_layers=0, vocab=VOCAB, vision=False
    )
    began = time.monotonic()
    make_checkpoint(folder, shape, seed=1)
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    print(f"checkpoint of one layer: {size:,} bytes in {time.monotonic() - began:.0f} s")
    return folder


def measure(gguf: Path, checkpoint: Path, folder: Path, tokens: int, memory: str) -> None:
    """Run the evaluation as a user does, and print what it found and took."""
    text = folder / "text.txt"
    text.write_text(Path(__file__).read_text())
    command = [sys.executable, "-m", "kimi_gguf", "eval", str(gguf), "--baseline", str(checkpoint), "--json"]
    command += ["--text", str(text), "--tokens", str(tokens), "--context", "32", "--memory", memory]
    began = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    seconds = time.monotonic() - began
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    found = json.loads(done.stdout)
    (layer,) = found["layers"]
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    used = layer["base_load"]["used"]
    print(f"evaluated {found['tokens']} tokens through {used} of 896 experts, twice, in {seconds:.0f} s")
    print(f"  peak memory {peak / 1e9:.2f} GB, foretold {found['settings']['forecast']['memory_bytes'] / 1e9:.2f} GB")
    exact, overlap = (layer["routing"][name]["value"] for name in ("exact", "overlap"))
    print(f"  routing: {exact:.2%} of sets exact, {overlap:.3%} of experts in common")
    print(f"  hidden state: relative error {layer['hidden_error']['value']:.2e}")
    print(f"  output: KL divergence {found['output']['kl']['value']:.3e} nats")
    if peak > parse_size(memory):
        raise SystemExit(f"more than {memory}")


def foretell(checkpoint: Path, memory: str) -> None:
    """The forecast for the whole model beside its MXFP4 GGUF, and how it comes about."""
    read_rate, flop_rate = measure_rates(open_checkpoint(checkpoint), torch.device("cpu"))
    config = released_config("k3.1-pro")
    print("whole model, source and MXFP4 GGUF side by side on this machine:")
    with tempfile.TemporaryDirectory() as scratch:
        store = open_checkpoint(make_sparse_release(Path(scratch) / "release"))
        for count, context in WHOLE:
            tokens = TokenSet(np.zeros(count, dtype=np.int32), context, config.vocab_size, "", "", "")
            plan = plan_memory(config, tokens, parse_size(memory), lanes=2, on_disk=False)
            read, flops = 2 * run_bytes(store, tokens, plan), 2 * run_flops(config, tokens)
            print(f"  {count:,} tokens in chunks of {context}: {plan.needed / 1e9:.1f} GB of memory,", end=" ")
            print(f"{plan.state_bytes / 1e9:.0f} GB of scratch disk")
            print(
                f"    read {read / 1e12:.2f} TB at {read_rate / 1e6:,.0f} MB/s: {human_time(read / read_rate)}",
                end="; ",
            )
            print(f"{flops / 1e15:.1f} PFLOP at {flop_rate / 1e9:,.0f} GFLOP/s: {human_time(flops / flop_rate)}")
    print(
        "bytes: every stored tensor once, an expert with the chance that some token chooses it, the output matrix once"
    )
    print(
        "per slice of tokens. Operations: two per active weight and token, attention and KDA by their formulas. Rates:"
    )
    print(
        "one attention layer and one expert read and decoded, and a product of 1024 x 1024 matrices, on this machine."
    )


if __name__ == "__main__":
    main()
