"""Instructions and chats for the causal task."""
