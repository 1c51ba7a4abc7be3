"""What all tests share: a home of their own for downloads and caches, and one thread each."""

import os
import tempfile


def pytest_configure(config):
    # Before anything is imported that reads these. Subprocesses inherit them.
    home = tempfile.TemporaryDirectory(prefix="lora-tests-")
    config.add_cleanup(home.cleanup)
    for name in [name for name in os.environ if name.startswith(("HF_", "TRANSFORMERS_"))]:
        del os.environ[name]
    os.environ["HF_HOME"] = home.name
    # Tests are small: more threads only wait for each other, most of all with several processes.
    os.environ["OMP_NUM_THREADS"] = "1"
