"""What the engine remembers of its requests: byte layouts, device tensors, pages, shared prefixes and slower tiers."""
