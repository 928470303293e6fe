"""Operators of the inference model: one folder each, with its contract and a PyTorch version that defines it.

`torch.py` in a folder is the specification and runs on every device; a faster version stands beside it under the same
names and must agree with it.
"""
