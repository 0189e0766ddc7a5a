"""Naive references, from the papers: Vertical Attention, Attention Residuals (also Delta) and ShortSWA along depth.

The local sublayer: in Attention Residuals its update counts into the output of the attention that follows, which sees
it on top of its read; where blocks read states, it is added to the newest state first.
"""

import math

import torch
from naive_llama import Llama, Parameters, Sizes, rms, rms_norm, weighted_sum
from torch import Tensor


def vertical_attention(p: Parameters, sizes: Sizes, options: dict, ids: Tensor) -> Tensor:
    """The reconstruction of depth-variants.md 3.4: h = sum_j a_j N(x_j), or x_l plus the centred sum."""
    llama = Llama(p, sizes)

    def weights(name: str) -> Tensor:
        if options["weights"] == "static":
            return p[f"{name}.score"].softmax(0)
        query = rms_norm(states[-1], llama.eps) @ p[f"{name}.query"].T
        keys = [rms_norm(x, llama.eps) @ p[f"{name}.key"].T for x in states]
        return torch.stack([(query * key).sum(-1) / options["key_dim"] ** 0.5 for key in keys]).softmax(0)

    def read(layer: int) -> Tensor:
        name = "model.residual" if layer == llama.layers else f"model.layers.{layer}.attn_residual"
        n, x = len(states), states[-1]
        a = weights(f"{name}.mixture.logits") if n > 1 else x.new_ones(1)
        if options["form"] == "paper":
            return weighted_sum(a, [rms_norm(state, llama.eps) for state in states])
        return x + weighted_sum(n * a - 1, [rms(x, llama.eps) * rms_norm(state, llama.eps) for state in states]) / n

    states = [llama.embed(ids)]
    for layer in range(llama.layers):
        states[-1] = states[-1] + llama.local(layer, states[-1])
        h = read(layer)
        a = h + llama.attention(layer, h)
        states.append(a + llama.mlp(layer, a))
    return llama.logits(read(llama.layers))


def block_length(layers: int, block_size: int | None) -> int:
    """Sublayers per block; by default an even number, so that blocks begin at attention, and about 8 blocks."""
    size = math.ceil(2 * layers / 8)
    return block_size or size + size % 2


def depth_softmax(p: Parameters, name: str, sources: list[Tensor], options: dict, eps: float) -> Tensor:
    """s_i = w . RMSNorm(v_i), a = softmax over the sources, sum a_i v_i (centred or not), head by head."""
    n, heads = len(sources), options["num_heads"]
    width = sources[0].shape[-1] // heads
    outputs = []
    for h in range(heads):
        part = slice(h * width, (h + 1) * width)
        values = [v[..., part] for v in sources]
        a = sources[0].new_ones(1)
        if n > 1:
            keys = values
            if options["key_norm"]:
                keys = [p[f"{name}.mixture.gain"][part] * rms_norm(v, eps) for v in values]
            a = torch.stack([key @ p[f"{name}.mixture.query"][part] for key in keys]).softmax(0)
        outputs.append(weighted_sum(a, values))
    return torch.cat(outputs, dim=-1)


def attention_residuals(p: Parameters, sizes: Sizes, options: dict, ids: Tensor, delta: bool) -> Tensor:
    llama = Llama(p, sizes)
    size = block_length(llama.layers, options["block_size"])

    def read(name: str) -> Tensor:
        """The sources are the embeddings, the sums of completed blocks, and the sum so far of the running one."""
        if not updates:  # the authors' code of both papers: the first sublayer reads the embeddings
            return embeddings
        blocks = [updates[first : first + size] for first in range(0, len(updates), size)]
        sources = [embeddings, *(sum(block) for block in blocks)]
        running, n = sum(updates, embeddings), len(sources)
        average = depth_softmax(p, name, sources, options, llama.eps)
        if delta and options["form"] == "paper":
            return running + average
        if delta:
            return running + average - sum(sources) / n
        return average if options["form"] == "paper" else n * average

    embeddings = llama.embed(ids)
    updates: list[Tensor] = []
    for layer in range(llama.layers):
        u = llama.local(layer, sum(updates, embeddings))
        updates.append(u + llama.attention(layer, read(f"model.layers.{layer}.attn_residual") + u))
        updates.append(llama.mlp(layer, read(f"model.layers.{layer}.mlp_residual")))
    final_read = options["final_read"] if options["final_read"] is not None else not delta  # as published
    return llama.logits(read("model.residual") if final_read else sum(updates, embeddings))


def attn_res(p: Parameters, sizes: Sizes, options: dict, ids: Tensor) -> Tensor:
    """arXiv 2603.15031, sections 3 and 4: sublayers read h = sum_i a_i v_i. Identity form: n times that."""
    return attention_residuals(p, sizes, options, ids, delta=False)


def delta_attn_res(p: Parameters, sizes: Sizes, options: dict, ids: Tensor) -> Tensor:
    """arXiv 2605.18855: h = r + sum_i a_i v_i, r the plain sum. Identity form: r + sum_i (a_i - 1/n) v_i."""
    return attention_residuals(p, sizes, options, ids, delta=True)


def short_swa(p: Parameters, sizes: Sizes, options: dict, ids: Tensor) -> Tensor:
    """arXiv 2603.16039, section 2.2: q from the state that enters a block, keys and values from the last K of them."""
    llama = Llama(p, sizes)
    heads = options["num_heads"]

    def read(layer: int) -> Tensor:
        name = "model.residual" if options["share_weights"] else f"model.layers.{layer}.attn_residual"
        seen = states if options["window"] is None else states[-options["window"] :]
        if options["norm"]:
            seen = [rms_norm(x, llama.eps) for x in seen]
        query, key, value = (p[f"{name}.mixture.swa.{part}.weight"].T for part in ("query", "key", "value"))
        q = (seen[-1] @ query).unflatten(-1, (heads, -1))
        k = torch.stack([(x @ key).unflatten(-1, (heads, -1)) for x in seen])
        v = torch.stack([(x @ value).unflatten(-1, (heads, -1)) for x in seen])
        a = (torch.einsum("bthd,nbthd->nbth", q, k) / q.shape[-1] ** 0.5).softmax(0)
        return torch.einsum("nbth,nbthd->bthd", a, v).flatten(2) @ p[f"{name}.mixture.swa.output.weight"].T

    states = [llama.embed(ids)]
    for layer in range(llama.layers):
        states[-1] = states[-1] + llama.local(layer, states[-1])
        h = states[-1] + read(layer)
        a = h + llama.attention(layer, h)
        states.append(a + llama.mlp(layer, a))
    return llama.logits(states[-1])
