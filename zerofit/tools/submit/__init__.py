"""The `zerofit submit` command."""
