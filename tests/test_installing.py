"""Tests of installing: the two wheels, conda's environment, and make_environment.sh."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import venv
import zipfile
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml
from paths import ROOT

# Wheel -> the folder of its setup.py, the folder of its package, and the package.
WHEELS = {
    "loralib": ("", "", "loralib"),
    "transformers": ("NLU", "NLU/src", "transformers"),
}
# Of the packages' files. Others, such as a file manager's, may lie in their folders.
SUFFIXES = (".py", ".json", ".typed")
# What other parts of loralib and of the project need, but loralib's layers do not.
NOT_TORCH = ("datasets", "huggingface_hub", "safetensors", "tokenizers", "tqdm", "transformers")


def pip(*arguments: object) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def ignored(folder: str, names: list[str]) -> set[str]:
    """The names in a folder of the project that git ignores, and .git."""
    lines = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    patterns = [".git", *(line.strip("/") for line in lines if line and line[0] != "#")]
    inside = Path(folder).relative_to(ROOT)
    return {
        name
        for name in names
        for pattern in patterns  # one with a slash is a path from the root
        if fnmatch(name if "/" not in pattern else (inside / name).as_posix(), pattern)
    }


@pytest.fixture(scope="module")
def wheels(tmp_path_factory) -> dict[str, Path]:
    """Name -> wheel, built offline from a copy of the project, in which builds leave files."""
    copy, built = tmp_path_factory.mktemp("copy") / "project", tmp_path_factory.mktemp("wheels")
    shutil.copytree(ROOT, copy, ignore=ignored)
    for folder, _, _ in WHEELS.values():
        pip("wheel", "--no-index", "--no-deps", "--no-build-isolation", "-w", built, copy / folder)
    return {path.name.partition("-")[0]: path for path in built.glob("*.whl")}


@pytest.fixture(scope="module")
def target(wheels, tmp_path_factory) -> Path:
    """A fresh folder with both packages installed, and nothing else."""
    folder = tmp_path_factory.mktemp("target")
    pip("install", "--no-index", "--no-deps", "--no-compile", "--target", folder, *wheels.values())
    return folder


def run(code: str, target: Path) -> str:
    """Returns what code prints that finds the packages in `target` before others."""
    code = f"import sys; sys.path.insert(0, {str(target)!r})\n{code}"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_both_wheels_are_built(wheels):
    assert set(wheels) == set(WHEELS)


@pytest.mark.slow
@pytest.mark.parametrize("name", WHEELS)
def test_a_wheel_has_its_package_and_nothing_else(wheels, name):
    _, source, package = WHEELS[name]
    with zipfile.ZipFile(wheels[name]) as wheel:
        files = set(wheel.namelist())
    inside = {file for file in files if ".dist-info/" not in file}
    expected = {
        path.relative_to(ROOT / source).as_posix()
        for path in (ROOT / source / package).rglob("*")
        if path.suffix in SUFFIXES and "__pycache__" not in path.parts
    }
    assert inside == expected
    assert {Path(file).name for file in files - inside} >= {"METADATA", "RECORD", "WHEEL"}


@pytest.mark.slow
@pytest.mark.parametrize("name", WHEELS)
def test_a_wheel_declares_its_requirements(wheels, name):
    with zipfile.ZipFile(wheels[name]) as wheel:
        (path,) = (file for file in wheel.namelist() if file.endswith(".dist-info/METADATA"))
        metadata = wheel.read(path).decode()
    assert re.search(r"^Requires-Python: >=3\.10$", metadata, re.M)
    needs = re.findall(r"^Requires-Dist: ([\w-]+)(?:[^;\n]*)$", metadata, re.M)
    assert "torch" in needs
    assert ("loralib" in needs) is (name == "transformers")
    # loralib alone does not require what only the fork needs.
    assert name != "loralib" or set(needs) == {"filelock", "numpy", "safetensors", "torch"}


@pytest.mark.slow
def test_the_layers_need_torch_alone(target):
    blocked = "\n".join(f"sys.modules[{name!r}] = None" for name in NOT_TORCH)
    printed = run(
        f"{blocked}\n"
        "import torch, loralib as lora\n"
        "model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))\n"
        "lora.add_lora(model, targets=['0'], r=2)\n"
        "model(torch.ones(1, 4)).sum().backward()\n"
        "print(lora.__file__, sorted(lora.lora_state_dict(model)))\n",
        target,
    )
    assert printed == f"{target / 'loralib' / '__init__.py'} ['0.lora_A', '0.lora_B']\n"


@pytest.mark.slow
def test_the_fork_is_found_with_its_version(target):
    printed = run("import transformers as t; print(t.__file__, t.__version__)", target)
    assert printed == f"{target / 'transformers' / '__init__.py'} {version_of('NLU/setup.py')}\n"


def version_of(path: str) -> str:
    return re.search(r'version="(.+?)"', (ROOT / path).read_text(encoding="utf-8"))[1]


def supported() -> tuple[int, int]:
    """The oldest and the newest minor version of Python 3 that make_environment.sh accepts."""
    script = (ROOT / "utils" / "make_environment.sh").read_text(encoding="utf-8")
    return tuple(map(int, re.search(r"\(3, (\d+)\) <= .* <= \(3, (\d+)\)", script).groups()))


def requirements(arguments: list[str]) -> list[tuple[str, ...]]:
    """Arguments of pip as tuples, each flag with its value."""
    pairs = iter(arguments)
    return [(one, next(pairs)) if one.startswith("-") else (one,) for one in pairs]


def test_conda_installs_what_the_quickstart_installs():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    of_conda, (of_pip,) = (
        [one for one in environment["dependencies"] if isinstance(one, kind)]
        for kind in (str, dict)
    )
    script = (ROOT / "utils" / "make_environment.sh").read_text(encoding="utf-8")
    project = shlex.split(re.search(r"^project=\((.*)\)$", script, re.M)[1])
    constrained = re.search(r"-c (\S+) \"\$\{packages\[@\]\}\"", script)[1]
    lines = [word for line in of_pip["pip"] for word in shlex.split(line)]
    assert requirements(lines) == [("-c", constrained), *requirements(project)]
    # Conda installs only Python and pip. Everything else has the versions of constraints.txt.
    assert [one.partition("=")[0] for one in of_conda] == ["python", "pip"]
    (minor,) = (int(one.removeprefix("python=3.")) for one in of_conda if one != "pip")
    oldest, newest = supported()
    assert oldest <= minor <= newest


def test_files_named_in_environment_yml_exist():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    words = [shlex.split(line) for line in environment["dependencies"][-1]["pip"]]
    for flag, value in words:
        path = ROOT / re.sub(r"\[.*\]$", "", value)
        assert (path / "setup.py").is_file() if flag == "-e" else path.is_file()


def test_an_environment_with_an_unsupported_python_is_refused(tmp_path):
    script, python = tmp_path / "utils" / "make_environment.sh", tmp_path / ".venv/bin/python"
    for path in (script, python):
        path.parent.mkdir(parents=True)
    shutil.copy(ROOT / "utils" / script.name, script)
    python.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.2\n')
    python.chmod(0o755)
    done = subprocess.run(["bash", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "make_environment.sh: error: .venv has Python 3.9.2, but needs Python 3.10 to "
        "3.14: remove it (rm -r .venv) and run this again\n"
    )


@pytest.mark.parametrize("is_moved", [False, True])
def test_an_environment_of_another_folder_is_refused(tmp_path, is_moved):
    """Its commands and its editable installation name the folder that it was made in."""
    first, second = tmp_path / "first", tmp_path / "second's"
    script = Path("utils/make_environment.sh")
    (first / "utils").mkdir(parents=True)
    shutil.copy(ROOT / script, first / script)
    venv.create(first / ".venv", with_pip=False)
    if is_moved:
        first.rename(second)
    else:
        shutil.copytree(first, second, symlinks=True)
    done = subprocess.run(["bash", second / script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"make_environment.sh: error: .venv belongs to another folder, {first}/.venv, and would "
        "run the code there: remove it (rm -r .venv) and run this again\n"
    )


def test_an_environment_is_accepted_through_a_symbolic_link(tmp_path):
    script = Path("utils/make_environment.sh")
    (tmp_path / "folder/utils").mkdir(parents=True)
    shutil.copy(ROOT / script, tmp_path / "folder" / script)
    venv.create(tmp_path / "folder/.venv", with_pip=False)
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    done = subprocess.run(["bash", tmp_path / "link" / script], capture_output=True, text=True)
    assert "another folder" not in done.stderr
    assert "constraints.txt" in done.stderr  # which it needs next, and which is missing here


@pytest.mark.parametrize("minor", [11, 13])
def test_another_version_of_python_than_the_environment_s_is_refused(tmp_path, minor):
    """The environment's Python and PYTHON are scripts that answer as Python 3.11 and 3.`minor`."""
    script, python = tmp_path / "utils/make_environment.sh", tmp_path / ".venv/bin/python"
    for path in (script, python):
        path.parent.mkdir(parents=True)
    shutil.copy(ROOT / "utils" / script.name, script)
    for path, number in ((python, 11), (tmp_path / "other", minor)):
        path.write_text(
            f'#!/bin/sh\ncase "$2" in *exit*) exit 0 ;; *print*) echo 3.{number} ;; esac\n'
        )
        path.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(tmp_path / "other")}
    done = subprocess.run(["bash", script], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout) == (1, "")
    if minor == 11:
        assert "constraints.txt" in done.stderr  # which it needs next, and which is missing here
    else:
        assert done.stderr == (
            f"make_environment.sh: error: .venv has Python 3.11, not 3.13 (PYTHON={tmp_path}/other"
            "): remove it first (rm -r .venv)\n"
        )


