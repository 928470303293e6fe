"""The `deepinfer` command; one module a subcommand."""
