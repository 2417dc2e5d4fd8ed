"""Tensors and no policy: models, the memory of KV, attention, sampling."""
