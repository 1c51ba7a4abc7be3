"""Data sets that 4.4.2 reads itself."""
