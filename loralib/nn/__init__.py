"""Numerics: dropout, norms, products, packed tokens, and which adapter computes which rows."""
