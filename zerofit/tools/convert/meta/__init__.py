"""Meta's Llama checkpoints: their files, their tokenizer, their arithmetic."""
