"""Data sets: reading, labels, metrics, collators."""
