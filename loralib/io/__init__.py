"""What comes from outside: files, the hub, texts, settings."""
