"""The tools of the `zerofit` command; only train/cli.py imports them."""
