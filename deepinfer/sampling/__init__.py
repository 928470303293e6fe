"""From logits to tokens: counter-based random numbers and the sampler."""
