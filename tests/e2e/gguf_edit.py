"""Reads a GGUF's list of tensors and writes it again with other tensors, another order, or holes between them.

Keys are kept byte for byte. Version 3, little-endian. For the tests' small models: everything is held in memory.
"""

import pathlib
import struct

# Bytes of one value of each type; strings and arrays are longer.
SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
STRING, ARRAY = 8, 9
F32 = 0


class Tensor:
    def __init__(self, name, shape, kind, data):
        self.name, self.shape, self.kind, self.data = name, list(shape), kind, data


class Gguf:
    def __init__(self, path):
        whole = pathlib.Path(path).read_bytes()
        magic, version, n_tensors, self.n_keys = struct.unpack_from("<4sIQQ", whole)
        assert magic == b"GGUF" and version == 3, "no GGUF of version 3"
        at = 24
        self.alignment = 32
        for _ in range(self.n_keys):
            key, at = self.text(whole, at)
            kind, = struct.unpack_from("<I", whole, at)
            if key == "general.alignment":
                self.alignment, = struct.unpack_from("<I", whole, at + 4)
            at = self.skip_value(whole, at + 4, kind)
        self.keys = whole[24:at]
        table = []
        for _ in range(n_tensors):
            name, at = self.text(whole, at)
            n_dims, = struct.unpack_from("<I", whole, at)
            shape = struct.unpack_from(f"<{n_dims}Q", whole, at + 4)
            kind, offset = struct.unpack_from("<IQ", whole, at + 4 + 8 * n_dims)
            at += 4 + 8 * n_dims + 12
            table.append((name, shape, kind, offset))
        begin = self.padded(at)
        ends = sorted(entry[3] for entry in table) + [len(whole) - begin]
        self.tensors = []
        for name, shape, kind, offset in table:
            # Padding included where there is some: it does no harm behind the data.
            end = next(end for end in ends if end > offset)
            self.tensors.append(Tensor(name, shape, kind, whole[begin + offset:begin + end]))

    @staticmethod
    def text(whole, at):
        length, = struct.unpack_from("<Q", whole, at)
        return whole[at + 8:at + 8 + length].decode(), at + 8 + length

    def skip_value(self, whole, at, kind):
        if kind == STRING:
            return self.text(whole, at)[1]
        if kind != ARRAY:
            return at + SCALAR_BYTES[kind]
        element, count = struct.unpack_from("<IQ", whole, at)
        at += 12
        if element in SCALAR_BYTES:
            return at + count * SCALAR_BYTES[element]
        for _ in range(count):
            at = self.skip_value(whole, at, element)
        return at

    def padded(self, size):
        return -(-size // self.alignment) * self.alignment

    def set_u32(self, key, value):
        """Sets a key that holds a u32, or adds it."""
        name, new = key.encode(), struct.pack("<II", 4, value)
        entry = struct.pack("<Q", len(name)) + name
        at = self.keys.find(entry)
        if at < 0:
            self.keys += entry + new
            self.n_keys += 1
            return
        at += len(entry)
        assert self.keys[at:at + 4] == new[:4], f"{key} is no u32"
        self.keys = self.keys[:at] + new + self.keys[at + 8:]

    def find(self, name):
        return next(tensor for tensor in self.tensors if tensor.name == name)

    def ending(self, suffix):
        return [tensor for tensor in self.tensors if tensor.name.endswith(suffix)]

    def header(self, sizes):
        out = bytearray(struct.pack("<4sIQQ", b"GGUF", 3, len(self.tensors), self.n_keys) + self.keys)
        offset = 0
        for tensor, size in zip(self.tensors, sizes):
            name = tensor.name.encode()
            out += struct.pack("<Q", len(name)) + name + struct.pack("<I", len(tensor.shape))
            out += struct.pack(f"<{len(tensor.shape)}Q", *tensor.shape) + struct.pack("<IQ", tensor.kind, offset)
            offset += self.padded(size)
        out += bytes(self.padded(len(out)) - len(out))
        return out

    def write(self, path):
        """In the order of `tensors`, without gaps."""
        with open(path, "wb") as file:
            file.write(self.header([len(tensor.data) for tensor in self.tensors]))
            for tensor in self.tensors:
                file.write(tensor.data + bytes(self.padded(len(tensor.data)) - len(tensor.data)))
