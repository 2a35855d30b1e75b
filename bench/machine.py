"""What a result must tell about the machine it comes from, and the page cache of a model's files."""

import ctypes
import mmap
import os
import pathlib
import re


def processor():
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"


def drive_of(path):
    """Model and kernel name of the drive that holds a file: "Samsung SSD 990 PRO (nvme0n1)"; virtual ones have no model."""
    device = os.stat(path).st_dev
    node = pathlib.Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    if not node.exists():
        return "unknown"
    node = node.resolve()
    if (node / "partition").exists():
        node = node.parent
    try:
        model = (node / "device/model").read_text().strip()
    except OSError:
        model = "no model told"
    return f"{model} ({node.name})"


def files_of(model):
    """The files that a model consists of: itself, all parts of a split one, or what is in its folder."""
    model = pathlib.Path(model)
    if model.is_dir():
        return sorted(path for path in model.rglob("*") if path.is_file())
    part = re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.gguf", model.name)
    return sorted(model.parent.glob(f"{part[1]}-?????-of-{part[2]}.gguf")) if part else [model]


def drop_cache(path):
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached_share(path):
    """The share of a file's pages that the page cache holds; None when the system does not say."""
    size = os.path.getsize(path)
    if size == 0:
        return 0.0
    # A private writable mapping, of which nothing is touched: ctypes tells addresses of writable memory only.
    with open(path, "rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) as mapped:
        pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        start = ctypes.c_char.from_buffer(mapped)
        told = ctypes.CDLL(None).mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size), pages)
        del start
    return None if told != 0 else sum(page & 1 for page in pages) / len(pages)
