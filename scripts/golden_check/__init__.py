"""Compares the reference model with golden data: see `scripts/check_golden.py`."""
