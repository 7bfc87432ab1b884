"""What a GGUF holds, from its header: metadata, sizes by type, and the structural check."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from convert.structure import check_structure
from kimi_gguf.sizes import SizedTensor, SizeReport, size_report
from quant.errors import InputError
from quant.gguf_cursor import StringArray
from quant.gguf_parser import GgufTensor, GgufValue, ValueType
from quant.gguf_split import GgufSet, read_gguf_set

LONGEST_ARRAY = 1024
_FIRST_STRINGS = 5


@dataclass(frozen=True, slots=True)
class InspectedFile:
    """One file of the model."""

    name: str
    nbytes: int
    tensors: int


@dataclass(frozen=True, slots=True)
class Inspection:
    """Everything that ``inspect`` found.

    Attributes:
        files: the file, or all files of its set.
        arch, name, file_type: of ``general.*``; empty when absent.
        metadata, tensors: every key and every tensor.
        sizes: tensor data by type.
        checked: the architecture is one whose structure is known.
        faults: what makes the file unusable or wrong.
        warnings: what is unusual.
    """

    files: tuple[InspectedFile, ...]
    arch: str
    name: str
    file_type: str
    metadata: dict[str, GgufValue]
    tensors: tuple[GgufTensor, ...]
    sizes: SizeReport
    checked: bool
    faults: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)

    def to_dict(self, *, tensors: bool = False) -> dict[str, Any]:
        """A JSON object; long arrays are given by their length and first elements, tensors only when asked."""
        value = {
            "files": [{"name": f.name, "bytes": f.nbytes, "tensors": f.tensors} for f in self.files],
            "bytes": self.nbytes,
            "architecture": self.arch,
            "name": self.name,
            "file_type": self.file_type,
            **self.sizes.to_dict(),
            "structure": {"checked": self.checked, "faults": list(self.faults), "warnings": list(self.warnings)},
            "metadata": {key: plain_value(value) for key, value in self.metadata.items()},
        }
        if tensors:
            value["tensor_list"] = [
                {"name": t.name, "type": t.qtype.name, "shape": t.shape, "bytes": t.nbytes} for t in self.tensors
            ]
        return value


def inspect(file: str | os.PathLike[str]) -> Inspection:
    """Read the header of a GGUF, with those of its set when it is one of several files.

    Args:
        file: a GGUF file, any file of a split set, on disk or on the Hub (``hf://owner/name/file.gguf``, or a
            repository or folder that holds one model); only headers are read.

    Raises:
        InputError: not a readable GGUF; a wrong structure is no error but is told in ``faults``.
        UsageError: an address on the Hub that stands for several models.
    """
    files = _read(file)
    structure = check_structure(files)
    first = files.headers[0]
    return Inspection(
        files=tuple(
            InspectedFile(path.name, header.file_size, len(header.tensors))
            for path, header in zip(files.paths, files.headers, strict=True)
        ),
        arch=first.get_str("general.architecture") or "",
        name=first.get_str("general.name") or "",
        file_type=_file_type(first.get_int("general.file_type")),
        metadata=files.metadata,
        tensors=files.tensors,
        sizes=size_report(_sized(files)),
        checked=structure is not None,
        faults=structure.faults if structure else (),
        warnings=structure.warnings if structure else (),
    )


def _read(file: str | os.PathLike[str]) -> GgufSet:
    text = os.fspath(file)
    if Path(file).exists() or not text.startswith(("hf://", "https://")):
        if not Path(file).exists() and text.count("/") == 1 and not text.endswith(".gguf"):
            raise InputError(f"there is no file {text}", f"if it is a repository on the Hub, write hf://{text}")
        return read_gguf_set(Path(file))
    from kimi_gguf.hub.gguf import read_hub_gguf

    return read_hub_gguf(os.fspath(file))


def plain_value(value: GgufValue) -> Any:
    """A metadata value as JSON has it."""
    if isinstance(value.value, StringArray | np.ndarray):
        length = len(value.value)
        if isinstance(value.value, StringArray):
            shown: list[Any] = value.value[:_FIRST_STRINGS] if length > LONGEST_ARRAY else list(value.value)
        else:
            shown = [_plain_float(x, value.element) for x in value.value[:LONGEST_ARRAY].tolist()]
        return shown if len(shown) == length else {"length": length, "first": shown}
    return _plain_float(value.value, value.type)


def _plain_float(value: Any, type_: Any) -> Any:
    """A float32 in its shortest digits; NaN and infinity, which JSON does not have, as text."""
    if not isinstance(value, float):
        return value
    if not math.isfinite(value):
        return str(value)
    return float(str(np.float32(value))) if type_ is ValueType.FLOAT32 else value


def _sized(files: GgufSet) -> list[SizedTensor]:
    return [SizedTensor(t.qtype, math.prod(t.shape), t.nbytes, "_exps." in t.name) for t in files.tensors]


def _file_type(number: int | None) -> str:
    if number is None:
        return ""
    try:
        name: str = gguf.LlamaFileType(number).name
    except ValueError:
        return str(number)
    return name.removeprefix("MOSTLY_").removeprefix("ALL_")
