"""`zerofit generate`: a model continues a text, answers a file of prompts, or chats."""
