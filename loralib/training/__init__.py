"""The parts that the training loops of NLU and NLG share.

Start reading at `process` (a script's run), `distributed` (its processes) and `resume`.
"""
