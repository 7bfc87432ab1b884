"""Turns what ``train_tiny.py`` trained into a checkpoint in the released format, measures it, and writes its card.

    python scripts/export_tiny.py --work DIR [--out kimi_gguf/data/tiny-k31]

All figures come from the written checkpoint, read back through the float32 reference.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tiny_store import CONFIG, SHAPE, TrainStore, key, mxfp4_round
from tiny_text import HELD_OUT_SHARE, PACKAGE, Data, load_data
from train_tiny import bigram_losses, windows

from kimi_gguf.reference import tokenizer
from kimi_gguf.reference.attn_res import Stream
from kimi_gguf.reference.checkpoint_files import generation_config, tokenizer_config
from kimi_gguf.reference.checkpoint_shape import checkpoint_config
from kimi_gguf.reference.checkpoint_store import open_checkpoint
from kimi_gguf.reference.checkpoint_writer import write_checkpoint
from kimi_gguf.reference.indexer import IndexerWeights
from kimi_gguf.reference.layer import Trace
from kimi_gguf.reference.model import ModelCache, logits
from kimi_gguf.reference.options import Options
from kimi_gguf.reference.weights import WeightStore, expert_prefix
from quant import mxfp4

Array = np.ndarray[Any, np.dtype[Any]]
OUT = Path(__file__).resolve().parent.parent / "kimi_gguf" / "data" / "tiny-k31"
PROMPT = "It was a truth that"


def checkpoint_tensors(store: TrainStore) -> Iterator[tuple[str, str, Array]]:
    """Name, dtype and values of every tensor of the checkpoint; experts packed."""
    for name, dtype in store.dtypes.items():
        yield name, dtype, store.values[key(name)].detach().numpy()
    for layer in range(store.config.dense_layers, store.config.n_layers):
        for part in ("w1", "w2", "w3"):
            stack = store.values[f"experts|{layer}|{part}"].detach()
            for expert in range(store.config.moe.experts):
                rows = mxfp4.quantize(stack[expert].numpy(), "ceil")
                if not np.array_equal(mxfp4.decode(rows), mxfp4_round(stack[expert]).numpy()):
                    raise SystemExit(f"layer {layer} expert {expert} {part}: packing differs from training")
                prefix = f"{expert_prefix(layer, expert)}{part}"
                yield f"{prefix}.weight_packed", "U8", rows.packed
                yield f"{prefix}.weight_scale", "U8", rows.scales


def window_losses(store: WeightStore, data: Tensor, options: Options) -> tuple[list[float], dict[int, Tensor]]:
    """Mean loss of each window of 513 tokens, and how often each layer chose each expert."""
    losses: list[float] = []
    loads: dict[int, Tensor] = {}

    def observe(index: int, _stream: Stream, trace: Trace) -> None:
        if trace.routing is not None:
            load = torch.bincount(trace.routing.ids.flatten(), minlength=CONFIG.moe.experts)
            loads[index] = loads.get(index, torch.zeros_like(load)) + load

    for window in data.split(4):
        output = logits(store, window[:, :-1], options, observe=observe)
        each = functional.cross_entropy(output.transpose(1, 2), window[:, 1:], reduction="none")
        losses += each.mean(1).tolist()
    return losses, loads


class BlindStore:
    """A store whose indexers are random matrices: what choosing keys without having learned it costs."""

    def __init__(self, store: WeightStore) -> None:
        self.store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def indexer(self, layer: int) -> IndexerWeights | None:
        learned = self.store.indexer(layer)
        if learned is None:
            return None
        generator = torch.Generator().manual_seed(layer)
        made_up = [torch.randn(w.shape, generator=generator) for w in (learned.wq_b, learned.wk, learned.weights)]
        return IndexerWeights(*made_up, torch.ones_like(learned.k_norm), None)


def sample(store: WeightStore, vocabulary: bytes, count: int, seed: int) -> str:
    """``count`` tokens after ``PROMPT``, drawn at temperature 0.8."""
    encoding = tokenizer.encoding(vocabulary)
    generator = torch.Generator().manual_seed(seed)
    ids = encoding.encode_ordinary(PROMPT)
    cache = ModelCache()
    new = ids
    for _ in range(count):
        last = logits(store, torch.tensor([new]), Options(), cache=cache)[0, -1, : encoding.n_vocab]
        new = [int(torch.multinomial(torch.softmax(last / 0.8, -1), 1, generator=generator))]
        ids = ids + new
    return encoding.decode(ids)


def perplexity(losses: list[float]) -> float:
    """exp of the mean."""
    return math.exp(sum(losses) / len(losses))


def measure(out: Path, data: Data, training: dict[str, Any]) -> dict[str, Any]:
    """Everything that the card states."""
    store = open_checkpoint(out)
    held_out = windows(data.held_out)
    sparse, loads = window_losses(store, held_out, Options(kda_form="centred"))
    dense, _ = window_losses(store, held_out, Options(kda_form="centred", sparse=False))
    blind, _ = window_losses(cast(WeightStore, BlindStore(store)), held_out, Options(kda_form="centred"))
    bigram = bigram_losses(data.train, held_out, CONFIG.vocab_size)
    return {
        "windows": len(held_out),
        "window_tokens": CONFIG.context_length,
        "perplexity": perplexity(sparse),
        "perplexity_without_indexer": perplexity(dense),
        "perplexity_with_random_indexer": perplexity(blind),
        "bigram_perplexity": perplexity(bigram),
        "bigram_window_losses": [round(loss, 5) for loss in bigram],
        "window_losses": [round(loss, 5) for loss in sparse],
        "expert_use": {str(layer): load.tolist() for layer, load in loads.items()},
        "train_tokens": len(data.train),
        "held_out_tokens": len(data.held_out),
        "held_out_sha256": hashlib.sha256(data.held_out_text.encode()).hexdigest(),
        "training": training,
    }


CARD = """# tiny-k31

