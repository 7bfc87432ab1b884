"""The plan: every output tensor with its type, file, offset and bytes, settled before a byte is moved.

A plan needs headers and small files alone. Its size is that of the finished files to the byte, because the header
bytes are part of it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from convert.config import ModelConfig, parse_config
from convert.domain import Plan, PlannedFile, PlannedTensor, Source, SourceTensor, TensorSpec
from convert.gguf_file import ALIGNMENT, TensorEntry, cut, lay_out_split, padded
from convert.layout import build_layout
from convert.metadata import ImatrixFacts, build_metadata, file_stem
from convert.overrides import Override
from convert.plan_warnings import file_warnings, growth, importance_gaps
from convert.version import VERSION
from convert.vocab import Vocab, load_vocab
from quant.errors import InputError, UsageError
from quant.gguf_split import split_name
from quant.imatrix import Imatrix
from quant.recipe_file import write_recipe
from quant.recipe_report import dominant_type, missing_importance
from quant.recipe_rules import quantizable
from quant.recipes import Assignment, RecipeInfo, assign, resolve
from quant.tensors import RecipeTensor
from quant.types import QuantType

_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose headers and small files have been read and found sound.

    Attributes:
        source: where its bytes are.
        config, vocab: from config.json and tiktoken.model.
        specs, left_out, warnings: of its layout.
        config_sha256: of config.json.
    """

    source: Source
    config: ModelConfig
    vocab: Vocab
    specs: tuple[TensorSpec, ...]
    left_out: tuple[SourceTensor, ...]
    warnings: tuple[str, ...]
    config_sha256: str


@dataclass(frozen=True, slots=True)
class Choices:
    """What the user decides about a conversion's output bytes.

    Attributes:
        quant: name or alias of a recipe.
        file_name: of a single output file, split sets are named after it; None follows the convention.
        split_max_size: bytes of a file, header included; None for one file.
        name: of the model, when not the checkpoint's own.
        tensor_types: (regex, type), the first match decides.
        output_type, embedding_type: of ``output.weight`` and ``token_embd.weight``.
        overrides: of metadata.
        encoder: ``ggml`` or ``native``.
        allow_fallback: a type that a tensor's rows do not fit is replaced and reported, else refused.
        force: overrides may go below the floors.
        table: types by tensor name, instead of the recipe called ``quant``, which then only names the result.
        target_size: bytes of all files together that types are to be chosen for, see ``convert.target_size``.
    """

    quant: str
    file_name: str | None = None
    split_max_size: int | None = None
    name: str | None = None
    tensor_types: tuple[tuple[str, QuantType], ...] = ()
    output_type: QuantType | None = None
    embedding_type: QuantType | None = None
    overrides: tuple[Override, ...] = ()
    encoder: str = "native"
    allow_fallback: bool = True
    force: bool = False
    table: Mapping[str, QuantType] | None = None
    target_size: int | None = None


def read_checkpoint(source: Source) -> Checkpoint:
    """Read and check what a plan needs: config, vocabulary, and the place of every tensor.

    Raises:
        InputError: the checkpoint cannot be converted.
    """
    text = source.read_file("config.json")
    if text is None:
        raise InputError(f"{source.label} has no config.json", "name a folder that holds a whole checkpoint")
    config = parse_config(text, "config.json")
    layout = build_layout(config, source.tensors, source.shards)
    vocab = load_vocab(source, config)
    return Checkpoint(
        source,
        config,
        vocab,
        layout.specs,
        layout.left_out,
        (*source.warnings, *layout.warnings),
        hashlib.sha256(text).hexdigest(),
    )


def load_imatrix(path: str | os.PathLike[str], checkpoint: Checkpoint) -> Imatrix:
    """Open and check an importance matrix for a checkpoint.

    Raises:
        InputError: it is damaged; names tensor and expert.
    """
    return Imatrix.load(path, {spec.name: spec.shape[-1] for spec in checkpoint.specs})


def make_plan(checkpoint: Checkpoint, choices: Choices, imatrix: Imatrix | None = None) -> Plan:
    """Plan the conversion of a checkpoint.

    Raises:
        UsageError: an unknown type, a type that needs an imatrix without one, an override below a floor.
        InputError: an imatrix that does not fit, an architecture that GGUF cannot express.
    """
    tensors = recipe_tensors(checkpoint.specs)
    recipe = _recipe(choices, tensors)
    assignments = _assign(recipe, tensors, checkpoint.config, choices, imatrix)
    metadata = build_metadata(
        checkpoint.config,
        checkpoint.vocab,
        checkpoint.source,
        recipe,
        specs=checkpoint.specs,
        name=choices.name,
        overrides=choices.overrides,
        imatrix=_facts(imatrix),
    )
    entries = [
        TensorEntry(spec.name, spec.shape, assignment.qtype)
        for spec, assignment in zip(checkpoint.specs, assignments, strict=True)
    ]
    cuts = cut(metadata.entries, entries, choices.split_max_size)
    layouts = lay_out_split(metadata.entries, entries, cuts)
    if choices.table is not None:
        # A recipe file is called as the output that it was written beside, model included.
        own = label(file_stem(metadata.name)) + "_"
        recipe = replace(recipe, name=recipe.name.removeprefix(own))
    stem = (choices.file_name or f"{file_stem(metadata.name)}-{recipe.name}.gguf").removesuffix(".gguf")
    files = tuple(
        PlannedFile(_file_name(stem, number, len(layouts)), layout.header, layout.nbytes)
        for number, layout in enumerate(layouts)
    )
    places = [(number, offset) for number, layout in enumerate(layouts) for offset in layout.offsets]
    planned = tuple(
        PlannedTensor(spec, a.qtype, file, offset, entry.nbytes, a.recipe_type, a.reason)
        for spec, a, entry, (file, offset) in zip(checkpoint.specs, assignments, entries, places, strict=True)
    )
    warnings = (
        *checkpoint.warnings,
        *metadata.warnings,
        *growth(recipe.name, planned, tensors, checkpoint.config.n_layers),
        *importance_gaps(planned, imatrix),
        *file_warnings(files, planned, choices.split_max_size),
    )
    return Plan(
        checkpoint.config.arch,
        recipe.name,
        choices.encoder,
        files,
        planned,
        checkpoint.left_out,
        tuple(dict.fromkeys(warnings)),
        _digest(checkpoint, choices, files, planned, imatrix),
        "" if choices.table is None else _table(choices, metadata.name, files, planned, imatrix),
    )


