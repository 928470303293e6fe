"""Measures what a checkpoint can do; `python eval/mini.py` prints the whole table."""
