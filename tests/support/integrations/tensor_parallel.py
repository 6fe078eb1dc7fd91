"""Two processes that share a tiny model's heads by transformers' own plan, with our attention; its
logits and gradients are those of the whole model with eager attention. Writes a line a rank.

    python -m support.integrations.tensor_parallel FAMILY
"""

import os
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import transformers as hf
from torch.multiprocessing.spawn import start_processes

from heedful.integrations.transformers import paths, register
from support.integrations.language_models import COMMON, FAMILIES, tokens


def work(rank: int, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.set_num_threads(1)
    register()
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    grads, logits = [], []
    for options in ({"attn_implementation": "eager"}, {"tp_plan": "auto"}):
        options = {"attn_implementation": "heedful", "dtype": torch.float32, **options}
        model: Any = hf.AutoModelForCausalLM.from_pretrained(folder, **options)
        found = whole(model(input_ids=ids, attention_mask=mask).logits)[mask.bool()]
        found.square().mean().backward()
        logits.append(found)
        projection = model.model.layers[0].self_attn.q_proj.weight
        grads.append(whole(projection.grad))
    # Of the model that is shared: half of the rows lie here.
    assert projection.to_local().shape[0] == projection.shape[0] // 2
    for want, got in (logits, grads):
        torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-5)
    assert paths()
    dist.destroy_process_group()
    sys.stdout.write("agrees\n")


def whole(x: Any) -> torch.Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


if __name__ == "__main__":
    name, own = FAMILIES[sys.argv[1]]
    # In transformers 5.17 ranks want equal parts of the vocabulary.
    config = getattr(hf, f"{name}Config")(**{**COMMON, **own, "vocab_size": 100})
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        getattr(hf, f"{name}ForCausalLM")(config).save_pretrained(folder)
        # Forked, as to import torch takes longer than all they do.
        start_processes(work, (folder,), nprocs=2, start_method="fork")
