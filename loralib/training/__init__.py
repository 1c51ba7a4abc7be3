"""What both training loops stand on: processes, locks, precision, the optimizer."""
