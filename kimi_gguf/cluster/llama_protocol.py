"""Messages between an engine and its child process: a JSON header and arrays, framed by lengths.

A frame is ``u32 n``, n bytes of JSON, then the arrays' bytes back to back; the header's ``arrays`` states dtype and
shape of each. Both ends run on one machine, so bytes are in its own order.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Header = dict[str, Any]

_LENGTH = struct.Struct("=I")


def frame(header: Header, arrays: Sequence[Array] = ()) -> Iterator[bytes | memoryview]:
    """The pieces of one message, to be written in this order."""
    packed = [np.ascontiguousarray(array) for array in arrays]
    described = header | {"arrays": [[array.dtype.str, array.shape] for array in packed]}
    text = json.dumps(described).encode()
    yield _LENGTH.pack(len(text)) + text
    for array in packed:
        if array.nbytes:
            yield array.reshape(-1).view(np.uint8).data


def read_frame(fill: Callable[[memoryview], None]) -> tuple[Header, list[Array]]:
    """Read one message.

    Args:
        fill: fills a buffer from the stream, or raises.
    """
    prefix = bytearray(_LENGTH.size)
    fill(memoryview(prefix))
    text = bytearray(_LENGTH.unpack(prefix)[0])
    fill(memoryview(text))
    header: Header = json.loads(text)
    arrays = []
    for dtype, shape in header.pop("arrays"):
        array: Array = np.empty(shape, dtype=np.dtype(dtype))
        if array.nbytes:
            fill(array.reshape(-1).view(np.uint8).data)
        arrays.append(array)
    return header, arrays
