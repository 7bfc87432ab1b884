"""The released models without files: counts and bytes of the public census, and agreement with the real layout."""

from __future__ import annotations

import pytest
from gguf_samples import small

from convert.domain import SourceTensor
from convert.layout import build_layout
from convert.shapes import SHAPES, released_config, released_specs, text_sources, vision_sources
from quant.errors import UsageError

CENSUS = {
    "k3": (2_573, 497_220, 1_560_860_324_864),
    "k3.1-pro": (2_693, 497_340, 1_561_217_377_280),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_counts_and_bytes_are_those_of_the_census(shape: str) -> None:
    config = released_config(shape)
    outputs, sources, payload = CENSUS[shape]
    patterns = (*text_sources(config), *vision_sources())
    assert len(released_specs(config)) == outputs
    assert sum(p.count for p in patterns) == sources
    assert sum(p.nbytes for p in patterns) == payload
    assert sum(p.nbytes for p in vision_sources()) == 894_717_952


def test_k3_dtypes_are_counted_as_in_the_census() -> None:
    patterns = (*text_sources(released_config("k3")), *vision_sources())
    counts = {dtype: sum(p.count for p in patterns if p.dtype == dtype) for dtype in ("U8", "BF16", "F32")}
    assert counts == {"U8": 494_592, "BF16": 2_122, "F32": 506}


@pytest.mark.parametrize("shape", SHAPES)
def test_specs_without_files_equal_the_layout_of_the_same_tensors(shape: str) -> None:
    config = small(released_config(shape))
    tensors = {}
    for pattern in (*text_sources(config), *vision_sources()):
        for expert in range(pattern.count):
            name = pattern.name.replace("{e}", str(expert))
            tensors[name] = SourceTensor(name, pattern.dtype, pattern.shape, 0, 0, pattern.nbytes // pattern.count)
    layout = build_layout(config, tensors)
    assert layout.specs == released_specs(config)
    assert {t.name for t in layout.left_out} == {p.name for p in vision_sources()}


def test_an_unknown_shape_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"(?s)k2.*k3, k3\.1-pro"):
        released_config("k2")