def test_only_what_was_installed_last_is_not_installed_again(tmp_path):
    """The environment's Python is a script that notes the first of the files that it installs."""
    script, python = tmp_path / "utils/make_environment.sh", tmp_path / ".venv/bin/python"
    files = [tmp_path / name for name in ("constraints.txt", "setup.py", "NLU/setup.py")]
    files += [tmp_path / folder / "requirements.txt" for folder in ("NLG", "utils", "docs")]
    for path in (script, python, *files):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    shutil.copy(ROOT / "utils" / script.name, script)
    python.write_text('#!/bin/sh\n[ "$1" = -m ] && cat constraints.txt >>noted.txt\nexit 0\n')
    python.chmod(0o755)
    installed = tmp_path / ".venv/lib/python3.11/site-packages"
    for name in ("loralib-0.2.0", "transformers-4.4.2+lora.1"):
        record = installed / f"{name}.dist-info/direct_url.json"
        record.parent.mkdir(parents=True)
        record.write_text('{"dir_info": {"editable": true}, "url": "file:///x"}')

    def install(version: str, *flags: str) -> None:
        files[0].write_text(version)
        subprocess.run(["bash", script, *flags], check=True, capture_output=True)

    for version, *flags in (["1", "--with-tests"], ["1"], ["2"], ["2"], ["1"]):
        install(version, *flags)
    assert (tmp_path / "noted.txt").read_text() == "121"
    record.write_text('{"dir_info": {}, "url": "file:///x"}')  # as after `pip install ./NLU`
    install("1")
    assert (tmp_path / "noted.txt").read_text() == "1211"


def test_the_fork_requires_this_version_of_loralib():
    needed = re.search(r'"loralib>=(.+?)"', (ROOT / "NLU/setup.py").read_text(encoding="utf-8"))[1]
    assert needed == version_of("setup.py")