def label(text: str) -> str:
    """What stands for the name of a recipe in the names of files."""
    return re.sub(r"[^A-Z0-9.]+", "_", text.upper()).strip("_.") or "MIX"


def padding(plan: Plan, index: int) -> Iterator[tuple[int, int]]:
    """(begin, end) of the zeros after each tensor of file ``index``."""
    for tensor in plan.tensors:
        end = tensor.offset + tensor.nbytes
        if tensor.file == index and end % ALIGNMENT:
            yield end, padded(end)


def check_importance(plan: Plan, imatrix: Imatrix | None) -> None:
    """Refuse to begin what could not be finished well without importance.

    Raises:
        UsageError: tensors of types that need an importance matrix have no entry; names the first.
    """
    missing = missing_importance(
        plan.recipe,
        recipe_tensors([t.spec for t in plan.tensors]),
        [Assignment(t.qtype, t.recipe_type, t.reason) for t in plan.tensors],
        imatrix.names if imatrix else (),
    )
    if missing:
        shown = ", ".join(missing[:_SHOWN])
        raise UsageError(
            f"{len(missing)} tensors get types that need an importance matrix, and have no entry: {shown}",
            "give --imatrix FILE with entries for them, or choose another --quant or --tensor-type",
        )


def recipe_tensors(specs: Sequence[TensorSpec]) -> list[RecipeTensor]:
    """The tensors as a recipe sees them."""
    return [RecipeTensor(s.name, s.cls, s.shape, s.layer, s.source_type) for s in specs]


def _recipe(choices: Choices, tensors: Sequence[RecipeTensor]) -> RecipeInfo:
    """The named recipe, or for a table one with the file type of the type that holds most weights."""
    if choices.table is None:
        return resolve(choices.quant)
    types = [Assignment(choices.table.get(t.name, QuantType.F32), QuantType.F32) for t in tensors]
    most = dominant_type(tensors, types).name
    return RecipeInfo(choices.quant, (), resolve(most).file_type, needs_imatrix=False)


def _assign(
    recipe: RecipeInfo,
    tensors: Sequence[RecipeTensor],
    config: ModelConfig,
    choices: Choices,
    imatrix: Imatrix | None,
) -> list[Assignment]:
    return assign(
        recipe.name if choices.table is None else choices.table,
        tensors,
        n_layers=config.n_layers,
        # A recipe that cannot be written without a matrix is planned as if there were one.
        has_imatrix=imatrix is not None or recipe.needs_imatrix,
        overrides=choices.tensor_types,
        output_type=choices.output_type,
        embedding_type=choices.embedding_type,
        allow_fallback=choices.allow_fallback,
        force=choices.force,
    )


def _table(
    choices: Choices,
    name: str,
    files: Sequence[PlannedFile],
    planned: Sequence[PlannedTensor],
    imatrix: Imatrix | None,
) -> str:
    """The text recipe that gives a plan's types again, and in its comment what else decides the bytes."""
    tensors = recipe_tensors([tensor.spec for tensor in planned])
    types = {t.spec.name: t.qtype for t, r in zip(planned, tensors, strict=True) if quantizable(r)}
    comment = [f"{name}: {sum(file.nbytes for file in files):,} bytes, encoder {choices.encoder}"]
    if imatrix is not None:
        comment.append(f"importance matrix {imatrix.sha256}")
    if choices.force and choices.tensor_types:
        flags = " ".join(f"--tensor-type '{pattern}={qtype.name}'" for pattern, qtype in choices.tensor_types)
        comment.append(f"types below floors need these flags again: --force {flags}")
    return write_recipe(types, "\n".join(comment))


def _facts(imatrix: Imatrix | None) -> ImatrixFacts | None:
    if imatrix is None:
        return None
    return ImatrixFacts(imatrix.sha256, ", ".join(imatrix.datasets), len(imatrix.names), imatrix.chunk_count)


def _file_name(stem: str, number: int, count: int) -> str:
    return f"{stem}.gguf" if count == 1 else split_name(stem, number, count)


def _digest(
    checkpoint: Checkpoint,
    choices: Choices,
    files: Sequence[PlannedFile],
    planned: Sequence[PlannedTensor],
    imatrix: Imatrix | None,
) -> str:
    """SHA-256 over all that decides output bytes; types, shapes and offsets are in the headers."""
    digest = hashlib.sha256()
    facts = {
        "tool": VERSION,
        "encoder": choices.encoder,
        "imatrix": imatrix.sha256 if imatrix else None,
        "shards": [[shard.name, shard.nbytes, shard.header_sha256] for shard in checkpoint.source.shards],
        "tensors": [
            [t.spec.name, t.spec.sources, t.spec.transform, t.spec.source_type, t.spec.experts, t.file] for t in planned
        ],
        "files": [file.name for file in files],
    }
    digest.update(json.dumps(facts).encode())
    for file in files:
        digest.update(file.header)
    return digest.hexdigest()
