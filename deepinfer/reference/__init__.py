"""The model as plain, differentiable PyTorch without caches: the specification, executable."""
