"""Speculative decoding with DSpark: what drafting gains, and how far its confidence can be trusted.

`drafting` makes a block of drafts over caches, `acceptance` says which of them stay, `speculator` does both for the
requests of a step, `blocks` is what it keeps. `calibration` turns confidence logits into probabilities that match what
is accepted, and keeps the fitted temperatures beside a checkpoint. `rounds` replays the drafting of finished sequences.
"""
