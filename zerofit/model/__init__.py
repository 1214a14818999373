"""Load or create a model and its tokenizer, the memory-saving loss head, export."""
