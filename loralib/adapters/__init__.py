"""An adapter as a thing: what it holds, its metadata, and its formats on disk."""
