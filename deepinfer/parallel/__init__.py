"""Many processes as one engine: ranks and their collectives, shared experts, load balancing of experts, placement."""
