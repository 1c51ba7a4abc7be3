"""What both training loops stand on.

Begin at `process` (a script's run), `distributed` (its processes) and `resume`.
"""
