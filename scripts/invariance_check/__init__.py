"""Parts of `check_invariance.py`: engines whose logits are recorded, and operators that are run twice."""
