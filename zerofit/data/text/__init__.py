"""Plain text for the causal task."""
