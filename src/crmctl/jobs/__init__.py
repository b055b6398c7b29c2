"""The jobs: one module = one subcommand = one transaction. No Typer, no printing, no commit."""
