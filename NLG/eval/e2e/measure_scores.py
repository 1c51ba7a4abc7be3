"""The name that E2E's program has in the release; it is `../measure_scores.py`."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from measure_scores import start

    start()
