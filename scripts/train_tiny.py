"""Trains the tiny K3.1 model that ships with the package, on the novels of Jane Austen.

    python scripts/train_tiny.py --work DIR [--minutes 60] [--resume]

The model is the reference itself: its layers run on a store of trainable tensors. Experts are MXFP4 in the forward
pass and other matrices BF16, so that the exported checkpoint is what was trained. Routers are balanced by moving
the selection bias, indexers learn to imitate the attention of their layer, and after a dense start every MLA layer
sees only the keys that its indexer picks. The schedule follows steps, or the clock when that runs out first.
``export_tiny.py`` turns the result into a checkpoint.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tiny_store
from tiny_store import CONFIG, TrainStore, key
from tiny_text import load_data

from kimi_gguf.reference import layer, mla, model, moe
from kimi_gguf.reference.indexer import causal_mask
from kimi_gguf.reference.layer import Trace
from kimi_gguf.reference.options import Options
from kimi_gguf.reference.weights import ROOT

CONTEXT = CONFIG.context_length
SPARSE_FROM = 0.3
EVALUATE = 4


def compile_blocks() -> None:
    """Replaces the blocks by compiled ones: the same values five times as fast, after a few minutes of compiling."""
    torch._dynamo.config.cache_size_limit = 64
    mlp = torch.compile(moe.mlp, dynamic=True)
    layer.mlp = moe.mlp = mlp
    layer.mix = model.mix = torch.compile(layer.mix, dynamic=False)
    layer.kda = torch.compile(layer.kda, dynamic=False)
    layer.indexer_scores = torch.compile(layer.indexer_scores, dynamic=False)
    for name in ("attend", "attention_logits", "gated_output"):
        setattr(mla, name, torch.compile(getattr(mla, name), dynamic=False))
    tiny_store.mxfp4_round = torch.compile(tiny_store.mxfp4_round, dynamic=False)
    globals()["index_loss"] = torch.compile(index_loss, dynamic=False)


@dataclass
class StepResult:
    """Losses and expert loads of one pass over a batch."""

    loss: Tensor
    index_loss: Tensor
    loads: dict[int, Tensor]


def index_loss(trace: Trace) -> Tensor:
    """KL divergence of the indexer's distribution from its layer's attention, averaged over heads and queries."""
    assert trace.index_scores is not None and trace.logits is not None
    visible = causal_mask(*trace.index_scores.shape[-2:])
    target = trace.logits.detach().masked_fill(~visible, float("-inf")).softmax(-1).mean(1)
    log_index = trace.index_scores.masked_fill(~visible, float("-inf")).log_softmax(-1)
    log_index = log_index.masked_fill(~visible, 0.0)
    return (target * (target.clamp(min=1e-9).log() - log_index)).sum(-1).mean()


def forward(store: TrainStore, ids: Tensor, *, sparse: bool, with_index: bool) -> StepResult:
    """Cross-entropy of the next token over ids [B, T + 1], indexer loss and expert loads."""
    losses: list[Tensor] = []
    loads: dict[int, Tensor] = {}

    def observe(index: int, _stream: Any, trace: Trace) -> None:
        if trace.routing is not None:
            loads[index] = torch.bincount(trace.routing.ids.flatten(), minlength=store.config.moe.experts)
        if with_index and trace.index_scores is not None:
            losses.append(index_loss(trace))

    options = Options(kda_form="centred", sparse=sparse, keep_logits=with_index)
    output = model.logits(store, ids[:, :-1], options, observe=observe)
    loss = functional.cross_entropy(output.flatten(0, 1), ids[:, 1:].flatten())
    return StepResult(loss, torch.stack(losses).sum() if losses else torch.zeros(()), loads)


def batch(ids: Tensor, step: int, size: int, seed: int) -> Tensor:
    """``size`` windows of 513 tokens; which ones depends on seed and step alone, so a resumed run sees the same."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(ids) - CONTEXT - 1, (size,), generator=generator)
    return torch.stack([ids[s : s + CONTEXT + 1] for s in starts.tolist()])


def windows(ids: Tensor) -> Tensor:
    """Consecutive windows of 513 tokens, one token shared by neighbours; a whole number of batches of them."""
    count = (len(ids) - 1) // CONTEXT // EVALUATE * EVALUATE
    return torch.stack([ids[i * CONTEXT : (i + 1) * CONTEXT + 1] for i in range(count)])


def held_out_loss(store: TrainStore, data: Tensor, *, sparse: bool) -> tuple[float, dict[int, Tensor]]:
    """Mean loss over windows, and how often each expert was chosen."""
    # Gradients stay on, though nobody asks for them: without them every compiled block would be compiled again.
    store.refresh()
    total = 0.0
    loads: dict[int, Tensor] = {}
    size = EVALUATE
    for i in range(0, len(data), size):
        result = forward(store, data[i : i + size], sparse=sparse, with_index=False)
        total += result.loss.item() * len(data[i : i + size])
        for at, load in result.loads.items():
            loads[at] = loads.get(at, torch.zeros_like(load)) + load
    return total / len(data), loads


