"""Cases and timing of `bench_ops.py`."""
