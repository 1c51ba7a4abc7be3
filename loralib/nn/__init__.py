"""Numerics: dropout, norms, tokens packed end to end, and which adapter computes which."""
