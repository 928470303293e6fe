"""Number formats, tensor layout, reading and writing of checkpoints."""
