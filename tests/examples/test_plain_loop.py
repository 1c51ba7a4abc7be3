"""The plain PyTorch loop: what it trains, what it saves, and that its files give the model back."""

import re
import sys

import pytest
import torch

R = 8


@pytest.fixture(scope="module")
def loop(load_example):
    return load_example("plain_pytorch_loop.py")


@pytest.fixture(scope="module")
def run(loop, tmp_path_factory):
    """A run of main(): its folder, and the model that it adapted."""
    folder = tmp_path_factory.mktemp("loop")
    models = []
    with pytest.MonkeyPatch.context() as patch:
        adapt = loop.adapt
        patch.setattr(loop, "adapt", lambda *args: models.append(adapt(*args)) or models[0])
        loop.main(["--output_dir", str(folder / "new"), "--r", str(R), "--epochs", "8"])
    return folder / "new", models[0]


def test_base_weights_keep_their_bits(run):
    folder, model = run
    base = torch.load(folder / "base.pt")
    state = model.state_dict()
    assert base.keys() == {name for name in state if "lora_" not in name}
    for name, tensor in base.items():
        assert torch.equal(tensor, state[name]), name


def test_lora_file_holds_lora_alone_and_all_of_it_was_trained(run):
    tensors = torch.load(run[0] / "lora.pt")
    assert len(tensors) == 6
    assert all(re.fullmatch(r"\d\.lora_[AB]", name) for name in tensors)
    assert all(tensor.abs().max() > 0 for tensor in tensors.values())
    assert all(tensor.shape["B" in name] == R for name, tensor in tensors.items())


def test_adapted_beats_base_on_its_task_and_reloads_exactly(loop, run):
    folder, model = run
    _, turned = loop.load_data(turned=True)
    _, upright = loop.load_data(turned=False)
    base = loop.make_model()
    base.load_state_dict(torch.load(folder / "base.pt"))
    assert loop.accuracy(base, upright) > 0.9
    adapted = loop.accuracy(model, turned)
    assert adapted > loop.accuracy(base, turned) + 0.5
    again = loop.reload(folder / "base.pt", folder / "lora.pt", R)
    assert loop.accuracy(again, turned) == adapted
    assert torch.equal(again(turned[0]), model(turned[0]))


def test_training_touches_lora_only(loop, tmp_path):
    model = loop.make_model()
    torch.save(model.state_dict(), tmp_path / "base.pt")
    adapted = loop.adapt(tmp_path / "base.pt", tmp_path / "lora.pt", r=2, epochs=0)
    trained = {name for name, p in adapted.named_parameters() if p.requires_grad}
    assert trained == torch.load(tmp_path / "lora.pt").keys()
    images = loop.load_data(turned=True)[1][0]
    # B is zero at the start, so adding LoRA has changed nothing.
    assert torch.equal(adapted(images), model(images))


def test_adding_lora_keeps_a_layer_without_bias(loop):
    model = torch.nn.Sequential(torch.nn.Linear(4, 3, bias=False))
    weight = model[0].weight.detach().clone()
    loop.add_lora(model, r=2)
    assert model[0].bias is None
    assert torch.equal(model[0].weight, weight)


def test_a_file_of_another_rank_is_refused(loop, run):
    folder, _ = run
    with pytest.raises(RuntimeError, match="size mismatch"):
        loop.reload(folder / "base.pt", folder / "lora.pt", R // 2)


def test_rank_zero_is_refused(loop, capsys):
    with pytest.raises(SystemExit, match="2"):
        loop.main(["--r", "0"])
    assert "--r must be at least 1" in capsys.readouterr().err


def test_prints_epochs_and_the_table(loop, tmp_path, capsys):
    loop.main(["--output_dir", str(tmp_path), "--r", "1", "--epochs", "2"])
    *epochs, _, _, _, _ = lines = capsys.readouterr().out.splitlines()
    assert [line.partition(",")[0] for line in epochs] == [
        f"{name}: epoch {number} of 2" for name in ("base", "base + LoRA") for number in (1, 2)
    ]
    lines = lines[len(epochs) :]
    assert [line.split("  ")[0] for line in lines[1:]] == ["base", "base + LoRA", "reloaded"]
    assert lines[2].split()[-2:] == lines[3].split()[-2:]


def test_without_scikit_learn_it_is_one_line(loop, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(OSError, match="the digits come with scikit-learn: pip install scikit-lear"):
        loop.load_data(turned=False)
