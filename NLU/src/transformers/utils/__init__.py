"""Small helpers that no model owns."""
