"""Data sets: readers, labels, metrics and collators."""
