"""What `benchmark.py` is made of: a model over caches that look used, prefill steps, decode steps."""