def bigram_losses(train: Tensor, data: Tensor, vocab: int) -> list[float]:
    """Mean loss of an add-one bigram model of the training text on each of the windows [N, 513]."""
    counts = torch.ones(vocab, vocab, dtype=torch.float64)
    counts.view(-1).index_add_(0, train[:-1] * vocab + train[1:], torch.ones(len(train) - 1, dtype=torch.float64))
    log_p = (counts / counts.sum(1, keepdim=True)).log()
    losses: list[float] = (-log_p[data[:, :-1], data[:, 1:]].mean(1)).tolist()
    return losses


def make_optimizer(store: TrainStore) -> torch.optim.AdamW:
    """AdamW; weight decay on matrices only."""
    matrices, vectors = [], []
    for parameter in store.values.values():
        if parameter.requires_grad:
            (matrices if parameter.ndim > 1 and parameter.shape[0] > 1 else vectors).append(parameter)
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), eps=1e-8, fused=True)


@torch.no_grad()
def balance(store: TrainStore, loads: dict[int, Tensor], rate: float) -> None:
    """Raises the selection bias of experts with less than the mean load, lowers it for the others."""
    for at, load in loads.items():
        bias = store.values[key(f"{ROOT}layers.{at}.block_sparse_moe.gate.e_score_correction_bias")]
        bias += rate * torch.sign(load.float().mean() - load)


def train(args: argparse.Namespace) -> None:
    """Trains until ``args.steps`` or ``args.minutes``, whichever comes first; saves every few minutes."""
    work: Path = args.work
    data = load_data(work)
    held_out = windows(data.held_out)
    store = TrainStore(CONFIG, args.seed)
    optimizer = make_optimizer(store)
    state_file = work / "state.pt"
    step, spent = 0, 0.0
    if args.resume and state_file.exists():
        state = torch.load(state_file)
        store.values.load_state_dict(state["values"])
        optimizer.load_state_dict(state["optimizer"])
        step, spent = state["step"], state["spent"]
    began = time.monotonic() - spent
    saved = time.monotonic()
    losses = bigram_losses(data.train, held_out, CONFIG.vocab_size)
    bigram = math.exp(sum(losses) / len(losses))
    print(f"tokens {len(data.train)} + {len(data.held_out)}, bigram perplexity {bigram:.2f}", flush=True)

    def save() -> None:
        values = {"values": store.values.state_dict(), "optimizer": optimizer.state_dict()}
        how = {"step": step, "spent": time.monotonic() - began, "batch": args.batch, "seed": args.seed}
        torch.save(values | how, work / "state.tmp")
        (work / "state.tmp").replace(state_file)

    while True:
        progress = max(step / args.steps, (time.monotonic() - began) / (60 * args.minutes))
        if progress >= 1:
            break
        rate = args.lr * min(1.0, (step + 1) / 100) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        store.refresh()
        ids = batch(data.train, step, args.batch, args.seed)
        result = forward(store, ids, sparse=progress > SPARSE_FROM, with_index=True)
        optimizer.zero_grad(set_to_none=True)
        (result.loss + result.index_loss).backward()
        norm = nn.utils.clip_grad_norm_(store.parameters(), 1.0)
        if not torch.isfinite(norm):
            raise SystemExit(f"step {step}: the gradient is not finite")
        optimizer.step()
        balance(store, result.loads, 2e-3 if progress < 0.7 else 5e-4)
        step += 1
        if step % 20 == 0:
            spread = max(float(load.max() / load.float().mean()) for load in result.loads.values())
            least = min(int(load.min()) for load in result.loads.values())
            speed = step * args.batch * CONTEXT / (time.monotonic() - began)
            print(
                f"step {step} {progress:.3f} loss {result.loss.item():.4f} index {result.index_loss.item():.4f} "
                f"norm {norm.item():.2f} load max/mean {spread:.2f} min {least} {speed:.0f} tok/s",
                flush=True,
            )
        if step % 200 == 0:
            loss, _ = held_out_loss(store, held_out[::4], sparse=True)
            print(f"step {step} held-out perplexity (a quarter) {math.exp(loss):.2f}", flush=True)
        if time.monotonic() - saved > 180:
            save()
            saved = time.monotonic()
    save()
    loss, loads = held_out_loss(store, held_out, sparse=True)
    dense, _ = held_out_loss(store, held_out, sparse=False)
    print(f"held-out perplexity {math.exp(loss):.2f}, without indexer {math.exp(dense):.2f}")
    print("expert use", json.dumps({at: load.tolist() for at, load in loads.items()}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for text, states and the log")
    parser.add_argument("--minutes", type=float, default=60.0, help="wall-clock limit")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=4, help="windows of 512 tokens per step")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2, help="1 is faster when the machine is shared")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    compile_blocks()
    train(args)


if __name__ == "__main__":
    main()
