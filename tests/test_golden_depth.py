"""The depth axis against values and gradients that the original implementations computed (tests/golden/depth)."""

from types import SimpleNamespace

import pytest
import torch
from golden_files import Golden, assign, cases, rms_norm

from transformer2.depth_attn_res import SourceAttention
from transformer2.depth_dca import GRN
from transformer2.depth_hyper_connections import DynamicConnection, HyperConnections
from transformer2.depth_mhc import ManifoldConnection, ManifoldHyperConnections
from transformer2.depth_mudd import MultiwayMixture
from transformer2.depth_sources import DepthWeights
from transformer2.layers import Transformer2RMSNorm
from transformer2.variants import build_residual, resolve


class Depth:
    """The residuals of a decoder whose sublayers are prescribed tensors."""

    def __init__(self, golden: Golden, num_layers: int, eps: float = 1e-6, **residual):
        self.config = SimpleNamespace(
            hidden_size=golden.D,
            num_hidden_layers=num_layers,
            rms_norm_eps=eps,
            initializer_range=0.02,
            local_mixer={"type": "none"},
        )
        self.config.residual = resolve("residual", residual, self.config)
        self.sites = {
            (layer, site): build_residual(self.config, layer, site)
            for layer in range(num_layers)
            for site in ("attn", "mlp")
        }
        self.model = build_residual(self.config, num_layers, "model")

    def owners(self):
        """What reads in front of every sublayer and at the end: layer by layer, sublayer by sublayer."""
        return [*self.sites.values(), self.model]

    def run(self, x0, sublayer):
        """`sublayer(layer, site, read)` returns the update. -> the reads, the streams after each sublayer, the end."""
        stream, reads, streams = self.model.open(x0), [], []
        for (layer, site), residual in self.sites.items():
            tokens = {"block": self.sites[layer, "attn"], "model": self.model}
            read, stream = residual.read(stream, **tokens)
            stream = residual.write(stream, sublayer(layer, site, read), read, read, **tokens)
            reads.append(read)
            streams.append(stream)
        return reads, streams, self.model.close(stream)


def record(module):
    """The list that the depth weights of this module will be put into."""
    weights = []
    owners = [m for m in module.modules() if isinstance(m, DepthWeights)]
    assert len(owners) == 1
    owners[0].register_forward_hook(lambda _, __, out: weights.append(out))
    return weights


@pytest.mark.parametrize("golden", cases("denseformer_dwa"))
def test_denseformer(golden):
    golden.load()
    depth = Depth(golden, golden.L, type="denseformer", dilation=golden.dilation, period=golden.period)
    states, stream, outputs = golden["X"], depth.model.open(golden["X"][0]), []
    for layer in range(golden.L + 1):
        residual = depth.sites[layer, "attn"] if layer < golden.L else depth.model
        if f"alpha.{layer}" in golden.leaves:
            assign(residual.mixture, alpha=golden[f"alpha.{layer}"])
        else:
            assert not hasattr(residual, "mixture")
        read, stream = residual.read(stream)
        outputs.append(read)
        if layer < golden.L:
            stream = (states[layer + 1], *stream[1:])
    golden.check({"Y": torch.stack(outputs[1:])})


@pytest.mark.parametrize("golden", cases("elc_bert"))
def test_elc_bert(golden):
    golden.load()
    options = {
        "base": {"mlp_reads": "attention", "start": "last", "final_read": False},
        "zero": {"final_read": False},
        "normalized": {"normalize": True, "final_read": False},
        "weighted_output": {},
    }[golden.case]
    depth = Depth(golden, golden.L, golden.layer_norm_eps, type="elc_bert", **options)
    for layer in range(1, golden.L):
        assign(depth.sites[layer, "attn"].mixture, score=golden[f"logits.{layer + 1}"])
    if golden.case == "weighted_output":
        assign(depth.model.mixture, score=golden["logits.final"])
    reads, streams, final = depth.run(golden["x0"], lambda layer, site, _: golden[site][layer])
    ours = {
        "g": torch.stack(reads[::2]),
        "mlp_in": torch.stack(reads[1::2]),
        "o": torch.stack([stream[-1] for stream in streams[1::2]]),
        "final": final,
    }
    golden.check({name: ours[name] for name in golden.out})


