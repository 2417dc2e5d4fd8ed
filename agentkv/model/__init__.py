"""Tensors, no policy: weights, KV, one forward pass, sampling."""
