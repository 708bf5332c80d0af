"""Layers: low-rank adapters and quantised bases, put into modules that know nothing of them."""