@pytest.mark.parametrize("golden", cases("attnres_full"))
def test_attention_over_sources(golden):
    golden.load()
    read = SourceAttention(golden.D, 1, key_norm=True, centred=False, adds=False)
    assign(read, query=golden["q"] * golden.scale, gain=golden["g"])
    weights = record(read)
    sources = golden["v"].unbind(0)
    scales = [torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + golden.rms_eps) for v in sources]
    h = read(sum(sources), *[entry for pair in zip(sources, scales, strict=True) for entry in pair])
    ours = {"h": h, "p": weights[0][0]}
    if golden.prenorm:
        ours["x"] = rms_norm(h, golden["prenorm"], golden.rms_eps)
    golden.check(ours)


@pytest.mark.parametrize("golden", cases("attnres_block"))
def test_attention_residuals(golden):
    golden.load()
    depth = Depth(golden, golden.L, golden.norm_eps, type="attn_res", block_size=golden.block_size)
    weights = {}
    for index, residual in enumerate(depth.owners()):
        if index:
            assign(residual.mixture, query=golden[f"q.{index}"], gain=golden[f"g.{index}"])
            weights[index] = record(residual.mixture)
    reads, _, final = depth.run(golden["x0"], lambda layer, site, _: golden["f"][2 * layer + (site == "mlp")])
    ours = {f"p.{index}": recorded[0][0] for index, recorded in weights.items()}
    for index, h in enumerate([*reads, final]):
        ours[f"x.{index}"] = rms_norm(h, golden[f"prenorm.{index}"], golden.norm_eps)
        if index:
            ours[f"h.{index}"] = h
    golden.check(ours)


@pytest.mark.parametrize("golden", cases("dca_grn", "grn"))
def test_generalised_residual_network(golden):
    golden.load()
    eps = golden.norm_eps if golden.key_norm else None
    grn = GRN(golden.D, golden.n, golden.outputs, "v3", golden.activation, eps)
    names = ["b", "w", *(["norm"] if golden.key_norm else [])]
    assign(grn, **{name: golden[name] for name in names})
    golden.check({"g": grn(golden["G"].sum(0), *golden["G"].unbind(0))})


@pytest.mark.parametrize("golden", cases("dca_grn", "flow"))
def test_deep_cross_attention(golden):
    golden.load()
    depth = Depth(golden, golden.depth, golden.norm_eps, type="dca", activation=golden.activation, key_norm=True)
    readers = [depth.sites[layer, "attn"] for layer in range(golden.depth)]
    for index, residual in enumerate([*readers, depth.model], start=1):
        name = index if index <= golden.depth else "final"
        mixture = residual.mixture
        mixture.b = torch.nn.Parameter(torch.empty_like(golden[f"b.{name}"]))  # fewer sources in `flow_first_last`
        assign(mixture, b=golden[f"b.{name}"], w=golden[f"w.{name}"], norm=golden[f"norm.{name}"])
    # The reference keeps the first k and the last k outputs and forgets those in between, which is not ours to offer.
    k = golden.k
    for residual in depth.owners():
        residual.keep = lambda sources: sources if len(sources) <= 2 * k else [*sources[:k], *sources[-k:]]
        if hasattr(residual, "mixture"):
            residual.mixture.register_forward_pre_hook(lambda _, args: (sum(args[1:]), *args[1:]))
    update = {"attn": golden["attn"], "mlp": golden["ffn"]}
    reads, _, final = depth.run(golden["x0"], lambda layer, site, _: update[site][layer])
    ours = {"final": final}
    for layer in range(golden.depth):
        ours.update({f"{name}.{layer + 1}": reads[2 * layer][i] for i, name in enumerate("qkv")})
        ffn_norm = golden[f"ffn_norm.{layer + 1}"]
        ours[f"ffn_in.{layer + 1}"] = rms_norm(reads[2 * layer + 1], ffn_norm, golden.norm_eps)
    golden.check(ours)


