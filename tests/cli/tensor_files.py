# SPDX-License-Identifier: Apache-2.0
"""safetensors files as the tests of the command write and read them, by the format's definition: an 8-byte length, that much JSON, the bytes."""
import json, struct

CODES = {"F64": "d", "F32": "f", "F16": "e", "I64": "q", "I32": "i", "U32": "I", "U16": "H", "U64": "Q", "F8_E4M3": "B", "BF8": "B"}


def write(path, **tensors):
    """tensors: name = (dtype, shape, values)."""
    header, data = {}, b""
    for name, (dtype, shape, values) in tensors.items():
        raw = struct.pack(f"<{len(values)}{CODES[dtype]}", *values)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + data)


def read(path):
    """name: (dtype, shape, values) of each tensor."""
    with open(path, "rb") as f:
        whole = f.read()
    begin = 8 + struct.unpack("<Q", whole[:8])[0]
    out = {}
    for name, t in json.loads(whole[8:begin]).items():
        if name != "__metadata__":
            first, end = (begin + x for x in t["data_offsets"])
            code = CODES[t["dtype"]]
            out[name] = (t["dtype"], t["shape"], list(struct.unpack(f"<{(end - first) // struct.calcsize('<' + code)}{code}", whole[first:end])))
    return out
