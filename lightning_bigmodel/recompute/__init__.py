"""Activations that are computed again or moved off the device, block by block, and what each choice costs."""
