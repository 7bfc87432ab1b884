"""Whose memory is counted: a GGUF on disk or on the Hub, or a released shape with a recipe, as ``ModelBytes``."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

from convert.model_config import ModelConfig
from convert.shapes import released_config, released_specs
from convert.structure import check_structure
from kimi_gguf.cluster.memory import ModelBytes, TensorBytes
from quant.errors import InputError, UsageError
from quant.gguf_split import GgufSet, read_gguf_set
from quant.recipes import assign, resolve
from quant.tensors import RecipeTensor
from quant.types import nbytes

_SHOWN = 3


def model_bytes(
    model: str | os.PathLike[str] | None, *, shape: str | None = None, quant: str | None = None
) -> ModelBytes:
    """Sizes and tensors of a model, from headers alone.

    Args:
        model: a GGUF, any file of a set, or ``hf://owner/name/file.gguf``; None with ``shape``.
        shape: ``k3`` or ``k3.1-pro``, with ``quant``.

    Raises:
        UsageError: both or neither are named.
        InputError: no GGUF there, or one of another architecture.
    """
    if (model is None) == (shape is None):
        raise UsageError(
            "name one model: a GGUF, or a released shape",
            "write MODEL.gguf, hf://owner/name/file.gguf, or --shape k3.1-pro --quant Q3_K_M",
        )
    if shape is not None:
        if quant is None:
            raise UsageError("--shape needs --quant", "for example --shape k3.1-pro --quant Q3_K_M")
        return released_bytes(shape, quant)
    if quant is not None:
        raise UsageError("--quant belongs to --shape", f"{os.fspath(model or '')} has its types already")
    return gguf_bytes(_read(os.fspath(model or "")))


@lru_cache(maxsize=64)
def released_bytes(shape: str, quant: str) -> ModelBytes:
    """A released shape in a recipe; recipes that need an importance matrix are sized as if they had one.

    Raises:
        UsageError: an unknown shape or recipe.
    """
    config, recipe = released_config(shape), resolve(quant)
    specs = released_specs(config)
    tensors = [RecipeTensor(s.name, s.cls, s.shape, s.layer, s.source_type) for s in specs]
    types = assign(recipe.name, tensors, n_layers=config.n_layers, has_imatrix=recipe.needs_imatrix)
    sizes = [TensorBytes(spec.name, nbytes(a.qtype, spec.shape)) for spec, a in zip(specs, types, strict=True)]
    return ModelBytes(config, tuple(sizes), f"{shape.lower()} in {recipe.name}")


def gguf_bytes(files: GgufSet) -> ModelBytes:
    """The model of a file or set.

    Raises:
        InputError: another architecture, or a file that is no whole model.
    """
    name = files.paths[0].name
    tensors = tuple(TensorBytes(tensor.name, tensor.nbytes) for tensor in files.tensors)
    return ModelBytes(_config(files, name), tensors, name)


def _config(files: GgufSet, name: str) -> ModelConfig:
    structure = check_structure(files)
    if structure is None:
        arch = files.headers[0].get_str("general.architecture")
        raise InputError(f"{name} is a {arch!r:.40}", "planning knows kimi-k3 and kimi-k31")
    if structure.config is None or structure.faults:
        more = f" and {len(structure.faults) - _SHOWN} more" if len(structure.faults) > _SHOWN else ""
        raise InputError(
            f"{name} is not a whole model: {'; '.join(structure.faults[:_SHOWN])}{more}",
            f"look at it with: kimi-gguf inspect {name}",
        )
    return structure.config


def _read(model: str) -> GgufSet:
    if not Path(model).exists():
        # The Hub's client takes a while to load.
        from kimi_gguf.hub.address import is_address
        from kimi_gguf.hub.gguf import read_hub_gguf

        if is_address(model):
            return read_hub_gguf(model)
    return read_gguf_set(Path(model))
