"""Modules of utils/convert.py: bases, adapters, merged models, and their description."""
