"""Benchmarks of a deployed engine: questions, rollouts that survive a kill, judges, a summary."""
