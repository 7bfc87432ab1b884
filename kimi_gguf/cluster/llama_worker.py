"""The child process of an engine: ``llama_cpp`` over the patched runtime, driven by messages on stdin and stdout.

ggml ends its process where it meets what it does not expect, and no other libggml may be loaded beside this one.
Both are why this is a process of its own. Imports are few for the second reason.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from kimi_gguf.cluster.llama_protocol import Array, Header, frame, read_frame

_GGML_F32, _GGML_I32 = 0, 26
_FLASH = {"off": 0, "on": 1, "auto": -1}
_LOG_NAMES = {2: b"info: ", 3: b"warning: ", 4: b"error: "}
_LOG_CONTINUED = 5
_CACHE_TYPES = {"f32": 0, "f16": 1, "q8_0": 8, "bf16": 30}


class _Tensor(ctypes.Structure):
    """The first fields of ``struct ggml_tensor``."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
    )


class WorkerError(Exception):
    """A request that cannot be served; the process goes on."""


class Ggml:
    """Functions of libggml that the bindings leave out."""

    def __init__(self, folder: Path) -> None:
        suffix = "dylib" if sys.platform == "darwin" else "so"
        base = ctypes.CDLL(str(folder / f"libggml-base.{suffix}"))
        self._main = ctypes.CDLL(str(folder / f"libggml.{suffix}"))
        self._rpc = ctypes.CDLL(str(folder / f"libggml-rpc.{suffix}"))
        self.name = base.ggml_get_name
        self.name.argtypes, self.name.restype = [ctypes.c_void_p], ctypes.c_char_p
        self.nbytes = base.ggml_nbytes
        self.nbytes.argtypes, self.nbytes.restype = [ctypes.c_void_p], ctypes.c_size_t
        self.get = base.ggml_backend_tensor_get
        self.get.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
        self.get.restype = None

    def add_rpc(self, endpoint: str) -> bool:
        """Make the devices of a worker known; False when it cannot be reached."""
        add, register = self._rpc.ggml_backend_rpc_add_server, self._main.ggml_backend_register
        add.argtypes, add.restype = [ctypes.c_char_p], ctypes.c_void_p
        register.argtypes, register.restype = [ctypes.c_void_p], None
        registry = add(endpoint.encode())
        if registry:
            register(registry)
        return bool(registry)

    def read(self, pointer: int) -> Array:
        """Values of an F32 or I32 tensor, row-major and without axes of 1 at the front; views are gathered."""
        tensor = _Tensor.from_address(pointer)
        dtype = {_GGML_F32: np.dtype(np.float32), _GGML_I32: np.dtype(np.int32)}[tensor.type]
        size = self.nbytes(pointer)
        data = np.empty(size, dtype=np.uint8)
        self.get(pointer, data.ctypes.data, 0, size)
        # ``ffn_moe_topk`` is a view of the whole argsort: rows lie further apart than they are long.
        shape, strides = tuple(tensor.ne)[::-1], tuple(tensor.nb)[::-1]
        values: Array = np.lib.stride_tricks.as_strided(data.view(dtype), shape, strides)
        while values.ndim > 1 and values.shape[0] == 1:
            values = values[0]
        return np.ascontiguousarray(values)


