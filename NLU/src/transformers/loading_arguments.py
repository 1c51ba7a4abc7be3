"""Sorts the arguments of `from_pretrained`: those that all classes share, and all others.

An unknown argument is an error: as a setting, it would be silently ignored.
"""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

# The arguments on where to look for a model: upstream's name -> the name in `resolve_file`.
WHERE = {
    "cache_dir": "cache_dir",
    "revision": "revision",
    "use_auth_token": "token",
    "token": "token",  # its name today
    "local_files_only": "local_files_only",
    "force_download": "force_download",
}
# Upstream's arguments that this fork does not have -> (values that ask for nothing, advice).
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "from_tf": (
        (None, False),
        "TensorFlow's checkpoints are not read: convert it with upstream's transformers",
    ),
    "proxies": ((None, {}), "name the proxy in the environment, as HTTPS_PROXY"),
    "mirror": ((None,), "name the mirror in the environment, as HF_ENDPOINT"),
    "torch_dtype": (
        (None,),
        "weights are read in float32: call .to(dtype) on the model, or train with --bf16 or "
        "--fp16, which keep frozen weights as they are in a file of that dtype",
    ),
}
# The hub's library resumes every download that was interrupted.
_NOT_NEEDED = {"resume_download"}


def split_arguments(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits arguments into those on where to look, by `resolve_file`'s names, and all others.

    Raises:
        ValueError: an argument asks for something that upstream can do and this fork cannot.
    """
    where, others = {}, {}
    for name, value in arguments.items():
        if name in _REFUSED:
            harmless, advice = _REFUSED[name]
            if not any(value is each or value == each for each in harmless):
                raise ValueError(f"from_pretrained({name}={value!r}): {advice}")
        elif name in WHERE:
            # For some switches, upstream's default is None.
            if value is not None:
                where[WHERE[name]] = value
        elif name not in _NOT_NEEDED:
            others[name] = value
    return where, others


def refuse_unknown(owner: type, unknown: Iterable[str], known: Iterable[str]) -> None:
    """Raises TypeError for arguments that `owner` does not have, and suggests similar names."""
    unknown, known = sorted(unknown), sorted({*known, *WHERE})
    if not unknown:
        return
    near = [match for name in unknown for match in difflib.get_close_matches(name, known, n=1)]
    hint = f" (did you mean {', '.join(near)}?)" if near else ""
    raise TypeError(
        f"{owner.__name__} has no setting {', '.join(unknown)} that from_pretrained could set{hint}"
    )
