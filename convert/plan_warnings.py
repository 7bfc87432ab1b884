"""What a plan has to say about itself: growth against the checkpoint, gaps of an imatrix, odd files."""

from __future__ import annotations

from collections.abc import Sequence

from convert.domain import PlannedFile, PlannedTensor
from quant.imatrix import Imatrix
from quant.recipes import assign
from quant.tensors import RecipeTensor, TensorClass
from quant.types import QuantType, nbytes

MANY_FILES = 60
_KEEPING_EXPERTS = {"MXFP4": "is lossless", "MXFP4_MOE": "is lossless for the experts"}
_SHOWN = 3


def growth(recipe: str, planned: Sequence[PlannedTensor], tensors: Sequence[RecipeTensor], n_layers: int) -> list[str]:
    """A sentence when packed weights take more bits than the checkpoint gives them."""
    packed = [t for t in planned if t.spec.source_type == "MXFP4"]
    before = sum(nbytes(QuantType.MXFP4, t.spec.shape) for t in packed)
    after = sum(t.nbytes for t in packed)
    if after <= before:
        return []
    whole = sum(t.nbytes for t in planned)
    bits = 4.25 * after / before
    what = "routed experts" if all(t.spec.cls is TensorClass.ROUTED_EXPERT for t in packed) else "packed weights"
    choices = []
    for name, promise in _KEEPING_EXPERTS.items():
        types = assign(name, tensors, n_layers=n_layers, has_imatrix=False)
        total = sum(nbytes(a.qtype, t.shape) for a, t in zip(types, tensors, strict=True))
        if total < whole:
            choices.append(f"--quant {name} {promise} and takes {total:,}")
    if not choices:
        choices = [f"--tensor-type 'ffn_.*_exps=MXFP4' keeps them as they are and saves {after - before:,}"]
    return [
        f"{recipe} gives the {what} {bits:.2f} bits per weight where the checkpoint holds 4.25, which cannot make "
        f"them better, and takes {whole:,} bytes; {'; '.join(choices)}"
    ]


def uses_importance(tensor: PlannedTensor) -> bool:
    """Whether the encoder of this tensor weighs errors: float types and moved bits have none."""
    moved = tensor.qtype.name == tensor.spec.source_type
    return not moved and tensor.qtype not in (QuantType.F32, QuantType.F16, QuantType.BF16)


def importance_gaps(planned: Sequence[PlannedTensor], imatrix: Imatrix | None) -> list[str]:
    """What an importance matrix leaves open; checks that its entries fit the tensors that use them."""
    if imatrix is None:
        return []
    weighed = [t for t in planned if uses_importance(t)]
    bare = [t.spec.name for t in weighed if not imatrix.check(t.spec.name, t.spec.shape)]
    neutral = imatrix.coverage.neutral
    never = {t.spec.name: neutral.get(t.spec.name, 0) for t in weighed}
    warnings = []
    if bare:
        shown = ", ".join(bare[:_SHOWN]) + (" ..." if len(bare) > _SHOWN else "")
        warnings.append(f"{len(bare)} of {len(weighed)} quantized tensors have no entry in the imatrix: {shown}")
    if total := sum(never.values()):
        tensors = sum(count > 0 for count in never.values())
        warnings.append(f"{total} experts in {tensors} tensors were never hit by the imatrix: they get neutral weights")
    return warnings


def file_warnings(
    files: Sequence[PlannedFile], planned: Sequence[PlannedTensor], split_max_size: int | None
) -> list[str]:
    warnings = []
    if len(files) > MANY_FILES:
        warnings.append(f"the output has {len(files)} files; older loaders stop at 64: raise --split-max-size")
    if split_max_size is not None:
        over = [number for number, file in enumerate(files) if file.nbytes > split_max_size]
        largest = {t.file: t.spec.name for t in sorted(planned, key=lambda t: t.nbytes)}
        if over:
            names = ", ".join(f"{largest[n]} ({files[n].nbytes:,} bytes)" for n in over[:_SHOWN])
            warnings.append(
                f"{len(over)} of {len(files)} files exceed {split_max_size:,} bytes, for one tensor alone does: {names}"
                + (" ..." if len(over) > _SHOWN else "")
            )
    return warnings
