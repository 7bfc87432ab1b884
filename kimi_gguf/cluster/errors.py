"""What can go wrong while a model runs."""

from __future__ import annotations

from quant.errors import KimiGgufError


class RuntimeFault(KimiGgufError):
    """The runtime, an engine process or an RPC worker failed or did not answer in time."""
