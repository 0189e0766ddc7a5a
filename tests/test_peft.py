"""LoRA on the pretrained projections together with full training of the new modules, through PEFT."""

import pytest
import torch
from helpers import case, tokens
from peft import LoraConfig, PeftModel, get_peft_model

CASES = [("ddl_identity_cc", "none"), ("ddl_tc_ec", "swa"), ("depth_swa", "none")]
NEW_MODULES = ["residual", "attn_residual", "mlp_residual", "local_mixer", "local_layernorm"]


@pytest.mark.parametrize(("residual", "mixer"), CASES)
def test_lora_next_to_new_modules(residual, mixer, tmp_path):
    """What PEFT copies is what runs: a compressor that two sublayers share is trained, saved and merged as one."""
    model = case(residual, mixer).double()
    present = {name.rpartition(".")[2] for name, module in model.named_modules() if list(module.parameters())}
    saved = [name for name in NEW_MODULES if name in present]
    peft = get_peft_model(
        model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], modules_to_save=saved, task_type="CAUSAL_LM")
    )
    assert {n.split(".lora_")[0].rpartition(".")[2] for n, _ in peft.named_parameters() if "lora_" in n} == {
        "q_proj",
        "v_proj",
    }
    optimizer = torch.optim.SGD([p for p in peft.parameters() if p.requires_grad], lr=0.5)
    for _ in range(2):
        peft(tokens(), labels=tokens()).loss.backward()
        optimizer.step()
    idle = [n for n, p in peft.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.any())]
    assert not idle
    trained = peft.eval()(tokens()).logits
    peft.save_pretrained(tmp_path)

    fresh = PeftModel.from_pretrained(case(residual, mixer).double(), tmp_path).eval()
    torch.testing.assert_close(fresh(tokens()).logits, trained, atol=1e-10, rtol=1e-10)
    merged = fresh.merge_and_unload()
    torch.testing.assert_close(merged(tokens()).logits, trained, atol=1e-10, rtol=1e-10)
    assert set(merged.state_dict()) == set(case(residual, mixer).state_dict())
