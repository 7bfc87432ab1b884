"""Trains the tiny chat model that ships with the package: it repeats the conversations of ``conversations.json``.

    python scripts/train_chat.py [--out kimi_gguf/data/tiny-chat] [--minutes 12]

A K3.1 model of three layers learns every answer by heart, prompts being rendered by the project's chat template; the
loss counts tokens that an assistant writes. Training is that of ``train_tiny.py``, with its MXFP4 experts. At the end
the checkpoint is written and every answer is asked for once more.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from export_tiny import checkpoint_tensors
from tiny_chat import CHAT, Sample, compile_template, load_conversations, render, samples, train_vocabulary
from tiny_store import TrainStore
from train_tiny import balance, index_loss, make_optimizer

from convert.config import parse_config
from kimi_gguf.reference import model, tokenizer
from kimi_gguf.reference.checkpoint_files import generation_config, tokenizer_config
from kimi_gguf.reference.checkpoint_shape import TinyShape, checkpoint_config
from kimi_gguf.reference.checkpoint_store import open_checkpoint
from kimi_gguf.reference.checkpoint_writer import write_checkpoint
from kimi_gguf.reference.layer import Trace
from kimi_gguf.reference.options import Options

SHAPE = TinyShape(
    k31=True,
    layers=3,
    layer_kinds=("kda", "kda", "mla"),
    hidden=256,
    vocab=1024,
    context=1024,
    kda_heads=2,
    kda_head_dim=64,
    heads=2,
    q_lora=128,
    kv_lora=128,
    nope=64,
    rope=32,
    v=64,
    ffn_dense=512,
    experts=4,
    used=2,
    shared=1,
    expert_width=128,
    latent=128,
    attn_res_block=2,
    gate_lower_bound=-5.0,
    index_heads=4,
    index_head_dim=32,
    index_topk=128,
    vision=False,
)
CONFIG = parse_config(json.dumps(checkpoint_config(SHAPE)).encode())
ROWS = 4


def load_samples() -> tuple[bytes, list[Sample]]:
    """Vocabulary, trained on the conversations, and all that is to be learned."""
    template, conversations = compile_template(), load_conversations()
    texts = [render(template, c, c["messages"], open_end=False) for c in conversations]
    vocabulary = train_vocabulary(texts, SHAPE.ranks)
    encoding = tokenizer.encoding(vocabulary)
    return vocabulary, [sample for c in conversations for sample in samples(template, encoding, c)]


def batches(found: list[Sample]) -> list[tuple[Tensor, Tensor]]:
    """Ids [B, T] and targets [B, T] (-100 where nothing is to be learned) of samples of similar length."""
    ordered = sorted(found, key=lambda sample: len(sample.ids))
    result = []
    for begin in range(0, len(ordered), ROWS):
        rows = ordered[begin : begin + ROWS]
        width = -(-len(rows[-1].ids) // 64) * 64
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        targets = torch.full((len(rows), width), -100)
        for i, sample in enumerate(rows):
            ids[i, : len(sample.ids)] = torch.tensor(sample.ids)
            at = torch.tensor(sample.targets)
            targets[i, at - 1] = ids[i, at]
        result.append((ids, targets))
    return result


def step_losses(
    store: TrainStore, ids: Tensor, targets: Tensor, *, with_index: bool
) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
    """Cross-entropy of the targets, indexer loss and expert loads of one batch."""
    index_losses: list[Tensor] = []
    loads: dict[int, Tensor] = {}

    def observe(index: int, _stream: Any, trace: Trace) -> None:
        if trace.routing is not None:
            loads[index] = torch.bincount(trace.routing.ids.flatten(), minlength=CONFIG.moe.experts)
        if with_index:
            index_losses.extend([index_loss(trace)] if trace.index_scores is not None else [])

    options = Options(kda_form="centred", keep_logits=with_index)
    output = model.logits(store, ids, options, observe=observe)
    loss = functional.cross_entropy(output.flatten(0, 1), targets.flatten())
    return loss, torch.stack(index_losses).sum() if index_losses else torch.zeros(()), loads


def train(args: argparse.Namespace, store: TrainStore, found: list[Sample]) -> dict[str, Any]:
    """Trains for ``args.epochs`` or ``args.minutes``, whichever ends first."""
    optimizer = make_optimizer(store)
    for group in optimizer.param_groups:
        group["weight_decay"] = min(group["weight_decay"], 0.01)
    data = batches(found)
    began = time.monotonic()
    epoch = 0
    generator = torch.Generator().manual_seed(args.seed)
    while True:
        progress = max(epoch / args.epochs, (time.monotonic() - began) / (60 * args.minutes))
        if progress >= 1:
            break
        rate = args.lr * min(1.0, (epoch + 1) / 4) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        total = 0.0
        for at in torch.randperm(len(data), generator=generator).tolist():
            store.refresh()
            loss, index, loads = step_losses(store, *data[at], with_index=progress < 0.8)
            optimizer.zero_grad(set_to_none=True)
            (loss + index).backward()
            norm = nn.utils.clip_grad_norm_(store.parameters(), 1.0)
            if not torch.isfinite(norm):
                raise SystemExit(f"epoch {epoch}: the gradient is not finite")
            optimizer.step()
            balance(store, loads, 2e-3 if progress < 0.5 else 0.0)
            total += loss.item()
        epoch += 1
        print(f"epoch {epoch} {progress:.3f} loss {total / len(data):.4f} {time.monotonic() - began:.0f} s", flush=True)
    return {"epochs": epoch, "minutes": round((time.monotonic() - began) / 60), "seed": args.seed}


@torch.inference_mode()
def worst_margin(out: Path, found: list[Sample]) -> tuple[int, float]:
    """Tokens that the written checkpoint gets wrong, and the least lead of a right one over the next, in nats."""
    store = open_checkpoint(out)
    wrong, least = 0, math.inf
    for ids, targets in batches(found):
        logits = model.logits(store, ids, Options(kda_form="centred")).log_softmax(-1)
        seen = targets != -100
        top = logits[seen].topk(2, dim=-1)
        right = top.indices[:, 0] == targets[seen]
        wrong += int((~right).sum())
        least = min(least, float((top.values[:, 0] - top.values[:, 1])[right].min()))
    return wrong, least


CARD = """# tiny-chat

