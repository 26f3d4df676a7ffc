"""How attention over paged memory is cut into tiles: from sizes and dtypes, and never from lengths.

A tile has rows of queries and keys of one split (`attention`). What decides are the registers of a thread, as
compiled, and the shared memory of a block:

    queries [rows, d]   weights [rows, keys]   keys [keys, d]   values [keys, d]; of MLA they are the keys
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from plait.kernels.triton.attention.mix import count_stages
from plait.kernels.triton.shared_memory import LEAST_SHARED
from plait.ops.entry import Codes, key_codes, latent_codes
from plait.ops.registry import OpFacts

SPLIT = 256  # tokens that share a softmax
FEW_ROWS = 8  # of a tile of queries in float32 of MLA, where latents become float32
ROWS = 16  # of a tile of queries: (token, query head) pairs that read the same keys
PROMPT_ROWS = 32  # of a tile in a step with prompts; the same instructions, so the same bits
SEQS = (16, 64, 256, 1024)  # sequences that a form is compiled for
NARROW_REGISTERS, WINDOW_REGISTERS = 128, 208  # of a thread: float32, and sliding windows
WIDE = 256  # columns of a head; with more of them tiles are smaller, and queries are mixed before
KEPT = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}
FEWEST_KEYS = 16  # of a tile: matrix units multiply no fewer


@dataclass(frozen=True, slots=True)
class PagedLayout:
    """What is static about an op's arguments: sizes that the kernels are compiled for."""

    heads: int
    kv_heads: int
    dim: int  # columns of queries that values have too
    rest: int  # and those behind them (MLA's rotated ones)
    codes: Codes | None
    window: int | None
    softcap: float | None
    dtype: torch.dtype = torch.bfloat16  # of queries

    @property
    def mixes_inside(self) -> bool:
        """Whether `attend` mixes queries itself, and turns outputs back, over codes: wide heads leave it no
        registers for that."""
        return self.dim <= WIDE

    def rows(self, has_prompts: bool, kept: torch.dtype) -> int:
        """Of a tile of queries, over a cache of `kept`. Wide heads, and what is float32, which has no matrix
        units, have no registers for more than a decode's."""
        is_wider = kept.itemsize > self.dtype.itemsize and 64 < self.dim <= 128  # by four warps
        is_heavy = self.rest or self.dim > WIDE or self.dtype == torch.float32 or is_wider
        if self.rest and self.dtype == torch.float32 and kept != self.dtype:
            return FEW_ROWS
        return PROMPT_ROWS if has_prompts and not is_heavy else ROWS

    def constants(self, num_seqs: int, rows: int) -> dict[str, int]:
        """The constants that both kernels of a step have."""
        size = next((size for size in SEQS if num_seqs <= size), triton.next_power_of_2(num_seqs))
        return {
            "S": size,
            "STEPS": size.bit_length() - 1,
            "G": self.heads // self.kv_heads,
            "KVH": self.kv_heads,
            "D": self.dim,
            "DP": max(16, triton.next_power_of_2(self.dim)),
            "BM": rows,
        }

    def attention(
        self, k_cache: Tensor, v_cache: Tensor, sinks: bool, alibi: bool = False, limit: int = LEAST_SHARED
    ) -> dict[str, int]:
        """Those of `attend` alone. limit: bytes of shared memory that a block of the device may have."""
        warps, stages = self.warps(k_cache.dtype)
        if sinks and self.dtype == torch.float32 and self.dim <= 64:
            stages = 1  # ptxas spills to have a block more on a processor; the bits are the same
        return {
            "REST": self.rest,
            "RESTP": max(16, triton.next_power_of_2(self.rest)),
            "LATENT": self.rest > 0,
            "KW": k_cache.shape[-1],
            "VW": v_cache.shape[-1],
            "GROUP": self.codes.group if self.codes else 0,
            "REST_AT": self.codes.rest_at if self.codes else 0,
            "PAGE": k_cache.shape[1],
            "SPLIT": SPLIT,
            "BN": self.keys(k_cache.dtype, limit),
            "WINDOW": self.window or 0,
            "SOFTCAP": self.softcap or 0.0,
            "SINKS": sinks,
            "ALIBI": alibi,
            "STAGES": count_stages(self.codes.mixed) if self.codes and self.mixes_inside else 0,
            "num_warps": warps,
            "num_stages": stages,
        }

    def warps(self, kept: torch.dtype) -> tuple[int, int]:
        """(warps, stages) over a cache of `kept`.

        Codes and wide heads have the registers of eight warps. What becomes float32 on its way has those of a
        loop without stages, and of 16 warps where heads are wide.
        A tile of latents has few rows: with 16 warps it spills for want of registers.
        """
        if self.dtype == torch.float32 and kept != self.dtype:
            return (16 if self.dim > WIDE and not self.rest else 8), 1
        return (8 if self.dim > 128 or self.codes else 4), 2

    def keys(self, kept: torch.dtype, limit: int = LEAST_SHARED) -> int:
        """Of a tile, over a cache of `kept`, in a block with `limit` bytes of shared memory.

        Registers decide first, as compiled: padded heads, the widest, codes, and float32 have half as many
        keys as others, wide heads of codes and of float32 half of that. Then shared memory does: no form
        takes more than the smallest of current GPUs has. Tiles of decodes and of prompts have the same keys
        and warps, because the order of sums follows from both.
        """
        is_padded, is_wide = self.dim & (self.dim - 1) > 0, self.dtype == torch.float32
        is_half = self.rest or self.dim > WIDE or is_padded or is_wide or self.codes
        keys = 32 if is_half else 64
        if (is_wide and (self.dim > 128 or self.codes)) or (self.codes and self.dim > 128 and not self.rest):
            keys = FEWEST_KEYS
        while keys > FEWEST_KEYS and self.shared_nbytes(keys, kept) > min(limit, LEAST_SHARED):
            keys //= 2
        return keys

    def shared_nbytes(self, keys: int, kept: torch.dtype) -> int:
        """Bytes of shared memory that a block takes at most, with that many keys in a tile.

        Queries, weights, a tile each of keys and values as they are kept, and one in the dtype of queries
        where that is another one. A result that changes its layout is there as a whole, in float32.
        """
        own, rows = self.dtype.itemsize, self.rows(has_prompts=True, kept=kept)
        wide = max(16, triton.next_power_of_2(self.dim))
        whole = wide + (max(16, triton.next_power_of_2(self.rest)) if self.rest else 0)
        tiles = keys * (whole if self.rest else 2 * wide) * kept.itemsize
        changed = keys * whole * own if kept != self.dtype else 0
        loop = tiles + changed + rows * whole * own + rows * keys * own
        return max(loop, rows * wide * 4)

    def options(self, kept: torch.dtype, has_slopes: bool = False) -> dict[str, int]:
        """Registers of a thread, for what becomes float32 or was it, for narrow heads and for ALiBi: left to
        itself, ptxas spills there to have one block more on a processor."""
        if self.dtype == torch.float32 and kept != self.dtype:
            return {"maxnreg": min(255, 2048 // self.warps(kept)[0])}  # all of them, for one block
        if self.codes:
            return {}
        is_wide = self.dtype == torch.float32
        if 64 < self.dim <= 128 and not is_wide and (has_slopes or kept.itemsize > self.dtype.itemsize):
            return {"maxnreg": 255}
        if self.dim <= 64 and is_wide:
            return {"maxnreg": NARROW_REGISTERS}
        return {"maxnreg": WINDOW_REGISTERS} if self.dim <= 64 and self.window else {}


def why_too_large(facts: OpFacts) -> str | None:
    """Why no tile of heads, or of latents, has a place in the shared memory of the facts' GPU."""
    rest, dim = facts.sizes.get("rope_dim", 0), facts.sizes.get("kv_rank", facts.sizes.get("dim"))
    if facts.chip is None or dim is None:
        return None
    kept = KEPT.get(facts.sizes.get("kv_dtype", "model"), facts.dtype)
    codes = None if kept != torch.int8 else latent_codes(dim, rest) if rest else key_codes(dim)
    layout, limit = PagedLayout(1, 1, dim, rest, codes, None, None, facts.dtype), facts.chip.shared_nbytes
    needed = layout.shared_nbytes(layout.keys(kept, limit), kept)
    if needed <= limit:
        return None
    return (
        f"a tile of {dim + rest} columns takes {-(-needed >> 10)} KiB of shared memory, and a block on "
        f"{facts.chip.name} has {limit >> 10}"
    )
