"""The model card: front matter, and regions that are written anew whenever a quant is published."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kimi_gguf.cluster.upstream import load_upstream
from kimi_gguf.publish.facts import SCHEME, QuantFacts
from kimi_gguf.publish.regions import join_front_matter, merge_front_matter, merge_regions, split_front_matter
from kimi_gguf.sizes import human_bytes

_WEB = "https://huggingface.co/"
_CONTEXTS = (8192, 32768, 131072)
_NEEDS = {"kimi-k31"}
_SPLIT = "-00001-of-"


def card(existing: str | None, repo: str, quants: Sequence[QuantFacts], owner: str | None = None) -> str:
    """README.md of a repository.

    Args:
        existing: what is there; its hand-written parts are kept.
        repo: ``owner/name``.
        quants: everything that the repository will hold.
        owner: who quantized; the repository's owner by default.

    Raises:
        InputError: the README that is there cannot be read.
    """
    front, body = split_front_matter(existing or "")
    quants = sorted(quants, key=lambda q: q.nbytes)
    ours = front_matter(quants, owner or repo.partition("/")[0])
    if not body.strip():
        base = ours.get("base_model") or _model_name(quants)
        body = f"\n# {repo.partition('/')[2]}\n\nGGUF files of {_linked(base)}.\n"
    merged = merge_regions(body, regions(repo, quants))
    return join_front_matter(merge_front_matter(front, ours), merged if merged.startswith("\n") else "\n" + merged)


def front_matter(quants: Sequence[QuantFacts], owner: str) -> dict[str, Any]:
    """What the Hub reads: license and model as the checkpoint has them."""
    base = next((q.base_repo for q in quants if q.base_repo), None)
    model: Mapping[str, Any] = next((m for q in quants if isinstance(m := q.document.get("model"), dict)), {})
    found: dict[str, Any] = {
        "license": model.get("license"),
        "license_name": model.get("license_name"),
        "license_link": _license_link(model.get("license_link"), base),
        "language": model.get("languages") or None,
        "base_model": base,
        "base_model_relation": "quantized" if base else None,
        "quantized_by": owner,
        "library_name": "gguf",
        "pipeline_tag": "text-generation",
        "tags": ["gguf", "kimi-gguf", *dict.fromkeys(str(q.document.get("architecture")) for q in quants)],
    }
    if found["license"] == "other" and not found["license_name"]:
        found["license_name"] = "see-base-model"
    return {key: value for key, value in found.items() if value is not None}


def regions(repo: str, quants: Sequence[QuantFacts]) -> dict[str, str]:
    """The generated parts by name, in the order of a new card."""
    return {
        "quants": _quant_section(quants),
        "run": _run_section(repo, quants),
        "memory": _memory_section(quants),
        "types": _types_section(quants),
        "recipes": _recipe_section(quants),
        "verify": _verify_section(repo, quants),
        "warnings": _warning_section(quants),
    }


def _quant_section(quants: Sequence[QuantFacts]) -> str:
    rows = []
    for q in quants:
        experts = q.sizes.experts
        rows.append(
            (
                f"[{q.quant}](./{q.quant})",
                human_bytes(q.nbytes),
                str(len(q.files)),
                f"{q.sizes.total.bits:.2f}",
                q.expert_types() + (f" ({experts.bits:.2f})" if experts.weights else ""),
                *_measured(q.report),
            )
        )
    columns = (
        "Quant",
        "Size",
        "Files",
        "Bits per weight",
        "Experts' types (bits)",
        "KL, nats",
        "Same experts",
        "PPL ratio",
    )
    notes = [
        f"{q.quant}: {q.report['tokens']:,} tokens of {q.report['text_name']} against {q.report['baseline']['label']}"
        for q in quants
        if q.report
    ]
    said = (
        "KL is the divergence from the unquantized model's next-token distribution, *Same experts* the overlap of "
        "routed experts, *PPL ratio* the perplexity over the unquantized model's; ± is one standard error. "
    )
    said += "Measured on " + "; ".join(notes) + "." if notes else "Nothing has been measured yet."
    return f"## Quants\n\n{_table(columns, rows)}\n\n{said}"


def _measured(report: Mapping[str, Any] | None) -> tuple[str, str, str]:
    output: Mapping[str, Any] = (report or {}).get("output") or {}
    routing: Mapping[str, Any] = (report or {}).get("routing") or {}
    overlap = _estimate(routing.get("overlap"), 100)
    return (
        _estimate(output.get("kl")),
        f"{overlap} %" if overlap != "-" else overlap,
        _estimate(output.get("perplexity_ratio")),
    )


def _estimate(found: Any, scale: float = 1.0) -> str:
    if not isinstance(found, dict) or not isinstance(found.get("value"), int | float):
        return "-"
    error = found.get("error")
    text = f"{found['value'] * scale:.4g}"
    return f"{text} ± {error * scale:.1g}" if isinstance(error, int | float) else text


def _run_section(repo: str, quants: Sequence[QuantFacts]) -> str:
    upstream = load_upstream()
    smallest = quants[0].quant
    needs = (
        f"llama.cpp **{upstream.needs_no_patch} or later** knows this architecture; `kimi-gguf runtime build` makes a "
        "patched older one that does too."
        if any(q.document.get("architecture") in _NEEDS for q in quants)
        else "A llama.cpp that knows the architecture kimi-k3; `kimi-gguf runtime build` makes one."
    )
    first = quants[0].files[0].name
    return (
        f"## Running\n\n{needs}\n\n```\nllama-server -hf {repo}:{smallest}\n\n"
        f"hf download {repo} --include '{smallest}/*' --local-dir .\n"
        f"llama-server -m {smallest}/{first}\n```\n\n"
        "Of a split model the first file is named; the others must lie beside it."
    )


def _memory_section(quants: Sequence[QuantFacts]) -> str:
    memory = next((m for q in quants if (m := q.memory()) is not None), None)
    if memory is None:
        return "## Memory\n\nThe weights' size, and the context on top."
    lengths = [n for n in _CONTEXTS if n < memory.longest] + [memory.longest]
    columns = ("Quant", "Weights", *(f"with {n:,} tokens" for n in lengths))
    rows = [
        (q.quant, human_bytes(q.nbytes), *(human_bytes(q.nbytes + (q.memory() or memory).at(n)) for n in lengths))
        for q in quants
    ]
    return (
        f"## Memory\n\n{_table(columns, rows)}\n\n"
        "RAM and VRAM together, of one sequence: weights, a 16-bit cache for MLA layers and indexer, the float32 state "
        "of KDA layers. Computed from the model's dimensions; buffers for computing come on top."
    )


def _types_section(quants: Sequence[QuantFacts]) -> str:
    parts = ["## Types by bytes"]
    for q in quants:
        rows = [
            (r.type, f"{r.tensors:,}", f"{r.nbytes:,}", f"{100 * r.nbytes / q.sizes.total.nbytes:.2f} %")
            for r in q.sizes.rows
        ]
        parts.append(f"### {q.quant}\n\n{_table(('Type', 'Tensors', 'Bytes', 'Share'), rows)}")
    return "\n\n".join(parts)


def _recipe_section(quants: Sequence[QuantFacts]) -> str:
    parts = ["## How they were made"]
    for q in quants:
        tool, made = q.document.get("tool") or {}, []
        if tool:
            made.append(f"{tool.get('name')} {tool.get('version')}, encoder {q.document.get('encoder')}")
        if q.source:
            made.append(f"from {q.source.get('name')}" + (f" at commit {r}" if (r := q.source.get("revision")) else ""))
        if q.document.get("imatrix_sha256"):
            made.append(f"importance matrix {q.document['imatrix_sha256']}")
        changed = sum(1 for t in q.document["tensors"] if t.get("reason"))
        if changed:
            made.append(f"{changed} tensors have another type than the recipe's; the manifest says why")
        text = f"### {q.quant}\n\n" + ("; ".join(made) + "." if made else "No manifest: how it was made is not known.")
        parts.append(f"{text}\n\n```\n{q.command()}\n```" if q.document.get("settings") else text)
    return "\n\n".join(parts)


def _verify_section(repo: str, quants: Sequence[QuantFacts]) -> str:
    base = next((q for q in quants if q.base_repo), quants[0])
    source = f"{SCHEME}{base.base_repo}@{base.source.get('revision')}" if base.base_repo else "CHECKPOINT"
    return (
        "## Verifying\n\nEach folder has a manifest (an in-toto statement): the checkpoint's commit and the hashes of "
        "its shards, tool and settings, SHA-256 of every file and every tensor. Without downloading the files, headers "
        "and a sample of blocks are compared with the checkpoint by\n\n"
        f"```\nkimi-gguf verify {SCHEME}{repo}/{base.quant} --source {source}\n```\n\n"
        "The recipe above makes files with the same hashes anywhere. Of files that were downloaded:\n\n"
        "```\n"
        f"python3 -c \"import json,sys; [print(s['digest']['sha256'],s['name'],sep='  ') "
        f"for s in json.load(open(sys.argv[1]))['subject']]\" *.manifest.json | sha256sum -c\n```"
    )


def _warning_section(quants: Sequence[QuantFacts]) -> str:
    lines = []
    if any(_SPLIT in file.name for q in quants for file in q.files):
        lines.append(
            "Split files: some apps refuse them or show the size of the first file alone. llama.cpp's "
            "`llama-gguf-split --merge` joins them."
        )
    for q in quants:
        lines += [f"{q.quant}: {warning}" for warning in q.document.get("warnings") or ()]
        lines += [f"{q.quant}: {flag}" for flag in (q.report or {}).get("flags") or ()]
        if q.report is None:
            lines.append(f"{q.quant}: no evaluation is published; its quality is not known.")
    return "## Warnings\n\n" + ("\n".join(f"- {line}" for line in lines) if lines else "None.")


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def _license_link(link: Any, base: str | None) -> str | None:
    if not isinstance(link, str) or not link:
        return None
    return link if "://" in link or base is None else f"{_WEB}{base}/blob/main/{link.lstrip('./')}"


def _model_name(quants: Sequence[QuantFacts]) -> str:
    return str(quants[0].source.get("name") or "a Kimi model")


def _linked(base: str) -> str:
    return f"[{base}]({_WEB}{base})" if "/" in base else base
