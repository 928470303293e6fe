"""Speculative decoding with DSpark: what drafting gains, and how far its confidence can be trusted.

`drafting` makes a block of drafts over caches. `rounds` replays the drafting and verifying of a finished sequence;
`calibration` turns confidence logits into probabilities that match what is accepted, and keeps the fitted temperatures
beside a checkpoint.
"""
