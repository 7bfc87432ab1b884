"""The gate: nothing is published but what an eval report is about, and only when the report's bars hold."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kimi_gguf.publish.facts import QuantFacts, evaluated, is_report, is_sound
from quant.errors import BelowBar

_HOW = "make one: kimi-gguf eval MODEL --baseline BASE --text FILE --report FILE.json, with the bars it must hold"


def read_required(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """The report that a publication requires.

    Raises:
        BelowBar: it is missing or no eval report.
    """
    try:
        document = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise BelowBar(f"the required report {path} cannot be read: {error.strerror}", _HOW) from None
    except (ValueError, RecursionError):
        document = None
    if not is_report(document):
        raise BelowBar(f"{path} is no eval report", _HOW)
    if not is_sound(document):
        raise BelowBar(f"{path} is damaged: no whole eval report", _HOW)
    found: Mapping[str, Any] = document
    return found


def check_required(report: Mapping[str, Any], models: Sequence[QuantFacts], where: str) -> None:
    """Refuse what the report is not about, and what misses its bars.

    Raises:
        BelowBar: names the hashes, or the bars that were missed.
    """
    if not report.get("model_files"):
        raise BelowBar(f"{where} does not say which files it is about", _HOW)
    for model in models:
        if not evaluated(report, model.files):
            hashes = set(report["model_files"].values())
            strange = next((file for file in model.files if file.sha256 not in hashes), None)
            what = (
                f"{strange.name} has SHA-256 {strange.sha256}, which is not among its {len(hashes)} files"
                if strange
                else f"it names {len(hashes)} files, {model.quant} has {len(model.files)}"
            )
            raise BelowBar(f"{where} is about other bytes than {model.quant}: {what}", _HOW)
    if not report.get("bars"):
        raise BelowBar(
            f"{where} sets no bars, so it cannot pass them",
            "run kimi-gguf eval again with --min-routing, --max-kld ...",
        )
    missed = report.get("below_bar")
    if missed:
        raise BelowBar(f"{where} is below its bars: {'; '.join(map(str, missed))}", "choose a larger --quant")
