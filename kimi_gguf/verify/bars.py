"""Bars that a user sets: below or above them a verification has failed, whatever else it shows."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from kimi_gguf.verify.result import EvalReport
from quant.errors import UsageError


@dataclass(frozen=True, slots=True)
class Bars:
    """Least and greatest values, None for no bar; shares are 0 .. 1.

    Attributes:
        min_routing: share of tokens, over all layers, whose set of experts is the same.
        min_overlap: experts in common.
        min_top1: positions whose likeliest token is the same.
        max_kld: mean KL divergence, max_kld_99 its 99 % quantile, in nats.
        max_ppl_ratio: perplexity of the model over that of the baseline.
        max_router_kl: mean KL divergence of the router's scores.
    """

    min_routing: float | None = None
    min_overlap: float | None = None
    min_top1: float | None = None
    max_kld: float | None = None
    max_kld_99: float | None = None
    max_ppl_ratio: float | None = None
    max_router_kl: float | None = None

    def __post_init__(self) -> None:
        for name in ("min_routing", "min_overlap", "min_top1"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise UsageError(f"{_flag(name)} {value} is not between 0 and 1", "0.99 is 99 %")
        for name in ("max_kld", "max_kld_99", "max_ppl_ratio", "max_router_kl"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise UsageError(f"{_flag(name)} {value} is not a number from 0 on", "0.01 for example")

    def stated(self) -> dict[str, float]:
        """The bars that are set, by name of their flag."""
        return {_flag(name): value for name, value in asdict(self).items() if value is not None}

    def missed(self, report: EvalReport) -> tuple[str, ...]:
        """The bars that ``report`` misses, as sentences; one that cannot be measured is missed."""
        return tuple(
            sentence
            for name, value in self._measured(report).items()
            if (sentence := _judge(name, getattr(self, name), value)) is not None
        )

    def _measured(self, report: EvalReport) -> dict[str, float | None]:
        routing, output = report.routing, report.output
        router_kl = None if routing is None else routing.router_kl
        return {
            "min_routing": None if routing is None else routing.exact.value,
            "min_overlap": None if routing is None else routing.overlap.value,
            "min_top1": None if output is None else output.top1_agreement.value,
            "max_kld": None if output is None else output.kl.value,
            "max_kld_99": None if output is None else output.kl_quantiles.p99.value,
            "max_ppl_ratio": None if output is None else output.perplexity_ratio.value,
            "max_router_kl": None if router_kl is None else router_kl.value,
        }


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _judge(name: str, bar: float | None, value: float | None) -> str | None:
    if bar is None:
        return None
    if value is None:
        return f"{_flag(name)} {bar:g}: not measured"
    # Written so that NaN misses every bar.
    holds = value >= bar if name.startswith("min_") else value <= bar
    return None if holds else f"{_flag(name)} {bar:g}: the value is {value:.6g}"
