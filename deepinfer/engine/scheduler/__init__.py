"""Decides what each step runs: admission, chunks, pages, preemption, ends. Plain data; no tensors."""
