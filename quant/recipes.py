"""Recipes: which type each tensor gets, with our floors, the user's overrides, and a reason for every change.

A recipe is a function of the ordered tensor list, the number of layers, and whether an importance matrix is given.
The recipes that llama.cpp knows assign what its quantizer assigns (``quant.recipe_rules``). Then, in this order:
an override of the user, the floor of the tensor's class, and the fallback for rows that are not whole blocks.
Tensors that the quantizer never touches (vectors, norms, convolutions) are F32 whatever is asked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import gguf

from quant.errors import UsageError
from quant.recipe_file import ReadRecipe
from quant.recipe_floors import FLOORS, below, check_encodable, refuse_below_floor, some, stated_types
from quant.recipe_rules import DEFAULT_TYPES, facts_of, fit_rows, mixture, quantizable
from quant.tensors import RecipeTensor, TensorClass
from quant.types import QuantType


@dataclass(frozen=True, slots=True)
class RecipeInfo:
    """A recipe by name.

    Attributes:
        name: canonical name.
        aliases: other names, all accepted in any case.
        file_type: value of ``general.file_type``.
        needs_imatrix: some of its tensors cannot be written without an importance matrix.
    """

    name: str
    aliases: tuple[str, ...]
    file_type: int
    needs_imatrix: bool


_ALIASES: Final[dict[str, tuple[str, ...]]] = {
    "F32": ("FP32",),
    "F16": ("FP16",),
    "MXFP4_MOE": ("MXFP4MOE",),
    "Q3_K_M": ("Q3_K",),
    "Q4_K_M": ("Q4_K",),
    "Q5_K_M": ("Q5_K",),
}
_FILE_TYPES: Final[dict[str, str]] = {
    "F32": "ALL_F32",
    "MXFP4": "MOSTLY_MXFP4_MOE",
    "Q3_K_XL": "MOSTLY_Q3_K_L",
    "Q2_K_XL": "MOSTLY_Q2_K",
}
_IMATRIX_RECIPES: Final = frozenset(
    ("Q2_K_S", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ2_M", "IQ3_XXS", "IQ3_XS")
)
_NAMES: Final = (
    *("MXFP4", "MXFP4_MOE", "F32", "BF16", "F16", "Q8_0", "Q6_K", "Q5_K_M", "Q5_K_S", "Q5_1", "Q5_0"),
    *("Q4_K_M", "Q4_K_S", "Q4_1", "Q4_0", "Q3_K_XL", "Q3_K_L", "Q3_K_M", "Q3_K_S", "Q2_K_XL", "Q2_K", "Q2_K_S"),
    *("IQ4_NL", "IQ4_XS", "IQ3_M", "IQ3_S", "IQ3_XS", "IQ3_XXS"),
    *("IQ2_M", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S"),
)

RECIPES: Final[dict[str, RecipeInfo]] = {
    name: RecipeInfo(
        name,
        _ALIASES.get(name, ()),
        int(gguf.LlamaFileType[_FILE_TYPES.get(name, f"MOSTLY_{name}")]),
        name in _IMATRIX_RECIPES,
    )
    for name in _NAMES
}
"""Every recipe by canonical name: lossless, float, then large to small within a family."""

_BY_NAME: Final = {alias: info for info in RECIPES.values() for alias in (info.name, *info.aliases)}

# Recipes of our own: (routed experts, dense side, down projections of the first and last eighth of the layers).
_BY_CLASS: Final[dict[str, tuple[QuantType, QuantType, QuantType]]] = {
    "MXFP4": (QuantType.MXFP4, QuantType.BF16, QuantType.MXFP4),
    "MXFP4_MOE": (QuantType.MXFP4, QuantType.Q8_0, QuantType.MXFP4),
    "F32": (QuantType.F32, QuantType.F32, QuantType.F32),
    "BF16": (QuantType.BF16, QuantType.BF16, QuantType.BF16),
    "F16": (QuantType.F16, QuantType.F16, QuantType.F16),
    "Q3_K_XL": (QuantType.Q3_K, QuantType.Q8_0, QuantType.Q4_K),
    "Q2_K_XL": (QuantType.Q2_K, QuantType.Q8_0, QuantType.Q3_K),
}
_LOSSLESS: Final[dict[str, frozenset[TensorClass]]] = {
    "MXFP4": frozenset(TensorClass),
    "MXFP4_MOE": frozenset({TensorClass.ROUTED_EXPERT}),
}


@dataclass(frozen=True, slots=True)
class Assignment:
    """The type of one tensor.

    Attributes:
        qtype: the type to write.
        recipe_type: the type that the recipe names.
        reason: why the two differ, or why the recipe's promise is not kept; None when there is nothing to tell.
    """

    qtype: QuantType
    recipe_type: QuantType
    reason: str | None = None


_FALLBACK: Final = "fallback"


def resolve(name: str) -> RecipeInfo:
    """The recipe called ``name``, in any case, by its name or an alias.

    Raises:
        UsageError: no such recipe; the hint lists the names.
    """
    try:
        return _BY_NAME[name.upper()]
    except KeyError:
        raise UsageError(f"unknown quantization {name!r}", "known: " + ", ".join(RECIPES)) from None


def assign(
    recipe: str | Mapping[str, QuantType],
    tensors: Sequence[RecipeTensor],
    *,
    n_layers: int,
    has_imatrix: bool,
    overrides: Sequence[tuple[str, QuantType]] = (),
    output_type: QuantType | None = None,
    embedding_type: QuantType | None = None,
    allow_fallback: bool = True,
    force: bool = False,
    floors: bool = True,
) -> list[Assignment]:
    """Give every tensor its type.

    Args:
        recipe: name of a recipe, or a table of types by tensor name (a recipe read from a text file).
        tensors: the whole model, in any order.
        n_layers: decoder layers; rules speak of eighths of them.
        has_imatrix: an importance matrix is given (some rules differ).
        overrides: (regular expression, type); the first that is found in a tensor's name wins, case is ignored.
            Tensors that are F32 in every file (vectors, norms, convolutions) are passed over.
        output_type, embedding_type: types of output.weight and token_embd.weight, before any override.
        allow_fallback: False refuses rows that do not fit the blocks of their type, instead of choosing another.
        force: let overrides go below a floor; such tensors carry a reason that says so.
        floors: False assigns what llama.cpp would, to compare sizes.

    Returns:
        One assignment per tensor, in the order of ``tensors``.

    Raises:
        UsageError: unknown recipe or type, a bad or useless expression, an override below a floor without ``force``,
            a table that misses a tensor, or a fallback where none is allowed.
    """
    stated = stated_types(tensors, overrides, output_type, embedding_type)
    named = _named_types(recipe, tensors, n_layers, has_imatrix, stated)
    if floors and not force:
        refuse_below_floor(tensors, stated)
    result = []
    for index, tensor in enumerate(tensors):
        if not quantizable(tensor) and index not in stated:
            result.append(Assignment(QuantType.F32, QuantType.F32))
            continue
        floor = FLOORS.get(tensor.cls) if floors else None
        result.append(_settle(tensor, named[index], stated.get(index), floor, _promise(recipe, tensor)))
    if not allow_fallback:
        _refuse_fallbacks(tensors, result)
    return result


def _settle(
    tensor: RecipeTensor,
    recipe_type: QuantType,
    stated: QuantType | None,
    floor: QuantType | None,
    promise: QuantType | None,
) -> Assignment:
    wanted = recipe_type if stated is None else stated
    reasons = []
    if stated is not None and stated is not recipe_type:
        reasons.append("override")
    if floor is not None and below(wanted, floor):
        if stated is None:
            wanted = floor
            reasons.append(f"floor of {tensor.cls}")
        else:
            reasons.append(f"forced below the floor of {tensor.cls}, {floor.name}")
    fitted = fit_rows(wanted, tensor.shape[-1])
    if fitted is not wanted:
        reasons.append(f"{_FALLBACK}: rows of {tensor.shape[-1]} are not whole {wanted.name} blocks")
    if promise is fitted and tensor.source_type != fitted.name:
        reasons.append(f"rounded: the source is {tensor.source_type}")
    return Assignment(fitted, recipe_type, "; ".join(reasons) or None)


def _promise(recipe: str | Mapping[str, QuantType], tensor: RecipeTensor) -> QuantType | None:
    """The type that a lossless recipe gives this tensor on the understanding that the source holds it already."""
    if not isinstance(recipe, str):
        return None
    name = resolve(recipe).name
    if tensor.cls not in _LOSSLESS.get(name, ()):
        return None
    experts, dense, _ = _BY_CLASS[name]
    return experts if tensor.cls is TensorClass.ROUTED_EXPERT else dense


def _named_types(
    recipe: str | Mapping[str, QuantType],
    tensors: Sequence[RecipeTensor],
    n_layers: int,
    has_imatrix: bool,
    stated: Mapping[int, QuantType],
) -> list[QuantType]:
    if not isinstance(recipe, str):
        return _table_types(recipe, tensors)
    name = resolve(recipe).name
    if name in DEFAULT_TYPES:
        facts = facts_of(tensors, n_layers, has_imatrix)
        plain = mixture(name, tensors, facts)
        if not stated:
            return plain
        # A tensor with a stated type is not counted in the walk; what it would have had is only for the report.
        walked = mixture(name, tensors, facts, stated)
        return [plain[i] if i in stated else walked[i] for i in range(len(tensors))]
    experts, dense, edge_down = _BY_CLASS[name]
    types = []
    for tensor in tensors:
        if not quantizable(tensor):
            types.append(QuantType.F32)
        elif tensor.cls is not TensorClass.ROUTED_EXPERT:
            types.append(dense)
        else:
            at_edge = tensor.layer is not None and not n_layers // 8 <= tensor.layer < 7 * n_layers // 8
            types.append(edge_down if at_edge and "ffn_down" in tensor.name else experts)
    return types


def _table_types(table: Mapping[str, QuantType], tensors: Sequence[RecipeTensor]) -> list[QuantType]:
    places = table.places if isinstance(table, ReadRecipe) else {}

    def place(name: str) -> str:
        return f"{places[name]}: " if name in places else ""

    missing = [t.name for t in tensors if quantizable(t) and t.name not in table]
    if missing:
        raise UsageError(
            f"the recipe names no type for {some(missing)}",
            "add a line for each, or make the recipe for this model again",
        )
    unknown = sorted(set(table) - {t.name for t in tensors})
    if unknown:
        raise UsageError(
            f"{place(unknown[0])}the recipe names {some(unknown)}, which this model does not have",
            "remove the line, or take a recipe made for this model",
        )
    for name, qtype in table.items():
        check_encodable(qtype, place(name) + name)
    for tensor in tensors:
        if not quantizable(tensor) and table.get(tensor.name, QuantType.F32) is not QuantType.F32:
            raise UsageError(
                f"{place(tensor.name)}{tensor.name} is F32 in every file, not {table[tensor.name].name}",
                "remove the line",
            )
    return [table.get(t.name, QuantType.F32) if quantizable(t) else QuantType.F32 for t in tensors]


def _refuse_fallbacks(tensors: Sequence[RecipeTensor], assignments: Sequence[Assignment]) -> None:
    names = [t.name for t, a in zip(tensors, assignments, strict=True) if a.reason and _FALLBACK in a.reason]
    if names:
        raise UsageError(
            f"{some(names)} cannot have the type of the recipe: their rows are not whole blocks",
            "drop --no-fallback, or name a type for them with --tensor-type",
        )
