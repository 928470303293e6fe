"""The nouns that every room shares: errors, sampling parameters, requests, outputs."""
