"""The rules, pure: no I/O."""
