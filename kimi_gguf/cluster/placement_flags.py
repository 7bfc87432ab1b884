"""A placement as flags of llama.cpp's programs."""

from __future__ import annotations

from kimi_gguf.cluster.placement import Placement


def flags(placement: Placement) -> list[str]:
    """Arguments in an order that llama.cpp accepts: ``--rpc`` stands before ``-ot``.

    ``-ts`` counts layers; llama.cpp divides by their sum and compares with the same division, so that counts are met
    exactly. Devices need no ``--device``: workers come first, then the head's GPUs, each in its order.
    """
    config, load = placement.model.config, placement.load
    used = {share.pool.label: share for share in placement.shares}
    workers = [node for node in placement.nodes[1:] if any(share.pool.node is node for share in placement.shares)]
    counts = []
    for node in (*workers, placement.nodes[0]):
        if node.head and not node.devices:
            continue
        shares = [share for share in placement.shares if share.pool.node is node]
        by_memory = [share.end - share.begin for share in shares]
        # A worker shows all its devices, used or not.
        counts += by_memory + [0] * (len(node.pools) - len(by_memory))
    own = used.get("CPU")
    result = []
    if workers:
        result += ["--rpc", ",".join(str(node.address) for node in workers)]
    result += ["-ngl", str(config.n_layers + 1 - (own.end if own else 0))]
    if len(counts) > 1:
        result += ["-ts", ",".join(map(str, counts))]
    if placement.on_head:
        layers = "|".join(map(str, placement.on_head))
        result += ["-ot", rf"blk\.({layers})\.ffn_(gate|up|down)_exps\.weight=CPU"]
    result += ["-c", str(load.cells * load.parallel), "--parallel", str(load.parallel), "-ub", str(load.ubatch)]
    return [*result, "-fa", "on"]
