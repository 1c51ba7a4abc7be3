"""examples/any_model.py from end to end, with a tiny model and tokenizer in a folder."""

import importlib.util
import re
from pathlib import Path

import peft
import pytest
import tokenizers
from models import BY_NAME

import transformers
from loralib.training import process

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "any_model.py"
WORDS = [
    "the",
    "model",
    "reads",
    "a",
    "text",
    "and",
    "learns",
    "what",
    "it",
    "says",
    "of",
    "rank",
    "or",
    "scale",
]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("any_model", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A folder with a tiny Llama and a tokenizer of words."""
    folder = tmp_path / "base"
    BY_NAME["llama"].build().save_pretrained(folder)
    numbers = {word: number for number, word in enumerate(["[UNK]", *WORDS])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]"
    ).save_pretrained(folder)
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """The words in their order, again and again: a model learns what comes next."""
    file = tmp_path / "text.txt"
    file.write_text(" ".join(WORDS * 60), encoding="utf-8")
    return file


def command(base: Path, text: Path, out: Path, *more: str) -> list[str]:
    given = ["--model", base, "--text", text, "--output_dir", out, "--length", "16", "--lr", "1e-2"]
    return [*map(str, given), *more]


@pytest.mark.parametrize("variant", ["lora", "rslora+dora"])
def test_it_learns_and_its_adapter_is_loaded(script, base, text, tmp_path, capsys, variant):
    out = tmp_path / "adapter"
    script.main(command(base, text, out, "--variant", variant, "--lora_plus_ratio", "4"))
    printed = capsys.readouterr().out
    losses = dict(re.findall(r"^(\w+) +loss ([\d.]+)$", printed, re.MULTILINE))
    losses = {name: float(loss) for name, loss in losses.items()}
    assert "14 modules adapted, " in printed
    assert losses["adapted"] < losses["base"] - 1
    assert losses["reloaded"] == losses["adapted"]
    assert losses["merged"] == pytest.approx(losses["adapted"], abs=2e-4)

    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    theirs = peft.PeftModel.from_pretrained(model, out)
    _, held_out = script.load_blocks(script.parse(command(base, text, out)))
    assert script.loss_of(theirs, held_out) == pytest.approx(losses["adapted"], abs=2e-4)


def test_targets_are_chosen(script, base, text, tmp_path, capsys):
    out = tmp_path / "adapter"
    script.main(command(base, text, out, "--targets", "q_proj", "v_proj", "--r", "2"))
    # In each of two layers, A and B of a weight of (32, 32) and of one of (32, 16).
    trained = 2 * 2 * (32 + 32 + 32 + 16)
    assert f"4 modules adapted, {trained} parameters to train" in capsys.readouterr().out


BAD = {
    "no such model": (["--model", "/no/such/folder"], "/no/such/folder"),
    "no such text": (["--text", "/no/such/text"], "/no/such/text: No such file or directory"),
    "no such target": (["--targets", "q_prj"], "'q_prj' matches no module of the model; it has "),
    "no linear layer": (["--targets", "norm"], "LlamaRMSNorm, which has no LoRA layer"),
    "no such variant": (["--variant", "qlora"], "unknown variant 'qlora' of LoRA"),
    "rank": (["--r", "0"], "r, the rank, has to be an integer of at least 1, got 0"),
    "alpha": (["--lora_alpha", "-1"], "lora_alpha has to be a number above 0"),
    "ratio": (["--lora_plus_ratio", "0"], "lora_plus_ratio has to be a number above 0"),
    "length": (["--length", "5000"], "840 tokens do not fill two blocks: lower --length"),
}


@pytest.mark.parametrize(("given", "expected"), BAD.values(), ids=BAD)
def test_bad_input_is_an_error_of_one_line(script, base, text, tmp_path, given, expected):
    lines: list[str] = []
    arguments = command(base, text, tmp_path / "adapter", *given)
    with pytest.raises(SystemExit) as ended:
        process.run(lambda: script.main(arguments), report=lines.append)
    assert ended.value.code == 1
    (line,) = lines
    assert expected in line
    assert "\n" not in line
    assert not (tmp_path / "adapter").exists()


@pytest.mark.parametrize("name", ["epochs", "batch_size", "length"])
def test_counts_are_at_least_one(script, base, text, tmp_path, capsys, name):
    with pytest.raises(SystemExit) as ended:
        script.main(command(base, text, tmp_path, f"--{name}", "0"))
    assert ended.value.code == 2
    assert f"--{name} must be at least 1, not 0" in capsys.readouterr().err


def test_an_adapter_is_not_overwritten(script, base, text, tmp_path, capsys):
    out = tmp_path / "adapter"
    script.main(command(base, text, out, "--epochs", "1"))
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    capsys.readouterr()
    lines: list[str] = []
    with pytest.raises(SystemExit):
        process.run(lambda: script.main(command(base, text, out)), report=lines.append)
    assert "exists already: give another --output_dir" in lines[0]
    assert len(lines) == 1
    assert capsys.readouterr().out == ""  # the error comes before the training
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before
