"""Naive references of the depth variants: plain functions of (parameters, sizes, options, input ids), no transformer2.

They are written from the papers' equations, in the most literal way, and agree with the models in float64.
"""

from naive_depth_attention import attn_res, delta_attn_res, short_swa, vertical_attention
from naive_depth_streams import hyper_connections, mhc
from naive_depth_sums import dca, denseformer, elc_bert, laurel, mudd

REFERENCES = {
    function.__name__: function
    for function in (
        *(elc_bert, denseformer, dca, mudd, laurel),
        *(vertical_attention, attn_res, delta_attn_res, short_swa),
        *(hyper_connections, mhc),
    )
}
