"""Tests of the simulated GPU: devices of tensors, recorded waits and launches, attention."""

import io

import pytest
import torch
import torch.nn.functional as F
from compare import assert_close_to_rounding
from simulated_gpu import OnGpu, SimulatedGpu, on_cpu
from torch import nn

TERMS = 100


@pytest.fixture
def gpu():
    with SimulatedGpu() as gpu:
        yield gpu


@pytest.fixture
def x(gpu):
    made = torch.arange(4.0, device="cuda:0")
    gpu.launches.clear()
    return made


# ---- devices ----


def test_a_tensor_reports_its_device(x):
    assert (x.device, x.is_cuda, x.is_cpu) == (torch.device("cuda", 0), True, False)
    assert (x + 1).is_cuda
    assert torch.zeros_like(x).is_cuda
    assert x[1:].is_cuda
    assert on_cpu(x).device.type == "cpu"
    assert on_cpu(x).data_ptr() == x.data_ptr()


def test_a_module_moves_with_its_tied_weights(gpu):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    before = model[0].weight
    model.to("cuda:0")
    assert model[0].weight is model[1].weight is before
    assert isinstance(before, nn.Parameter)
    model(torch.ones(2, 3, device="cuda:0")).sum().backward()
    assert isinstance(before.grad, OnGpu)


def test_pytorch_is_restored_afterwards():
    before = (torch.autocast, torch.cuda.is_available(), torch.cuda._lazy_init)
    with SimulatedGpu():
        assert torch.cuda.is_available()
    assert (torch.autocast, torch.cuda.is_available(), torch.cuda._lazy_init) == before
    assert not torch.__future__.get_swap_module_params_on_conversion()


# ---- waits and launches ----

WAITING = {
    "item": lambda x: x[0].item(),
    "bool": lambda x: bool(x[0]),
    "int": lambda x: int(x[0]),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "to the cpu": lambda x: x.to("cpu"),
    "numpy": lambda x: x.numpy(),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 1],
    "assigned mask": lambda x: x.index_put_((x > 1,), x.new_zeros(2)),
    "equal": lambda x: torch.equal(x, x),
    "a list": lambda x: torch.tensor([1.0], device=x.device),
    "not pinned": lambda x: torch.ones(3).to(x.device, non_blocking=True),
    "blocking": lambda x: torch.ones(3).pin_memory().to(x.device),
    "copied in": lambda x: x.copy_(torch.ones(4)),
    "copied out": lambda x: torch.ones(4).copy_(x),
    "synchronize": lambda x: torch.cuda.synchronize(),
    "a number copied out": lambda x: torch.ones(4).__setitem__(0, x[0]),
    "a number copied out by copy_": lambda x: torch.tensor(1.0).copy_(x[0]),
    "a number copied in": lambda x: x.__setitem__(0, torch.tensor(1.0)),
    "a number copied in by copy_": lambda x: x[0].copy_(torch.tensor(1.0)),
    "as a tensor of the CPU": lambda x: torch.as_tensor(x, device="cpu"),
    "as a type of the CPU": lambda x: x.type(torch.FloatTensor),
    "new_tensor": lambda x: x.new_tensor([1.0]),
    "bincount": lambda x: x.long().bincount(),
    "repr": repr,
    "str": str,
    "format": lambda x: f"{x[0]:.2f}",
    "saved": lambda x: torch.save(x, io.BytesIO()),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("case", WAITING)
def test_waits_are_recorded(gpu, x, case, inference):
    with torch.inference_mode(inference):
        WAITING[case](x)
    assert len(gpu.waits) >= 1


LAUNCHED = {
    "sum": (lambda x: x + x, 1),
    "in place": (lambda x: x.mul_(2), 1),
    "views": (lambda x: x.view(2, 2).t()[0].unsqueeze(0).expand(3, -1).detach(), 0),
    "memory": (lambda x: torch.empty_like(x), 0),
    "zeros": (lambda x: x.new_zeros(3), 1),
    "list": (lambda x: torch._foreach_mul_([x, x, x], 2.0), 1),
    "dropout": (lambda x: F.dropout(x, 0.5), 1),
    "no dropout": (lambda x: F.dropout(x, 0.5, False), 0),
    "no cast": (lambda x: x.to("cuda:0").float(), 0),
    "cast": (lambda x: x.to(torch.bfloat16), 1),
    "pinned": (lambda x: torch.ones(3).pin_memory().to(x.device, non_blocking=True), 0),
    "of the CPU": (lambda x: torch.ones(3) + 1, 0),
    "a number": (lambda x: x.__setitem__(0, 5.0), 1),
    "no copy": (lambda x: torch.as_tensor(x, device="cuda:0"), 0),
}


@pytest.mark.parametrize("case", LAUNCHED)
def test_launches_are_counted_and_do_not_wait(gpu, x, case):
    run, expected = LAUNCHED[case]
    run(x)
    assert gpu.launches.total() == expected
    assert gpu.waits == []


