"""What utils/convert.py is made of: bases, adapters as they are to be written, merged models."""
