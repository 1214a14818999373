"""The tools of the `zerofit` command; only zerofit/cli.py imports them."""
