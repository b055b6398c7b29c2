"""crmctl: one subcommand, one idempotent batch transaction."""

__version__ = "0.1.0"
