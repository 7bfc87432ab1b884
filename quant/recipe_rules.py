"""The types that llama.cpp's quantizer assigns to a Kimi model, recipe by recipe.

The rules are facts about that tool: they look at names, at the place of a tensor in the walk (by layer, then by
name), at the number of layers and experts, and at whether an importance matrix is given. Counters run over the walk,
so the types are a function of the whole ordered list. Nothing here knows our floors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from quant.tensors import RecipeTensor, TensorClass
from quant.types import QuantType, block_size

Q = QuantType

DEFAULT_TYPES: Final[dict[str, QuantType]] = {
    "Q4_0": Q.Q4_0,
    "Q4_1": Q.Q4_1,
    "Q5_0": Q.Q5_0,
    "Q5_1": Q.Q5_1,
    "Q8_0": Q.Q8_0,
    "Q2_K": Q.Q2_K,
    "Q2_K_S": Q.Q2_K,
    "Q3_K_S": Q.Q3_K,
    "Q3_K_M": Q.Q3_K,
    "Q3_K_L": Q.Q3_K,
    "Q4_K_S": Q.Q4_K,
    "Q4_K_M": Q.Q4_K,
    "Q5_K_S": Q.Q5_K,
    "Q5_K_M": Q.Q5_K,
    "Q6_K": Q.Q6_K,
    "IQ1_S": Q.IQ1_S,
    "IQ1_M": Q.IQ1_M,
    "IQ2_XXS": Q.IQ2_XXS,
    "IQ2_XS": Q.IQ2_XS,
    "IQ2_S": Q.IQ2_XS,
    "IQ2_M": Q.IQ2_S,
    "IQ3_XXS": Q.IQ3_XXS,
    "IQ3_XS": Q.IQ3_S,
    "IQ3_S": Q.IQ3_S,
    "IQ3_M": Q.IQ3_S,
    "IQ4_NL": Q.IQ4_NL,
    "IQ4_XS": Q.IQ4_XS,
}
"""The type of tensors that no rule of a recipe names."""

_LOWEST: Final = frozenset({"IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ2_M"})

# What a type becomes when rows are not whole super-blocks of 256.
_NARROW_ROWS: Final[dict[QuantType, QuantType]] = {
    Q.Q2_K: Q.Q4_0,
    Q.Q3_K: Q.Q4_0,
    Q.Q4_K: Q.Q5_0,
    Q.Q5_K: Q.Q5_1,
    Q.Q6_K: Q.Q8_0,
    **{t: Q.IQ4_NL for t in (Q.IQ1_S, Q.IQ1_M, Q.IQ2_XXS, Q.IQ2_XS, Q.IQ2_S, Q.IQ3_XXS, Q.IQ3_S, Q.IQ4_XS)},
}

# Recipes that raise the attention output of a model with exactly eight experts to Q5_K.
_EIGHT_EXPERTS_OUTPUT: Final = frozenset(
    ("Q2_K", "IQ3_XS", "IQ3_XXS", "Q3_K_S", "Q3_K_M", "IQ4_NL", "Q4_K_S", "Q4_K_M", "IQ3_S", "IQ3_M", "IQ4_XS")
)
_OUTPUT_PROJECTION: Final = {"Q2_K": Q.Q3_K, "IQ3_XXS": Q.IQ3_S, "Q3_K_M": Q.Q4_K, "Q3_K_L": Q.Q5_K, "IQ3_M": Q.Q4_K}


@dataclass(frozen=True, slots=True)
class Facts:
    """What the rules know of a model besides its tensors.

    Attributes:
        n_layers: decoder layers.
        n_experts: routed experts of a layer.
        grouped: at least four query heads share a key head in layer 0; never true when layer 0 is KDA.
        has_imatrix: an importance matrix is given.
    """

    n_layers: int
    n_experts: int
    grouped: bool
    has_imatrix: bool


def facts_of(tensors: Sequence[RecipeTensor], n_layers: int, has_imatrix: bool) -> Facts:
    """Read the facts off the tensor list (experts from the stacks, grouping from layer 0's absorbed keys)."""
    stacks = (t.shape[0] for t in tensors if t.cls is TensorClass.ROUTED_EXPERT and len(t.shape) == 3)
    heads = (t.shape[0] for t in tensors if t.name == "blk.0.attn_k_b.weight")
    return Facts(n_layers, max(stacks, default=1), max(heads, default=0) >= 4, has_imatrix)


def walk_order(tensors: Sequence[RecipeTensor]) -> list[int]:
    """Indices of ``tensors`` in the order of the quantizer's walk: globals, then layer by layer, each by name."""

    def key(index: int) -> tuple[int, str]:
        found = re.match(r"blk\.(\d+)\.", tensors[index].name)
        return (int(found[1]) if found else -1, tensors[index].name)

    return sorted(range(len(tensors)), key=key)


def quantizable(tensor: RecipeTensor) -> bool:
    """Whether the quantizer touches a tensor at all; the others keep the F32 that the converter writes."""
    name, kept = tensor.name, ("_norm.weight", "ffn_gate_inp.weight", "ssm_conv1d")
    is_matrix = math.prod(tensor.shape[:-1]) > 1
    return is_matrix and name.endswith("weight") and not any(part in name for part in kept)


def fit_rows(qtype: QuantType, columns: int) -> QuantType:
    """``qtype``, or what the quantizer falls back to when rows of ``columns`` weights are not whole blocks of it."""
    if columns % block_size(qtype) == 0:
        return qtype
    narrow = _NARROW_ROWS.get(qtype, qtype)
    return narrow if columns % block_size(narrow) == 0 else Q.F16


def needs_importance(name: str, qtype: QuantType, recipe: str) -> bool:
    """Whether llama.cpp refuses to write ``qtype`` for this tensor without importance."""
    if name in ("token_embd.weight", "output.weight"):
        return False
    if qtype is Q.Q2_K:
        return recipe == "Q2_K_S"
    return qtype in (Q.IQ1_S, Q.IQ1_M, Q.IQ2_XXS, Q.IQ2_XS, Q.IQ2_S, Q.IQ3_XXS)


def mixture(recipe: str, tensors: Sequence[RecipeTensor], facts: Facts, given: Collection[int] = ()) -> list[QuantType]:
    """The types that ``recipe`` names, before fallbacks for row widths.

    Args:
        recipe: a key of ``DEFAULT_TYPES``.
        tensors: the whole list, in any order.
        facts: of the model.
        given: indices whose types the user states; the walk's counters pass them by.

    Returns:
        One type per tensor, in the order of ``tensors``; F32 where the quantizer does not touch a tensor.
    """
    walk = _Walk(recipe, facts, tensors)
    types = [Q.F32] * len(tensors)
    for index in walk_order(tensors):
        if quantizable(tensors[index]) and index not in given:
            types[index] = walk.next_type(tensors[index])
    return types


class _Walk:
    """The running counters of one pass over the tensors."""

    def __init__(self, recipe: str, facts: Facts, tensors: Sequence[RecipeTensor]) -> None:
        self.recipe = recipe
        self.default = DEFAULT_TYPES[recipe]
        self.facts = facts
        self.n_values = sum("attn_v.weight" in t.name for t in tensors)
        self.tied = all(t.name != "output.weight" for t in tensors)
        self.values_seen = 0
        self.downs_seen = 0

    def next_type(self, tensor: RecipeTensor) -> QuantType:
        name = tensor.name
        if name == "output.weight" or (self.tied and name == "token_embd.weight"):
            return self._output(tensor.shape[-1])
        if name == "token_embd.weight":
            return self._embedding()
        low = self.recipe in _LOWEST
        if "attn_v.weight" in name:
            chosen = self._low_values() if low else self._values()
            self.values_seen += 1
            return chosen
        if "attn_k.weight" in name or "attn_q.weight" in name:
            return self._keys_and_queries("attn_k.weight" in name)
        if "attn_output.weight" in name:
            return self._low_attention_output() if low else self._attention_output()
        if "ffn_down" in name:
            chosen = self._low_down() if low else self._down(_layer(tensor))
            self.downs_seen += 1
            return chosen
        if "ffn_up" in name or "ffn_gate" in name:
            return self._gate_and_up(_layer(tensor))
        return self.default

    def _output(self, columns: int) -> QuantType:
        if columns % block_size(self.default):
            return Q.Q8_0
        if self.recipe in _LOWEST or self.recipe == "IQ3_XXS":
            return Q.Q5_K
        return Q.Q8_0 if self.default is Q.Q8_0 else Q.Q6_K

    def _embedding(self) -> QuantType:
        if self.recipe in ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS"):
            return Q.Q2_K
        return Q.IQ3_S if self.recipe in ("IQ2_S", "IQ2_M", "IQ3_XXS") else self.default

    def _low_values(self) -> QuantType:
        if self.facts.grouped or self.facts.n_experts >= 4:
            return Q.Q4_K
        return Q.IQ3_S if self.recipe in ("IQ2_S", "IQ2_M") else Q.Q2_K

    def _values(self) -> QuantType:
        if self.facts.n_experts == 8:
            return Q.Q8_0
        grouped, seen = self.facts.grouped, self.values_seen
        match self.recipe:
            case "Q2_K":
                return Q.Q4_K if grouped else Q.Q3_K
            case "IQ3_XXS":
                return Q.Q4_K if grouped else Q.IQ3_XXS if self.facts.has_imatrix else Q.IQ3_S
            case "Q2_K_S" | "IQ3_XS" | "IQ3_S" if grouped:
                return Q.Q4_K
            case "IQ4_NL" | "IQ4_XS" if grouped:
                return Q.Q5_K
            case "IQ3_M":
                return Q.Q4_K
            case "Q3_K_M":
                return Q.Q5_K if seen < 2 else Q.Q4_K
            case "Q3_K_L":
                return Q.Q5_K
            case "Q4_K_M" | "Q5_K_M" if _more_bits(seen, self.n_values):
                return Q.Q6_K
            case "Q4_K_S" if seen < 4:
                return Q.Q5_K
        return self.default

    def _keys_and_queries(self, key: bool) -> QuantType:
        if key and self.facts.n_experts == 8:
            return Q.Q4_K if self.recipe in _LOWEST else Q.Q8_0
        return {"IQ3_XS": Q.IQ3_XXS, "IQ3_XXS": Q.IQ2_S}.get(self.recipe, self.default)

    def _low_attention_output(self) -> QuantType:
        if self.facts.n_experts == 8:
            return Q.Q5_K
        if self.recipe in ("IQ1_S", "IQ1_M"):
            return Q.IQ2_XXS
        return Q.IQ3_S if self.recipe in ("IQ2_S", "IQ2_M") else self.default

    def _attention_output(self) -> QuantType:
        if self.facts.n_experts == 8:
            return Q.Q5_K if self.recipe in _EIGHT_EXPERTS_OUTPUT else self.default
        return _OUTPUT_PROJECTION.get(self.recipe, self.default)

    def _low_down(self) -> QuantType:
        # Compares the number of down projections seen, not the layer, with an eighth of the layers.
        if self.downs_seen >= self.facts.n_layers // 8:
            return self.default
        return Q.IQ3_S if self.recipe in ("IQ2_S", "IQ2_M") else Q.Q2_K

    def _down(self, layer: int) -> QuantType:
        n, imatrix = self.facts.n_layers, self.facts.has_imatrix
        first_eighth, more = layer < n // 8, _more_bits(layer, n)
        match self.recipe:
            case "Q2_K":
                return Q.Q3_K
            case "Q2_K_S" if first_eighth:
                return Q.Q4_K
            case "IQ3_XXS" if not imatrix:
                return Q.Q4_K if first_eighth else Q.Q3_K
            case "Q3_K_M":
                return Q.Q5_K if layer < n // 16 else Q.Q4_K
            case "IQ3_M" if first_eighth or (self.facts.n_experts == 8 and more):
                return Q.Q4_K
            case "Q3_K_L":
                return Q.Q5_K
            case "Q4_K_M" | "Q5_K_M" if more:
                return Q.Q6_K
            case "IQ4_NL" | "IQ4_XS" if first_eighth and not imatrix:
                return Q.Q5_K
            case "Q4_K_S" if first_eighth:
                return Q.Q5_K
            case "Q4_0" | "Q5_0" if first_eighth and imatrix:
                return Q.Q4_1 if self.recipe == "Q4_0" else Q.Q5_1
        return self.default

    def _gate_and_up(self, layer: int) -> QuantType:
        n = self.facts.n_layers
        middle = n // 8 <= layer < 7 * n // 8
        return Q.IQ3_XXS if self.recipe == "IQ3_XS" and middle else self.default


def _more_bits(index: int, count: int) -> bool:
    """The first and the last eighth, and every third in between."""
    eighth = count // 8
    return index < eighth or index >= 7 * count // 8 or (index - eighth) % 3 == 2


def _layer(tensor: RecipeTensor) -> int:
    return tensor.layer if tensor.layer is not None else 0
