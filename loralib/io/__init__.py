"""What comes from outside and goes there: files, the hub, text, settings, the console, pictures."""
