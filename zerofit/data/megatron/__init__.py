"""Corpora in Megatron's format."""