def test_a_wait_names_the_line_that_waits(gpu, x):
    from loralib.io.tensors import first_not_finite

    first_not_finite([("x", x)])
    assert len(gpu.waits) == 1
    assert "loralib/io/tensors.py:" in gpu.waits[0].replace("\\", "/")


def test_mixing_devices_is_an_error(gpu, x):
    with pytest.raises(RuntimeError, match="tensors of cuda:0 and of the CPU together"):
        x + torch.ones(4)
    with pytest.raises(RuntimeError, match="together"):
        F.linear(x, torch.ones(2, 4))
    assert (x + torch.tensor(1.0)).tolist() == [1, 2, 3, 4]
    for join in (torch.stack, torch.cat):
        with pytest.raises(RuntimeError, match="together"):
            join([x[:1].sum(), torch.tensor(1.0)] if join is torch.stack else [x, torch.ones(2)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_number_on_the_device_is_rounded_to_the_tensors_dtype(gpu, dtype):
    """As in PyTorch's kernels. A number on the CPU, which they get by value, is not rounded."""
    x, third = torch.arange(128, 256).to(dtype), torch.tensor(1 / 3)
    rounded, kept = ((x.double() * y.double()).to(dtype) for y in (third.to(dtype), third))
    assert torch.equal(rounded, kept) == (dtype is torch.float32)
    on_device = x.to("cuda:0")
    assert torch.equal(on_cpu(on_device * torch.full((), 1 / 3, device="cuda:0")), rounded)
    assert torch.equal(on_cpu(on_device * third), kept)


# ---- attention ----


def inputs(*shape, count=3, dtype=torch.float32):
    torch.manual_seed(2)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(count)]


def gradients(out, of):
    torch.manual_seed(4)
    return torch.autograd.grad(out, of, torch.randn(out.shape, dtype=out.dtype).to(out.device))


@pytest.mark.parametrize(("biased", "causal"), [(False, False), (False, True), (True, False)])
def test_padded_attention_matches_the_cpus(gpu, biased, causal):
    given = inputs(2, 3, 5, 8)
    given += inputs(2, 3, 5, 5, count=1) if biased else []
    expected = F.scaled_dot_product_attention(*given, is_causal=causal)
    ours = [x.detach().to("cuda:0").requires_grad_() for x in given]
    out = F.scaled_dot_product_attention(*ours, is_causal=causal)
    assert_close_to_rounding(on_cpu(out), expected, TERMS)
    for own, theirs in zip(gradients(out, ours), gradients(expected, given), strict=True):
        assert_close_to_rounding(on_cpu(own), theirs, TERMS)


@pytest.mark.parametrize("lengths", [[3], [2, 5, 1]])
def test_packed_attention_matches_each_row_alone(gpu, lengths):
    dtype = torch.bfloat16
    given = inputs(sum(lengths), 3, 8, dtype=dtype)
    rows = zip(*(x.float().split(lengths) for x in given), strict=True)
    one_by_one = [
        F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in row)).transpose(0, 1)
        for row in rows
    ]
    expected = torch.cat(one_by_one).to(dtype)
    ours = [x.detach().to("cuda:0").requires_grad_() for x in given]
    ends = torch.tensor([0, *lengths]).cumsum(0).int().to("cuda:0")
    longest = max(lengths)
    flash = torch.ops.aten._flash_attention_forward
    out = flash(*ours, ends, ends, longest, longest, 0.0, False, False)[0]
    assert_close_to_rounding(on_cpu(out), expected, 4, dtype)
    for own, theirs in zip(gradients(out, ours), gradients(expected, given), strict=True):
        assert_close_to_rounding(on_cpu(own), theirs, 4, dtype)


def test_forward_and_backward_have_the_same_dropout_mask(gpu):
    """With q and k zero and v the identity, the output is the probabilities after dropout."""
    q = torch.zeros(1, 1, 6, 8, device="cuda:0")
    v = torch.eye(6, 8, device="cuda:0")[None, None].requires_grad_()
    out = F.scaled_dot_product_attention(q, q, v, dropout_p=0.5)
    kept = on_cpu(out)[0, 0, :, :6]
    assert set((kept * 3).unique().tolist()) == {0.0, 1.0}
    (gradient,) = torch.autograd.grad(out[..., 0].sum(), v)
    assert_close_to_rounding(on_cpu(gradient)[0, 0, :, 0], kept.sum(0), TERMS)


@pytest.mark.parametrize("damage", ["dtype", "int64", "short", "longest", "width"])
def test_the_kernel_of_packed_rows_refuses_wrong_inputs(gpu, damage):
    dtype = torch.float32 if damage == "dtype" else torch.bfloat16
    q = torch.zeros(5, 2, 12 if damage == "width" else 8, dtype=dtype, device="cuda:0")
    ends = torch.tensor([0, 2, 4 if damage == "short" else 5])
    ends = (ends if damage == "int64" else ends.int()).to("cuda:0")
    longest = 2 if damage == "longest" else 3
    with pytest.raises(RuntimeError):
        torch.ops.aten._flash_attention_forward(
            q, q, q, ends, ends, longest, longest, 0.0, False, False
        )
