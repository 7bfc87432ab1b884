"""Proof of quality: structure, payload, routing fidelity, perplexity, KL divergence, importance matrices."""
