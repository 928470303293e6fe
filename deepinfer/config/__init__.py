"""Configuration: the model's, the engine's, the environment's."""