A Kimi K3.1 model of 17 million parameters with every part of the architecture: KDA, gated MLA with an indexer that
picks {top_k} of up to {context} keys, attention residuals, and latent mixture of experts in MXFP4. It exists to test
conversion, quantization and runtimes on weights that have learned something; as a writer it is a curiosity.

## Format
The released checkpoint's: one safetensors shard per layer and one for the globals, `config.json` with `dsa_config`,
and `tiktoken.model` with {ranks} ranks, trained on the training text, below 256 special slots.

## Text
The six novels of Jane Austen (1811 to 1818, public domain) from version 1.0.0-1 of Debian's package
`{package}` (packaging: MIT). Each paragraph is one line, with blank lines between. The last {share:.0%} of
each novel, from a paragraph's start, are held out and stand in `heldout.txt`: {held_out_tokens:,} tokens, against
{train_tokens:,} to train on.

## Training
`scripts/train_tiny.py`, seed {seed}: {steps} steps of {batch} x {context} tokens in about {minutes} minutes on busy
CPUs. AdamW, experts rounded to MXFP4 and other matrices to BF16 in every forward pass, routers balanced through
`e_score_correction_bias`, indexers trained to imitate their layer's attention. `scripts/export_tiny.py` wrote this
folder.

## Figures
Measured by the float32 reference on this checkpoint: {windows} windows of {window_tokens} held-out tokens, each from an
empty context. `figures.json` has them by window and by expert.

| what | value |
|---|---|
| perplexity on the held-out text | {perplexity:.4f} |
| the same with the indexer off (dense attention) | {perplexity_without_indexer:.4f} |
| the same with an indexer of random weights | {perplexity_with_random_indexer:.4f} |
| add-one bigram model with the same vocabulary | {bigram_perplexity:.2f} |
| tokens per expert, least to most (even share {even:.0f}) | {least} to {most} |

KDA carries most of the context in this model: what MLA adds is small, and so is what the indexer's choice changes.

## Sample
Temperature 0.8:

{quoted}

License of the weights: MIT, as the rest of the project.
"""


def card(figures: dict[str, Any], text: str) -> str:
    """CARD.md."""
    use = [count for counts in figures["expert_use"].values() for count in counts]
    tokens = figures["windows"] * figures["window_tokens"]
    return CARD.format(
        **figures,
        **figures["training"],
        top_k=SHAPE.index_topk,
        context=SHAPE.context,
        ranks=SHAPE.ranks,
        package=PACKAGE,
        share=HELD_OUT_SHARE,
        even=tokens * CONFIG.moe.used / CONFIG.moe.experts,
        least=min(use),
        most=max(use),
        quoted="\n".join(f"> {line}".rstrip() for line in text.splitlines()),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of train_tiny.py")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    data = load_data(args.work)
    state = torch.load(args.work / "state.pt")
    store = TrainStore(CONFIG, 0)
    store.values.load_state_dict(state["values"])
    write_checkpoint(
        args.out,
        checkpoint_config(SHAPE),
        checkpoint_tensors(store),
        tiktoken_model=data.vocabulary,
        extra_files={
            "tokenizer_config.json": tokenizer_config(SHAPE),
            "generation_config.json": generation_config(SHAPE),
            "heldout.txt": data.held_out_text,
        },
    )
    training = {"steps": state["step"], "minutes": round(state["spent"] / 60), "batch": state["batch"]}
    with torch.inference_mode():
        figures = measure(args.out, data, training | {"seed": state["seed"]})
        text = sample(open_checkpoint(args.out), data.vocabulary, 160, seed=3)
    (args.out / "figures.json").write_text(json.dumps(figures, indent=1) + "\n")
    (args.out / "CARD.md").write_text(card(figures, text))
    shown = {name: value for name, value in figures.items() if not name.endswith("losses")}
    print(json.dumps(shown, indent=1))


if __name__ == "__main__":
    main()
