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
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from convert.config import parse_config
from convert.domain import Source
from convert.layout import build_layout
from convert.source import LocalSource, open_source
from convert.structure import check_structure
from convert.threads import worker_count
from convert.vocab import load_vocab
from kimi_gguf.hub.address import parse_address
from kimi_gguf.hub.proxy import RangedSource, SourceProxy
from kimi_gguf.hub.source import HubSource
from kimi_gguf.sources import resolve_source
from kimi_gguf.verify.gguf_bytes import open_gguf
from kimi_gguf.verify.hub_manifest import manifest_faults
from kimi_gguf.verify.identity import config_faults, match_tensors, vocabulary_faults
from kimi_gguf.verify.observations import NoProgress, Progress
from kimi_gguf.verify.payload_rows import Pair
from kimi_gguf.verify.payload_run import PayloadRun
from kimi_gguf.verify.sampling import DEFAULT_SHARE, parse_share
from kimi_gguf.verify.verdicts import VerifyReport
from quant.errors import InputError, UsageError
from quant.imatrix import Imatrix

PathLike = str | os.PathLike[str]
_CONNECTIONS = 16


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
        model: a GGUF, or any file of a split set; or ``hf://owner/name/FOLDER``, with the manifest that lies there.
        source: folder of the checkpoint, or ``hf://owner/name@revision``. Of what is on the Hub ranges are read, of
            each tensor a few unless ``sample`` or ``full`` says otherwise; nothing is downloaded.
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
    if seed < 0:
        raise UsageError(f"--seed {seed} is negative", "give 0 or more")
    with ExitStack() as stack:
        gguf = stack.enter_context(open_gguf(model))
        files = gguf.files
        structure = check_structure(files)
        if structure is None:
            arch = files.headers[0].get_str("general.architecture")
            raise InputError(f"{model}: architecture {arch!r}", "verify knows kimi-k3 and kimi-k31")
        opened = stack.enter_context(_opened_source(source))
        far = gguf.repository is not None or isinstance(opened, SourceProxy)
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
        if gguf.repository is not None:
            faults += manifest_faults(gguf.repository, files, opened)
        matched = match_tensors(layout.specs, opened.tensors, files.tensors)
        weighed_unknown = matrix is None and any(k.startswith("quantize.imatrix.") for k in files.metadata)
        run = PayloadRun(
            Pair(opened, files, gguf.content, matrix),
            share,
            seed,
            max(worker_count(threads), _CONNECTIONS) if far else worker_count(threads),
            progress or NoProgress(),
            weighed_unknown,
            spots=far and sample is None and not full,
        )
        verdicts = run.verdicts(matched.pairs)
        rows = sum(verdict.rows for verdict in verdicts)
        return VerifyReport(
            model=Path(model).name,
            source=opened.label,
            arch=config.arch,
            share=sum(verdict.checked for verdict in verdicts) / rows if far and rows else share,
            seed=seed,
            encoders=dict(Counter(v.encoder for v in verdicts if v.encoder)),
            structure=tuple(faults),
            tensors=(*verdicts, *matched.unpaired),
            warnings=(*structure.warnings, *opened.warnings, *layout.warnings),
            bytes_read=run.bytes_read,
            seconds=time.monotonic() - started,
        )


@contextmanager
def _opened_source(source: PathLike) -> Iterator[Source]:
    """A folder, or a checkpoint on the Hub of which ranges are read."""
    if Path(source).is_dir():
        with open_source(Path(source)) as folder:
            yield folder
        return
    if parse_address(os.fspath(source)) is None:
        raise UsageError(
            f"there is no folder {os.fspath(source)}", "name the checkpoint with --source: a folder, or hf://owner/name"
        )
    # No shard is fetched, so the folder where shards would be is never made.
    opened = resolve_source(source)
    try:
        yield RangedSource(opened) if isinstance(opened, HubSource) else opened
    finally:
        if isinstance(opened, LocalSource):
            opened.close()


def _share(sample: str | float | None, full: bool) -> float:
    if full and sample is not None:
        raise UsageError("--sample and --full exclude each other", "drop one of the two")
    if full:
        return 1.0
    try:
        return DEFAULT_SHARE if sample is None else parse_share(sample)
    except ValueError:
        raise UsageError(f"--sample {sample} is no share of the rows", "write per cent: --sample 1%") from None
