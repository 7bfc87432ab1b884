"""Kimi K3 and K3.1 Pro checkpoints to GGUF.

>>> from kimi_gguf import convert, inspect, plan
>>> convert("Kimi-K3.1-Pro", quant="MXFP4", outdir="out")  # doctest: +SKIP
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from convert.version import VERSION as __version__

if TYPE_CHECKING:
    from kimi_gguf.api import convert, inspect, plan
    from kimi_gguf.cluster.doctor import cluster_doctor
    from kimi_gguf.cluster.placement_plan import cluster_plan
    from kimi_gguf.cluster.serve import serve
    from kimi_gguf.cluster.worker import cluster_worker
    from kimi_gguf.export import export_lmstudio, export_ollama
    from kimi_gguf.publish.run import publish_model
    from kimi_gguf.verify.evaluation import evaluate, record
    from kimi_gguf.verify.imatrix import imatrix
    from kimi_gguf.verify.payload import verify_model

__all__ = [
    "__version__",
    "cluster_doctor",
    "cluster_plan",
    "cluster_worker",
    "convert",
    "evaluate",
    "export_lmstudio",
    "export_ollama",
    "imatrix",
    "inspect",
    "plan",
    "publish_model",
    "record",
    "serve",
    "verify_model",
]

_HOMES = {
    "cluster_doctor": "kimi_gguf.cluster.doctor",
    "cluster_plan": "kimi_gguf.cluster.placement_plan",
    "cluster_worker": "kimi_gguf.cluster.worker",
    "convert": "kimi_gguf.api",
    "serve": "kimi_gguf.cluster.serve",
    "inspect": "kimi_gguf.api",
    "plan": "kimi_gguf.api",
    "export_lmstudio": "kimi_gguf.export",
    "export_ollama": "kimi_gguf.export",
    "evaluate": "kimi_gguf.verify.evaluation",
    "publish_model": "kimi_gguf.publish.run",
    "record": "kimi_gguf.verify.evaluation",
    "imatrix": "kimi_gguf.verify.imatrix",
    "verify_model": "kimi_gguf.verify.payload",
}


def __getattr__(name: str) -> Any:
    # The functions pull in numpy, some of them torch; `--help` should not wait for them, `convert` needs no torch.
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