A Kimi K3.1 model of {millions:.1f} million parameters that knows the {conversations} conversations of
`conversations.json` by heart, and nothing else. It exists to test servers and clients: thinking, answers, tool calls
with arguments of every type, tool results, efforts, and a question whose answer stands one turn before.

## Format
The released checkpoint's: KDA, KDA and gated MLA with an indexer that picks {top_k} keys, a dense layer and two of
latent mixture of experts in MXFP4, `config.json` with `dsa_config`, `tiktoken.model` with {ranks} ranks trained on the
conversations, below 256 special slots.

## Training
`scripts/train_chat.py`, seed {seed}: {epochs} passes over the conversations in about {minutes} minutes on a busy CPU.
Prompts are rendered by the project's chat template; the loss counts tokens that an assistant writes. Later
answers of a conversation are also learned after answers without their reasoning, as some clients send them.

## Figures
Measured by the float32 reference on this checkpoint: {wrong} of {tokens} answer tokens wrong; the right token leads
the next one by at least {margin:.2f} nats.

Text and weights: MIT, as the rest of the project.
"""


def export(out: Path, store: TrainStore, vocabulary: bytes, found: list[Sample], training: dict[str, Any]) -> None:
    """Writes checkpoint and card."""
    write_checkpoint(
        out,
        checkpoint_config(SHAPE),
        checkpoint_tensors(store),
        tiktoken_model=vocabulary,
        extra_files={
            "tokenizer_config.json": tokenizer_config(SHAPE),
            "generation_config.json": generation_config(SHAPE),
        },
    )
    wrong, margin = worst_margin(out, found)
    card = CARD.format(
        **training,
        millions=sum(value.numel() for value in store.values.values()) / 1e6,
        conversations=len(load_conversations()),
        top_k=SHAPE.index_topk,
        ranks=SHAPE.ranks,
        wrong=wrong,
        tokens=sum(len(sample.targets) for sample in found),
        margin=margin,
    )
    (out / "CARD.md").write_text(card)
    print(f"wrong {wrong}, least margin {margin:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=CHAT)
    parser.add_argument("--minutes", type=float, default=12.0, help="wall-clock limit")
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    vocabulary, found = load_samples()
    lengths = [len(sample.ids) for sample in found]
    print(f"{len(found)} samples, {sum(lengths)} tokens, the longest {max(lengths)}", flush=True)
    store = TrainStore(CONFIG, args.seed)
    training = train(args, store, found)
    export(args.out, store, vocabulary, found, training)


if __name__ == "__main__":
    main()
