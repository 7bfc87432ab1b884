"""``python -m kimi_gguf.cli``."""

from kimi_gguf.cli import main

main()
