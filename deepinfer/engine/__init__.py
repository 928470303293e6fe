"""Runs requests: admission, batches, the generation loop."""
