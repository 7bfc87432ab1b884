"""C sources of the encoders and hashes; the built library lies here in the tree and in an installed package."""

from __future__ import annotations

import ctypes
from importlib import resources

from quant.errors import InputError

LIBRARY = "libkimi_quant.so"


def load_library() -> ctypes.CDLL:
    """The built library, without signatures.

    Raises:
        InputError: it is not there, or not for this machine.
    """
    try:
        # In an editable install it is not beside the sources.
        with resources.as_file(resources.files(__name__) / LIBRARY) as path:
            return ctypes.CDLL(str(path))
    except OSError as error:
        raise InputError(
            f"the encoder library {LIBRARY} cannot be loaded: {error}",
            "install the package with pip, or run scripts/build_kernels.sh in a source tree",
        ) from error
