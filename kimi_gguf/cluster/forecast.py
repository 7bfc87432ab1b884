"""How long loading takes: the head sends every worker its weights, one tensor after another, at every start."""

from __future__ import annotations

from dataclasses import dataclass

from kimi_gguf.cluster.nodes import Node
from kimi_gguf.cluster.placement import Placement


@dataclass(frozen=True, slots=True)
class Transfer:
    """What one worker gets.

    Attributes:
        node: the worker.
        nbytes: all its weights.
        seeded: what is sent when the worker's tensor cache holds them: small tensors, and hashes of the others.
        speed: bytes per second of the slower of its link and the head's; None when neither is stated.
    """

    node: Node
    nbytes: int
    seeded: int
    speed: float | None

    @property
    def seconds(self) -> float | None:
        """Time of the transfer at the full speed of the link: a lower bound."""
        return None if self.speed is None else self.nbytes / self.speed

    @property
    def seeded_seconds(self) -> float | None:
        return None if self.speed is None else self.seeded / self.speed


def forecast(placement: Placement) -> tuple[Transfer, ...]:
    """The transfers of one start, in the order of the workers; they follow each other."""
    head = placement.nodes[0]
    transfers = []
    for node in placement.nodes[1:]:
        shares = [share for share in placement.shares if share.pool.node is node]
        if shares:
            speeds = [speed for speed in (node.link, head.link) if speed is not None]
            seeded = sum(sum(placement.model.unhashed[share.begin : share.end]) for share in shares)
            nbytes = sum(share.weights for share in shares)
            transfers.append(Transfer(node, nbytes, min(seeded, nbytes), min(speeds, default=None)))
    return tuple(transfers)
