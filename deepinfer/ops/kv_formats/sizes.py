"""Bytes of one stored row, from its number of channels."""

POWER_BLOCK = 32
"""Channels that share a power-of-two scale: window rows and index keys."""
LATENT_BLOCK = 16
"""Channels that share an E4M3 scale: compressed latents."""


def window_bytes(channels: int) -> int:
    """A byte an element and a scale per 32."""
    return channels + channels // POWER_BLOCK


def latent_bytes(channels: int) -> int:
    """Half a byte an element and a scale per 16."""
    return channels // 2 + channels // LATENT_BLOCK


def index_bytes(channels: int) -> int:
    """Half a byte an element and a scale per 32."""
    return channels // 2 + channels // POWER_BLOCK
