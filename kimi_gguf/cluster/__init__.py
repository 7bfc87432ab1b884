"""The llama.cpp runtime, patched for Kimi K3.1: building it, finding it, running models in it, and RPC workers."""
