"""Where implementations of the model differ: the constants inside square roots, and the form of the recurrence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quant.errors import UsageError

KdaForm = Literal["sequential", "chunked", "centred"]


@dataclass(frozen=True, slots=True)
class Options:
    """Conventions of one implementation.

    Attributes:
        latent_norm_eps: eps of ``q_a_layernorm`` and ``kv_a_layernorm``; None takes the config's ``rms_norm_eps``.
        l2_eps: added to the sum of squares of KDA's q and k; None takes ``rms_norm_eps``.
        indexer_eps: eps of the LayerNorm of indexer keys.
        kda_form: token by token; chunks of 16 tokens; or "centred", chunks in a faster form that needs bounded decays.
        sparse: False lets every MLA layer attend to all visible keys, as if the model had no indexer.
        keep_logits: MLA layers hand their attention logits out with the trace, all of them at once in memory.
        absorbed: MLA on the 512-wide latent (as llama.cpp computes it) instead of on expanded keys and values.
    """

    latent_norm_eps: float | None = 1e-6
    l2_eps: float | None = 1e-6
    indexer_eps: float = 1e-5
    kda_form: KdaForm = "chunked"
    sparse: bool = True
    keep_logits: bool = False
    absorbed: bool = False


PRESETS = {
    "official": Options(),
    "llama.cpp": Options(latent_norm_eps=None, l2_eps=None, absorbed=True),
}


def preset(name: str) -> Options:
    """The options called ``name``.

    Raises:
        UsageError: no such preset.
    """
    try:
        return PRESETS[name]
    except KeyError:
        raise UsageError(f"unknown preset {name!r}", f"known presets: {', '.join(PRESETS)}") from None
