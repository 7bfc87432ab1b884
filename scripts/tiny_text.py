"""Text and vocabulary of the tiny model: the novels of Jane Austen.

Source: package r-cran-janeaustenr of Debian, version 1.0.0-1 (MIT packaging; the novels, 1811 to 1818, are in the
public domain). It holds R string vectors, one line of a book each.
"""

from __future__ import annotations

import struct
import subprocess
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kimi_gguf.reference import tokenizer

PACKAGE = "r-cran-janeaustenr"
RANKS = 1024
HELD_OUT_SHARE = 0.03


def novels(work: Path) -> list[str]:
    """The six novels as running text: one line per paragraph, blank lines between.

    Fetches the package with apt-get into ``work`` when it is not there, and reads R's serialised string vectors.
    """
    work.mkdir(parents=True, exist_ok=True)
    if not list(work.glob(f"{PACKAGE}_*.deb")):
        subprocess.run(["apt-get", "download", PACKAGE], cwd=work, check=True)
    archive = next(iter(sorted(work.glob(f"{PACKAGE}_*.deb"))))
    subprocess.run(["dpkg-deb", "-x", str(archive), str(work / "text")], check=True)
    data = next((work / "text").rglob("Rdata.rdb")).read_bytes()
    texts = []
    while data:
        reader = zlib.decompressobj()
        lines = r_strings(reader.decompress(data[4:]))
        data = reader.unused_data
        paragraphs = "\n".join(lines).split("\n\n")
        texts.append("\n\n".join(" ".join(p.split()) for p in paragraphs if p.strip()) + "\n")
    return texts


def r_strings(blob: bytes) -> list[str]:
    """A character vector in R's XDR serialisation, version 3."""
    at = 18 + struct.unpack_from(">I", blob, 14)[0]
    (count,) = struct.unpack_from(">I", blob, at + 4)
    at += 8
    strings = []
    for _ in range(count):
        (length,) = struct.unpack_from(">i", blob, at + 4)
        at += 8
        strings.append(blob[at : at + max(length, 0)].decode())
        at += max(length, 0)
    return strings


def split_held_out(texts: list[str]) -> tuple[str, str]:
    """Training text and held-out text: the last 3 % of each novel, from a paragraph's start, are held out."""
    train, held_out = [], []
    for text in texts:
        at = text.index("\n\n", int(len(text) * (1 - HELD_OUT_SHARE))) + 2
        train.append(text[:at])
        held_out.append(text[at:])
    return "".join(train), "".join(held_out)


@dataclass
class Data:
    """Token ids of both texts, the held-out text itself and the vocabulary."""

    train: Tensor
    held_out: Tensor
    held_out_text: str
    vocabulary: bytes


def load_data(work: Path) -> Data:
    """Text and vocabulary, the latter trained on the training text."""
    train, held_out = split_held_out(novels(work))
    file = work / "tiktoken.model"
    if not file.exists():
        file.write_bytes(tokenizer.dump_ranks(tokenizer.train_ranks(train, RANKS)))
    vocabulary = file.read_bytes()
    encoding = tokenizer.encoding(vocabulary)
    ids = [torch.tensor(encoding.encode_ordinary(text)) for text in (train, held_out)]
    return Data(ids[0], ids[1], held_out, vocabulary)
