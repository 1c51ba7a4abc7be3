"""examples/any_model.py where upstream's Transformers is not: elsewhere tests/interop/ runs it."""

import re
import subprocess
import sys

from paths import ROOT


def test_in_the_fork_s_environment_it_says_what_to_install(tmp_path):
    script = ROOT / "examples" / "any_model.py"
    given = ["--model", tmp_path, "--text", tmp_path / "text.txt"]
    done = subprocess.run([sys.executable, script, *given], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("any_model.py: error: this needs upstream's Transformers")
    (install,) = re.findall(r"pip install transformers \S+", line)
    for page in ("any-model.md", "installing.md"):  # the same as there
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        assert f"{install}    # upstream's, with loralib" in text
