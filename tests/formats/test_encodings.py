"""The facts of each encoding against ml_dtypes' own tables."""

import ml_dtypes
import numpy as np
import pytest
import torch

from moe_runtime.formats import E2M1, E4M3, E5M2, E8M0, Encoding

THEIRS = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e8m0": ml_dtypes.float8_e8m0fnu,
}


@pytest.mark.parametrize("encoding", [E4M3, E5M2, E2M1, E8M0], ids=lambda encoding: encoding.name)
def test_facts(encoding: Encoding) -> None:
    theirs = ml_dtypes.finfo(THEIRS[encoding.name])
    assert (encoding.bits, encoding.mantissa_bits, encoding.max) == (theirs.bits, theirs.nmant, float(theirs.max))
    one = np.array([1.0], dtype=THEIRS[encoding.name]).view(np.uint8)[0]
    assert int(one) == encoding.exponent_bias << encoding.mantissa_bits


@pytest.mark.parametrize("encoding", [E4M3, E5M2, E8M0], ids=lambda encoding: encoding.name)
def test_torch_agrees(encoding: Encoding) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    theirs = codes.numpy().view(THEIRS[encoding.name]).astype(np.float32)
    np.testing.assert_array_equal(codes.view(encoding.dtype).float().numpy(), theirs)
