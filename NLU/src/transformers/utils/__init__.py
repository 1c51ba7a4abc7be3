"""Helpers for scripts and logging."""


def check_min_version(min_version: str) -> None:
    """Checks that this package is new enough for a script; scripts of 4.4 call it when they start.

    Raises:
        ImportError: the package is older than `min_version`.
    """
    from packaging import version

    from .. import __version__

    if version.parse(__version__) < version.parse(min_version):
        raise ImportError(
            f"this script needs transformers {min_version}, and {__version__} is installed: use "
            "the script of the installed version"
        )
