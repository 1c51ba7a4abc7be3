"""Tests of the local hub server, as huggingface_hub and datasets use it."""

import json
import urllib.request

import pytest
from launches import fork_server

DOWNLOAD = """
from pathlib import Path
from huggingface_hub import hf_hub_download
path = hf_hub_download("org/tiny", "deep/weights.bin")
print(Path(path).read_bytes() == bytes(range(256)))
"""
ERRORS = """
from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError, HfHubHTTPError
for args in (("org/tiny", "none.json"), ("org/none", "config.json"), ("org/secret", "config.json")):
    try:
        hf_hub_download(*args)
        print("found")
    except (EntryNotFoundError, RepositoryNotFoundError) as error:
        print(type(error).__name__)
try:
    hf_hub_download("org/tiny", "config.json", revision="other")
except HfHubHTTPError as error:
    print(type(error).__name__)
info = HfApi().model_info("org/tiny")
print(info.id, len(info.sha), HfApi().list_repo_files("org/tiny"))
"""
LOAD_GLUE = """
from datasets import load_dataset
rte = load_dataset("nyu-mll/glue", "rte")
print({split: rte[split].num_rows for split in rte})
print(rte["train"].features["label"].names, rte["train"]["sentence1"][:])
"""


@pytest.fixture
def hub(hub_server):
    tiny = hub_server.root / "org" / "tiny"
    (tiny / "deep").mkdir(parents=True)
    (tiny / "config.json").write_text("{}")
    (tiny / "deep" / "weights.bin").write_bytes(bytes(range(256)))
    secret = hub_server.root / "org" / "secret"
    secret.mkdir()
    (secret / "config.json").write_text("{}")
    hub_server.tokens["org/secret"] = "hf_open"
    return hub_server


def run_python(hub, home, code: str, **environment: str) -> list[str]:
    result = fork_server("hub").run(["-c", code], hub.environment(home, **environment), timeout=300)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


@pytest.mark.slow
def test_download_then_cache_then_offline(hub, tmp_path):
    assert run_python(hub, tmp_path / "home", DOWNLOAD) == ["True"]
    assert [r.path for r in hub.downloads()] == ["/org/tiny/resolve/main/deep/weights.bin"]

    hub.requests.clear()
    assert run_python(hub, tmp_path / "home", DOWNLOAD) == ["True"]
    assert hub.requests
    assert hub.downloads() == []

    hub.requests.clear()
    assert run_python(hub, tmp_path / "home", DOWNLOAD, HF_HUB_OFFLINE="1") == ["True"]
    assert hub.requests == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("token", "secret"), [({}, "RepositoryNotFoundError"), ({"HF_TOKEN": "hf_open"}, "found")]
)
def test_errors_and_listings(hub, tmp_path, token, secret):
    assert run_python(hub, tmp_path / "home", ERRORS, **token) == [
        "RemoteEntryNotFoundError",
        "RepositoryNotFoundError",
        secret,
        "RevisionNotFoundError",
        "org/tiny 40 ['config.json', 'deep/weights.bin']",
    ]


def test_a_range_of_a_file_is_served(hub):
    url = f"{hub.url}/org/tiny/resolve/main/deep/weights.bin"
    request = urllib.request.Request(url, headers={"Range": "bytes=250-"})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as response:
        assert response.status == 206
        assert response.headers["Content-Range"] == "bytes 250-255/256"
        assert response.read() == bytes(range(250, 256))


def test_the_commit_changes_with_the_content(hub):
    def commit():
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
            f"{hub.url}/api/models/org/tiny"
        ) as response:
            return json.load(response)["sha"]

    first = commit()
    assert commit() == first
    (hub.root / "org" / "tiny" / "config.json").write_text('{"changed": true}')
    assert commit() != first


@pytest.mark.slow
def test_load_dataset_then_offline(hub, tmp_path):
    rows = {"sentence1": ["a", "b"], "sentence2": ["c", "d"], "label": [0, 1], "idx": [0, 1]}
    hub.add_rte({"train": rows, "validation": rows})
    expected = ["{'train': 2, 'validation': 2}", "['entailment', 'not_entailment'] ['a', 'b']"]
    assert run_python(hub, tmp_path / "home", LOAD_GLUE) == expected

    hub.requests.clear()
    assert run_python(hub, tmp_path / "home", LOAD_GLUE, HF_HUB_OFFLINE="1") == expected
    assert hub.requests == []
