"""The layers of a tiny model over the plug-in's classes, called as vLLM calls them."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from heedful import merge_attn_states
from support.captures import graph_capture
from support.integrations.engine import Engine, Request
from support.integrations.tiny_model import LONGEST, Facts, slopes

# Physical orders of [layers, blocks, heads, tokens, content], by vLLM's names.
Layout = tuple[int, ...]


def caches(engine: Engine, layout: Layout, heads: int, content: int, dtype: torch.dtype) -> Tensor:
    """(layers, blocks, heads, block_size, content), in memory in this order. Nothing but NaN is in
    it: whoever reads what no token wrote is found out."""
    layers = len(engine.model.facts.windows)
    shape = layers, engine.blocks, heads, engine.block_size, content
    pool = torch.empty([shape[dim] for dim in layout], dtype=dtype, device=engine.device)
    if dtype == torch.uint8:
        pool.fill_(0x7F)
    else:
        pool.fill_(torch.nan)
    return pool.permute(*[layout.index(dim) for dim in range(5)])


class Step:
    """What runs a step: eagerly, or by one graph that is captured at the first.

    backend: its class. vllm: the modules' common metadata class, and the configuration.
    """

    def __init__(self, engine: Engine, backend: Any, common: Any, config: Any, captures: bool):
        self.engine, self.common, self.captures = engine, common, captures
        self.builder = backend.get_builder_cls()(SimpleNamespace(), ["0"], config, engine.device)
        self.graph: Any = None
        self.graphs = 0

    def run(self, batch: list[tuple[Request, int]], fields: SimpleNamespace) -> Tensor:
        """The logits of all tokens of the step."""
        common = self.common(**vars(fields))
        if not self.captures:
            return self.forward(self.builder.build(0, common), batch, fields)
        if self.graph is None:
            metadata = self.builder.build_for_cudagraph_capture(common)
            torch.cuda.synchronize()
            side = torch.cuda.Stream()
            with torch.cuda.stream(side):
                self.forward(metadata, batch, fields)
            torch.cuda.current_stream().wait_stream(side)
            self.graph, self.graphs = torch.cuda.CUDAGraph(), self.graphs + 1
            with graph_capture(self.graph):
                self.out = self.forward(metadata, batch, fields)
        self.graph.replay()
        return self.out.clone()

    def forward(self, metadata: Any, batch: list, fields: SimpleNamespace) -> Tensor:
        def attend(n: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self.attend(n, q, k, v, metadata, batch, fields)

        x, given = self.engine.inputs, fields.num_actual_tokens
        return self.engine.model.logits(x["tokens"][:given], x["places"][:given], attend)

    def attend(self, n, q, k, v, metadata, batch, fields) -> Tensor:
        raise NotImplementedError


class PlainStep(Step):
    """Layers that have keys and values in their cache."""

    def __init__(
        self, engine: Engine, backend: Any, common: Any, config: Any, layout: Layout, captures=False
    ):
        super().__init__(engine, backend, common, config, captures)
        facts, w = engine.model.facts, engine.model.weights
        dtype = w["embed"].dtype if facts.kv_cache_dtype == "auto" else torch.uint8
        self.cache = caches(engine, layout, facts.heads_k, 2 * facts.dim, dtype)
        scale = torch.ones((), device=engine.device, dtype=torch.float32)
        self.layer = SimpleNamespace(_k_scale=scale, _v_scale=scale)
        self.impls = [self.made(backend, facts, n) for n in range(len(facts.windows))]

    def made(self, backend: Any, facts: Facts, n: int) -> Any:
        return backend.get_impl_cls()(
            facts.heads,
            facts.dim,
            facts.scale,
            facts.heads_k,
            slopes(facts).tolist() if facts.alibi else None,
            facts.windows[n],
            facts.kv_cache_dtype,
            facts.softcap,
            "decoder",
            None,
            **({"sinks": self.engine.model.weights[f"sink{n}"]} if facts.sinks else {}),
        )

    def attend(self, n, q, k, v, metadata, batch, fields) -> Tensor:
        impl, out = self.impls[n], torch.full_like(q, torch.nan)
        impl.do_kv_cache_update(self.layer, k, v, self.cache[n], metadata.slot_mapping)
        given = impl.forward(self.layer, q, k, v, self.cache[n], metadata, out)
        assert given is out
        return out


class LatentStep(Step):
    """Layers of latent attention: decodes over latent vectors, prefills over keys and values made
    of them, and of those that came before."""

    def __init__(self, engine: Engine, backend: Any, common: Any, config: Any, prefill: Any):
        super().__init__(engine, backend, common, config, False)
        facts, w = engine.model.facts, engine.model.weights
        content, self.stored = facts.rank + facts.rotary, facts.kv_cache_dtype
        dtype = w["embed"].dtype if self.stored == "auto" else torch.uint8
        self.cache = caches(engine, (0, 1, 2, 3, 4), 1, content, dtype).squeeze(2)
        scale = torch.ones((), device=engine.device, dtype=torch.float32)
        self.layer = SimpleNamespace(_k_scale=scale)
        sizes = {
            "q_lora_rank": None,
            "kv_lora_rank": facts.rank,
            "qk_nope_head_dim": facts.dim,
            "qk_rope_head_dim": facts.rotary,
            "qk_head_dim": facts.dim + facts.rotary,
            "v_head_dim": facts.dim,
            "kv_b_proj": None,
        }
        given = facts.heads, content, facts.scale, 1, None, None, self.stored, None, "decoder", None
        self.impl = backend.get_impl_cls()(*given, **sizes)
        dims = facts.rank, facts.dim, facts.rotary, facts.dim
        self.prefill = prefill(facts.heads, facts.scale, *dims, config)

    def run(self, batch: list[tuple[Request, int]], fields: SimpleNamespace) -> Tensor:
        return self.forward(None, batch, fields)

    def attend(self, n, q, k, v, metadata, batch, fields) -> Tensor:
        facts, w, cache = self.engine.model.facts, self.engine.model.weights, self.cache[n]
        slots = fields.slot_mapping
        scale = self.layer._k_scale
        self.impl.do_kv_cache_update(k, v[:, None], cache, slots, self.stored, scale)
        if self.stored != "auto":
            cache = cache.view(torch.float8_e4m3fn)
        decodes, alike = 0, batch[0][1]
        if alike <= self.engine.drafts + 1:
            decodes = sum(count == alike for _, count in batch)
        tokens, outs = decodes * alike, []
        if decodes:
            nope, rotary = q[:tokens].split([facts.dim, facts.rotary], -1)
            latent = torch.einsum("thd,rhd->thr", nope, w[f"up_k{n}"])
            part = {"block_table": fields.block_table_tensor[:decodes]}
            part |= {"seq_lens": fields.seq_lens[:decodes], "dcp_tot_seq_lens": None}
            of_decodes = SimpleNamespace(decode=SimpleNamespace(**part), num_decodes=decodes)
            out, _ = self.impl.forward_mqa((latent, rotary), cache, of_decodes, self.layer)
            outs.append(torch.einsum("thr,rhd->thd", out, w[f"up_v{n}"]))
        if decodes < len(batch):
            new = q[tokens:], k[tokens:], v[tokens:]
            outs.append(self.prefilled(n, *new, cache, batch[decodes:]))
        return torch.cat(outs)

    def prefilled(self, n, q, k, v, cache: Tensor, batch: list[tuple[Request, int]]) -> Tensor:
        """Attention of prefills: over the new tokens, over what came before them, and merged."""

        def expanded(latent: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
            keys, values = (
                torch.einsum("tr,rhd->thd", latent, self.engine.model.weights[f"{half}{n}"])
                for half in ("up_k", "up_v")
            )
            return torch.cat([keys, rotary[:, None].expand(-1, keys.shape[1], -1)], -1), values

        counts, before = [c for _, c in batch], [r.computed for r, _ in batch]
        starts = torch.tensor([0, *counts]).cumsum(0).int().to(q.device)
        facts = {"query_start_loc": starts, "max_query_len": max(counts)}
        self.prefill.prepare_metadata(SimpleNamespace(**facts))
        has_context = any(before)
        new = self.prefill.run_prefill_new_tokens(q, *expanded(k, v), has_context)
        if not has_context:
            return new
        size, rows = self.engine.block_size, cache.flatten(0, 1)
        slots = [r.blocks[p // size] * size + p % size for r, _ in batch for p in range(r.computed)]
        old = rows[torch.tensor(slots, device=q.device)].to(q.dtype)
        chunk = SimpleNamespace(
            **facts,
            cu_seq_lens=torch.tensor([0, *before]).cumsum(0).int().to(q.device),
            max_seq_len=max(before),
        )
        rank = self.engine.model.facts.rank
        context = self.prefill.run_prefill_context_chunk(
            chunk, q, *expanded(old[:, :rank], old[:, rank:])
        )
        outs, lses = zip(context, new, strict=True)
        return merge_attn_states(outs, lses)[0]


def configured(mode: Any) -> SimpleNamespace:
    """The parts of VllmConfig that the plug-in reads. mode: a CUDAGraphMode."""
    return SimpleNamespace(
        compilation_config=SimpleNamespace(cudagraph_mode=mode),
        model_config=SimpleNamespace(max_model_len=LONGEST),
    )
