"""Adapters: their contents, their metadata, and their formats on disk."""
