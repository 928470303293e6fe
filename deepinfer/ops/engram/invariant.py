"""The batch-invariant version of what is not exact: the gate and its sums."""

from torch import Tensor

from deepinfer.ops.invariance import elementwise, row_sums


def remember(x: Tensor, kv: Tensor, qk: Tensor, is_text: Tensor, eps: float) -> Tensor:
    """x [N, S, H], kv [N, (S + 1) * H], qk FP32 [S, H], is_text bool [N] -> [N, S, H] in the dtype of x."""
    width = x.shape[1] * x.shape[2]
    streams, keys = x.float(), kv[:, :width].view_as(x).float()
    norms = _root_mean(streams, eps) * _root_mean(keys, eps)
    agreement = (row_sums(streams * qk * keys) / norms * x.shape[2] ** -0.5)[..., 0]
    gate = elementwise(Tensor.sigmoid, agreement.sign() * agreement.abs().clamp(min=1e-6).sqrt()) * is_text[:, None]
    return (gate[:, :, None] * kv[:, None, width:].float()).add_(streams).to(x.dtype)


def _root_mean(x: Tensor, eps: float) -> Tensor:
    return (row_sums(x.square()) * (1 / x.shape[-1])).add_(eps).sqrt_()
