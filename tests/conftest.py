"""Isolates all tests from the machine (caches, threads, GPUs), and has the fixtures they share.

Tests that need a GPU are marked `gpu`. `pytest -m gpu` runs only those, and hides no GPU.
"""

import gc
import importlib
import logging
import os
import signal
import tempfile
from pathlib import Path

import pytest
from file_server import FileServer
from hub_server import HubServer

# They need an environment with upstream's transformers: bash tests/interop/run.sh
collect_ignore = ["interop"]

SEEN_GPUS = pytest.StashKey[dict[str, str]]()


# Set before any other conftest.py imports modules that read these. Subprocesses inherit them.
_HOME = tempfile.TemporaryDirectory(prefix="lora-tests-")
for _name in [name for name in os.environ if name.startswith(("HF_", "TRANSFORMERS_", "TQDM_"))]:
    del os.environ[_name]
os.environ["HF_HOME"] = _HOME.name
os.environ["XDG_CACHE_HOME"] = _HOME.name
if "LORA_TESTS" not in os.environ:  # not a worker of pytest-xdist
    # A folder for all of its workers, and a pipe that ends with this process; see SharedForkServer.
    os.environ["LORA_TESTS"] = _HOME.name
    os.mkfifo(f"{_HOME.name}/alive")
    _ALIVE = os.open(f"{_HOME.name}/alive", os.O_RDWR)
# Tests are small: more threads only wait for each other, above all with several processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Background jobs of shell scripts ignore SIGINT. Processes that tests interrupt must not.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config):
    config.add_cleanup(_HOME.cleanup)
    # What tests on the CPU expect must not depend on whether the machine has a GPU.
    name = "CUDA_VISIBLE_DEVICES"
    seen = {name: os.environ[name]} if name in os.environ else {}
    config.stash[SEEN_GPUS] = getattr(config, "workerinput", {}).get("seen_gpus", seen)
    if config.option.markexpr != "gpu":
        os.environ[name] = ""
    else:
        # Runs in deterministic mode set it, but PyTorch reads it at a process's first product,
        # which may be another test's.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    # Workers of pytest-xdist start with the environment that hides the GPUs.
    node.workerinput["seen_gpus"] = node.config.stash[SEEN_GPUS]


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collects tests without Python's collector of garbage, which would look at all of them again
    and again, and need not look at them later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Runs the slowest files first, so that no worker is left alone with one at the end."""

    def files_with(*markers):
        return {item.path for item in items if any(map(item.get_closest_marker, markers))}

    distributed, slow = files_with("distributed"), files_with("slow", "fuzz")
    items.sort(key=lambda item: (item.path not in distributed, item.path not in slow))


@pytest.fixture
def tmp_path(tmp_path_factory):
    """Returns an empty folder. Its name is a number: errors name it, and a test that looks for a
    word in an error must not find it in the test's own name, which pytest would use."""
    return tmp_path_factory.mktemp("0")


_SCRIPTS = Path(__file__).resolve().parents[1] / "NLG" / "src"
LOG_LEVELS = {"": logging.WARNING} | dict.fromkeys(
    ("loralib", "transformers", "__main__", *(path.stem for path in _SCRIPTS.glob("*.py"))),
    logging.NOTSET,
)


@pytest.fixture(autouse=True)
def log_levels():
    """Resets the log levels, which scripts set, to those of a new process before each test."""
    for name, level in LOG_LEVELS.items():
        logger = logging.getLogger(name)
        if logger.level != level:  # setting a level goes through all loggers there are
            logger.setLevel(level)


@pytest.fixture(autouse=True)
def gloo_interface():
    """Unsets gloo's network interface, which a process group sets for the whole process."""
    yield
    os.environ.pop("GLOO_SOCKET_IFNAME", None)


@pytest.fixture(autouse=True)
def determinism():
    """Resets PyTorch's settings of determinism, which scripts set for the whole process."""
    import torch

    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True


@pytest.fixture
def nan_in_empty_memory(determinism):
    """Has PyTorch fill uninitialized memory with NaN, so that tests notice if it is read."""
    import torch

    torch.use_deterministic_algorithms(True)
    assert torch.empty(1).isnan()


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a GPU that is not hidden: pytest -m gpu")


@pytest.fixture
def environment_with_gpus(pytestconfig):
    """The environment of a subprocess that sees the GPUs visible when pytest was started."""
    others = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    return others | pytestconfig.stash[SEEN_GPUS]


class DeviceSettings:
    """Reads, sets and checks PyTorch's settings for GPUs; needs no GPU."""

    @staticmethod
    def read() -> dict[str, bool]:
        """Returns the current settings."""
        import torch

        return {
            "products in TF32": torch.backends.cuda.matmul.allow_tf32,
            "convolutions in TF32": torch.backends.cudnn.allow_tf32,
            "cuDNN's attention": torch.backends.cuda.cudnn_sdp_enabled(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        }

    @staticmethod
    def write(products: bool, convolutions: bool, attention: bool, deterministic: bool) -> None:
        """Sets all of them."""
        import torch

        torch.backends.cuda.matmul.allow_tf32 = products
        torch.backends.cudnn.allow_tf32 = convolutions
        torch.backends.cuda.enable_cudnn_sdp(attention)
        torch.use_deterministic_algorithms(deterministic)

    @classmethod
    def expect(cls, tf32: bool, deterministic: bool = False) -> None:
        """Asserts that the settings are those that this project's scripts make."""
        expected = {"products in TF32": tf32, "convolutions in TF32": tf32}
        expected |= {"cuDNN's attention": False, "deterministic": deterministic}
        assert cls.read() == expected


@pytest.fixture
def device_settings():
    """`DeviceSettings`, with TF32 and cuDNN's attention on at first; restored after the test."""
    before = DeviceSettings.read()
    workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    DeviceSettings.write(True, True, True, False)
    yield DeviceSettings
    DeviceSettings.write(*before.values())
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    if workspace is not None:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = workspace


@pytest.fixture
def fake_gpu_rng(monkeypatch):
    """Pretends that there is a GPU with an RNG: a list of its states, the last one current."""
    import torch

    states = [torch.tensor([1, 2], dtype=torch.uint8)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: states[-1])
    monkeypatch.setattr(torch.cuda, "set_rng_state", states.append)
    return states


@pytest.fixture
def file_server(monkeypatch):
    """A server of files, which downloads try to reach again without waiting."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr("loralib.io.downloads.FIRST_WAIT", 0.0)
    with FileServer() as server:
        yield server


@pytest.fixture
def hub_server(tmp_path):
    """A running local hub: `.root` holds repositories, `.environment(home)` is for clients."""
    root = tmp_path / "hub"
    root.mkdir()
    with HubServer(root) as server:
        yield server


@pytest.fixture
def drawn_masks(monkeypatch):
    """A list of the dropout masks sampled during the test, each as the factors of elements."""
    import torch

    module, drawn = importlib.import_module("loralib.nn.dropout"), []
    draw = module.keep_mask

    def record(shape, p):
        mask = draw(shape, p)
        drawn.append(module.apply_mask(torch.ones(shape), mask, p))
        return mask

    monkeypatch.setattr(module, "keep_mask", record)
    return drawn
