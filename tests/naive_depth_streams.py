"""Naive references, from the papers: Hyper-Connections and Manifold-Constrained Hyper-Connections."""

import torch
from naive_llama import Llama, Parameters, Sizes, rms_norm
from torch import Tensor


def hyper_connections(p: Parameters, sizes: Sizes, options: dict, ids: Tensor) -> Tensor:
    """arXiv 2409.19606, sections 2 and 3: h = A_m' H, H' = A_r' H + B' F(h), with static or dynamic A and B."""
    llama = Llama(p, sizes)

    def matrices(name: str, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A_m [B, T, n], A_r [B, T, n, n], B [B, T, n]"""
        read_and_mix = p[f"{name}.read_and_mix"].expand(*h.shape[:3], -1)
        write = p[f"{name}.write"].expand(*h.shape[:3])
        if options["dynamic"]:
            normed = p[f"{name}.gain"] * rms_norm(h, llama.eps)
            bound = torch.tanh if options["tanh"] else lambda x: x
            read_and_mix = read_and_mix + p[f"{name}.read_scale"] * bound(normed @ p[f"{name}.to_read_and_mix"])
            write = write + p[f"{name}.write_scale"] * bound(normed @ p[f"{name}.to_write"])[..., 0]
        return read_and_mix[..., 0], read_and_mix[..., 1:], write

    h = torch.stack(options["num_streams"] * [llama.embed(ids)], dim=2)
    for layer in range(llama.layers):
        h = h + llama.local(layer, h.mean(2))[:, :, None]
        for site, sublayer in (("attn", llama.attention), ("mlp", llama.mlp)):
            a_m, a_r, b = matrices(f"model.layers.{layer}.{site}_residual.connection", h)
            f = sublayer(layer, torch.einsum("bts,btsd->btd", a_m, h))
            h = torch.einsum("btsu,btsd->btud", a_r, h) + torch.einsum("btu,btd->btud", b, f)
    reduce = options["reduce"] or ("sum" if options["form"] == "paper" else "mean")
    return llama.logits(h.sum(2) if reduce == "sum" else h.mean(2))


def sinkhorn(c: Tensor, iters: int, eps: float) -> Tensor:
    """Rows (source) and columns (target) in the order of DeepSeek-V4: the first row step is a softmax."""
    c = c.softmax(-1) + eps
    c = c / (c.sum(-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        c = c / (c.sum(-1, keepdim=True) + eps)
        c = c / (c.sum(-2, keepdim=True) + eps)
    return c


def mhc(p: Parameters, sizes: Sizes, options: dict, ids: Tensor) -> Tensor:
    """arXiv 2512.24880, section 4: h = H_pre H, H' = H_res H + H_post' F(h), H_res doubly stochastic."""
    llama = Llama(p, sizes)
    n, eps = options["num_streams"], options["sinkhorn_eps"]

    def matrices(name: str, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """H_pre [B, T, n], H_post [B, T, n], H_res [B, T, n, n] from stream (row) to stream (column)"""
        z = rms_norm(h.flatten(2), llama.eps) @ p[f"{name}.phi"].T
        alpha = p[f"{name}.alpha"]
        pre = torch.sigmoid(alpha[0] * z[..., :n] + p[f"{name}.read_bias"]) + eps
        post = 2 * torch.sigmoid(alpha[1] * z[..., n : 2 * n] + p[f"{name}.write_bias"])
        mix = alpha[2] * z[..., 2 * n :].unflatten(-1, (n, n)) + p[f"{name}.mix_bias"]
        return pre, post, sinkhorn(mix, options["sinkhorn_iters"], eps)

    h = torch.stack(n * [llama.embed(ids)], dim=2)
    for layer in range(llama.layers):
        h = h + llama.local(layer, h.mean(2))[:, :, None]
        for site, sublayer in (("attn", llama.attention), ("mlp", llama.mlp)):
            pre, post, res = matrices(f"model.layers.{layer}.{site}_residual.connection", h)
            f = sublayer(layer, torch.einsum("bts,btsd->btd", pre, h))
            h = torch.einsum("btsu,btsd->btud", res, h) + torch.einsum("btu,btd->btud", post, f)
    return llama.logits(h.sum(2) if options["reduce"] == "sum" else h.mean(2))
