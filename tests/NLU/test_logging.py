"""The package's loggers: levels, TRANSFORMERS_VERBOSITY, handlers and formats."""

import io
import logging
import os
import subprocess
import sys

import pytest

from transformers import logging as package_logging


@pytest.fixture(autouse=True)
def as_before():
    """Restores level, handlers, formats and propagation after a test."""
    logger = package_logging.get_logger()
    level, handlers, propagates = logger.level, list(logger.handlers), logger.propagate
    yield
    logger.setLevel(level)
    logger.handlers[:] = handlers
    logger.propagate = propagates
    package_logging.reset_format()


@pytest.fixture
def shown():
    """The text that a handler of the package has written."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    package_logging.add_handler(handler)
    yield stream
    package_logging.remove_handler(handler)


@pytest.mark.parametrize(
    ("name", "level"),
    [
        ("debug", logging.DEBUG),
        ("info", logging.INFO),
        ("warning", logging.WARNING),
        ("error", logging.ERROR),
    ],
)
def test_levels(shown, name, level):
    getattr(package_logging, f"set_verbosity_{name}")()
    assert package_logging.get_verbosity() == level
    assert package_logging.log_levels[name] == level
    logger = package_logging.get_logger("transformers.some.module")
    assert logger.getEffectiveLevel() == level
    for each in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
        logger.log(each, "level %d", each)
    expected = [f"level {each}" for each in (10, 20, 30, 40) if each >= level]
    assert shown.getvalue().splitlines() == expected


def test_the_explicit_format_names_level_and_file(shown):
    package_logging.enable_explicit_format()
    package_logging.get_logger("transformers.x").warning("a message")
    assert shown.getvalue().startswith("[WARNING|test_logging.py:")
    assert shown.getvalue().endswith(" >> a message\n")
    package_logging.reset_format()
    package_logging.get_logger("transformers.x").warning("another")
    assert shown.getvalue().endswith("\nanother\n")


def test_propagation(caplog):
    package_logging.disable_propagation()
    package_logging.get_logger().warning("kept")
    package_logging.enable_propagation()
    package_logging.get_logger().warning("passed on")
    assert [record.getMessage() for record in caplog.records] == ["passed on"]


def test_the_default_handler_leaves_messages_to_the_roots(capsys):
    """pytest has added handlers to the root logger."""
    package_logging.get_logger().warning("once")
    assert capsys.readouterr().err == ""
    package_logging.disable_propagation()
    package_logging.get_logger().warning("here")
    package_logging.disable_default_handler()
    package_logging.get_logger().warning("nowhere")
    package_logging.enable_default_handler()
    package_logging.get_logger().warning("here again")
    assert capsys.readouterr().err.splitlines() == ["here", "here again"]


@pytest.mark.parametrize(
    ("verbosity", "lines"),
    [
        (None, ["warning"]),
        ("info", ["info", "warning"]),
        ("ERROR", []),
        (
            "loud",
            [
                "TRANSFORMERS_VERBOSITY is loud, not one of debug, info, warning, error, critical: "
                "it has no effect",
                "warning",
            ],
        ),
    ],
)
def test_the_environment_sets_the_level(verbosity, lines):
    environment = {k: v for k, v in os.environ.items() if k != "TRANSFORMERS_VERBOSITY"}
    if verbosity is not None:
        environment["TRANSFORMERS_VERBOSITY"] = verbosity
    code = "import importlib.util, sys\n"
    code += f"spec = importlib.util.spec_from_file_location('x', {package_logging.__file__!r})\n"
    code += "module = importlib.util.module_from_spec(spec)\nspec.loader.exec_module(module)\n"
    code += "for name in ('debug', 'info', 'warning'):\n"
    code += "    getattr(module.get_logger('transformers.y'), name)(name)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.stderr.splitlines() == lines
