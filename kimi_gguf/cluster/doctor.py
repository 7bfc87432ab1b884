"""``kimi-gguf cluster doctor``: everything about the workers that can be known before a model is loaded.

Every question has a time limit, workers are asked side by side, and a minute is enough for all of it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Container, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from kimi_gguf.cluster.doctor_sample import compare, run_sample, sample_model
from kimi_gguf.cluster.errors import RuntimeFault
from kimi_gguf.cluster.nodes import Node, read_nodes
from kimi_gguf.cluster.placement import Placement
from kimi_gguf.cluster.placement_plan import cluster_plan
from kimi_gguf.cluster.rpc import Worker, ask_worker, lost_worker
from kimi_gguf.cluster.runtime import Runtime, find
from kimi_gguf.cluster.side_port import Link, WorkerState, ask_side_port, measure_link
from quant.errors import UsageError

_SLOW = 0.5
# Bytes per second that one connection and one busy core surely measure: beyond it, less than stated means nothing.
_MEASURABLE = 0.5e9


@dataclass(frozen=True, slots=True)
class NodeReport:
    """What was found about a worker.

    Attributes:
        name, address: as in the file of nodes.
        state: what its supervisor says; None without a side port.
        worker: what its server says; None when it does not answer.
        link: measured; None without a side port.
        faults: reasons not to use it; empty when it is fit.
        warnings: what could not be checked, or is worth knowing.
    """

    name: str
    address: str
    state: WorkerState | None = None
    worker: Worker | None = None
    link: Link | None = None
    faults: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What the doctor found.

    Attributes:
        nodes: one report per worker.
        difference: of the sample's log-probabilities over all workers from those here; None when it was not run.
        faults: of the cluster as a whole.
        seconds: how long it took.
    """

    nodes: tuple[NodeReport, ...]
    difference: float | None
    faults: tuple[str, ...]
    seconds: float
    build: str = field(default="")

    @property
    def healthy(self) -> bool:
        return not self.faults and not any(node.faults for node in self.nodes)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"healthy": self.healthy, "seconds": round(self.seconds, 1)}


def cluster_doctor(
    model: str | os.PathLike[str] | None = None,
    *,
    nodes: str | os.PathLike[str],
    context: int | None = None,
    parallel: int = 1,
    sample: bool = True,
    note: Callable[[str], None] = lambda text: None,
) -> Diagnosis:
    """Check the workers of a cluster: reach, build, protocol, memory, link, and numbers.

    Args:
        model: a GGUF; each worker's free memory is compared with its share of it.
        nodes: file that describes the machines.
        context, parallel: tokens of a conversation, and conversations at once, for the share; as ``cluster_plan``.
        sample: run a small model over all workers and compare its numbers with those here.
        note: told what is being done.

    Raises:
        UsageError: no runtime, or no worker among the nodes.
        InputError: no such nodes or model, or the model does not fit what the file says of the nodes.
    """
    started = time.monotonic()
    runtime = find()
    unstated: set[str] = set()

    def later(address: str) -> tuple[int, ...]:
        # The examination asks, of all workers at once, and names those that do not answer.
        unstated.add(address)
        return (1,)

    machines = read_nodes(nodes, ask=later)
    workers = [node for node in machines if node.address is not None]
    if not workers:
        raise UsageError(f"{os.fspath(nodes)} names no worker", 'give a node an address = "10.0.0.2:50052"')
    placement = None if model is None else _placement(model, nodes, context, parallel, note)
    note(f"asking {len(workers)} worker{'s' * (len(workers) > 1)}")
    with ThreadPoolExecutor(len(workers)) as pool:
        reports = list(pool.map(lambda node: _examine(node, runtime, placement, unstated), workers))
    value: float | None = None
    faults: tuple[str, ...] = ()
    if sample and not any(report.faults for report in reports):
        note("running a small model of the same architecture here and over all workers")
        reports, value, faults = _try_sample(reports, runtime)
    return Diagnosis(tuple(reports), value, faults, time.monotonic() - started, runtime.facts.digest)


def report_text(found: Diagnosis) -> str:
    """A diagnosis for people."""
    lines = []
    for node in found.nodes:
        parts = []
        if node.worker is not None:
            parts.append(f"RPC {'.'.join(map(str, node.worker.protocol))}")
            parts.append(f"{_gigabytes(_free(node))} free")
        if node.link is not None:
            parts.append(f"{node.link.latency * 1e3:.1f} ms, {node.link.bandwidth * 8 / 1e9:.2f} Gbit/s")
        lines.append(f"{'FAIL' if node.faults else 'ok':5} {node.name} ({node.address})  {'; '.join(parts)}".rstrip())
        lines += [f"      {text}" for text in node.faults]
        lines += [f"      note: {text}" for text in node.warnings]
    if found.difference is not None:
        lines.append(
            f"ok    two turns of a sample over all workers: log-probabilities differ by {found.difference:.2g}"
        )
    lines += [f"FAIL  {text}" for text in found.faults]
    lines.append(f"{'healthy' if found.healthy else 'not fit'} after {found.seconds:.1f} s")
    return "\n".join(lines)


def _placement(
    model: str | os.PathLike[str],
    nodes: str | os.PathLike[str],
    context: int | None,
    parallel: int,
    note: Callable[[str], None],
) -> Placement | None:
    """Where layers go; None when that depends on a worker that does not answer, which its examination says."""
    try:
        return cluster_plan(model, nodes=nodes, context=context, parallel=parallel)
    except RuntimeFault as fault:
        note(f"no shares of the model can be planned: {fault.message}")
        return None


