"""DeBERTa-v2."""
