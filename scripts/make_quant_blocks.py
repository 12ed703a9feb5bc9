#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write tests/data/quants/<type>.bin: blocks of every quantised type and the f32 values that PyPI's
gguf package gives for them.

usage: make_quant_blocks.py [folder]       needs numpy and gguf (pip install gguf)

Layout, little endian: u32 qtype, elems per block, bytes per block, n_blocks; n_blocks blocks;
n_blocks * elems f32. Blocks are random bytes with chosen f16 scales: ordinary, denormal, zero,
largest, infinite, NaN; some have all quants 0x00 or 0xff.
"""
import pathlib
import struct
import sys

import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import quants

# type: (bytes of f16 fields, number of blocks)
TYPES = {
    Type.Q4_0: ([0], 40),
    Type.Q4_1: ([0, 2], 40),
    Type.Q5_0: ([0], 40),
    Type.Q5_1: ([0, 2], 40),
    Type.Q8_0: ([0], 40),
    Type.Q4_K: ([0, 2], 12),
    Type.Q5_K: ([0, 2], 12),
    Type.Q6_K: ([208], 12),
    Type.F16: ([0], 64),
    Type.BF16: ([0], 64),
}
SPECIAL = [0x0001, 0x03FF, 0x8200, 0x0000, 0x8000, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00]


def blocks_of(qtype, fields, n_blocks, rng):
    n_bytes = 2 if qtype in (Type.F16, Type.BF16) else quants.GGML_QUANT_SIZES[qtype][1]
    blocks = rng.integers(0, 256, size=(n_blocks, n_bytes), dtype=np.uint8)
    for i in range(n_blocks):
        if i % 5 == 1:
            blocks[i] = 0x00
        if i % 5 == 2:
            blocks[i] = 0xFF
        for j, at in enumerate(fields):
            scale = np.float16(rng.normal() * 0.05)
            if i < len(SPECIAL) and j == 0 or i + 3 < len(SPECIAL) and j == 1:
                scale = np.array(SPECIAL[i + 3 * j], np.uint16).view(np.float16)
            blocks[i, at : at + 2] = np.array(scale, np.float16).reshape(1).view(np.uint8)
    return blocks


def main():
    folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "tests/data/quants")
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(2112)
    for qtype, (fields, n_blocks) in TYPES.items():
        blocks = blocks_of(qtype, fields, n_blocks, rng)
        with np.errstate(all="ignore"):
            if qtype == Type.F16:
                values = blocks.view(np.float16).astype(np.float32)
            else:
                values = quants.dequantize(blocks, qtype)
        elems = values.size // n_blocks
        with open(folder / f"{qtype.name.lower()}.bin", "wb") as out:
            out.write(struct.pack("<4I", int(qtype), elems, blocks.shape[1], n_blocks))
            out.write(blocks.tobytes())
            out.write(np.ascontiguousarray(values, np.float32).tobytes())


if __name__ == "__main__":
    main()
