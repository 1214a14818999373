"""`zerofit prepare`: from text to corpora in Megatron's format."""
