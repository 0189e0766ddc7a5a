"""The one local operator, on both axes."""

import pytest
import torch
from helpers import SIZE, tiny_model, tokens
from torch import nn

from transformer2.depth_short_swa import DepthShortSWA
from transformer2.short_swa import ShortSWA, windowed_attention


def naive(query, key, value, window, valid=None, reach=None, seq_idx=None):
    """Token by token, head by head, from the definition."""
    batch, heads, num_queries, dim = query.shape
    groups, num_keys = heads // key.shape[1], key.shape[2]
    out = torch.zeros(batch, heads, num_queries, value.shape[-1], dtype=query.dtype)
    for b in range(batch):
        for h in range(heads):
            for q in range(num_queries):
                i = q + num_keys - num_queries
                seen = []
                for j in range(num_keys):
                    ok = 0 <= i - j < window
                    ok = ok and (valid is None or bool(valid[b, j]))
                    ok = ok and (reach is None or i - j <= int(reach[b, q]))
                    ok = ok and (seq_idx is None or bool(seq_idx[b, j] == seq_idx[b, i]))
                    if ok or i == j:
                        seen.append(j)
                k, v = key[b, h // groups, seen], value[b, h // groups, seen]
                out[b, h, q] = ((k @ query[b, h, q]) * dim**-0.5).softmax(0) @ v
    return out


def random_inputs(num_queries, num_keys, dtype=torch.float64):
    torch.manual_seed(num_queries * 100 + num_keys)
    shapes = [(2, 4, num_queries, 6), (2, 2, num_keys, 6), (2, 2, num_keys, 6)]
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("window", [1, 2, 3, 7, 16, 100])
@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 1), (1, 9), (4, 4), (3, 8), (16, 16), (17, 40), (41, 41)])
def test_operator_is_its_definition(num_queries, num_keys, window, masked):
    """Values and gradients, over every path: one step, dense band, blocks."""
    query, key, value = random_inputs(num_queries, num_keys)
    options = {}
    if masked:
        valid = torch.ones(2, num_keys, dtype=torch.bool)
        valid[0, : num_keys // 3] = False
        seq_idx = (torch.arange(num_keys) // 5).expand(2, -1)
        reach = (torch.arange(num_queries) % 4).expand(2, -1)
        options = {"valid": valid, "seq_idx": seq_idx, "reach": reach}
    ours = windowed_attention(query, key, value, window, **options)
    reference = naive(query, key, value, window, **options)
    torch.testing.assert_close(ours, reference, atol=1e-12, rtol=1e-12)
    weights = torch.randn_like(ours)
    gradients = torch.autograd.grad((ours * weights).sum(), (query, key, value))
    expected = torch.autograd.grad((reference * weights).sum(), (query, key, value))
    for a, b in zip(gradients, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-11, rtol=1e-11)


def test_no_quadratic_mask():
    """A long input allocates blocks, not T x T: the largest tensor grows linearly."""

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else [out]:
                if isinstance(tensor, torch.Tensor):
                    self.numel = max(self.numel, tensor.numel())
            return out

    sizes = {}
    for length in (512, 1024, 2048):
        x = torch.randn(1, 1, length, 4)
        with Largest() as largest:
            windowed_attention(x, x, x, 8)
        sizes[length] = largest.numel
    assert sizes[2048] <= 2 * sizes[1024] + 200
    assert sizes[2048] < 2048**2 / 50


def test_chunks_are_aligned_to_tokens_not_slots():
    """In a chunk-aligned model of window 3 a token is blind to the chunk before its own."""
    mixer = {"type": "short_swa", "mask": "chunk", "window": 3, "rope": False}
    mixer = tiny_model("standard", mixer).model.layers[0].local_mixer.double()
    x = torch.randn(1, 8, SIZE["hidden_size"], dtype=torch.float64)
    positions = torch.arange(8)[None]
    base = mixer(x, position_ids=positions, token_index=positions)
    for changed in range(8):
        other = x.clone()
        other[0, changed] += 1
        difference = (mixer(other, position_ids=positions, token_index=positions) - base).abs().amax(-1)[0]
        influenced = [t for t in range(8) if difference[t] > 1e-12]
        assert influenced == [t for t in range(changed, 8) if t // 3 == changed // 3]


def test_window_is_local():
    """The mixer alone reaches exactly window - 1 tokens back."""
    mixer = tiny_model("standard", {"type": "short_swa", "window": 4}).model.layers[0].local_mixer.double()
    x = torch.randn(1, 30, SIZE["hidden_size"], dtype=torch.float64)
    positions = torch.arange(30)[None]
    base = mixer(x, position_ids=positions)
    other = x.clone()
    other[0, 10] += 1
    difference = (mixer(other, position_ids=positions) - base).abs().amax(-1)[0]
    assert [t for t in range(30) if difference[t] > 1e-12] == [10, 11, 12, 13]


class TestDuality:
    """One operator, two axes: depth attention is sequence attention of the transposed stack (arXiv 2603.16039)."""

    @pytest.mark.parametrize("window", [1, 2, 3, 6, 9])
    @pytest.mark.parametrize("num_heads", [1, 4])
    def test_depth_reads_are_the_sequence_operator_on_the_transposed_stack(self, window, num_heads):
        torch.manual_seed(0)
        swa = ShortSWA(32, num_heads, num_heads, 8, window, zero_output=False).double()
        stack = torch.randn(6, 2, 7, 32, dtype=torch.float64)  # [L + 1, B, T, D]: the states of every layer
        online = []
        for layer in range(6):
            history = torch.stack(list(stack[max(0, layer - window + 1) : layer + 1]), dim=-2)  # [B, T, K, D]
            online.append(swa(history[..., -1:, :], history).squeeze(-2))
        tokens_as_rows = stack.permute(1, 2, 0, 3).flatten(0, 1)  # [B T, L + 1, D]: layers are the sequence
        along_sequence = swa(tokens_as_rows, tokens_as_rows).unflatten(0, (2, 7)).permute(2, 0, 1, 3)
        torch.testing.assert_close(torch.stack(online), along_sequence, atol=1e-12, rtol=1e-12)

    @pytest.mark.parametrize("window", [1, 2, 3, None])
    def test_the_model_reads_depth_by_that_operator(self, window):
        """In a running model: every block's read equals the one-shot sequence operator over the states so far."""
        residual = {"type": "short_swa", "window": window, "num_heads": 2}
        model = tiny_model(residual, num_hidden_layers=5).double()
        entering, reads = [], []
        for layer in model.model.layers:
            layer.register_forward_pre_hook(lambda _, args: entering.append(args[0]))
            layer.input_layernorm.register_forward_pre_hook(lambda _, args: reads.append(args[0]))
        model(tokens())
        stack = torch.stack(entering)  # [L, B, T, D]
        mixture = model.model.residual.mixture
        rows = stack.permute(1, 2, 0, 3).flatten(0, 1)
        rows = rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + model.config.rms_norm_eps)
        one_shot = mixture.swa(rows, rows).unflatten(0, stack.shape[1:3]).permute(2, 0, 1, 3)
        torch.testing.assert_close(torch.stack(reads), stack + one_shot, atol=1e-12, rtol=1e-12)

    def test_literal_form_shares_its_weights(self):
        model = tiny_model({"type": "short_swa"})
        owners = [name for name, module in model.named_modules() if isinstance(module, ShortSWA)]
        assert owners == ["model.residual.mixture.swa"]
        per_layer = tiny_model({"type": "short_swa", "share_weights": False})
        assert sum(isinstance(module, ShortSWA) for module in per_layer.modules()) == SIZE["num_hidden_layers"]


def test_depth_history_is_truncated():
    """A window of K keeps K states, not all of them."""
    model = tiny_model({"type": "short_swa", "window": 2}, num_hidden_layers=6)
    widths = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda _, __, out: widths.append(len(out)))
    model(tokens())
    assert widths == [3, 5, 5, 5, 5, 5]  # the state, and at most two keys and two values


def test_depth_window_by_hand():
    """Against a loop over layers written from the formula, with per-layer weights and several heads."""
    torch.manual_seed(0)
    residual = {"type": "short_swa", "window": 3, "share_weights": False, "num_heads": 2, "head_dim": 5}
    model = tiny_model(residual, num_hidden_layers=4).double()
    assert all(isinstance(layer.attn_residual, DepthShortSWA) for layer in model.model.layers)
    states, outputs = [], []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda _, args: states.append(args[0]))
        layer.input_layernorm.register_forward_pre_hook(lambda _, args: outputs.append(args[0]))
    model(tokens())
    for index, layer in enumerate(model.model.layers):
        swa, eps = layer.attn_residual.mixture.swa, model.config.rms_norm_eps
        window = [
            h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps) for h in states[max(0, index - 2) : index + 1]
        ]
        heads = []
        for h in range(2):
            rows = slice(5 * h, 5 * h + 5)
            q = nn.functional.linear(window[-1], swa.query.weight[rows])
            ks = torch.stack([nn.functional.linear(w, swa.key.weight[rows]) for w in window])
            vs = torch.stack([nn.functional.linear(w, swa.value.weight[rows]) for w in window])
            weights = ((q * ks).sum(-1, keepdim=True) / 5**0.5).softmax(0)
            heads.append((weights * vs).sum(0))
        z = nn.functional.linear(torch.cat(heads, dim=-1), swa.output.weight)
        torch.testing.assert_close(outputs[index], states[index] + z, atol=1e-12, rtol=1e-12)
