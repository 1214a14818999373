"""Sentences, pairs and multiple choice with labels."""
