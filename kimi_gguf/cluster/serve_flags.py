"""The command line of llama-server for K3 and K3.1: a pure function of what the user chose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from convert.model_config import ModelConfig
from kimi_gguf.cluster.memory import state_bytes

_CHECKPOINT_BYTES = 4_000_000_000
_FEWEST, _MOST = 2, 32


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What to serve, and how.

    Attributes:
        model: a GGUF, or the first file of a split set.
        alias: name of the model in the API.
        context: tokens of one conversation, prompt and answer together.
        parallel: conversations at once; each has a context of its own.
        host, port: where to listen.
        rpc: workers.
        placement: flags that say which layers go where, with context and parallel as planned; empty leaves the layers
            to llama.cpp, which goes by free memory.
        threads: of the CPU backend.
        template: a file with the chat template, when the model has none.
        extra: further arguments, which win.
    """

    model: Path
    alias: str
    context: int
    parallel: int
    host: str
    port: int
    rpc: tuple[str, ...] = ()
    placement: tuple[str, ...] = ()
    threads: int | None = None
    template: Path | None = None
    extra: tuple[str, ...] = ()


def server_arguments(options: ServeOptions, config: ModelConfig) -> list[str]:
    """Arguments of ``llama-server``.

    - Nothing is reused from the middle of an old prompt (``--cache-reuse 0``): KDA's state cannot be cut, only
      continued. A prompt that begins like the slot's last one continues it, from a context checkpoint where it departs.
    - A checkpoint holds the KDA state alone, 465 MB for K3.1 Pro; as many are kept per conversation as fit into 4 GB.
    - Idle slots are not copied to the head's memory (``--cache-ram 0``): with workers that moves gigabytes per switch.
    - Each slot has a cache of its own, so that one long conversation cannot take the cells of another.
    - The file is mapped, so that loading needs no second copy of it; llama.cpp must not shrink the context to fit.
    - Sampling is the model's own, also for files without the keys; llama.cpp's top-k and min-p are off.
    """
    command = [*_rpc(options), "--model", str(options.model), "--alias", options.alias]
    command += ["--host", options.host, "--port", str(options.port)]
    if not options.placement:
        command += ["-c", str(options.context * options.parallel), "--parallel", str(options.parallel), "-ngl", "999"]
    command += ["--no-kv-unified", "--cache-prompt", "--cache-reuse", "0", "--cache-ram", "0", "--no-cache-idle-slots"]
    command += ["--ctx-checkpoints", str(checkpoints(config)), "--no-context-shift"]
    command += ["--load-mode", "mmap", "--fit", "off"]
    command += ["--jinja", "--reasoning-format", "auto"]
    command += ["--temp", "1.0", "--top-p", "0.95", "--top-k", "0", "--min-p", "0"]
    command += ["--offline", "--no-ui", "--slots", "--log-colors", "off"]
    if options.template is not None:
        command += ["--chat-template-file", str(options.template)]
    if options.threads is not None:
        command += ["--threads", str(options.threads)]
    return [*command, *options.placement, *options.extra]


def checkpoints(config: ModelConfig) -> int:
    """Context checkpoints per slot."""
    layers = sum(kind == "kda" for kind in config.layer_kinds)
    return max(_FEWEST, min(_MOST, _CHECKPOINT_BYTES // max(1, layers * state_bytes(config))))


def _rpc(options: ServeOptions) -> Sequence[str]:
    # It must come first: other flags name the devices that it adds.
    return ["--rpc", ",".join(options.rpc)] if options.rpc else []
