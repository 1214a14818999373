"""`zerofit plan`: the search over batches and layouts, and its table."""
