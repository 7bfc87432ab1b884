"""``python -m kimi_gguf``."""

from kimi_gguf.cli import main

main()
