"""Data sets that upstream's 4.4.2 reads itself."""
