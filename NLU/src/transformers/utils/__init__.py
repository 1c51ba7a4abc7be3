"""Small helpers that no model owns."""


def check_min_version(min_version: str) -> None:
    """Checks that this package is as new as a script needs it, as 4.4's scripts do at their head.

    Raises:
        ImportError: it is older.
    """
    from packaging import version

    from .. import __version__

    if version.parse(__version__) < version.parse(min_version):
        raise ImportError(
            f"this script needs transformers {min_version}, and {__version__} is installed: use "
            "the script of the installed version"
        )
