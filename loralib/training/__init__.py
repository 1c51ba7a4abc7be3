"""What both training loops stand on; begin at `process`, a script's run, `distributed`, `resume`."""