def _examine(node: Node, runtime: Runtime, placement: Placement | None, unstated: Container[str]) -> NodeReport:
    address = str(node.address)
    report = NodeReport(node.name, address)
    try:
        state = ask_side_port(address)
    except (OSError, ValueError) as error:
        why = f"its side port says nothing ({error}): build, free main memory and link are not known"
        report = replace(report, warnings=(why,))
    else:
        report = replace(report, state=state)
        if fault := _state_fault(state, runtime):
            return replace(report, faults=(fault,))
    try:
        report = replace(report, worker=ask_worker(address, runtime.facts.rpc_protocol))
    except RuntimeFault as fault:
        return replace(report, faults=(_sentence(fault),))
    if report.state is not None:
        try:
            report = replace(report, link=measure_link(address))
        except (OSError, ValueError) as error:
            report = replace(report, warnings=(f"its link could not be measured: {error}",))
    slow = _slow(node, report)
    faults = _memory_faults(node, report, placement, address not in unstated)
    return replace(report, faults=faults, warnings=(*report.warnings, *slow))


def _state_fault(state: WorkerState, runtime: Runtime) -> str | None:
    facts = runtime.facts
    if state.protocol[0] != facts.rpc_protocol[0] or state.protocol[1] > facts.rpc_protocol[1]:
        theirs, ours = (".".join(map(str, version)) for version in (state.protocol, facts.rpc_protocol))
        return f"it speaks RPC protocol {theirs}, this runtime {ours}; install the same kimi-gguf on every node"
    if state.build != facts.digest:
        return (
            f"its runtime is build {state.build[:12]}, this one {facts.digest[:12]}: operations may differ; "
            "install the same kimi-gguf on every node, then: kimi-gguf runtime build"
        )
    if state.state != "running":
        return f"its server is {state.state}{f': {state.reason}' if state.reason else ''}"
    if state.client:
        return "it serves another head now, and a worker serves one at a time; end that head, or ask again later"
    return None


def _memory_faults(node: Node, report: NodeReport, placement: Placement | None, stated: bool) -> tuple[str, ...]:
    if report.worker is None:
        return ()
    devices = report.worker.memory
    if stated and len(devices) != len(node.pools):
        return (f"it offers {len(devices)} devices, the file of nodes states {len(node.pools)}",)
    free = [_free_of(report, number) for number in range(len(devices))]
    if placement is None:
        return tuple(
            f"it has {_gigabytes(has)} free{_number(number, devices)}, the file of nodes states {_gigabytes(want)}"
            for number, (has, want) in enumerate(zip(free, node.pools, strict=False))
            if stated and has < want
        )
    # The plan's needs are what counts when there is a plan.
    shares = [share for share in placement.shares if share.pool.node.address == node.address]
    return tuple(
        f"its share of the model needs {_gigabytes(share.need)}{_number(number, devices)}, {_gigabytes(has)} are free"
        for number, (share, has) in enumerate(zip(shares, free, strict=False))
        if share.need > has
    )


def _free(report: NodeReport) -> int:
    return 0 if report.worker is None else sum(_free_of(report, i) for i in range(len(report.worker.memory)))


def _free_of(report: NodeReport, number: int) -> int:
    """Free bytes of a device. A processor calls all memory of its machine free; its supervisor knows better."""
    assert report.worker is not None
    free, total = report.worker.memory[number]
    available = None if report.state is None else report.state.available
    return min(free, available) if free == total and available is not None else free


def _slow(node: Node, report: NodeReport) -> tuple[str, ...]:
    if node.link is None or report.link is None:
        return ()
    if report.link.bandwidth >= _SLOW * min(node.link, _MEASURABLE):
        return ()
    measured, stated = (value * 8 / 1e9 for value in (report.link.bandwidth, node.link))
    return (f"its link gives {measured:.2f} Gbit/s, the file of nodes states {stated:.2f}",)


def _try_sample(
    reports: Sequence[NodeReport], runtime: Runtime
) -> tuple[list[NodeReport], float | None, tuple[str, ...]]:
    """Reports with the guilty marked, the difference, faults that no single worker shows."""
    addresses = [report.address for report in reports]
    model = sample_model(len(addresses))
    try:
        local = run_sample(model, runtime)
    except RuntimeFault as fault:
        return list(reports), None, (f"the sample does not run here: {_sentence(fault)}",)
    try:
        return list(reports), compare(model, runtime, addresses, local), ()
    except RuntimeFault as fault:
        together = fault
    guilty = lost_worker(together.message)
    if guilty in addresses:
        return [_blame(r, together) if r.address == guilty else r for r in reports], None, ()
    if len(addresses) == 1:
        return [_blame(reports[0], together)], None, ()
    alone = [_alone(report, runtime) for report in reports]
    if any(report.faults for report in alone):
        return alone, None, ()
    return alone, None, (f"each worker computes well alone, together they fail: {_sentence(together)}",)


def _alone(report: NodeReport, runtime: Runtime) -> NodeReport:
    model = sample_model(1)
    try:
        compare(model, runtime, (report.address,), run_sample(model, runtime))
    except RuntimeFault as fault:
        return _blame(report, fault)
    return report


def _blame(report: NodeReport, fault: RuntimeFault) -> NodeReport:
    return replace(report, faults=(*report.faults, f"the sample: {_sentence(fault)}"))


def _sentence(fault: RuntimeFault) -> str:
    return fault.message if fault.hint is None else f"{fault.message}; {fault.hint}"


def _number(number: int, devices: Sequence[Any]) -> str:
    return f" on device {number}" if len(devices) > 1 else ""


def _gigabytes(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB"
