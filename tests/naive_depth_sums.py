"""Naive references, from the papers: ELC-BERT, DenseFormer, DCA, MUDDFormer and LAuReL.

The local sublayer: where blocks read increments (ELC-BERT, DCA), its update counts into the increment of its own
block, and attention sees it on top of the mixture; where they read states, it is added to the newest state first.
"""

import torch
from naive_llama import Llama, Parameters, Sizes, gelu, rms_norm, silu, weighted_sum
from torch import Tensor

ACTIVATIONS = {"gelu": gelu, "relu": lambda x: x.clamp(min=0), "silu": silu}


def read_name(llama: Llama, layer: int, site: str = "attn") -> str:
    """The prefix of the parameters of a read; the read after the last layer belongs to the model."""
    return "model.residual" if layer == llama.layers else f"model.layers.{layer}.{site}_residual"


def layer_norm(x: Tensor, eps: float) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, unbiased=False) + eps).sqrt()


def elc_bert(p: Parameters, sizes: Sizes, options: dict, ids: Tensor) -> Tensor:
    """arXiv 2311.02265, section 3: g_n = sum_i softmax(beta_n)_i o_i. Identity form: n times that."""
    llama = Llama(p, sizes)

    def convex(layer: int) -> Tensor:
        beta = p.get(f"{read_name(llama, layer)}.mixture.score", outputs[0].new_zeros(1))
        scale = len(outputs) if options["form"] == "identity" else 1
        return weighted_sum(scale * beta.softmax(0), outputs)

    outputs = [llama.embed(ids)]
    running = outputs[0]  # what a plain Transformer would carry along, so never normalised
    for layer in range(llama.layers):
        u = llama.local(layer, running)
        g = convex(layer) + u
        a = llama.attention(layer, g)
        o = u + a + llama.mlp(layer, g + a if options["mlp_reads"] == "sum" else a)
        running = running + o
        outputs.append(layer_norm(o, llama.eps) if options["normalize"] else o)
    return llama.logits(convex(llama.layers) if options["final_read"] else outputs[-1])


def denseformer(p: Parameters, sizes: Sizes, options: dict, ids: Tensor) -> Tensor:
    """arXiv 2402.02622, section 3: Y_i = sum_j alpha_ij X_j over j <= i, j = i mod k, where p divides i > 0."""
    llama = Llama(p, sizes)

    def average(i: int) -> Tensor:
        if i == 0 or i % options["period"]:
            return states[i]
        sources = [states[j] for j in range(i + 1) if j % options["dilation"] == i % options["dilation"]]
        return weighted_sum(p[f"{read_name(llama, i)}.mixture.alpha"], sources)

    states = [llama.embed(ids)]
    for i in range(llama.layers):
        states[i] = states[i] + llama.local(i, states[i])
        y = average(i)
        a = y + llama.attention(i, y)
        states.append(a + llama.mlp(i, a))
    return llama.logits(average(llama.layers))


def dca(p: Parameters, sizes: Sizes, options: dict, ids: Tensor) -> Tensor:
    """arXiv 2502.06785, sections 3 and 4: GRN-v1, v2 or v3 for queries, keys and values; k-DCA of section 3.3."""
    llama = Llama(p, sizes)

    def stack() -> list[Tensor]:
        """The input, the sum of the middle and the last k outputs."""
        k = options["window"]
        if k is None or len(outputs) <= k + 1:
            return outputs
        return [outputs[0], sum(outputs[1:-k]), *outputs[-k:]]

    def grn(layer: int) -> list[Tensor]:
        name = f"{read_name(llama, layer)}.mixture"
        results = []
        for o, b in enumerate(p[f"{name}.b"]):
            g = torch.zeros_like(outputs[0])
            for b_j, source in zip(b, stack(), strict=True):
                weight = b_j
                if options["grn"] == "v3":
                    key = p[f"{name}.norm"] * rms_norm(source, llama.eps) if options["key_norm"] else source
                    weight = b_j + ACTIVATIONS[options["activation"]](key @ p[f"{name}.w"][o])[..., None]
                g = g + weight * source
            results.append(g)
        return results

    outputs = [llama.embed(ids)]
    for layer in range(llama.layers):
        u = llama.local(layer, sum(outputs))
        g = [x + u for x in grn(layer)]
        a = llama.attention(layer, *g)
        outputs.append(u + a + llama.mlp(layer, a + g[0]))
    return llama.logits(grn(llama.layers)[0])


def mudd(p: Parameters, sizes: Sizes, options: dict, ids: Tensor) -> Tensor:
    """arXiv 2502.12170, section 2: four streams, weights GELU(N(X_i) W1) W2 + a; PrePostDANorm of section 2.4."""
    llama = Llama(p, sizes)

    def hidden(layer: int, name: str) -> Tensor:
        width = (1 if layer == llama.layers else 4) * len(states)  # K = C (i + 1)
        width = 4 * width if options["expand_last"] and layer == llama.layers else width
        width = (width // 64 + 1) * 64 if options["round64"] else width
        assert len(p[f"{name}.w1"]) == width
        return gelu(rms_norm(states[-1], llama.eps) @ p[f"{name}.w1"].T)

    def source(j: int) -> Tensor:
        if not options["prepost_norm"]:
            return states[j]
        return p[f"{read_name(llama, j)}.mixture.pre_norm.weight"] * rms_norm(states[j], llama.eps)

    def streams(layer: int) -> list[Tensor]:
        name, results = f"{read_name(llama, layer)}.mixture", []
        for c, static in enumerate(p[f"{name}.static"]):
            total = torch.zeros_like(states[0])
            for j in range(len(states)):
                weight = static[j]
                if options["dynamic"]:
                    row = p[f"{name}.w2"][c * len(states) + j]
                    weight = static[j] + (hidden(layer, name) @ row)[..., None]
                total = total + weight * source(j)
            if options["prepost_norm"]:
                total = states[-1] + p[f"{name}.post_norm"][c] * rms_norm(total, llama.eps)
            results.append(total)
        return results

    states = [llama.embed(ids)]
    for layer in range(llama.layers):
        states[-1] = states[-1] + llama.local(layer, states[-1])
        q, k, v, r = streams(layer) if layer else 4 * states  # every stream of the first block is its input
        a = llama.attention(layer, q, k, v) + r
        states.append(llama.mlp(layer, a) + a)
    return llama.logits(streams(llama.layers)[0])


def laurel(p: Parameters, sizes: Sizes, options: dict, ids: Tensor) -> Tensor:
    """arXiv 2411.07501, section 2: a f(x) + b (x + B A x + sum_j c_j x_(l - j)), the sum over the last states."""
    llama = Llama(p, sizes)

    def augmented(name: str, f: Tensor) -> Tensor:
        x = states[-1]
        skip = x
        if options["rank"]:
            skip = skip + x @ p[f"{name}.down"].T @ p[f"{name}.up"].T
        for j in range(1, min(options["previous"], len(states) - 1) + 1):
            skip = skip + p[f"{name}.earlier"][-j] * states[-1 - j]  # stored oldest first
        a, b = p[f"{name}.sublayer_and_skip"] if options["weighted"] else (1, 1)
        return a * f + b * skip

    states = [llama.embed(ids)]
    for layer in range(llama.layers):
        states[-1] = states[-1] + llama.local(layer, states[-1])
        for site, sublayer in (("attn", llama.attention), ("mlp", llama.mlp)):
            states.append(augmented(f"{read_name(llama, layer, site)}.augment", sublayer(layer, states[-1])))
    return llama.logits(states[-1])
