"""No step of the plug-in reads lengths, tables or slots on the host: it would wait for the GPU, and
a graph could not be replayed for other lengths. They lie in memory that ends a process that looks,
beside a stand-in for a GPU. This file is also the program of that process."""

import ctypes
import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

MOST = 4  # Sequences of a batch.


def unreadable(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in memory that nobody may touch."""
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    copy = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel()).view(tensor.shape)
    copy.copy_(tensor)
    # PROT_NONE, which the module has no name for.
    begin = ctypes.c_void_p(copy.data_ptr())
    assert not ctypes.CDLL(None).mprotect(begin, mmap.PAGESIZE, 0), "mprotect failed"
    return copy


def fields() -> dict:
    """A mixed batch of vLLM's common metadata."""
    starts = torch.tensor([0, 1, 2, 9, 9], dtype=torch.int32)
    return {
        "query_start_loc": unreadable(starts),
        "query_start_loc_cpu": unreadable(starts),
        "seq_lens": unreadable(torch.tensor([40, 3, 17, 0], dtype=torch.int32)),
        "num_reqs": MOST,
        "num_actual_tokens": 9,
        "max_query_len": 7,
        "max_seq_len": 40,
        "block_table_tensor": unreadable(torch.zeros(MOST, 8, dtype=torch.int32)),
        "slot_mapping": unreadable(torch.zeros(9, dtype=torch.int64)),
    }


def plain(vllm: dict) -> None:
    from heedful.integrations.vllm.backend import HeedfulImpl, HeedfulMetadataBuilder
    from support.integrations.vllm_layers import configured

    modes = vllm["vllm.config.compilation"].CUDAGraphMode
    builder = HeedfulMetadataBuilder(None, ["0"], configured(modes.FULL), torch.device("cpu"))
    common = vllm["vllm.v1.attention.backend"].CommonAttentionMetadata(**fields())
    impl = HeedfulImpl(8, 64, 0.125, 2, sliding_window=9, sinks=torch.zeros(8).bfloat16())
    q, k = (torch.zeros(9, n, 64).bfloat16() for n in (8, 2))
    cache = torch.zeros(6, 2, 16, 128).bfloat16()
    for make in (
        lambda: builder.build(0, common),
        lambda: builder.build_for_cudagraph_capture(common),
    ):
        metadata = make()
        for _ in range(2):  # Known calls have another way.
            impl.do_kv_cache_update(None, k, k, cache, metadata.slot_mapping)
            impl.forward(None, q, k, k, cache, metadata, torch.zeros_like(q))


def latent(vllm: dict) -> None:
    from heedful.integrations.vllm.mla import HeedfulMLAImpl

    names = "alibi_slopes sliding_window logits_soft_cap kv_sharing_target_layer_name q_lora_rank"
    sizes: dict = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    sizes |= {"num_heads": 16, "head_size": 576, "scale": 0.1, "num_kv_heads": 1}
    sizes |= {"qk_head_dim": 192, "v_head_dim": 128, "kv_b_proj": None}
    kinds: dict = {"kv_cache_dtype": "auto", "attn_type": "decoder"}
    impl = HeedfulMLAImpl(**dict.fromkeys(names.split()), **sizes, **kinds)
    given, cache = fields(), torch.zeros(6, 16, 576).bfloat16()
    new, rotary = torch.zeros(9, 512).bfloat16(), torch.zeros(9, 1, 64).bfloat16()
    part = {"block_table": given["block_table_tensor"], "seq_lens": given["seq_lens"]}
    batch = SimpleNamespace(decode=SimpleNamespace(**part), num_decodes=MOST)
    for _ in range(2):
        impl.do_kv_cache_update(new, rotary, cache, given["slot_mapping"], "auto", torch.ones(()))
        impl.forward_mqa(torch.zeros(2 * MOST, 16, 576).bfloat16(), cache, batch, None)


def run() -> None:
    """The program of the process: says after each step which kernels it launched; then it looks."""
    from support.integrations import vllm_stub
    from support.runs import standin

    torch.set_num_threads(1)
    with vllm_stub.installed() as vllm, standin.gpu("H200") as machine:
        for step in (plain, latent):
            step(vllm)
            names = " ".join(launch.kernel.function for launch in machine.launches)
            sys.stdout.write(f"{names}\n")
            sys.stdout.flush()
            machine.launches.clear()
        int(fields()["seq_lens"].max())


@pytest.mark.skipif(os.name != "posix", reason="memory is taken away by mprotect")
def test_a_step_reads_no_length_on_the_host_and_who_looks_ends_the_process():
    pytest.importorskip("triton")
    tests = Path(__file__).parents[2]
    path = os.pathsep.join([str(tests.parent / "src"), str(tests)])
    environment = os.environ | {"PYTHONPATH": path}
    command = [sys.executable, __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == -signal.SIGSEGV, done.stderr[-2000:]
    of_plain, of_latent = (line.split() for line in done.stdout.splitlines())
    assert of_plain.count("append_slots") == 4 and len(of_plain) >= 8, of_plain
    assert of_latent.count("append_slots") == 2 and len(of_latent) >= 4, of_latent


if __name__ == "__main__":
    run()
