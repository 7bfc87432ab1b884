"""``python -m kimi_gguf``, and the command ``kimi-gguf``."""

from __future__ import annotations

import sys
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line; an interrupt while it is still being imported ends like any other."""
    try:
        from kimi_gguf.cli import main as command_line
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted\n")
        sys.exit(130)
    command_line()


if __name__ == "__main__":
    main()
