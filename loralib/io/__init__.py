"""Input and output: files, the hub, text, settings, the console and pictures."""
