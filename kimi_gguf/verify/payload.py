"""Does a GGUF hold what its checkpoint says? Keys, shapes and vocabulary first, then the values of every tensor.

Which source tensors make which output tensor is derived from the checkpoint's config by the layout, never from what
the file or its manifest claims. Where only one sequence of bytes is right it is compared; quantized rows are encoded
again by the encoder that a few rows of the tensor betray; where none is recognised, errors are compared with what
the type explains. Work goes to threads by pieces of a tensor, so memory is threads times a piece.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

from convert.config import parse_config
from convert.layout import build_layout
from convert.source import open_source
from convert.structure import check_structure
from convert.threads import worker_count
from convert.vocab import load_vocab
from kimi_gguf.verify.identity import config_faults, match_tensors, vocabulary_faults
from kimi_gguf.verify.observations import NoProgress, Progress
from kimi_gguf.verify.payload_rows import Pair
from kimi_gguf.verify.payload_run import PayloadRun
from kimi_gguf.verify.sampling import DEFAULT_SHARE, parse_share
from kimi_gguf.verify.verdicts import VerifyReport
from quant.errors import InputError, UsageError
from quant.gguf_split import read_gguf_set
from quant.imatrix import Imatrix

PathLike = str | os.PathLike[str]


def verify_model(
    model: PathLike,
    *,
    source: PathLike,
    sample: str | float | None = None,
    full: bool = False,
    imatrix: PathLike | None = None,
    seed: int = 0,
    threads: int | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """Trace every tensor of a GGUF to the checkpoint that it was made from.

    Args:
        model: a GGUF, or any file of a split set.
        source: folder of the checkpoint.
        sample: share of the rows to read, ``1%`` by default; every expert of every stack gives at least one row.
        full: read everything; excludes ``sample``.
        imatrix: what the file was quantized with; without it tensors that used one are compared by their errors.
        seed: of the choice of rows; another one looks elsewhere.
        threads: workers; None takes the processors that this process may use.
        progress: told how many tensors are done.

    Raises:
        UsageError: parameters that make no sense.
        InputError: one side cannot be read, or is no Kimi model.
    """
    started = time.monotonic()
    share = _share(sample, full)
    files = read_gguf_set(Path(model))
    structure = check_structure(files)
    if structure is None:
        arch = files.headers[0].get_str("general.architecture")
        raise InputError(f"{model}: architecture {arch!r}", "verify knows kimi-k3 and kimi-k31")
    if not Path(source).is_dir():
        raise UsageError(f"there is no folder {source}", "name the folder of the checkpoint with --source")
    with open_source(Path(source)) as opened:
        text = opened.read_file("config.json")
        if text is None:
            raise InputError(f"{opened.label}: no config.json", "name the folder of a whole checkpoint")
        config = parse_config(text)
        layout = build_layout(config, opened.tensors, opened.shards)
        columns = {spec.name: spec.shape[-1] for spec in layout.specs}
        matrix = None if imatrix is None else Imatrix.load(imatrix, columns)
        faults = [*structure.faults]
        if structure.config is not None:
            faults += config_faults(config, structure.config)
        faults += vocabulary_faults(load_vocab(opened, config), files.metadata)
        matched = match_tensors(layout.specs, opened.tensors, files.tensors)
        with closing(Pair(opened, files, matrix)) as pair:
            weighed_unknown = matrix is None and any(k.startswith("quantize.imatrix.") for k in files.metadata)
            run = PayloadRun(pair, share, seed, worker_count(threads), progress or NoProgress(), weighed_unknown)
            verdicts = run.verdicts(matched.pairs)
        return VerifyReport(
            model=Path(model).name,
            source=opened.label,
            arch=config.arch,
            share=share,
            seed=seed,
            encoders=dict(Counter(v.encoder for v in verdicts if v.encoder)),
            structure=tuple(faults),
            tensors=(*verdicts, *matched.unpaired),
            warnings=(*structure.warnings, *opened.warnings, *layout.warnings),
            bytes_read=run.bytes_read,
            seconds=time.monotonic() - started,
        )


def _share(sample: str | float | None, full: bool) -> float:
    if full and sample is not None:
        raise UsageError("--sample and --full exclude each other", "drop one of the two")
    if full:
        return 1.0
    try:
        return DEFAULT_SHARE if sample is None else parse_share(sample)
    except ValueError:
        raise UsageError(f"--sample {sample} is no share of the rows", "write per cent: --sample 1%") from None