class Worker:
    """One model and one context."""

    def __init__(self, reply: Callable[[Header], None]) -> None:
        import llama_cpp.llama_cpp as api

        self._api: Any = api
        self._reply = reply
        self._ggml = Ggml(Path(os.environ["LLAMA_CPP_LIB_PATH"]))
        self._model: Any = None
        self._context: Any = None
        self._watched: frozenset[str] = frozenset()
        self._trace: list[tuple[str, Array]] = []
        # ctypes keeps no reference to a callback that a structure holds.
        self._keep: list[Any] = []
        self._log_level = 0
        api.llama_log_set(self._hold(api.llama_log_callback(self._log)), None)
        api.llama_backend_init()

    def load(self, header: Header, arrays: list[Array]) -> tuple[Header, list[Array]]:
        """Load a model and make a context for it."""
        if self._model is not None:
            raise WorkerError("a model is loaded already")
        for endpoint in header["rpc"]:
            if not self._ggml.add_rpc(endpoint):
                raise WorkerError(f"RPC worker {endpoint} cannot be used; see the log")
        self._model = self._load_model(header)
        if not self._model:
            raise WorkerError(f"llama.cpp does not load {header['model']}")
        self._context = self._make_context(header)
        if not self._context:
            raise WorkerError("llama.cpp cannot make a context for this model")
        api = self._api
        vocab = api.llama_model_get_vocab(self._model)
        self._vocab_size = api.llama_vocab_n_tokens(vocab)
        return {
            "vocab": self._vocab_size,
            "layers": api.llama_model_n_layer(self._model),
            "context": api.llama_n_ctx(self._context),
            "batch": api.llama_n_batch(self._context),
            "end_tokens": [t for t in range(self._vocab_size) if api.llama_vocab_is_eog(vocab, t)],
        }, []

    def decode(self, header: Header, arrays: list[Array]) -> tuple[Header, list[Array]]:
        """Run tokens I32 [n] of sequences I32 [n] in one batch; logits of the positions where U8 [n] is set."""
        tokens, sequences, wanted = arrays
        self._watched = frozenset(header["watch"])
        self._trace = []
        rows = []
        memory = self._api.llama_get_memory(self._context)
        last = {int(s): self._api.llama_memory_seq_pos_max(memory, int(s)) for s in np.unique(sequences)}
        step = self._api.llama_n_batch(self._context)
        for begin in range(0, len(tokens), step):
            part = slice(begin, begin + step)
            rows.append(self._decode(tokens[part], sequences[part], wanted[part], last))
        names = [name for name, _ in self._trace]
        return {"trace": names}, [np.concatenate(rows), *(values for _, values in self._trace)]

    def memory(self, header: Header, arrays: list[Array]) -> tuple[Header, list[Array]]:
        """Forget, copy or keep sequences."""
        api = self._api
        memory = api.llama_get_memory(self._context)
        action, sequence = header["action"], header["sequence"]
        if action == "clear":
            api.llama_memory_clear(memory, True)
        elif action == "copy":
            api.llama_memory_seq_cp(memory, sequence, header["target"], -1, -1)
        elif action == "remove":
            if not api.llama_memory_seq_rm(memory, sequence, header["begin"], -1):
                raise WorkerError(f"sequence {sequence} cannot be cut at position {header['begin']}: KDA keeps no past")
        else:
            raise WorkerError(f"unknown action {action!r}")
        return {}, []

    def save(self, header: Header, arrays: list[Array]) -> tuple[Header, list[Array]]:
        """State of one sequence as bytes."""
        api, sequence = self._api, header["sequence"]
        size = api.llama_state_seq_get_size(self._context, sequence)
        data = np.empty(size, dtype=np.uint8)
        written = api.llama_state_seq_get_data(self._context, _bytes_pointer(data), size, sequence)
        if written == 0:
            raise WorkerError(f"llama.cpp cannot save sequence {sequence}")
        return {}, [data[:written]]

    def restore(self, header: Header, arrays: list[Array]) -> tuple[Header, list[Array]]:
        """Put saved bytes into a sequence."""
        (data,) = arrays
        data = np.ascontiguousarray(data)
        sequence = header["sequence"]
        if not self._api.llama_state_seq_set_data(self._context, _bytes_pointer(data), len(data), sequence):
            raise WorkerError(f"llama.cpp cannot restore {len(data)} bytes into sequence {sequence}")
        return {}, []

    def _load_model(self, header: Header) -> Any:
        api = self._api
        params = api.llama_model_default_params()
        params.n_gpu_layers = header["gpu_layers"]
        params.use_extra_bufts = header["repack"]
        params.check_tensors = header["check_tensors"]

        def progress(done: float, _: Any) -> bool:
            self._reply({"progress": done})
            return True

        params.progress_callback = self._hold(api.llama_progress_callback(progress))
        split = header["tensor_split"]
        if split:
            room = api.llama_max_devices()
            if len(split) > room:
                raise WorkerError(f"a tensor split of {len(split)} parts; llama.cpp takes at most {room}")
            params.tensor_split = self._hold((ctypes.c_float * room)(*split))
        return api.llama_model_load_from_file(header["model"].encode(), params)

    def _make_context(self, header: Header) -> Any:
        api = self._api
        params = api.llama_context_default_params()
        params.n_ctx = header["n_ctx"]
        params.n_batch = header["n_batch"]
        params.n_ubatch = header["n_ubatch"]
        params.n_seq_max = header["n_seq"]
        params.kv_unified = header["unified"]
        params.n_threads = params.n_threads_batch = header["threads"]
        params.flash_attn_type = _FLASH[header["flash_attn"]]
        params.type_k = params.type_v = _CACHE_TYPES[header["cache_type"]]
        params.cb_eval = self._hold(api.ggml_backend_sched_eval_callback(self._evaluated))
        params.no_perf = True
        return api.llama_init_from_model(self._model, params)

    def _evaluated(self, pointer: int, ask: bool, _: Any) -> bool:
        name = self._ggml.name(pointer).decode()
        if ask:
            base, _, layer = name.rpartition("-")
            # Views of a node carry its name with a remark behind it.
            return layer.isdecimal() and base in self._watched
        self._trace.append((name, self._ggml.read(pointer)))
        return True

    def _decode(self, tokens: Array, sequences: Array, wanted: Array, last: dict[int, int]) -> Array:
        api = self._api
        batch = api.llama_batch_init(len(tokens), 0, 1)
        try:
            batch.n_tokens = len(tokens)
            for i, (token, sequence, output) in enumerate(zip(tokens, sequences, wanted, strict=True)):
                last[int(sequence)] += 1
                batch.token[i] = token
                batch.pos[i] = last[int(sequence)]
                batch.n_seq_id[i] = 1
                batch.seq_id[i][0] = sequence
                batch.logits[i] = output
            status = api.llama_decode(self._context, batch)
        finally:
            api.llama_batch_free(batch)
        if status == 1:
            raise WorkerError("the context is full: no room for these tokens")
        if status:
            raise WorkerError(f"llama_decode failed with status {status}")
        count = int(np.count_nonzero(wanted))
        if count == 0:
            return np.empty((0, self._vocab_size), dtype=np.float32)
        logits = api.llama_get_logits(self._context)
        return np.ctypeslib.as_array(logits, shape=(count, self._vocab_size)).copy()

    def _log(self, level: int, text: bytes, _: Any) -> None:
        """llama.cpp's messages on stderr, each line with its level; those for debugging are left out."""
        if level != _LOG_CONTINUED:
            self._log_level = level
        prefix = _LOG_NAMES.get(self._log_level)
        if prefix is not None:
            os.write(2, text if level == _LOG_CONTINUED else prefix + text)

    def _hold(self, value: Any) -> Any:
        self._keep.append(value)
        return value


def _bytes_pointer(data: Array) -> Any:
    return data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer requests until the other end closes."""

    def fill(buffer: memoryview) -> None:
        while buffer:
            count = requests.readinto(buffer)  # type: ignore[attr-defined]
            if not count:
                raise EOFError
            buffer = buffer[count:]

    def reply(header: Header, arrays: list[Array] | None = None) -> None:
        for piece in frame(header, arrays or []):
            answers.write(piece)
        answers.flush()

    worker = Worker(reply)
    actions = {"load": worker.load, "decode": worker.decode, "memory": worker.memory}
    actions |= {"save": worker.save, "restore": worker.restore}
    while True:
        try:
            header, arrays = read_frame(fill)
        except EOFError:
            return
        try:
            reply(*actions[header["do"]](header, arrays))
        except WorkerError as error:
            reply({"error": str(error)})


def _guard_process() -> None:
    """No core dumps of a model's size; an interrupt is the parent's to handle."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def main() -> None:
    """Serve on stdin and stdout; what libraries print goes to stderr, which the parent keeps as the log."""
    _guard_process()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    serve(sys.stdin.buffer, answers)
    # The libraries' own destructors may wait for workers that are gone.
    os._exit(0)


if __name__ == "__main__":
    main()
