"""The switch between what is fast and what is plain: by the environment, and within a block."""

import importlib

import pytest

from loralib.nn import plain as module


@pytest.fixture
def with_variable(monkeypatch):
    """Reads the module again, as a new process does, with LORALIB_PLAIN set to a text."""

    def read(text):
        monkeypatch.setenv("LORALIB_PLAIN", text)
        return importlib.reload(module)

    yield read
    monkeypatch.undo()
    importlib.reload(module)


@pytest.mark.parametrize(("text", "on"), [("1", True), ("yes", True), ("0", False), ("", False)])
def test_the_environment_turns_it_on(with_variable, text, on):
    assert with_variable(text).is_plain() == on


def test_a_block_turns_it_on_and_off_again():
    before = module.is_plain()
    for on in (True, False):
        with module.plain(on):
            assert module.is_plain() == on
            with module.plain(not on):
                assert module.is_plain() != on
            assert module.is_plain() == on
        assert module.is_plain() == before


def test_an_error_in_a_block_ends_it():
    before = module.is_plain()
    with pytest.raises(ZeroDivisionError), module.plain(not before):
        raise ZeroDivisionError
    assert module.is_plain() == before
