"""Products through oneDNN are the products: values, gradients, and where they stay away."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import dpo_pack.model.fast_layers as fast_layers
from dpo_pack.model.fast_layers import speed_up_linears, times_transposed

needs_kernel = pytest.mark.skipif(
    fast_layers._onednn_product() is None, reason="no AVX-512, or a torch without the oneDNN binding"
)


@pytest.fixture(autouse=True)
def on_amd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are sped up whoever made this machine's processor."""
    monkeypatch.setattr(fast_layers, "is_intel", lambda: False)


def run(layer: nn.Linear, features: Tensor, weights: Tensor) -> list[Tensor]:
    """Output, and gradients of features, weight and bias where they have one."""
    inputs = [features, *layer.parameters()]
    inputs = [values for values in inputs if values.requires_grad]
    output = layer(features)
    return [output, *torch.autograd.grad((output * weights).sum(), inputs)]


def errors(exact: list[Tensor], computed: list[Tensor]) -> list[float]:
    pairs = zip(exact, computed, strict=True)
    return [float((a - b).detach().norm() / a.detach().norm()) for a, b in pairs]


@needs_kernel
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(7,), (1, 33), (3, 5)])
@pytest.mark.parametrize("frozen", ["nothing", "weight", "features"])
def test_a_linear_layer_by_onednn_gives_the_values_and_gradients_of_float64(
    bias: bool, shape: tuple[int, ...], frozen: str
) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(24, 40, bias=bias)
    layer.weight.requires_grad_(frozen != "weight")
    features = torch.randn(*shape, 24, requires_grad=frozen != "features")
    weights = torch.randn(*shape, 40)
    exact = nn.Linear(24, 40, bias=bias, dtype=torch.float64)
    exact.load_state_dict(layer.state_dict())
    exact.weight.requires_grad_(frozen != "weight")
    expected = run(exact, features.detach().double().requires_grad_(features.requires_grad), weights.double())
    speed_up_linears(layer)
    computed = run(layer, features, weights)
    assert max(errors(expected, [values.double() for values in computed])) < 1e-6
    assert "forward" in vars(layer)
    output = layer(features)
    output.clamp_(max=0.5)  # as OLMo does
    if output.requires_grad:
        output.sum().backward()


@needs_kernel
def test_a_product_by_onednn_takes_views_as_they_lie() -> None:
    torch.manual_seed(0)
    grad, weight = torch.randn(2, 9, 40), torch.randn(40, 24)
    torch.testing.assert_close(times_transposed(grad, weight.T), grad @ weight)
    torch.testing.assert_close(times_transposed(grad[:, ::2], weight.T), grad[:, ::2] @ weight)


@needs_kernel
def test_linear_layers_are_as_before_under_autocast_and_in_another_dtype() -> None:
    torch.manual_seed(0)
    plain, sped_up = nn.Linear(24, 40), nn.Linear(24, 40)
    sped_up.load_state_dict(plain.state_dict())
    speed_up_linears(sped_up)
    features = torch.randn(5, 24)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(plain(features), sped_up(features))
    doubled = features.double()
    assert torch.equal(plain.double()(doubled), sped_up.double()(doubled))


def test_without_onednn_s_kernel_a_model_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_layers, "_onednn_product", lambda: None)
    model = nn.Sequential(nn.Linear(3, 4))
    speed_up_linears(model)
    assert "forward" not in vars(model[0])
    features, weight = torch.randn(5, 3), torch.randn(4, 3)
    assert torch.equal(times_transposed(features, weight), features @ weight.T)


def test_on_intel_layers_stay_with_mkl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_layers, "_onednn_product", lambda: pytest.fail)
    monkeypatch.setattr(fast_layers, "is_intel", lambda: True)
    model = nn.Sequential(nn.Linear(3, 4))
    speed_up_linears(model)
    assert "forward" not in vars(model[0])
