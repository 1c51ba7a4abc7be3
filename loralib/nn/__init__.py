"""Numerics: dropout, norms, tokens packed end to end, and which of them are whose."""
