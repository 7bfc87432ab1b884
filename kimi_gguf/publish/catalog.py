"""The quants that a repository holds already, read back from their manifests and eval reports."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from convert.output import MANIFEST
from kimi_gguf.hub.repository import Repository
from kimi_gguf.publish.card import card
from kimi_gguf.publish.facts import QuantFacts, evaluated, facts_of, is_manifest, is_report, is_sound, read_manifest
from kimi_gguf.publish.local import EVAL
from kimi_gguf.publish.regions import merge_regions, split_front_matter
from kimi_gguf.publish.target import Upload, small
from quant.errors import InputError

README = "README.md"
_LARGEST = 1 << 28


def published_quants(repository: Repository | None) -> list[QuantFacts]:
    """Every quant that is whole on the Hub: a manifest in a folder, and all its files with their hashes."""
    if repository is None:
        return []
    found = []
    for path, file in sorted(repository.files.items()):
        folder, _, name = path.rpartition("/")
        if not name.endswith(MANIFEST) or not folder or "/" in folder or file.nbytes > _LARGEST:
            continue
        try:
            facts = facts_of(read_manifest(repository.read_whole(path), path), _reports(repository, folder))
        except InputError:
            # One that is being uploaded, or somebody else's.
            continue
        listed = [repository.files.get(f"{folder}/{f.name}") for f in facts.files]
        if all(h is not None and h.sha256 == f.sha256 for h, f in zip(listed, facts.files, strict=True)):
            found.append(facts)
    return found


def _reports(repository: Repository, folder: str) -> list[Mapping[str, Any]]:
    reports = []
    for path, file in repository.files.items():
        if path.startswith(f"{folder}/") and path.endswith(EVAL) and file.nbytes <= _LARGEST:
            try:
                document = json.loads(repository.read_whole(path))
            except (ValueError, RecursionError):
                continue
            if is_report(document) and is_sound(document):
                reports.append(document)
    return reports


def with_published(ours: Sequence[QuantFacts], repository: Repository | None) -> list[QuantFacts]:
    """``ours``, and what else the repository holds; of the same files the report that exists."""
    mine = {facts.quant: facts for facts in ours}
    quants = list(mine.values())
    for facts in published_quants(repository):
        held = mine.get(facts.quant)
        if held is None:
            quants.append(facts)
        elif held.report is None and facts.report is not None and held.files == facts.files:
            quants[quants.index(held)] = facts_of(held.document, [facts.report])
    return quants


def stale_paths(repository: Repository | None, ours: Sequence[QuantFacts], keep: Collection[str]) -> list[str]:
    """What earlier publications of the same quants left and these replace: files of other sets, reports about them.

    Only what a manifest of ours names is stale, and manifests and reports themselves; never a file of others.
    """
    if repository is None:
        return []
    stale = set()
    for facts in ours:
        inside = f"{facts.quant}/"
        for path in repository.files:
            if not path.startswith(inside) or not path.endswith((MANIFEST, EVAL)):
                continue
            try:
                document = json.loads(repository.read_whole(path))
            except (ValueError, RecursionError):
                continue
            if is_report(document) and not (is_sound(document) and evaluated(document, facts.files)):
                stale.add(path)
            elif is_manifest(document):
                stale.update({path, *(f"{inside}{name}" for name in _named(document))})
    return sorted(path for path in stale if path in repository.files and path not in keep)


def _named(document: Mapping[str, Any]) -> list[str]:
    """Files that a manifest names; none when it is damaged."""
    try:
        return [str(file["name"]) for file in document["files"]]
    except (KeyError, TypeError):
        return []


def readme(repo: str, quants: Sequence[QuantFacts], repository: Repository | None) -> list[Upload]:
    """The model card of a repository that will hold ``quants``, hand-written parts kept; none where it holds none.

    Raises:
        InputError: the one that is there cannot be read.
    """
    there = None
    if repository is not None and README in repository.files:
        there = repository.read_whole(README).decode("utf-8", errors="replace")
    if not quants:
        merge_regions(split_front_matter(there or "")[1], {})
        return []
    # What UTF-8 cannot hold comes from somebody's JSON alone.
    return [small(README, card(there, repo, quants).encode(errors="replace"))]