def mudd(golden, name, num_sources, width, static=True):
    """The reference's block `name` as our mixture, and the list that will hold its weights."""
    w2 = golden[f"w2.{name}"]
    mixture = MultiwayMixture(golden.D, num_sources, len(w2) // num_sources, width, golden.norm_eps)
    a = golden[f"a.{name}"] if static else torch.zeros(len(w2) // num_sources, num_sources)
    assign(mixture, w1=golden[f"w1.{name}"], w2=w2, static=a)
    return mixture, record(mixture)


@pytest.mark.parametrize("golden", cases("muddformer", "states"))
def test_muddformer_mixtures(golden):
    golden.load()
    depth = Depth(
        golden,
        golden.L,
        golden.norm_eps,
        type="mudd",
        expand_last=golden.expand_last,
        round64=golden.round64,
    )
    ours, states = {}, golden["X"].unbind(0)
    for layer, width in enumerate(golden.K, start=1):
        owner = depth.sites[layer, "attn"] if layer < golden.L else depth.model
        assert owner.mixture.w1.shape[0] == width
        mixture, weights = mudd(golden, layer, layer + 1, width)
        _, *streams = mixture(states[layer], *states[:layer])
        ours[f"streams.{layer}"] = torch.stack(streams)
        ours[f"dw.{layer}"] = weights[0].permute(0, 2, 3, 1)
    golden.check(ours)


@pytest.mark.parametrize("golden", cases("muddformer", "op"))
def test_muddformer_block(golden):
    golden.load()
    mixture, weights = mudd(golden, golden.layer, golden.layer + 1, golden.K, static=False)
    states = golden["X"].unbind(0)
    _, *streams = mixture(states[-1], *states[:-1])
    golden.check(
        {
            f"streams.{golden.layer}": torch.stack(streams),
            f"dw_dynamic.{golden.layer}": weights[0].permute(0, 2, 3, 1),
        }
    )


@pytest.mark.parametrize("golden", cases("muddformer", "flow"))
def test_muddformer(golden):
    golden.load()
    depth = Depth(golden, golden.L, golden.norm_eps, type="mudd", expand_last=True, round64=True)
    weights = {}
    for layer in range(1, golden.L + 1):
        owner = depth.sites[layer, "attn"] if layer < golden.L else depth.model
        owner.mixture, weights[layer] = mudd(golden, layer, layer + 1, golden.K[layer - 1])
        if layer < golden.L:
            gains = torch.stack([golden[f"attn_norm_{name}.{layer + 1}"] for name in "qkv"])
            assign(owner.gains, weight=gains[:, None, None])
    update = {"attn": golden["attn"], "mlp": golden["ffn"]}
    reads, _, final = depth.run(golden["x0"], lambda layer, site, _: update[site][layer])
    ours = {"final": final, "attn_in.1": rms_norm(reads[0], golden["attn_norm.1"], golden.norm_eps)}
    for layer in range(golden.L):
        ours[f"ffn_in.{layer + 1}"] = rms_norm(reads[2 * layer + 1], golden[f"ffn_norm.{layer + 1}"], golden.norm_eps)
        ours[f"dw.{layer + 1}"] = weights[layer + 1][0].permute(0, 2, 3, 1)
        if layer:
            norm = Transformer2RMSNorm(golden.D, golden.norm_eps)
            contexts = norm(reads[2 * layer], depth.sites[layer, "attn"].gain())
            ours.update({f"attn_in_{name}.{layer + 1}": contexts[i] for i, name in enumerate("qkv")})
    golden.check(ours)


def hyper_connection(golden, suffix=""):
    connection = DynamicConnection(golden.D, golden.n, 0, 0.0, 0.01, golden.tanh)
    assign(
        connection,
        gain=1 + golden[f"gamma{suffix}"],
        to_read_and_mix=golden[f"dynamic_alpha{suffix}"],
        to_write=golden[f"dynamic_beta{suffix}"].unsqueeze(-1),
        read_and_mix=golden[f"static_alpha{suffix}"],
        write=golden[f"static_beta{suffix}"],
        read_scale=golden[f"alpha_scale{suffix}"],
        write_scale=golden[f"beta_scale{suffix}"],
    )
    return connection


def streams_step(residual, connection, streams, update):
    """One sublayer of a residual with parallel streams -> the read, the weights, the new streams."""
    residual.connection = connection
    read, stream = residual.read((streams[..., 0, :], streams))
    weights = stream[2:]
    return read, weights, residual.write(stream, update, read, read)[1]


def hyper_outputs(golden, residual, streams, update, suffix=""):
    connection = hyper_connection(golden, suffix)
    h, (mixing, write), new = streams_step(residual, connection, streams, update)
    read, *_ = connection(streams)
    identity = torch.eye(golden.n)
    ours = {"A_m": read, "A_r": mixing + identity, "B": write + 1, "h": h}
    return {f"{name}{suffix}": tensor for name, tensor in ours.items()}, new


@pytest.mark.parametrize("golden", cases("hyper_connections", "op"))
def test_hyper_connections(golden):
    golden.load()
    depth = Depth(golden, 1, type="hyper_connections", num_streams=golden.n)
    ours, new = hyper_outputs(golden, depth.sites[0, "attn"], golden["H"], golden["f"])
    golden.check({**ours, "H_new": new})


@pytest.mark.parametrize("golden", cases("hyper_connections", "flow"))
def test_hyper_connections_in_a_row(golden):
    golden.load()
    depth = Depth(golden, 2, type="hyper_connections", num_streams=golden.n)
    assert isinstance(depth.model, HyperConnections)
    streams, ours = depth.model.open(golden["x0"])[1], {}
    for index, residual in zip(range(1, golden.M + 1), depth.owners(), strict=False):
        outputs, streams = hyper_outputs(golden, residual, streams, golden["f"][index - 1], f".{index}")
        ours.update({**outputs, f"H.{index}": streams})
    mean = streams.mean(-2)
    golden.check({**ours, "final": depth.model.close((mean, streams))})


def manifold_connection(golden, suffix=""):
    connection = ManifoldConnection(
        golden.D,
        golden.n,
        golden.sinkhorn_iters,
        golden.hc_eps,
        golden.rms_norm_eps,
        0.02,
        0.01,
        [1 / golden.n] * golden.n,
    )
    read, write, mix = golden[f"b{suffix}"].split((golden.n, golden.n, golden.n**2))
    assign(
        connection,
        phi=golden[f"phi{suffix}"],
        alpha=golden[f"alpha{suffix}"],
        read_bias=read,
        write_bias=write,
        mix_bias=mix.view(golden.n, golden.n),
    )
    return connection


@pytest.mark.parametrize("golden", cases("mhc_deepseek_v4", "op"))
def test_manifold_connection(golden):
    golden.load()
    connection = manifold_connection(golden)
    read, mixing, write = connection(golden["H"])
    ours = {
        "H_pre": read,
        "H_post": write + 1,
        "H_res": (mixing + torch.eye(golden.n)).mT,
        "x": (read.unsqueeze(-2) @ golden["H"]).squeeze(-2),
    }
    golden.check(ours)


@pytest.mark.parametrize("golden", cases("mhc_deepseek_v4", "flow"))
def test_manifold_hyper_connections(golden):
    golden.load()
    depth = Depth(golden, 2, golden.rms_norm_eps, type="mhc", num_streams=golden.n)
    streams, ours = golden["H"], {}
    for index, residual in enumerate(depth.sites.values()):
        assert isinstance(residual, ManifoldHyperConnections)
        connection = manifold_connection(golden, f".{index}")
        h, _, streams = streams_step(residual, connection, streams, golden["f"][index])
        ours[f"x.{index}"] = rms_norm(h, golden[f"prenorm.{index}"], golden.rms_norm_eps)
        if index % 2:
            ours[f"H.layer{index // 2}"] = streams
    # The reference merges its streams by a learned head that the paper does not specify.
    flat = rms_norm(streams.flatten(-2), 1.0, golden.rms_norm_eps)
    shares = (golden["alpha.head"] * (flat @ golden["phi.head"].T) + golden["b.head"]).sigmoid() + golden.hc_eps
    golden.check({**ours, "final": (shares.unsqueeze(-1) * streams).sum(-2)})
