"""The result of an evaluation as frozen values; tables, JSON and the HTML page are made from these."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from kimi_gguf.verify.observations import EngineName, ModelIdentity


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with its standard error.

    Attributes:
        error: standard error of ``value``; None where it cannot be known (a single sample).
        over: what the error treats as independent samples: "chunks" where there are 8 or more, else "tokens", which
            is too small when neighbours resemble each other.
        count: number of those samples.
    """

    value: float
    error: float | None
    over: Literal["tokens", "chunks"]
    count: int


@dataclass(frozen=True, slots=True)
class Load:
    """How many tokens reached each expert.

    Attributes:
        counts: tokens by expert.
        used: experts that some token reached; never: the others.
        gini: 0 when all are equally loaded, towards 1 when one takes all.
    """

    counts: tuple[int, ...]
    used: int
    never: int
    gini: float


@dataclass(frozen=True, slots=True)
class RoutingResult:
    """Whether tokens reach the same experts; shares are 0 .. 1.

    Attributes:
        exact: tokens whose set of experts is the same.
        overlap: experts in common, over experts per token.
        weighted_overlap: the baseline's router weight that lies on common experts.
        top1_changed: tokens whose heaviest expert is another.
        router_kl: KL(base || model) of the router's scores normalised to sum 1, in nats; None from a trace.
    """

    exact: Estimate
    overlap: Estimate
    weighted_overlap: Estimate
    top1_changed: Estimate
    router_kl: Estimate | None


@dataclass(frozen=True, slots=True)
class LayerResult:
    """One decoder layer; parts are None where the layer or the engine has none.

    Attributes:
        layer: 0-based.
        kind: ``kda`` or ``mla``.
        base_load, model_load: of the layer's routed experts.
        indexer_overlap: keys that both indexers keep over keys kept, where fewer are kept than visible.
        hidden_error: |model - base| / |base| of the running residual, mean over tokens.
        hidden_cosine: cosine of the two, mean over tokens.
    """

    layer: int
    kind: str
    routing: RoutingResult | None
    base_load: Load | None
    model_load: Load | None
    indexer_overlap: Estimate | None
    hidden_error: Estimate | None
    hidden_cosine: Estimate | None


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where tokens first reach another set of experts.

    Attributes:
        first: tokens by the layer where they first diverge, for every layer of the model.
        never: tokens that reach the same sets in all layers.
        mean_layer: mean first layer of those that diverge; None when none does.
    """

    first: tuple[int, ...]
    never: int
    mean_layer: float | None


@dataclass(frozen=True, slots=True)
class KlQuantiles:
    """Quantiles of the per-token KL divergence, in nats; errors from the ranks one standard deviation away."""

    median: Estimate
    p90: Estimate
    p99: Estimate
    p999: Estimate


@dataclass(frozen=True, slots=True)
class Histogram:
    """``counts[i]`` samples lie in [edges[i], edges[i + 1]); below and above count the rest."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    below: int
    above: int


@dataclass(frozen=True, slots=True)
class OutputResult:
    """The next-token distributions compared; KL is KL(base || model) in nats.

    Attributes:
        base_perplexity, model_perplexity, perplexity_ratio: the ratio is model over base, its error from paired
            differences.
        kl: mean; kl_quantiles; kl_histogram over powers of ten.
        top1_agreement: positions whose likeliest token is the same.
        probability_rms: RMS change of the true token's probability.
        chunk_base_perplexity, chunk_model_perplexity: by chunk.
        from_trace: KL is an estimate from the baseline's top-K tokens and a sample of the others.
    """

    base_perplexity: Estimate
    model_perplexity: Estimate
    perplexity_ratio: Estimate
    kl: Estimate
    kl_quantiles: KlQuantiles
    kl_histogram: Histogram
    top1_agreement: Estimate
    probability_rms: Estimate
    chunk_base_perplexity: tuple[float, ...]
    chunk_model_perplexity: tuple[float, ...]
    from_trace: bool


@dataclass(frozen=True, slots=True)
class EvalReport:
    """Everything that an evaluation found.

    Attributes:
        engine: the engine that ran both models; figures of different engines are not comparable.
        baseline_kind: ``live`` or ``trace``.
        tokens, scored: tokens run, and positions with a next token.
        routing: over all MoE layers; None when no layer has one.
        missing: measures that could not be taken, with the reason.
        flags: findings that a reader must see, for example a first chunk over twice the baseline's perplexity.
        bars: the bars that were set, by name of their flag.
        below_bar: the bars that were missed, as sentences; empty when all hold.
        settings: engine settings worth keeping (device, precision, batch, presets).
        model_files: SHA-256 of each file of the model by name, when it is a GGUF: what ``publish --require`` compares.
    """

    engine: EngineName
    model: ModelIdentity
    baseline: ModelIdentity
    baseline_kind: Literal["live", "trace"]
    text_name: str
    text_sha256: str
    context: int
    chunks: int
    tokens: int
    scored: int
    teacher_forced: bool
    routing: RoutingResult | None
    divergence: Divergence | None
    layers: tuple[LayerResult, ...]
    output: OutputResult | None
    seconds: float
    missing: dict[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    bars: dict[str, float] = field(default_factory=dict)
    below_bar: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    model_files: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"kind": "kimi-gguf eval", "version": 1, **asdict(self)}
