"""What all tests share: folders of their own for downloads and caches, one thread each, no GPU.

A test that is about a GPU is marked `gpu`; `pytest -m gpu` runs those alone, and hides none.
"""

import importlib
import logging
import os
import signal
import tempfile
from pathlib import Path

import pytest
from hub_server import HubServer

# Those need an environment with upstream's transformers: bash tests/interop/run.sh
collect_ignore = ["interop"]

SEEN_GPUS = pytest.StashKey[dict[str, str]]()


# Before a folder's conftest.py imports what reads these. Processes that tests start inherit them.
_HOME = tempfile.TemporaryDirectory(prefix="lora-tests-")
for _name in [name for name in os.environ if name.startswith(("HF_", "TRANSFORMERS_"))]:
    del os.environ[_name]
os.environ["HF_HOME"] = _HOME.name
os.environ["XDG_CACHE_HOME"] = _HOME.name
# Tests are small: more threads only wait for each other, most of all with several processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A shell script's background job ignores Ctrl-C, and so would the processes that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config):
    config.add_cleanup(_HOME.cleanup)
    # What the tests of a CPU expect does not depend on what else the machine has.
    name = "CUDA_VISIBLE_DEVICES"
    seen = {name: os.environ[name]} if name in os.environ else {}
    config.stash[SEEN_GPUS] = getattr(config, "workerinput", {}).get("seen_gpus", seen)
    if config.option.markexpr != "gpu":
        os.environ[name] = ""


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    # pytest-xdist's worker starts with what is hidden here.
    node.workerinput["seen_gpus"] = node.config.stash[SEEN_GPUS]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Files that take longest go first: of several workers none ends alone with one of them."""

    def files_with(*markers):
        return {item.path for item in items if any(map(item.get_closest_marker, markers))}

    distributed, slow = files_with("distributed"), files_with("slow", "fuzz")
    items.sort(key=lambda item: (item.path not in distributed, item.path not in slow))


@pytest.fixture
def tmp_path(tmp_path_factory):
    """Returns an empty folder. Its name is a number: errors name it, and a test that looks for a
    word in an error must not find it in the test's own name, which pytest would use."""
    return tmp_path_factory.mktemp("0")


@pytest.fixture(autouse=True)
def log_levels():
    """Those of a new process: scripts set them, and what one test shows is no other's."""
    logging.getLogger().setLevel(logging.WARNING)
    scripts = Path(__file__).resolve().parents[1] / "NLG" / "src"
    for name in ("loralib", "transformers", "__main__", *(p.stem for p in scripts.glob("*.py"))):
        logging.getLogger(name).setLevel(logging.NOTSET)


@pytest.fixture(autouse=True)
def gloo_interface():
    """A process group of one test chooses gloo's interface; no other test inherits that."""
    yield
    os.environ.pop("GLOO_SOCKET_IFNAME", None)


@pytest.fixture(autouse=True)
def determinism():
    """A new process's: scripts set both for the process, which goes on to other tests here."""
    import torch

    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True


@pytest.fixture
def empty_memory_shows(determinism):
    """Memory that nothing was written to holds NaN."""
    import torch

    torch.use_deterministic_algorithms(True)
    assert torch.empty(1).isnan()


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a GPU that is not hidden: pytest -m gpu")


@pytest.fixture
def seeing_gpus(pytestconfig):
    """The environment for a subprocess that sees the GPUs which the tests were started with."""
    kept = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    return kept | pytestconfig.stash[SEEN_GPUS]


class DeviceSettings:
    """PyTorch's settings of a GPU, as a plain dict, to be read and set; no GPU is needed."""

    @staticmethod
    def read() -> dict[str, bool]:
        """What is set now."""
        import torch

        return {
            "products in TF32": torch.backends.cuda.matmul.allow_tf32,
            "convolutions in TF32": torch.backends.cudnn.allow_tf32,
            "cuDNN's attention": torch.backends.cuda.cudnn_sdp_enabled(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        }

    @staticmethod
    def write(products: bool, convolutions: bool, attention: bool, deterministic: bool) -> None:
        """Sets them all."""
        import torch

        torch.backends.cuda.matmul.allow_tf32 = products
        torch.backends.cudnn.allow_tf32 = convolutions
        torch.backends.cuda.enable_cudnn_sdp(attention)
        torch.use_deterministic_algorithms(deterministic)

    @classmethod
    def expect(cls, tf32: bool, deterministic: bool = False) -> None:
        """Asserts that they are as a script of this project sets them."""
        expected = {"products in TF32": tf32, "convolutions in TF32": tf32}
        expected |= {"cuDNN's attention": False, "deterministic": deterministic}
        assert cls.read() == expected


@pytest.fixture
def device_settings():
    """`DeviceSettings`, all the other way about to begin with; what was set before comes back."""
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
def pretended_gpu(monkeypatch):
    """A GPU's generator without a GPU: a list with its state, whose last item is the present."""
    import torch

    states = [torch.tensor([1, 2], dtype=torch.uint8)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: states[-1])
    monkeypatch.setattr(torch.cuda, "set_rng_state", states.append)
    return states


@pytest.fixture
def hub_server(tmp_path):
    """A started local hub: `.root` for repositories, `.environment(home)` for a subprocess."""
    root = tmp_path / "hub"
    root.mkdir()
    with HubServer(root) as server:
        yield server


@pytest.fixture
def drawn_masks(monkeypatch):
    """The list that every dropout mask drawn from here on goes to: what elements are scaled by."""
    import torch

    module, drawn = importlib.import_module("loralib.nn.dropout"), []
    draw = module.keep_mask

    def record(shape, p):
        mask = draw(shape, p)
        drawn.append(module.apply_mask(torch.ones(shape), mask, p))
        return mask

    monkeypatch.setattr(module, "keep_mask", record)
    return drawn
