"""Every dtype that may travel becomes bytes and back, bit for bit; every other is refused by name."""

from __future__ import annotations

import pytest
import torch

from weightplane.controlplane.core.manifest import DTYPE_BYTES
from weightplane.transports.dtypes import as_bytes, byte_view, check_movable, dtype_of, name_of

#: torch's typing stubs do not know them.
SUB_BYTE: dict[str, torch.dtype] = {n: getattr(torch, n) for n in ("int4", "uint1")}


def filled(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A tensor whose bytes are all different bit patterns, NaNs and odd bools among them."""
    t = torch.empty(shape, dtype=dtype)
    raw = torch.arange(t.numel() * t.element_size(), dtype=torch.int64).mul(37).remainder(256).to(torch.uint8)
    return raw.view(dtype).view(shape)


def raw(t: torch.Tensor) -> list[int]:
    """Logical bytes, element by element, by indexing only."""
    out: list[int] = []
    ints = t.unsqueeze(-1).view(torch.uint8) if t.dim() else t.reshape(1).view(torch.uint8)
    for index in torch.cartesian_prod(*(torch.arange(d) for d in ints.shape)).view(-1, ints.dim()).tolist():
        out.append(int(ints[tuple(index)]))
    return out


@pytest.mark.parametrize("name", sorted(DTYPE_BYTES))
def test_every_dtype_every_stride(name: str) -> None:
    dtype = dtype_of(name)
    assert name_of(dtype) == name
    assert torch.empty((), dtype=dtype).element_size() == DTYPE_BYTES[name]
    base = filled(dtype, 5, 6)
    for view in (base, base.t(), base[:, ::2], base[1:, 1:], base[2], base[1, 2], base[:0], base[:, 3:4]):
        before = raw(base)
        flat = as_bytes(view)
        assert flat.dtype == torch.uint8 and flat.is_contiguous() and flat.dim() == 1
        assert flat.tolist() == raw(view) if view.numel() else flat.numel() == 0
        assert raw(base) == before
    assert byte_view(base).data_ptr() == base.data_ptr()


def test_byte_view_is_live() -> None:
    t = torch.zeros(3, dtype=torch.bfloat16)
    byte_view(t).fill_(255)
    assert bool(t.isnan().all())
    zero_dim = torch.zeros((), dtype=torch.float64)
    byte_view(zero_dim)[7] = 0x40
    assert zero_dim.item() == 2.0
    parameter = torch.nn.Parameter(torch.zeros(2))
    byte_view(parameter)[3] = 0x40
    assert parameter.tolist() == [2.0, 0.0]


def test_odd_bools_and_nan_payloads_survive_a_copy() -> None:
    odd = torch.tensor([[0, 1, 2], [255, 3, 1]], dtype=torch.uint8).view(torch.bool)
    assert as_bytes(odd.t()).tolist() == [0, 255, 1, 3, 2, 1]
    nan = torch.tensor([0x7FA00001, 0x7FC12345], dtype=torch.int32).view(torch.float32)
    assert as_bytes(nan[::2]).view(torch.int32).tolist() == [0x7FA00001]


def test_strided_has_no_byte_view() -> None:
    with pytest.raises(ValueError, match=r"'w'.*not contiguous"):
        byte_view(torch.zeros(4, 4).t(), "w")


def test_lazy_conjugate() -> None:
    z = torch.tensor([1 + 2j])
    assert as_bytes(z.conj()).view(torch.complex64).tolist() == [1 - 2j]
    with pytest.raises(ValueError, match="not contiguous"):
        byte_view(z.conj(), "z")


class _Wrapper(torch.Tensor):
    def __tensor_flatten__(self) -> object:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(*args: object) -> object:
        raise NotImplementedError

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        raise NotImplementedError


def _refused() -> dict[str, torch.Tensor]:
    return {
        "quantised": torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8),
        "sparse": torch.zeros(3, 3).to_sparse(),
        "meta": torch.zeros(3, device="meta"),
        "nested": torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
        "int4": torch.empty(3, dtype=SUB_BYTE["int4"]),
        "uint1": torch.empty(3, dtype=SUB_BYTE["uint1"]),
        "Wrapper": torch.Tensor._make_wrapper_subclass(_Wrapper, (3,)),
    }


@pytest.mark.parametrize("why", ["quantised", "sparse", "meta", "nested", "int4", "uint1", "Wrapper"])
def test_refused_by_name(why: str) -> None:
    tensor = _refused()[why]
    for function in (check_movable, as_bytes, byte_view):
        with pytest.raises(TypeError, match=rf"layer\.7.*{why}"):
            function(tensor, "layer.7")


def test_unknown_names() -> None:
    with pytest.raises(TypeError, match="float7"):
        dtype_of("float7")
    with pytest.raises(TypeError, match="quint8"):
        name_of(torch.quint8)
