"""The inference model: the reference's mathematics for a flat list of rows over caches.

Read `batching` (from a plan's spans to rows), `weights` and `loading`, then `model` and what it is made of: `window`,
`compression`, `selection`, `attention`, `experts`, `memory`, `vision`. It allocates no caches and schedules nothing.
"""
