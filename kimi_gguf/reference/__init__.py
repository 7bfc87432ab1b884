"""Kimi K3 and K3.1 in float32 PyTorch, one layer at a time, and a numpy-only maker of checkpoints.

The model, a module per block: ``conv``, ``kda``, ``mla``, ``indexer``, ``attn_res``, ``moe``, ``situ``; ``layer`` puts
them together, ``model`` runs all layers. Weights come from a ``WeightStore`` (``weights``): ``stores.open_store`` opens
a checkpoint folder or a GGUF of any tensor type. ``options`` holds the conventions in which implementations differ.
``tokenizer`` reads and trains tiktoken vocabularies. Of ``checkpoint_*`` only ``checkpoint_store`` needs torch.

Example:
    >>> from pathlib import Path
    >>> import torch
    >>> from kimi_gguf.reference.model import logits
    >>> from kimi_gguf.reference.options import preset
    >>> from kimi_gguf.reference.stores import open_store
    >>> store = open_store(Path("kimi_gguf/data/tiny-k31"))  # doctest: +SKIP
    >>> with torch.inference_mode():  # doctest: +SKIP
    ...     scores = logits(store, torch.tensor([[65, 66, 67]]), preset("llama.cpp"))

One layer, for those who stream (memory holds this layer, and one routed expert at a time)::

    layer = build_layer(store, store.config, index, options)
    stream, trace = layer.forward(stream, cache)    # Stream(store.embedding(ids)) in front of layer 0
"""
