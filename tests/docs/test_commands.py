"""Commands and code in the documents: those that can run offline run; the others are checked."""

import ast
import re
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from documents import Block, blocks, commands, pages, wrong_commands
from page_runs import FOLDERS, clean_environment, run_page, shortened
from paths import ROOT

PAGES = [page for page in pages() if blocks(page)]
BLOCKS = [block for page in PAGES for block in blocks(page)]
RUN = [page for page in PAGES if any(block.reason is None for block in blocks(page))]


@pytest.fixture(scope="module")
def runs(request, checkout, new_user, tmp_path_factory) -> Iterator[dict[Path, Future]]:
    """Page -> the future of its run; the pages that are tested now run two at a time."""

    def run(page: Path) -> None:
        folder = tmp_path_factory.mktemp(page.stem) / "lora"
        shutil.copytree(checkout, folder, symlinks=True)
        run_page(blocks(page), folder, new_user)

    ours = (item for item in request.session.items if item.path == request.path)
    tested = [item for item in ours if "runs" in item.fixturenames]
    pool = ThreadPoolExecutor(max_workers=2)
    yield {page: pool.submit(run, page) for page in (i.callspec.params["page"] for i in tested)}
    pool.shutdown(cancel_futures=True)


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN, ids=str)
def test_the_blocks_of_a_page_run(page, runs):
    runs[page].result()


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "bash"], ids=str)
def test_bash_can_be_parsed(block):
    process = subprocess.run(["bash", "-n", "-c", block.text], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr


@pytest.mark.parametrize(
    "block", [block for block in BLOCKS if block.language == "python"], ids=str
)
def test_python_can_be_parsed(block):
    ast.parse(block.text, str(block))


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=str)
def test_scripts_exist_and_know_their_flags(page):
    folder = FOLDERS.get(page, Path())
    bash = [block for block in blocks(page) if block.language == "bash"]
    assert [wrong for block in bash for wrong in wrong_commands(block, folder)] == []


@pytest.mark.parametrize("page", pages(), ids=str)
def test_every_reason_not_to_run_belongs_to_a_block(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    fenced = sum(block.reason is not None for block in blocks(page))
    assert len(re.findall(r"^\s*<!-- not run", text, re.M)) == fenced


def test_the_readme_names_the_quickstart_and_the_tests():
    named = {word for block in blocks(Path("README.md")) for word in block.text.split()}
    assert {"quickstart.sh", "run_tests.sh"} <= named


def test_the_quickstart_is_shortened():
    script = shortened((ROOT / "quickstart.sh").read_text(encoding="utf-8"))
    assert "run_mlm.py" in script
    assert "--max_steps 4" in script
    assert "make_environment" not in script
    assert "quickstart_summary.py" in script


# ------------------------------------------------------------------------------------------------
# Tests of the checks themselves
# ------------------------------------------------------------------------------------------------


def page_of(text: str, folder: Path) -> list[Block]:
    (folder / "page.md").write_text(text, encoding="utf-8")
    return blocks(Path("page.md"), folder)


def test_blocks_are_found_with_their_lines_and_reasons(tmp_path):
    text = "# A\n\n```bash\nls\n```\n\n1. b\n\n   ```python\n   if 1:\n       x = 2\n   ```\n"
    text += "\n   ```text\n   7\n   ```\n"
    text += "\n<!-- not run: needs a GPU -->\n```bash\nfalse\n```\n\n```\noutput\n```\n"
    first, second, third = page_of(text, tmp_path)
    assert [block.output for block in (first, second, third)] == [None, "7\n", None]
    assert (first.line, first.language, first.text, first.reason) == (4, "bash", "ls\n", None)
    assert second.text == "if 1:\n    x = 2\n"
    assert third.reason == "needs a GPU"


def test_commands_are_split():
    text = "A=1 python a.py \\\n  --b 'c d' && cd x # --e\ncat > f <<'E'\npython no.py\nE\nls | wc"
    assert list(commands(text)) == [
        ["A=1", "python", "a.py", "--b", "c d"],
        ["cd", "x"],
        ["cat", ">", "f", "<<E"],
        ["ls"],
        ["wc"],
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("python utils/convert.py a b --to peft", None),
        ("python utils/convert.py a b --into peft", "does not know --into"),
        ("python utils/converter.py a b", "there is no utils/converter.py"),
        ("cd utils && python convert.py a --info", None),
        ("cd examples && python convert.py a --info", "there is no examples/convert.py"),
        ("python -m torch.distributed.launch --nproc_per_node=2 utils/convert.py --info a", None),
        ("bash NLU/roberta_base_rte.sh --print --lora_r=4", None),
        ("bash NLU/roberta_base_rte.sh --lora_rr 4", "does not know --lora_rr"),
        ("bash run_tests.sh --fast", None),
        ("bash run_tests.sh --faster", "does not know --faster"),
        ("grep --x utils/convert.py", None),
    ],
)
def test_wrong_commands_are_found(tmp_path, text, wrong):
    (block,) = page_of(f"```bash\n{text}\n```\n", tmp_path)
    found = list(wrong_commands(block))
    assert len(found) == (wrong is not None)
    assert all(each.endswith(wrong) for each in found)


@pytest.mark.slow
def test_blocks_run_in_order_and_stop_at_the_first_failure(tmp_path):
    text = "```python\nx = 1\nopen('made', 'w').write('7')\n```\n"
    text += "```bash\ntest $(cat made) = 7\necho 8 > made\n```\n"
    text += "```python\nassert open('made').read() == '8\\n' and x == 1\n```\n"
    environment = clean_environment(tmp_path)
    run_page(page_of(text, tmp_path), tmp_path, environment)
    text += "```python\nprint(x)\n```\n\n```text\n1\n```\n"
    run_page(page_of(text, tmp_path), tmp_path, environment)
    text += "<!-- not run: of no use -->\n```bash\nfalse\n```\n"
    run_page(page_of(text, tmp_path), tmp_path, environment)
    for broken in (
        "```bash\nfalse | cat\ntrue\n```\n",
        "```python\nx / 0\n```\n",
        "```python\nprint(x)\n```\n\n```text\n2\n```\n",
    ):
        with pytest.raises(AssertionError, match=r"page\.md:\d+"):
            run_page(page_of(text + broken, tmp_path), tmp_path, environment)
