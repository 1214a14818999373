"""Checkpoints: the manager, the asynchronous writer, shards, choosing and resuming."""
