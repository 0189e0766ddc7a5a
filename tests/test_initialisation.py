"""How new parameters start in the papers' form, and ShortSWA's mixer against its formula."""

import pytest
import torch
from helpers import SIZE, tiny_model, tokens
from torch.nn.functional import linear

from transformer2 import Transformer2Config, Transformer2ForCausalLM

WIDE = {**SIZE, "hidden_size": 256, "intermediate_size": 64, "num_attention_heads": 4}


@pytest.mark.parametrize("beta", [0.2, 1.0, 1.7])
def test_ddl_starts_as_in_the_authors_code(beta):
    """Weights N(0, (0.5 / sqrt(D))^2), the gate at beta_init, the read the mean of the channels, EC the repetition."""
    torch.manual_seed(0)
    residual = {"type": "ddl", "value_channels": 4, "expand": True, "compress": "tokens", "beta_init": beta}
    model = Transformer2ForCausalLM(Transformer2Config(**WIDE, residual=residual)).model
    rewrites = [getattr(layer, f"{site}_residual").rewrite for layer in model.layers for site in ("attn", "mlp")]
    std = 0.5 * 256**-0.5
    for kind in ("gate", "value"):
        weights = torch.cat([getattr(rewrite, kind).weight.flatten() for rewrite in rewrites])
        assert weights.mean().abs() < 0.1 * std
        assert 0.93 * std < weights.std() < 1.07 * std
    for rewrite in rewrites:
        torch.testing.assert_close(2 * rewrite.gate.bias.sigmoid(), torch.tensor([beta]))
        assert rewrite.value.bias.abs().max() <= 256**-0.5
    for compress in [layer.attn_residual.compress for layer in model.layers] + [model.residual.compress]:
        expected = torch.zeros(4, 4, 256)
        expected[-1] = 1 / 4
        assert torch.equal(compress.weight, expected)
    stream = model.residual.open(model.embed_tokens(tokens()))
    assert torch.equal(stream[1], stream[0].unsqueeze(-2).expand(-1, -1, 4, -1))


def test_short_swa_starts_like_attention():
    torch.manual_seed(0)
    model = Transformer2ForCausalLM(Transformer2Config(**WIDE, local_mixer="short_swa"))
    for name in ("query", "key", "value", "output"):
        weight = getattr(model.model.layers[0].local_mixer.swa, name).weight
        assert 0.9 * 0.02 < weight.std() < 1.1 * 0.02


def test_short_swa_by_hand():
    """Rotation, groups, window and scale of the whole mixer, from the formulas, token by token."""
    theta = 500.0
    mixer = {"type": "short_swa", "window": 3, "num_heads": 4, "num_kv_heads": 2, "head_dim": 6}
    rope = {"rope_type": "default", "rope_theta": theta}
    module = tiny_model("standard", mixer, rope_parameters=rope).model.layers[1].local_mixer.double()
    torch.manual_seed(0)
    x = torch.randn(1, 7, 32, dtype=torch.float64)
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 6]]) + 11
    swa = module.swa

    def rotated(weight, head, t):
        vector = linear(x[0, t], weight[6 * head : 6 * head + 6])
        out = torch.empty_like(vector)
        for pair in range(3):  # half-split pairs (i, i + 3)
            angle = positions[0, t].double() * theta ** (-2 * pair / 6)
            a, b = vector[pair], vector[pair + 3]
            out[pair], out[pair + 3] = a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()
        return out

    rows = []
    for t in range(7):
        heads = []
        for head in range(4):
            group, window = head // 2, range(max(0, t - 2), t + 1)
            query = rotated(swa.query.weight, head, t)
            scores = torch.stack([query @ rotated(swa.key.weight, group, j) for j in window]) / 6**0.5
            values = torch.stack([linear(x[0, j], swa.value.weight[6 * group : 6 * group + 6]) for j in window])
            heads.append(scores.softmax(0) @ values)
        rows.append(linear(torch.cat(heads), swa.output.weight))
    ours = module(x, position_ids=positions, token_index=positions)
    torch.testing.assert_close(ours[0], torch.stack(rows), atol=1e-6, rtol=1e-5)
