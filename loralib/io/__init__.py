"""What comes from outside: files, the hub, text, settings."""
