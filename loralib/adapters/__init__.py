"""Adapters: what they hold, their metadata, and their formats on disk."""
