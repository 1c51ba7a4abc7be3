"""Runs `../measure_scores.py` under the name of the release's program for WebNLG and DART."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from measure_scores import start

    start()
